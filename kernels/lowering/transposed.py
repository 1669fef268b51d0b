"""Lists of blocks the other way round: which query blocks attend to each key block, for a backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .chunks import Listed

# Entries of a list that a program reads at once; and of the matrix of pairs, query blocks by key blocks.
ENTRIES, ROWS, ITEMS = 256, 64, 32


@triton.jit(do_not_specialize=["capacity", "items"])
def _pairs_kernel(counts, indices, pairs, capacity, items, ENTRIES: tl.constexpr):
    """A row of the matrix: 1 where the list names the item, else 0."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES)
    pairs += row * items
    for first in range(0, items, ENTRIES):
        tl.store(pairs + first + place, tl.zeros([ENTRIES], tl.int8), mask=first + place < items)
    # Other threads write where these have.
    tl.debug_barrier()
    count = tl.minimum(tl.load(counts + row), capacity)
    for first in range(0, count, ENTRIES):
        item = tl.load(indices + row * capacity + first + place, mask=first + place < count, other=-1)
        # Ids out of range count as absent.
        tl.store(pairs + item, tl.full([ENTRIES], 1, tl.int8), mask=(item >= 0) & (item < items))


@triton.jit(do_not_specialize=["rows", "items"])
def _columns_kernel(pairs, counts, indices, rows, items, ROWS: tl.constexpr, ITEMS: tl.constexpr):
    """The lists of ITEMS columns of the matrix."""
    item, lists = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS), tl.program_id(1).to(tl.int64)
    to, inside = lists * items + item, item < items
    count = tl.zeros([ITEMS], tl.int32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (lists * rows + row)[:, None] * items + item[None, :]
        kept = tl.load(pairs + at, mask=(row < rows)[:, None] & inside[None, :], other=0).to(tl.int32)
        place = count[None, :] + tl.cumsum(kept, 0) - 1
        tl.store(indices + to[None, :] * rows + place, tl.broadcast_to(row[:, None], [ROWS, ITEMS]), mask=kept > 0)
        count += tl.sum(kept, 0)
    tl.store(counts + to, count, mask=inside)


def transposed(listed: Listed) -> Listed:
    """For each item the rows that list it, ids ascending; nothing is written past the counts."""
    (batch, heads, rows, capacity), items, device = listed.indices.shape, listed.items.number, listed.indices.device
    counts = torch.empty(batch, heads, items, dtype=torch.int32, device=device)
    indices = torch.empty(batch, heads, items, rows, dtype=torch.int32, device=device)
    if batch * heads * rows * items:
        pairs = torch.empty(batch, heads, rows, items, dtype=torch.int8, device=device)
        launch(_pairs_kernel, (batch * heads * rows, 1, 1), (listed.counts, listed.indices, pairs), (capacity, items),
               dict(ENTRIES=ENTRIES))
        launch(_columns_kernel, (-(-items // ITEMS), batch * heads, 1), (pairs, counts, indices), (rows, items),
               dict(ROWS=ROWS, ITEMS=ITEMS))
    else:
        counts.zero_()
    return Listed(counts, indices, listed.items, listed.rows)
