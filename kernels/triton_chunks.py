"""Lists of blocks become lists of chunks: runs of at most CHUNK tokens that a kernel loads in one step, whole ones apart from cut ones.

The kernels then have one simple loop over whole chunks, with no mask at all, and one over the chunks that a ragged tail or the causal
diagonal cuts, whatever the blocks looked like. The order inside a list is free, so this costs nothing but one small launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import BlockLists

# List entries read at once by one program.
SEGMENT = 256


class Chunks(NamedTuple):
    """For each row of the lists: whole chunks from the front of ``starts``, cut chunks from its back, with their token counts in ``sizes``."""

    starts: Tensor   # int32 [B|1, H|1, rows, width], first token of a chunk
    sizes: Tensor    # int32, same shape, tokens of a chunk that is cut; not written for whole ones
    whole: Tensor    # int32 [B|1, H|1, rows]
    cut: Tensor      # int32 [B|1, H|1, rows]


@triton.jit
def _chunks_kernel(counts, indices, row_starts, row_sizes, item_starts, item_sizes, starts, sizes, whole, cut,
                   list_batch, list_head, list_group, row_batch, row_head, row_group, item_batch, item_head, item_group,
                   heads, rows, items, capacity, width, parts, shift,
                   CHUNK: tl.constexpr, SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, ROWS_ARE_QUERIES: tl.constexpr):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    list_row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + row
    row_at = batch * row_batch + (head // row_group) * row_head + row
    item_at = batch * item_batch + (head // item_group) * item_head
    out_row = (batch.to(tl.int64) * heads + head) * rows + row
    row_start, row_size = tl.load(row_starts + row_at), tl.load(row_sizes + row_at)
    count = tl.minimum(tl.load(counts + list_row), capacity)
    number_whole, number_cut = 0, 0
    for first in range(0, count * parts, SEGMENT):
        slot = first + tl.arange(0, SEGMENT)
        item = tl.load(indices + list_row * capacity + slot // parts, mask=slot < count * parts, other=-1)
        known = (item >= 0) & (item < items)
        offset = (slot % parts) * CHUNK
        start = tl.load(item_starts + item_at + item, mask=known, other=0) + offset
        size = tl.minimum(tl.load(item_sizes + item_at + item, mask=known, other=0) - offset, CHUNK)
        seen, complete = size > 0, size == CHUNK
        if CAUSAL:
            # Key j is visible to query i when j <= i + shift.
            if ROWS_ARE_QUERIES:
                seen = seen & (start <= row_start + row_size - 1 + shift)
                complete = complete & (start + CHUNK - 1 <= row_start + shift)
            else:
                seen = seen & (row_start <= start + size - 1 + shift)
                complete = complete & (row_start + row_size - 1 <= start + shift)
        is_whole, is_cut = seen & complete, seen & (complete == 0)
        at_front = number_whole + tl.cumsum(is_whole.to(tl.int32), 0) - 1
        at_back = width - (number_cut + tl.cumsum(is_cut.to(tl.int32), 0))
        tl.store(starts + out_row * width + at_front, start, mask=is_whole)
        tl.store(starts + out_row * width + at_back, start, mask=is_cut)
        tl.store(sizes + out_row * width + at_back, size, mask=is_cut)
        number_whole += tl.sum(is_whole.to(tl.int32), 0)
        number_cut += tl.sum(is_cut.to(tl.int32), 0)
    # A row without real tokens attends to nothing.
    tl.store(whole + out_row, tl.where(row_size > 0, number_whole, 0))
    tl.store(cut + out_row, tl.where(row_size > 0, number_cut, 0))


def chunk_lists(blocks: BlockLists, row_bounds: tuple[Tensor, Tensor], item_bounds: tuple[Tensor, Tensor], chunk: int,
                causal_shift: int | None = None, rows_are_queries: bool = True) -> Chunks:
    """Cuts every listed block into chunks of ``chunk`` tokens.

    Args:
        blocks: the lists; of a transpose, rows are key blocks and items query blocks.
        row_bounds, item_bounds: (first token, real tokens), int32 ``[B|1, H|1, number]`` each, of the rows' and the listed blocks.
        chunk: tokens of a chunk, a power of two.
        causal_shift: Skv - Sq under a causal mask, else None. Chunks that no row sees are dropped.
        rows_are_queries: False for a transpose.
    """
    counts, indices = blocks.counts, blocks.indices.contiguous()
    counts = counts.contiguous()
    batch = max(x.shape[0] for x in (counts, row_bounds[0], item_bounds[0]))
    heads = max(x.shape[1] for x in (counts, row_bounds[0], item_bounds[0]))
    rows, capacity = indices.shape[2:]
    parts = triton.cdiv(blocks.max_kv_length, chunk)
    width = max(capacity * parts, 1)
    starts = torch.empty(batch, heads, rows, width, dtype=torch.int32, device=counts.device)
    sizes = torch.empty_like(starts)
    whole = torch.empty(batch, heads, rows, dtype=torch.int32, device=counts.device)
    cut = torch.empty_like(whole)
    _chunks_kernel[(rows, heads, batch)](
        counts, indices, *row_bounds, *item_bounds, starts, sizes, whole, cut,
        *shared_strides(counts, heads), *shared_strides(row_bounds[0], heads), *shared_strides(item_bounds[0], heads),
        heads, rows, item_bounds[0].shape[2], capacity, width, parts, causal_shift or 0,
        CHUNK=chunk, SEGMENT=SEGMENT, CAUSAL=causal_shift is not None, ROWS_ARE_QUERIES=rows_are_queries)
    return Chunks(starts, sizes, whole, cut)


def shared_strides(x: Tensor, heads: int) -> tuple[int, int, int]:
    """(batch stride, head stride, heads that share one entry) of a contiguous ``[B|1, H|1, n]`` tensor read by ``heads`` heads."""
    n = x.shape[2]
    return (x.shape[1] * n if x.shape[0] > 1 else 0), n, heads // x.shape[1]


def readable(x: Tensor) -> Tensor:
    """x, or a copy where the kernels cannot walk it: a last stride other than 1, or rows so far apart that 256 of them leave 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(-2) < 1 << 23 else x.contiguous()
