"""A call's arguments: that q, k and v fit one another and their layouts, and the LayerSpec of what does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from .config import SSTAConfig
from .kernels import Deferred
from .kernels.checks import DTYPES, require_bool, require_strided, resolve_scale
from .kernels.routing import require_impl
from .sequence import TokenLayout, require_layout
from .spec import LayerSpec
from .text import TextMask

# (name, what came as the argument of that name) -> the shape ``[B, H, S, D]`` of the whole that it is a part of.
WholeShape = Callable[[str, Any], Sequence[int]]


def described(
    query: Any, key: Any, value: Any, layout: Any, config: Any, *, kv_layout: Any = None, text_mask: Any = None, scale: Any = None,
    deterministic: Any = True, impl: Any = "auto", means: bool = False, by_thw: bool = False, recorded: bool = False,
    whole: WholeShape | None = None,
) -> LayerSpec:
    """The layer that a call is of, after all checks. The arguments are those of ``attention.attend``, the tensors in autocast's dtype.

    Args:
        recorded: whether a gradient is wanted.
        whole: gives the shapes that query, key and value have together with the parts of other processes; None = they are whole.
    """
    require_bool("deterministic", deterministic)
    require_layout("layout", layout)
    kv_layout = layout if kv_layout is None else require_layout("kv_layout", kv_layout)
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig, got {type(config).__name__}")
    heads, kv_heads, dim = check_tensors(query, key, value, layout, kv_layout, by_thw, whole)
    if text_mask is not None:
        TextMask.of(text_mask, query.shape[0], kv_layout, query.device)
    for grids in (kv_layout, layout):
        if grids.longest_video is not None:
            config = config.for_canvas(grids.longest_video)
            break
    if kv_layout != layout and config.pad_type != "none":
        raise ValueError(f"pad_type must be 'none' where keys have a kv_layout of their own, got {config.pad_type!r}")
    return LayerSpec(layout, kv_layout, config, resolve_scale(scale, dim), query.dtype, query.device, heads, kv_heads, dim,
                     require_impl(impl), deterministic, recorded, means)


def check_tensors(query: Any, key: Any, value: Any, layout: TokenLayout, kv_layout: TokenLayout, by_thw: bool = False,
                  whole: WholeShape | None = None) -> tuple[int, int, int]:
    """(H, Hkv, D), after the check that the three fit one another and their layouts. ``whole``: as ``described`` takes it."""
    _check_tensor("query", query, whole)
    dtype, device, batch, dim = query.dtype, query.device, query.shape[0], query.shape[3]
    of_heads = []
    for name, x, tokens in (("query", query, layout), ("key", key, kv_layout), ("value", value, kv_layout)):
        shape = _check_tensor(name, x, whole)
        if isinstance(x, Tensor) != isinstance(query, Tensor):
            raise TypeError(f"{name} must be {type(query).__name__} as query is, got {type(x).__name__}")
        if isinstance(x, Deferred) and not set(accumulate(x.lengths)) <= set(accumulate([of.length for of in tokens.segments])):
            raise ValueError(f"{name}'s projections must end where segments of the layout do, got {x.lengths} tokens for {tokens.segments}")
        if shape[2] != tokens.length:
            if by_thw and x is query:
                raise _wrong_thw(shape, tokens)
            whose = "layout" if tokens is layout else "kv_layout"
            raise ValueError(f"{name} must have the {whose}'s {tokens.length} tokens, got {shape[2]} in shape {tuple(shape)}"
                             + _tokens_first(shape, tokens.length))
        if shape[0] != batch or shape[3] != dim:
            raise ValueError(f"{name} must have query's batch {batch} and head_dim {dim}, got shape {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have query's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on query's device {device}, got {x.device}")
        of_heads.append(shape[1])
    if key.shape != value.shape:
        raise ValueError(f"value must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}")
    heads, kv_heads, _ = of_heads
    if heads == 0:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query's heads must be a multiple of key's {kv_heads}, got {heads}")
    return heads, kv_heads, dim


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


def _check_tensor(name: str, x: Any, whole: WholeShape | None = None) -> Sequence[int]:
    """The shape of ``x``, or of the whole that it is a part of."""
    if whole is not None:
        shape = whole(name, x)
    elif isinstance(x, (Tensor, Deferred)):
        shape = x.shape
    else:
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if isinstance(x, Tensor):
        require_strided(name, x)
    if len(shape) != 4:
        raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(shape)}")
    if x.dtype not in DTYPES:
        taken = "float16, bfloat16, float32 or float64" if x.dtype.is_floating_point else "a floating-point tensor"
        raise TypeError(f"{name} must be {taken}, got {x.dtype}")
    return shape


def _wrong_thw(shape: Sequence[int], layout: TokenLayout) -> ValueError:
    """That thw and text_len, of which ``layout`` was made, do not say how long the sequence is."""
    length, text_len, hint = shape[2], layout.dense_length, _tokens_first(shape, layout.length)
    if text_len > length:
        return ValueError(f"text_len must be at most the sequence's {length} tokens, got {text_len}{hint}")
    return ValueError(f"thw must multiply to the {length - text_len} video tokens of query ({length} tokens less text_len {text_len}), "
                      f"got {layout.video[0].thw} = {layout.video_length}{hint}")
