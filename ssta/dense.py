"""dense_attention: exact attention over a layout, in which not every token of the text need be valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import LayerResult, ssta_layer
from .config import SSTAConfig
from .inputs import check_inputs, require_layout
from .kernels import PatternFacts, autocast_inputs, block_sparse_attention, choose_route
from .layout import checked_layout
from .selection import Selection, window_lists
from .sequence import DenseRun, TokenLayout
from .text import TextMask

if TYPE_CHECKING:
    from .rings import Rings

# Only its tile counts, which is the one that kernels are fastest with: without video there is nothing to select.
_EXACT = SSTAConfig(pad_type="none")


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | TextMask | None = None, *,
    scale: float | None = None, impl: str = "auto", rings: Rings | None = None, note: Callable[[str], object] | None = None,
) -> LayerResult:
    """Exact attention of every token to every valid one, through lists of blocks, the last of which are short.

    Attention backends want a mask for every token here, and leave their fast kernels for it. Nothing is tiled or copied.

    Args:
        query: ``[B, H, S, D]``, S = ``layout.length``; any strides whose last is 1. Under autocast all three are cast to its dtype.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        layout: what the sequence consists of.
        text_mask: bool or integer ``[B, layout.dense_length]``, nonzero = valid, in each dense run the valid tokens first; or a TextMask.
            Invalid tokens are not attended to, and their rows give zeros.
        scale: factor on the scores; default 1 / sqrt(D).
        impl: which kernel runs; "auto" chooses by device, dtype and shape.
        rings: how ranks share ``layout`` out beyond its heads; query, key and value are then this rank's share.
        note: as in ``ssta_layer``.

    Returns:
        LayerResult: its selection holds all blocks of the sequence. Differentiable in query, key and value.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    require_layout(layout)
    whole, runs = None, TokenLayout(tuple([DenseRun(segment.length) for segment in layout.segments]))
    if rings is not None:
        if text_mask is not None:
            text_mask = TextMask.of(text_mask, query.shape[0], layout, query.device).whole()
        return ssta_layer(query, key, value, runs, _EXACT, text_mask=text_mask, scale=scale, impl=impl, shards=rings, note=note)
    query, key, value = autocast_inputs(query=query, key=key, value=value)
    check_inputs(query, key, value, layout, _EXACT)
    tiles = checked_layout(runs, _EXACT.tile_thw, _EXACT.pad_type, query.device)
    if text_mask is not None:
        whole = TextMask.of(text_mask, query.shape[0], layout, query.device).whole()
    blocks = window_lists(tiles, _EXACT.kernel_thw, whole)
    out = block_sparse_attention(query, key, value, blocks, scale=scale, impl=impl)
    route = None
    if not torch.compiler.is_compiling():
        # A pure function: what block_sparse_attention chose by the same facts.
        route = choose_route(impl, query.device, query.dtype, query.shape[3], PatternFacts.of(blocks), heads=query.shape[1],
                             kv_heads=key.shape[1])
    return LayerResult(out, Selection(blocks), route)
