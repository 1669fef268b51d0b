"""Family: what has to be said about one kind of video transformer before SSTA can be put into it; the register of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ssta import SSTAConfig

from .context import ModelContext
from .processor import SSTAProcessor
from .schedule import Schedule


def thousandth(timestep: Tensor | float) -> Tensor | float:
    """The noise level of timesteps that go from 1000 down to 0."""
    return timestep / 1000


def published_size() -> SSTAConfig:
    """For models without published SSTA settings: the tile, window and budget that HunyuanVideo-1.5 uses for 121 frames, on real tokens
    only, by plain similarity, which needs no training to mean something."""
    return SSTAConfig(tile_thw=(6, 8, 8), kernel_thw=(3, 3, 3), topk=32)


@dataclass(frozen=True)
class Site:
    """One self-attention over video tokens inside a model.

    Attributes:
        name: the module's dotted name in the model.
        module: the attention module, which holds its processor in ``.processor``.
        stock: the processor class (or a tuple of classes) that the site is known to work with; SSTA refuses to replace any other.
        replacement: called with the model's ``ModelContext``, returns the processor that attends through SSTA.
    """

    name: str
    module: nn.Module
    stock: type | tuple[type, ...]
    replacement: Callable[[ModelContext], SSTAProcessor]


@dataclass(frozen=True)
class Family:
    """One kind of video transformer.

    Attributes:
        model: class name of the transformer; its subclasses belong to the family too.
        sites: ``sites(model)`` yields the model's video self-attentions. Cross-attention and text-only layers are not sites.
        canvas: ``canvas(model, arguments)`` is the canvas (t, h, w) in tokens of a forward, from its arguments by name. It runs before
            every forward, so it looks at shapes and numbers, not at a tensor's values, which lie on the device.
        default_config: the configuration when the user gives none.
        default_schedule: the schedule when the user gives none.
        noise: ``noise(timestep)`` is the noise level in [0, 1] of a timestep, from the scheduler or from the forward's ``timestep``.
    """

    model: str
    sites: Callable[[nn.Module], Iterator[Site]]
    canvas: Callable[[nn.Module, Mapping[str, Any]], tuple[int, int, int]]
    default_config: Callable[[], SSTAConfig] = published_size
    default_schedule: Callable[[], Schedule] = Schedule.warm_up
    noise: Callable[[Tensor | float], Tensor | float] = thousandth


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Makes ``apply_ssta`` know one more kind of transformer. README has an example.

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
