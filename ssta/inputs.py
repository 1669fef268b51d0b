"""That q, k and v fit one another and their layouts, or a rank's share of one; and the LayerSpec of what does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from .config import SSTAConfig
from .kernels import Deferred
from .kernels.checks import require_bool, require_strided, resolve_scale
from .kernels.routing import require_impl
from .sequence import TokenLayout
from .spec import LayerSpec, Peers
from .text import TextMask


class Share(Protocol):
    """What ranks have of a sequence; see ``ranks``."""

    def check(self, name: str, x: Any) -> None:
        """That x is this rank's share."""

    def deal_heads(self, total: int, key_heads: int | None = None) -> Any:
        """That heads can be dealt out."""


def checked_spec(
    query: Any, key: Any, value: Any, layout: Any, kv_layout: Any, config: Any, scale: Any, deterministic: Any, impl: Any,
    rows: tuple[tuple[int, int], ...] | None, peers: Peers | None, means: bool = False, *, text_mask: Any, recorded: bool,
) -> LayerSpec:
    """The spec of a call, after its checks; arguments as ``ssta_attention`` takes them.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    require_bool("deterministic", deterministic)
    check_inputs(query, key, value, layout, config, kv_layout)
    kv_layout = layout if kv_layout is None else kv_layout
    if text_mask is not None:
        TextMask.of(text_mask, query.shape[0], kv_layout, query.device)
    for grids in (kv_layout, layout):
        if grids.longest_video is not None:
            config = config.for_canvas(grids.longest_video)
            break
    if kv_layout != layout and config.pad_type != "none":
        raise ValueError(f"pad_type must be 'none' where keys have a kv_layout of their own, got {config.pad_type!r}")
    return LayerSpec(layout, kv_layout, config, resolve_scale(scale, query.shape[3]), query.dtype, query.shape[1], key.shape[1],
                     query.shape[3], require_impl(impl), deterministic, recorded, rows, peers, means)


def check_inputs(query: Any, key: Any, value: Any, layout: Any, config: Any, kv_layout: Any = None, share: Share | None = None) -> None:
    """That they fit one another and their layouts, or with ``share`` a rank's share of ``layout``."""
    require_layout("layout", layout)
    if kv_layout is not None:
        require_layout("kv_layout", kv_layout)
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig, got {type(config).__name__}")
    _check_tensor("query", query)
    dtype, device, (batch, heads, _, dim) = query.dtype, query.device, query.shape
    for name, x, tokens in (("query", query, layout), ("key", key, kv_layout or layout), ("value", value, kv_layout or layout)):
        if x is not query:
            _check_tensor(name, x)
        shape = x.shape
        if isinstance(x, Tensor) != isinstance(query, Tensor):
            raise TypeError(f"{name} must be {type(query).__name__} as query is, got {type(x).__name__}")
        if isinstance(x, Deferred):
            if not set(accumulate(x.lengths)) <= set(accumulate([segment.length for segment in tokens.segments])):
                raise ValueError(f"{name}'s projections must end where segments of the layout do, got {x.lengths} tokens for "
                                 f"{tokens.segments}")
        if share is not None:
            share.check(name, x)
        elif shape[2] != tokens.length:
            whose = "layout" if tokens is layout else "kv_layout"
            raise ValueError(f"{name} must have the {whose}'s {tokens.length} tokens, got {shape[2]} in shape {tuple(shape)}"
                             + _tokens_first(shape, tokens.length))
        if shape[0] != batch or shape[3] != dim:
            raise ValueError(f"{name} must have query's batch {batch} and head_dim {dim}, got shape {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have query's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on query's device {device}, got {x.device}")
    if key.shape != shape:
        raise ValueError(f"value must have key's shape {tuple(key.shape)}, got {tuple(shape)}")
    if heads == 0:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    if shape[1] == 0 or heads % shape[1]:
        raise ValueError(f"query's heads must be a multiple of key's {shape[1]}, got {heads}")
    if share is not None:
        share.deal_heads(heads, shape[1])


def require_layout(name: str, layout: Any) -> TokenLayout:
    """``layout``, a TokenLayout.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"{name} must be a TokenLayout, got {type(layout).__name__}")
    return layout


def check_query(name: str, query: Any, layout: TokenLayout) -> None:
    """That ``query``, under its ``name``, is ``[B, H, S, D]`` of ``layout``."""
    require_layout("layout", layout)
    _check_tensor(name, query)
    if query.shape[2] != layout.length:
        raise ValueError(f"{name} must have the layout's {layout.length} tokens, got {query.shape[2]} in shape {tuple(query.shape)}"
                         + _tokens_first(query.shape, layout.length))


def _tokens_first(shape: Sequence[int], length: int) -> str:
    """A hint for an error where ``length`` tokens stand where heads should."""
    if shape[1] != length or shape[2] == length:
        return ""
    return f"; the order of axes is [batch, heads, tokens, head_dim], so transpose(1, 2) of the shape {tuple(shape)} that came may be meant"


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, (Tensor, Deferred)) and not hasattr(x, "wait"):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if isinstance(x, Tensor):
        require_strided(name, x)
    if len(x.shape) != 4:
        raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_lengths(query: Tensor, layout: TokenLayout) -> None:
    """That thw and text_len, of which ``layout`` was made, say how long the sequence is, in these two names."""
    if type(query) is Tensor and query.dim() == 4 and query.shape[2] == layout.length:
        # Whatever else must hold of a query every layer sees to, once for each kind of inputs.
        return
    _check_tensor("query", query)
    length, text_len = query.shape[2], layout.dense_length
    if layout.length == length:
        return
    hint = _tokens_first(query.shape, layout.length)
    if text_len > length:
        raise ValueError(f"text_len must be at most the sequence's {length} tokens, got {text_len}{hint}")
    raise ValueError(f"thw must multiply to the {length - text_len} video tokens of query ({length} tokens less text_len {text_len}), "
                     f"got {layout.video[0].thw} = {layout.video_length}{hint}")
