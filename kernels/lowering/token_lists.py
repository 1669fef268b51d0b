"""The lists of query tokens by key blocks, from ids, without asking how long the longest list is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import operator
from .quick_launch import FUSED

# Lists of ids that one program goes through, of up to 32 ids each.
LISTS = 32


@triton.jit
def _chosen_kernel(given, limits, spans, ids, counts, full, lists, heads, capacity, block_size,
                   LISTS: tl.constexpr, CAPACITY: tl.constexpr):
    """Writes for each list the ids of blocks in the span, each once: those wholly inside at the front, the others at the back."""
    row = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    real, slot = row < lists, tl.arange(0, CAPACITY)
    low = tl.load(spans + row // heads * 3 + 1, mask=real, other=0)[:, None]
    high = tl.load(spans + row // heads * 3 + 2, mask=real, other=0)[:, None]
    there = (slot < capacity)[None, :]
    if limits is not None:
        limit = tl.minimum(tl.load(limits + row, mask=real, other=0), capacity).to(tl.int32)[:, None]
        there = there & (slot[None, :] < limit)
    first = row.to(tl.int64) * capacity
    at = first[:, None] + slot[None, :]
    item = tl.load(given + at, mask=real[:, None] & there, other=-1)
    # Before it is multiplied: an id may be anything.
    known = (item >= 0) & (item < tl.cdiv(high, block_size))
    item = tl.where(known, item, 0).to(tl.int32)
    kept = known & (item * block_size + block_size > low)
    for before in range(capacity - 1):
        other = tl.load(given + first + before, mask=real, other=-1)[:, None]
        again = (other == item) & (slot[None, :] > before)
        if limits is not None:
            again = again & (limit > before)
        kept = kept & (again == 0)
    full_block = kept & (item * block_size >= low) & (item * block_size + block_size <= high)
    partial_block = kept & (full_block == 0)
    tl.store(ids + at + (tl.cumsum(full_block.to(tl.int32), 1) - 1 - slot[None, :]), item, mask=full_block)
    tl.store(ids + at + (capacity - tl.cumsum(partial_block.to(tl.int32), 1) - slot[None, :]), item, mask=partial_block)
    tl.store(counts + row, tl.sum(kept.to(tl.int32), 1), mask=real)
    tl.store(full + row, tl.sum(full_block.to(tl.int32), 1), mask=real)


def _like_lists(given: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    ids, counts = (given.new_empty(given.shape[:n], dtype=torch.int32) for n in (3, 2))
    return ids, counts, torch.empty_like(counts)


@operator("chosen_blocks", _like_lists)
def chosen_blocks(given: Tensor, limits: Tensor | None, spans: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [T, H, S], counts int32 [T, H], full int32 [T, H]), as TokenLists, of any ids [T, H, S]; contiguous all."""
    tokens, heads, capacity = given.shape
    ids, counts, full = _like_lists(given)
    if not given.numel():
        return ids, counts.zero_(), full.zero_()
    padded = triton.next_power_of_2(capacity)
    at_once = max(1, LISTS * 32 // max(padded, 32))
    _chosen_kernel[(triton.cdiv(tokens * heads, at_once),)](
        given, limits, spans, ids, counts, full, tokens * heads, heads, capacity, block_size, LISTS=at_once, CAPACITY=padded, **FUSED)
    return ids, counts, full
