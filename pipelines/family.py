"""Family: what has to be said about one kind of video transformer before SSTA can be put into it; the register of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ssta import SSTAConfig, TokenLayout, ssta_attention
from ssta.kernels import resolve_impl


@dataclass(frozen=True)
class Site:
    """One self-attention over video tokens inside a model.

    Attributes:
        name: the module's dotted name in the model.
        module: the attention module, which holds its processor in ``.processor``.
        stock: the processor class that the site is known to work with; SSTA refuses to replace any other.
        replacement: called with the model's ``ModelContext``, returns the processor that attends through SSTA.
    """

    name: str
    module: nn.Module
    stock: type
    replacement: Callable[[ModelContext], SSTAProcessor]


@dataclass(frozen=True)
class LayerRun:
    """What one layer ran last.

    Attributes:
        layer: the attention module's dotted name; in a pipeline after the transformer's.
        implementation: the kernel, as ``block_sparse_attention`` names it.
        thw: the canvas, in tokens.
        tokens: length of the attended sequence, conditions included.
        tiles: how many tiles that makes, conditions included.
        density: fraction of the (query tile, key tile) pairs that were attended to.
    """

    layer: str
    implementation: str
    thw: tuple[int, int, int]
    tokens: int
    tiles: int
    density: float


@dataclass(frozen=True)
class Family:
    """One kind of video transformer.

    Attributes:
        model: class name of the transformer; its subclasses belong to the family too.
        sites: ``sites(model)`` yields the model's video self-attentions. Cross-attention and text-only layers are not sites.
        canvas: ``canvas(model, arguments)`` is the canvas (t, h, w) in tokens of a forward, from its arguments by name. It runs before
            every forward, so it looks at shapes and numbers only, never at a tensor's values.
        default_config: the configuration when the user gives none.
    """

    model: str
    sites: Callable[[nn.Module], Iterator[Site]]
    canvas: Callable[[nn.Module, Mapping[str, Any]], tuple[int, int, int]]
    default_config: Callable[[], SSTAConfig]


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Makes ``apply_ssta`` know one more kind of transformer.

    Raises:
        TypeError: not a ``Family``.
        ValueError: the class name is registered already.
    """
    if not isinstance(family, Family):
        raise TypeError(f"family must be a Family, got {type(family).__name__}")
    if family.model in _FAMILIES:
        raise ValueError(f"family must name a model that is not registered yet, got {family.model!r}")
    _FAMILIES[family.model] = family


def supported_models() -> tuple[str, ...]:
    """Class names of the transformers that ``apply_ssta`` knows, sorted."""
    return tuple(sorted(_FAMILIES))


def family_of(model: nn.Module) -> Family:
    """The family that ``model`` belongs to, by its class or the nearest base class.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    for base in type(model).__mro__:
        if base.__name__ in _FAMILIES:
            return _FAMILIES[base.__name__]
    if hasattr(model, "_orig_mod") or hasattr(model, "module"):
        raise ValueError(f"model must be the transformer itself, got it wrapped in {type(model).__name__}; apply SSTA before wrapping")
    raise ValueError(f"model must be one of {', '.join(supported_models())}, got {type(model).__name__}; register_family adds others")


class ModelContext:
    """What the processors of one model share: the configuration, and the canvas of the forward in progress.

    The canvas stays until the next forward begins, because gradient checkpointing recomputes attention after the forward has
    returned. So with checkpointing, a forward's backward must come before a forward of another canvas.
    """

    def __init__(self, family: Family, config: SSTAConfig, impl: str) -> None:
        self.family = family
        self.config = config
        self.impl = impl
        self.thw: tuple[int, int, int] | None = None
        self.canvas_config: SSTAConfig | None = None

    def capture(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of the transformer: takes the canvas from the call."""
        call = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        thw = self.family.canvas(model, call.arguments)
        self.thw, self.canvas_config = thw, self.config.for_canvas(thw)


class SSTAProcessor:
    """Base of the processors that take a stock processor's place.

    A subclass spells out ``__call__`` with exactly the stock processor's parameters (diffusers drops the arguments that are not
    in the signature), makes q, k and v as the stock processor does, and calls ``attend``. It is a plain object, so state dicts
    and saved models do not change.
    """

    # Set by diffusers' set_attention_backend and enable_parallelism on processors that have them.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self._last: tuple | None = None

    def canvas(self, video_tokens: int) -> tuple[int, int, int]:
        """The canvas (t, h, w) of the forward in progress.

        Raises:
            ValueError: it does not have ``video_tokens`` tokens, or there was no forward of the whole model.
        """
        thw = self.context.thw
        if thw is None:
            raise ValueError("SSTA learns the canvas from a forward of the whole model, got a call of the attention without one before")
        if math.prod(thw) != video_tokens:
            raise ValueError(f"hidden_states must have the canvas' {' x '.join(map(str, thw))} tokens, got {video_tokens} video tokens")
        return thw

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | None = None) -> Tensor:
        """Sparse attention over ``layout``; notes what ran, for ``SSTAHandle.report``.

        Args:
            query: ``[B, S, H, D]``, with S = ``layout.length``; memory order as diffusers' processors have it.
            key: ``[B, S, Hkv, D]``.
            value: ``[B, S, Hkv, D]``.
            layout: where the video and the conditions lie in the sequence.
            text_mask: bool or integer ``[B, layout.dense_length]``, nonzero = valid, the valid tokens first.

        Returns:
            ``[B, S, H, D]`` in query's dtype.

        Raises:
            TypeError, ValueError: what ``ssta_attention`` raises, or context parallelism.
        """
        if self._parallel_config is not None:
            raise ValueError(f"SSTA must run without context parallelism, got _parallel_config = {self._parallel_config}")
        config, impl = self.context.canvas_config, self.context.impl
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, blocks = ssta_attention(q, k, v, layout, config, text_mask=text_mask, impl=impl, return_blocks=True)
        # The density stays on the device until somebody asks for the report.
        ran = resolve_impl(impl, out.device, out.dtype, out.shape[-1], blocks.max_q_length)
        self._last = (ran, self.context.thw, layout.length, blocks.num_q_blocks, blocks.density())
        return out.transpose(1, 2)

    def last_run(self, layer: str) -> LayerRun | None:
        """What ran last, under the name ``layer``; None if nothing did. Synchronises the device."""
        if self._last is None:
            return None
        *facts, density = self._last
        return LayerRun(layer, *facts, float(density))
