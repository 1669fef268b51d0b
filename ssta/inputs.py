"""That q, k and v fit one another and their layout, or a rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from .config import SSTAConfig
from .kernels import Deferred, require_strided
from .layout import Input
from .parallel import Shards
from .rings import Rings
from .sequence import TokenLayout


def check_inputs(query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig,
                 shards: Shards | Rings | None = None) -> None:
    """That they fit one another, and ``layout``, or a rank's share of it; a layer's first step after autocast."""
    require_layout(layout)
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig, got {type(config).__name__}")
    _check_tensor("query", query)
    deferred, dtype, device, (batch, heads, _, dim) = isinstance(query, Deferred), query.dtype, query.device, query.shape
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not query:
            _check_tensor(name, x)
        shape = x.shape
        if isinstance(x, Deferred) != deferred:
            raise TypeError(f"{name} must be {type(query).__name__} as query is, got {type(x).__name__}")
        if deferred and isinstance(x, Deferred):
            if not set(accumulate(x.lengths)) <= set(accumulate([segment.length for segment in layout.segments])):
                raise ValueError(f"{name}'s projections must end where segments of the layout do, got {x.lengths} tokens for "
                                 f"{layout.segments}")
        if shards is not None:
            shards.check(name, x)
        elif shape[2] != layout.length:
            raise ValueError(f"{name} must have the layout's {layout.length} tokens, got {shape[2]} in shape {tuple(shape)}"
                             + _tokens_first(shape, layout.length))
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
    if shards is not None:
        shards.deal_heads(heads, shape[1])


def require_layout(layout: TokenLayout) -> TokenLayout:
    """``layout``, a TokenLayout.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {type(layout).__name__}")
    return layout


def _tokens_first(shape: Sequence[int], length: int) -> str:
    """A hint for an error where ``length`` tokens stand where heads should."""
    if shape[1] != length or shape[2] == length:
        return ""
    return f"; the order of axes is [batch, heads, tokens, head_dim], so transpose(1, 2) of the shape {tuple(shape)} that came may be meant"


def _check_tensor(name: str, x: Input) -> None:
    if not isinstance(x, (Tensor, Deferred)):
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
