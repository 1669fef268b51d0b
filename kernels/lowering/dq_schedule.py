"""Which tiles each program of the Hopper backward takes, and in which order they add to dQ: the same bits every time, and hardly a wait.

A tile is KEYS keys of one block; its list names the query blocks that attend to it; a visit is one chunk of QUERIES queries of one of them.
Where additions have an order, as many programs as there are multiprocessors run side by side and each walks tiles that are dealt out
here, from the lists alone. The time of a visit is the number of visits that its program makes before it. Programs that keep pace reach a
query block in the order of these times, so that is the order of their turns: hardly anyone ever waits. Nor can they wait for one another in
a ring: whoever is first in time among all that wait has its turn.

Lists are rings, and where a tile enters them follows the clock: all programs sweep over the queries together, so that most of what one
brings into L2, the sums of dQ above all, the others find there. They do not go abreast, since programs side by side often have tiles of
the same block and would want the same chunk at the same time: each is GAP visits ahead of the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from .chunks import Partition, shared_strides
from .dq_accum import KEYS, QUERIES
from .primitives import block_bounds

# int32 numbers of a tile: first key; keys from there to the end of the block; batch; key/value head; key block; part of it; visits;
# the next tile of the same program, or -1; where in its lists it begins, in 1 / RING of their length.
FIELDS = tl.constexpr(9)
ROW, ROWS, BATCH, HEAD, BLOCK, PART, VISITS, NEXT, BEGIN = map(tl.constexpr, range(9))
RING = tl.constexpr(4096)
# An addition is written about two visits after it began. Time of the backward over that in any order, H200, bfloat16, D 128, six patterns
# (46,080 to 138,240 tokens, blocks of 128 and 384, random lists and neighbours, one of grouped heads): 3 visits apart 1.02 to 1.12, 5 apart
# 1.00 to 1.08, 7 apart 1.02 to 1.12, 10 apart 1.00 to 1.18. Abreast 1.5 at 46,080 tokens; without the clock 1.1, and 1.3 at 138,240.
GAP = 5
SEGMENT = 128


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker.
_NUMBERS = [f"{of}_{what}" for of in ("list", "listed", "row", "item") for what in ("batch", "head", "group", "length", "tokens")]
_NUMBERS += ["kv_heads", "group", "rows", "blocks", "capacity", "width", "parts", "halvings", "number", "programs", "gap", "shift"]


class Schedule(NamedTuple):
    """What the programs of the backward kernel walk."""

    tiles: Tensor          # int32 [B * Hkv * parts * key blocks + programs, FIELDS]: tiles in the order in which they are taken, head after
    #                        head, then for each program a row of which NEXT, its first tile, is set
    lock_values: Tensor | None   # int32 [B, Hq, key blocks, parts, width]: how many tiles add to a query block before this one does
    passed: Tensor | None  # int32 [B, Hq, key blocks], under a causal mask: the first entries of a list, of which none sees a key
    width: int             # of a list


@triton.jit(do_not_specialize=_NUMBERS)
def _tiles_kernel(counts, indices, row_starts, row_sizes, item_starts, item_sizes, tiles, passed,
                  list_batch, list_head, list_group, row_batch, row_head, row_group, item_batch, item_head, item_group,
                  kv_heads, group, rows, row_length, row_tokens, item_length, item_tokens, width, parts, shift,
                  M: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr, UNIFORM_ROWS: tl.constexpr,
                  UNIFORM_ITEMS: tl.constexpr, CAUSAL: tl.constexpr):
    block = tl.program_id(0)
    kv_head, batch = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    row_at = batch * row_batch + (kv_head // row_group) * row_head
    row, size = block_bounds(row_starts, row_sizes, row_at, block, row_length, row_tokens, UNIFORM_ROWS)
    visits = tl.zeros([SEGMENT], tl.int32)
    for member in range(group):
        head = kv_head * group + member
        list_row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + block
        item_at = batch * item_batch + (head // item_group) * item_head
        count = tl.minimum(tl.load(counts + list_row), width)
        unseen = tl.zeros([SEGMENT], tl.int32)
        for first in range(0, count, SEGMENT):
            entry = first + tl.arange(0, SEGMENT)
            item = tl.load(indices + list_row * width + entry, mask=entry < count, other=0)
            start, length = block_bounds(item_starts, item_sizes, item_at, item, item_length, item_tokens, UNIFORM_ITEMS)
            seen = entry < count
            if CAUSAL:
                # Blocks of queries that all come before these keys are passed by. Ids ascend, so they are the first of the list.
                seen = seen & (start + length + shift > row)
                unseen += (entry < count) & ~seen
            visits += tl.where(seen, tl.maximum(length + M - 1, 0) // M, 0)
        if CAUSAL:
            tl.store(passed + (batch.to(tl.int64) * kv_heads * group + head) * rows + block, tl.sum(unseen, 0))
    part = tl.arange(0, PARTS)
    left = size - part * N
    # Each head from the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    place = (tl.program_id(1) + 1) * rows * parts - 1 - (block * parts + part)
    to = tiles + place.to(tl.int64) * FIELDS
    here = part < parts
    tl.store(to + ROW, row + part * N, mask=here)
    tl.store(to + ROWS, left, mask=here)
    tl.store(to + BATCH, batch, mask=here)
    tl.store(to + HEAD, kv_head, mask=here)
    tl.store(to + BLOCK, block, mask=here)
    tl.store(to + PART, part, mask=here)
    tl.store(to + VISITS, tl.where(left > 0, tl.sum(visits, 0), 0), mask=here)
    tl.store(to + NEXT, -1, mask=here)
    tl.store(to + BEGIN, 0, mask=here)


@triton.jit(do_not_specialize=_NUMBERS)
def _deal_kernel(tiles, times, number, programs, group, gap, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr):
    """Deals the tiles out, in their order, to the programs that have least to do: NEXT, BEGIN, and the time at which each begins."""
    total, walked = tl.zeros([WINDOW], tl.int64), tl.zeros([WINDOW], tl.int32)
    for first in range(0, number, WINDOW):
        tile = first + tl.arange(0, WINDOW)
        visits = tl.load(tiles + tile * FIELDS + VISITS, mask=tile < number, other=0)
        total += visits
        walked += (visits > 0).to(tl.int32)
    # Programs that come within an average tile of one another take theirs together: one at a time would be fairer by a hundredth, and slow.
    step = tl.maximum(tl.sum(total, 0) // tl.maximum(tl.sum(walked, 0), 1), 1).to(tl.int32)
    # To change tiles takes about as long as a visit. Every query head of a group has a list of its own, walked one after another.
    period = (step + 1 + group - 1) // group
    program = tl.arange(0, PROGRAMS)
    place = program * gap % period * RING // period
    work = tl.where(program < programs, 0, 1 << 30)
    last = number + program
    taken = 0
    while taken < number:
        free = work < tl.min(work, 0) + step
        tile = taken + tl.cumsum(free.to(tl.int32), 0) - 1
        taken += tl.sum(free.to(tl.int32), 0)
        free = free & (tile < number)
        # A part beyond the end of its block is nobody's.
        free = free & (tl.load(tiles + tile * FIELDS + ROWS, mask=free, other=0) > 0)
        tl.store(tiles + last * FIELDS + NEXT, tile, mask=free)
        tl.store(times + tile, work, mask=free)
        tl.store(tiles + tile * FIELDS + BEGIN, (work % period * RING // period + place) % RING, mask=free)
        last = tl.where(free, tile, last)
        work += tl.where(free, tl.load(tiles + tile * FIELDS + VISITS, mask=free, other=0) + 1, 0)
    tl.store(tiles + last * FIELDS + NEXT, -1, mask=program < programs)


@triton.jit
def _visible(listed_counts, passed, row, list_row, width, mask, CAUSAL: tl.constexpr):
    """Of a list: (its entries less those that are passed by, how many these are)."""
    count = tl.minimum(tl.load(listed_counts + list_row, mask=mask, other=0), width)
    if CAUSAL:
        unseen = tl.load(passed + row, mask=mask, other=0)
        return count - unseen, unseen
    return count, tl.zeros_like(count)


@triton.jit
def _visitors(indices, listed_counts, listed_indices, tiles, times, passed, listed_batch, listed_head, listed_group,
              first, number, batch, head, kv_heads, group, block, blocks, width, parts, halvings, SEGMENT: tl.constexpr,
              CAUSAL: tl.constexpr):
    """Of a query block's list from ``first`` on, every part of a key block apart: (when it comes, where its rank stands, if it comes)."""
    entry = first + tl.arange(0, SEGMENT)
    part = entry % parts
    other = tl.load(indices + entry // parts, mask=entry < number, other=-1)
    # Ids out of range count as absent.
    known = (entry < number) & (other >= 0) & (other < blocks)
    other = tl.where(known, other, 0)
    kv_head = head // group
    tile = (batch * kv_heads + kv_head + 1) * blocks * parts - 1 - (other * parts + part)
    at = tiles + tile.to(tl.int64) * FIELDS
    known = known & (tl.load(at + ROWS, mask=known, other=0) > 0)
    before, total = tl.zeros([SEGMENT], tl.int32), tl.zeros([SEGMENT], tl.int32)
    for member in range(kv_head * group, kv_head * group + group):
        list_row = batch.to(tl.int64) * listed_batch + (member // listed_group) * listed_head + other
        row = (batch.to(tl.int64) * kv_heads * group + member) * blocks + other
        count, _ = _visible(listed_counts, passed, row, list_row, width, known, CAUSAL)
        before += tl.where(member < head, count, 0)
        total += count
    list_row = batch.to(tl.int64) * listed_batch + (head // listed_group) * listed_head + other
    row = (batch.to(tl.int64) * kv_heads * group + head) * blocks + other
    count, unseen = _visible(listed_counts, passed, row, list_row, width, known, CAUSAL)
    # Where in the key block's list, which ascends, this query block stands.
    low, high = tl.zeros([SEGMENT], tl.int32), count + unseen
    for _ in range(halvings):
        middle = (low + high) // 2
        less = tl.load(listed_indices + list_row * width + middle, mask=known & (low < high), other=block) < block
        low, high = tl.where(less & (low < high), middle + 1, low), tl.where(less, high, middle)
    known = known & (low >= unseen)
    entry = low - unseen - tl.load(at + BEGIN, mask=known, other=0) * count // RING
    before += tl.where(entry < 0, entry + count, entry)
    visits = tl.load(at + VISITS, mask=known, other=0).to(tl.int64)
    time = tl.load(times + tile, mask=known, other=0) + before * visits // tl.maximum(total, 1)
    # Of those that come at the same time, any order that is the same everywhere will do.
    when = tl.where(known, (time << 32) + other * parts + part, 1 << 62)
    where = (row * parts + part) * width + low
    return when, where, known


@triton.jit(do_not_specialize=_NUMBERS)
def _rank_kernel(counts, indices, listed_counts, listed_indices, tiles, times, passed, whens, lock_values,
                 list_batch, list_head, list_group, listed_batch, listed_head, listed_group,
                 kv_heads, group, blocks, capacity, width, parts, halvings, SEGMENT: tl.constexpr, OTHERS: tl.constexpr,
                 CAUSAL: tl.constexpr):
    """For one query block: the rank of each tile that adds to its dQ."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + block
    indices += row * capacity
    number = tl.minimum(tl.load(counts + row), capacity) * parts
    whens += ((batch.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(0) + block) * capacity * parts
    for first in range(0, number, SEGMENT):
        when, where, known = _visitors(indices, listed_counts, listed_indices, tiles, times, passed, listed_batch, listed_head,
                                       listed_group, first, number, batch, head, kv_heads, group, block, blocks, width, parts, halvings,
                                       SEGMENT, CAUSAL)
        entry = first + tl.arange(0, SEGMENT)
        tl.store(whens + entry, when, mask=entry < number)
    # Other threads read what these have written.
    tl.debug_barrier()
    for first in range(0, number, SEGMENT):
        when, where, known = _visitors(indices, listed_counts, listed_indices, tiles, times, passed, listed_batch, listed_head,
                                       listed_group, first, number, batch, head, kv_heads, group, block, blocks, width, parts, halvings,
                                       SEGMENT, CAUSAL)
        rank = tl.zeros([SEGMENT], tl.int32)
        for start in range(0, number, OTHERS):
            entry = start + tl.arange(0, OTHERS)
            other = tl.load(whens + entry, mask=entry < number, other=1 << 62)
            rank += tl.sum((other[None, :] < when[:, None]).to(tl.int32), 1)
        tl.store(lock_values + where, rank, mask=known)


def schedule(blocks: BlockLists, flipped: BlockLists, queries: Partition, keys: Partition, batch: int, heads: int, kv_heads: int,
             programs: int, shift: int | None = None) -> Schedule:
    """The tiles of all heads; with ``programs`` > 0 dealt out to so many, and ranked.

    Where ``shift`` is given, query i sees the keys up to i + shift, and tiles pass by the blocks of which none sees a key of their block.
    ``flipped`` is ``blocks.transpose()``, whose ids ascend. Tiles that are not dealt out begin at the first block of their lists.
    """
    counts, indices = flipped.counts.contiguous(), flipped.indices.contiguous()
    group, width = heads // kv_heads, indices.shape[3]
    parts = triton.cdiv(keys.length, KEYS)
    number = batch * kv_heads * keys.number * parts
    tiles = torch.empty(number + programs, FIELDS.value, dtype=torch.int32, device=counts.device)
    strides = shared_strides(counts, heads)
    passed = None if shift is None else torch.empty(batch, heads, keys.number, dtype=torch.int32, device=counts.device)
    _tiles_kernel[(keys.number, batch * kv_heads)](
        counts, indices, keys.starts, keys.sizes, queries.starts, queries.sizes, tiles, passed,
        *strides, *keys.strides(kv_heads), *queries.strides(heads),
        kv_heads, group, keys.number, keys.length, keys.tokens, queries.length, queries.tokens, width, parts, shift or 0,
        M=QUERIES, N=KEYS, SEGMENT=SEGMENT, PARTS=triton.next_power_of_2(parts), UNIFORM_ROWS=keys.uniform, UNIFORM_ITEMS=queries.uniform,
        CAUSAL=shift is not None)
    if not programs:
        return Schedule(tiles, None, passed, width)
    times = torch.empty(number, dtype=torch.int32, device=counts.device)
    _deal_kernel[(1,)](tiles, times, number, programs, group, GAP, PROGRAMS=triton.next_power_of_2(programs), WINDOW=1024)
    own_counts, own_indices = blocks.counts.contiguous(), blocks.indices.contiguous()
    capacity = own_indices.shape[3]
    whens = torch.empty(batch, heads, queries.number, capacity, parts, dtype=torch.int64, device=counts.device)
    lock_values = torch.empty(batch, heads, keys.number, parts, width, dtype=torch.int32, device=counts.device)
    _rank_kernel[(queries.number, heads, batch)](
        own_counts, own_indices, counts, indices, tiles, times, passed, whens, lock_values,
        *shared_strides(own_counts, heads), *strides,
        kv_heads, group, keys.number, capacity, width, parts, width.bit_length(), SEGMENT=SEGMENT, OTHERS=32, CAUSAL=shift is not None)
    return Schedule(tiles, lock_values, passed, width)
