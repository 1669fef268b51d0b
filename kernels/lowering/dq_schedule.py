"""Which tiles each program of the Hopper backward takes, and in which order they add to dQ: bitwise deterministic, and hardly a wait.

A tile is KEYS keys of one block; its list names the query blocks that attend to it; an iteration is one chunk of QUERIES queries of one of
them. Where dQ must be deterministic, as many programs as there are multiprocessors run side by side, each on the tiles that list scheduling
assigns to it here, from the lists alone. The time of an iteration is the number of iterations that its program makes before it. Programs
that keep pace reach a query block in the order of these times, so that is the order in which they add (FlashAttention-4's dQ write order):
a tile's lock value is what the dQ semaphore of a query block must have reached. Hardly anyone ever waits. Nor can programs wait for one
another in a circle: whoever is first in time among all that wait finds its lock open. The same holds for waits for the first addition
alone, which stores; it waits for nobody.

Tiles are taken head by head, so that L2 holds what their programs read, but the last of all the longest first: what is left to do when
the first program ends is little then. On an H200 that takes 0.82 of the time at 11,520 tokens and 2 heads, of which each multiprocessor
has one tile or two, 0.96 at 16 heads, and 0.98 over blocks of 128 at 30,720 tokens and at 23,040 tokens.

Lists are rotated, and where a tile begins its list follows the clock: all programs sweep over the queries at the same pace, so that most
of what one brings into L2, the sums of dQ above all, the others find there. They are staggered, since programs side by side often have
tiles of the same block and would want the same chunk at the same time: each is STAGGER iterations ahead of the one before it. Heads that
fit into the cache together take turns, for programs of different heads never meet. Where blocks are single tiles, programs share no lists
and meet by chance alone: they are staggered over no more of the queries than L2 holds.

Without an order a tile is taken by whoever is free next, and such a tile begins where the head's other programs are by then: they tell, in
the field ROTATION of the head's first tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2
from .arguments import Bounds
from .chunks import Listed, shared_strides
from .dq_accum import KEYS, QUERIES
from .primitives import block_bounds

# int32 numbers of a tile: first key; keys from there to the end of the block; batch; key/value head; key block; part of it; iterations, -1
# of a part beyond the end of its block; the next tile of the same program, or -1; where in its lists it begins, in 1 / ROTATION_UNITS of
# their length; not ordered, in a head's first tile where those programs are that are at work on it.
FIELDS = tl.constexpr(9)
ROW, ROWS, BATCH, HEAD, BLOCK, PART, ITERATIONS, NEXT, ROTATION = map(tl.constexpr, range(9))
ROTATION_UNITS = tl.constexpr(4096)
# An addition is written about two iterations after it began. Time of the backward over that of the non-deterministic one, H200, bfloat16,
# D 128, six patterns (46,080 to 138,240 tokens, blocks of 128 and 384, random lists and neighbours, one of grouped heads): staggered by 3
# iterations 1.02 to 1.12, by 5 1.00 to 1.08, by 7 1.02 to 1.12, by 10 1.00 to 1.18. Not staggered 1.5 at 46,080 tokens; without the clock
# 1.1, and 1.3 at 138,240.
STAGGER = 5
SEGMENT = 128
# So many tiles a program are the last. Counted over the same lists, the longest of 132 programs has 1.14 times the average to do at 11,520
# tokens and 16 heads where none are sorted, 1.07 where programs take what they come by, as blocks of a launch do; with one tile each
# sorted 1.03, two 1.03, three 1.025, four 1.02.
LAST_TILES = 3
# More tiles than the keys of any GPU's memory make, a power of two.
MOST_TILES = tl.constexpr(1 << 24)
# Bytes of L2 that programs use without pushing one another out: of an H200's 50 MB half, for it has two parts.
CACHE = 25 << 20
# And so many over which they are staggered. Over blocks of 128 on an H200, of the time without that limit: 113,664 tokens and 16 heads .926
# with 40 MiB, .939 with 60; 75,520 and 12 heads .974 and .977. Over blocks of 384 at 138,240 tokens and 2 heads both 1.03.
NEAR = 40 << 20


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker.
_NUMBERS = [f"{of}_{what}" for of in ("list", "listed", "kv", "q")
            for what in ("batch", "head", "head_stride", "group", "length", "tokens")]
_NUMBERS += [
    "kv_heads", "group", "kv_blocks", "blocks", "capacity", "width", "parts", "together", "search_steps", "number", "programs", "stagger",
    "shift", "tail", "share"]


class DqSchedule(NamedTuple):
    """The work of the backward kernel's programs."""

    tiles: Tensor               # int32 [number + tail + programs, FIELDS]: tiles as _place has them; then rows of which NEXT is set: to
    #                             the last tiles, the longest first, whose ITERATIONS they repeat, and, persistent, to the first tile of
    #                             each program
    number: int                 # how many tiles
    tail: int                   # how many of these, at the end, are taken the longest first
    times: Tensor | None        # int32 [number], persistent: when each tile begins
    skipped: Tensor | None      # int32 [B, Hq, key blocks], under a causal mask: the first entries of a list, of which none sees a key
    width: int                  # entries that a list has room for
    parts: int                  # tiles of a key block
    together: int               # heads that take turns


@triton.jit
def _place(pair, block, part, blocks, parts, together):
    """Where a tile stands in the order in which tiles are taken; ``pair``: its batch element and key/value head."""
    # Each head from the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    return (pair // together * (blocks * parts) + (blocks * parts - 1 - (block * parts + part))) * together + pair % together


@triton.jit(do_not_specialize=_NUMBERS)
def _tiles_kernel(counts, indices, kv_starts, kv_sizes, q_starts, q_sizes, tiles, skipped,
                  list_batch, list_head, list_group, kv_batch, kv_head_stride, kv_group, q_batch, q_head_stride, q_group,
                  kv_heads, group, kv_blocks, kv_length, kv_tokens, q_length, q_tokens, width, parts, together, shift,
                  M: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr, CAUSAL: tl.constexpr):
    keys = Bounds(kv_starts, kv_sizes, kv_batch, kv_head_stride, kv_group, kv_length, kv_tokens)
    queries = Bounds(q_starts, q_sizes, q_batch, q_head_stride, q_group, q_length, q_tokens)
    block = tl.program_id(0)
    kv_head, batch = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    kv_at = batch * kv_batch + (kv_head // kv_group) * kv_head_stride
    row, size = block_bounds(keys, kv_at, block)
    iterations = tl.zeros([SEGMENT], tl.int32)
    for q_head in range(group):
        head = kv_head * group + q_head
        list_row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + block
        q_at = batch * q_batch + (head // q_group) * q_head_stride
        count = tl.minimum(tl.load(counts + list_row), width)
        unseen = tl.zeros([SEGMENT], tl.int32)
        for first in range(0, count, SEGMENT):
            entry = first + tl.arange(0, SEGMENT)
            q_block = tl.load(indices + list_row * width + entry, mask=entry < count, other=0)
            start, length = block_bounds(queries, q_at, q_block)
            seen = entry < count
            if CAUSAL:
                # Blocks of queries that all come before these keys are skipped. Ids ascend, so they are the first of the list.
                seen = seen & (start + length + shift > row)
                unseen += (entry < count) & ~seen
            iterations += tl.where(seen, tl.maximum(length + M - 1, 0) // M, 0)
        if CAUSAL:
            tl.store(skipped + (batch.to(tl.int64) * kv_heads * group + head) * kv_blocks + block, tl.sum(unseen, 0))
    part = tl.arange(0, PARTS)
    left = size - part * N
    place = _place(tl.program_id(1), block, part, kv_blocks, parts, together)
    to = tiles + place.to(tl.int64) * FIELDS
    here = part < parts
    tl.store(to + ROW, row + part * N, mask=here)
    tl.store(to + ROWS, left, mask=here)
    tl.store(to + BATCH, batch, mask=here)
    tl.store(to + HEAD, kv_head, mask=here)
    tl.store(to + BLOCK, block, mask=here)
    tl.store(to + PART, part, mask=here)
    tl.store(to + ITERATIONS, tl.where(left > 0, tl.sum(iterations, 0), -1), mask=here)
    tl.store(to + NEXT, -1, mask=here)
    tl.store(to + ROTATION, 0, mask=here)


@triton.jit(do_not_specialize=_NUMBERS)
def _order_kernel(tiles, number, tail, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """The last ``tail`` tiles, the longest first: NEXT and ITERATIONS of the rows behind all tiles."""
    entry = tl.program_id(0) * OWN + tl.arange(0, OWN)
    tile = number - tail + entry
    length = tl.load(tiles + tile * FIELDS + ITERATIONS, mask=entry < tail, other=-1)
    rank = tl.zeros([OWN], tl.int32)
    for first in range(0, tail, OTHERS):
        other = first + tl.arange(0, OTHERS)
        others = tl.load(tiles + (number - tail + other) * FIELDS + ITERATIONS, mask=other < tail, other=-1)
        before = (others[None, :] > length[:, None]) | ((others[None, :] == length[:, None]) & (other[None, :] < entry[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(tiles + (number + rank) * FIELDS + NEXT, tile, mask=entry < tail)
    tl.store(tiles + (number + rank) * FIELDS + ITERATIONS, length, mask=entry < tail)


@triton.jit
def _take(tiles, times, tile, iterations, free, last, work, place, period):
    """Programs that are ``free`` take a tile each: (the last tile of each program, what it has to do)."""
    # A part beyond the end of its block is nobody's.
    free = free & (iterations >= 0)
    tl.store(tiles + last * FIELDS + NEXT, tile, mask=free)
    tl.store(times + tile, work, mask=free)
    tl.store(tiles + tile * FIELDS + ROTATION, (work % period * ROTATION_UNITS // period + place) % ROTATION_UNITS, mask=free)
    return tl.where(free, tile, last), work + tl.where(free, iterations + 1, 0)


@triton.jit(do_not_specialize=_NUMBERS)
def _assign_kernel(tiles, times, number, programs, group, stagger, tail, share, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr):
    """List scheduling: each tile, in their order, to a program that has least to do: NEXT, ROTATION, and the time at which it begins.

    The last ``tail`` the longest first, and of several programs who has least to do takes the longest.
    """
    total, busy = tl.zeros([WINDOW], tl.int64), tl.zeros([WINDOW], tl.int32)
    for first in range(0, number, WINDOW):
        tile = first + tl.arange(0, WINDOW)
        iterations = tl.load(tiles + tile * FIELDS + ITERATIONS, mask=tile < number, other=0)
        total += tl.maximum(iterations, 0)
        busy += (iterations > 0).to(tl.int32)
    # Programs that come within an average tile of one another take theirs together: one at a time would be fairer by a hundredth, and slow.
    step = tl.maximum(tl.sum(total, 0) // tl.maximum(tl.sum(busy, 0), 1), 1).to(tl.int32)
    # To change tiles takes about as long as an iteration. Every query head of a group has a list of its own, one after another.
    period = (step + 1 + group - 1) // group
    program = tl.arange(0, PROGRAMS)
    span = tl.maximum(period * share // ROTATION_UNITS, 1)
    work = tl.where(program < programs, 0, 1 << 30)
    last = number + tail + program
    taken = 0
    while taken < number - tail:
        free = work < tl.min(work, 0) + step
        tile = taken + tl.cumsum(free.to(tl.int32), 0) - 1
        taken += tl.sum(free.to(tl.int32), 0)
        free = free & (tile < number - tail)
        iterations = tl.load(tiles + tile * FIELDS + ITERATIONS, mask=free, other=-1)
        place = program * stagger % span * ROTATION_UNITS // period
        last, work = _take(tiles, times, tile, iterations, free, last, work, place, period)
    taken = number - tail
    while taken < number:
        # The programs stand in the order of what they have to do from here on; all that is known of one is sorted as one number.
        by_work = tl.sort((work.to(tl.int64) * PROGRAMS + program) * MOST_TILES + last)
        last = (by_work % MOST_TILES).to(tl.int32)
        program = (by_work // MOST_TILES % PROGRAMS).to(tl.int32)
        work = (by_work // MOST_TILES // PROGRAMS).to(tl.int32)
        rank = taken + tl.arange(0, PROGRAMS)
        free = (work < tl.min(work, 0) + step) & (rank < number)
        taken += tl.sum(free.to(tl.int32), 0)
        row = tiles + (tail + rank) * FIELDS
        tile = tl.load(row + NEXT, mask=free, other=0)
        iterations = tl.load(row + ITERATIONS, mask=free, other=-1)
        place = program * stagger % span * ROTATION_UNITS // period
        last, work = _take(tiles, times, tile, iterations, free, last, work, place, period)
    tl.store(tiles + last * FIELDS + NEXT, -1, mask=program < programs)


@triton.jit
def _visible(listed_counts, skipped, row, list_row, width, mask, CAUSAL: tl.constexpr):
    """(entries of a list less the skipped ones, how many are skipped)."""
    count = tl.minimum(tl.load(listed_counts + list_row, mask=mask, other=0), width)
    if CAUSAL:
        unseen = tl.load(skipped + row, mask=mask, other=0)
        return count - unseen, unseen
    return count, tl.zeros_like(count)


@triton.jit
def _writers(indices, listed_counts, listed_indices, tiles, times, skipped, listed_batch, listed_head, listed_group,
              first, number, batch, head, kv_heads, group, block, blocks, width, parts, together, search_steps, SEGMENT: tl.constexpr,
              CAUSAL: tl.constexpr):
    """For each part of each key block in a query block's list, from ``first`` on: (when it adds, where its lock value stands, whether it
    adds at all)."""
    entry = first + tl.arange(0, SEGMENT)
    part = entry % parts
    other = tl.load(indices + entry // parts, mask=entry < number, other=-1)
    # Ids out of range count as absent.
    known = (entry < number) & (other >= 0) & (other < blocks)
    other = tl.where(known, other, 0)
    kv_head = head // group
    tile = _place(batch * kv_heads + kv_head, other, part, blocks, parts, together)
    at = tiles + tile.to(tl.int64) * FIELDS
    known = known & (tl.load(at + ROWS, mask=known, other=0) > 0)
    before, total = tl.zeros([SEGMENT], tl.int32), tl.zeros([SEGMENT], tl.int32)
    for q_head in range(kv_head * group, kv_head * group + group):
        list_row = batch.to(tl.int64) * listed_batch + (q_head // listed_group) * listed_head + other
        row = (batch.to(tl.int64) * kv_heads * group + q_head) * blocks + other
        count, _ = _visible(listed_counts, skipped, row, list_row, width, known, CAUSAL)
        before += tl.where(q_head < head, count, 0)
        total += count
    list_row = batch.to(tl.int64) * listed_batch + (head // listed_group) * listed_head + other
    row = (batch.to(tl.int64) * kv_heads * group + head) * blocks + other
    count, unseen = _visible(listed_counts, skipped, row, list_row, width, known, CAUSAL)
    # Where in the key block's list, which ascends, this query block stands.
    low, high = tl.zeros([SEGMENT], tl.int32), count + unseen
    for _ in range(search_steps):
        middle = (low + high) // 2
        less = tl.load(listed_indices + list_row * width + middle, mask=known & (low < high), other=block) < block
        low, high = tl.where(less & (low < high), middle + 1, low), tl.where(less, high, middle)
    known = known & (low >= unseen)
    entry = low - unseen - tl.load(at + ROTATION, mask=known, other=0) * count // ROTATION_UNITS
    before += tl.where(entry < 0, entry + count, entry)
    iterations = tl.load(at + ITERATIONS, mask=known, other=0).to(tl.int64)
    time = tl.load(times + tile, mask=known, other=0) + before * iterations // tl.maximum(total, 1)
    # Tiles that come at the same time may be in any order, as long as it is the same everywhere.
    when = tl.where(known, (time << 32) + other * parts + part, 1 << 62)
    where = (row * parts + part) * width + low
    return when, where, known


@triton.jit(do_not_specialize=_NUMBERS)
def _lock_value_kernel(counts, indices, listed_counts, listed_indices, tiles, times, skipped, whens, lock_values,
                 list_batch, list_head, list_group, listed_batch, listed_head, listed_group,
                 kv_heads, group, blocks, capacity, width, parts, together, search_steps, SEGMENT: tl.constexpr, OTHERS: tl.constexpr,
                 CAUSAL: tl.constexpr):
    """For one query block: the lock value of each tile that adds to its dQ."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + block
    indices += row * capacity
    number = tl.minimum(tl.load(counts + row), capacity) * parts
    whens += ((batch.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(0) + block) * capacity * parts * 2
    wheres = whens + capacity * parts
    for first in range(0, number, SEGMENT):
        when, where, known = _writers(indices, listed_counts, listed_indices, tiles, times, skipped, listed_batch, listed_head,
                                       listed_group, first, number, batch, head, kv_heads, group, block, blocks, width, parts, together,
                                       search_steps, SEGMENT, CAUSAL)
        entry = first + tl.arange(0, SEGMENT)
        tl.store(whens + entry, when, mask=entry < number)
        tl.store(wheres + entry, tl.where(known, where, -1), mask=entry < number)
    # Other threads read what these have written.
    tl.debug_barrier()
    for first in range(0, number, SEGMENT):
        entry = first + tl.arange(0, SEGMENT)
        when = tl.load(whens + entry, mask=entry < number, other=0)
        where = tl.load(wheres + entry, mask=entry < number, other=-1)
        lock_value = tl.zeros([SEGMENT], tl.int32)
        for start in range(0, number, OTHERS):
            others = start + tl.arange(0, OTHERS)
            other = tl.load(whens + others, mask=others < number, other=1 << 62)
            lock_value += tl.sum((other[None, :] < when[:, None]).to(tl.int32), 1)
        tl.store(lock_values + where, lock_value, mask=where >= 0)


def bytes_of(rows: int, dim: int) -> int:
    """How much is read, and added to, for so many query rows: q, dO, lse_dpsum and the sums of dQ."""
    return rows * (8 * dim + 32)


def heads_together(pairs: int, rows: int, dim: int) -> int:
    """How many of so many (batch element, key/value head) pairs take turns in the order of tiles: a divisor of ``pairs``.

    Programs of different heads never wait for one another, but what they read and add to must fit into CACHE: for each of ``rows`` query
    rows of a pair q, dO, lse_dpsum and the sums of dQ. On an H200, head_dim 128, 11,520 tokens, 12 of 30 blocks kept, one head at a time
    takes 1.95 ms, two 1.87, four longer than one; at 46,080 tokens, of which one head fills all of L2, two take 1.1 times as long as one.
    """
    most = max(CACHE // max(bytes_of(rows, dim), 1), 1)
    return max(number for number in range(1, min(most, pairs) + 1) if pairs % number == 0)


def schedule(flipped: Listed, batch: int, heads: int, kv_heads: int, programs: int, ordered: bool, shift: int | None = None,
             dim: int = 128) -> DqSchedule:
    """The tiles of all heads; ``ordered``: assigned to so many programs.

    Where ``shift`` is given, query i sees the keys up to i + shift, and tiles skip the blocks of which none sees a key of their block.
    ``flipped``: for each key block the query blocks that attend to it, whose ids ascend; ``dim`` the head_dim, see ``heads_together``.
    ROTATION of tiles that are not assigned is 0.
    """
    (counts, indices, keys, queries), device = flipped, flipped.counts.device
    group, width = heads // kv_heads, indices.shape[3]
    parts = -(-keys.length // KEYS)
    number = batch * kv_heads * keys.number * parts
    together = heads_together(batch * kv_heads, queries.tokens * group, dim) if ordered else 1
    tail = min(number, LAST_TILES * programs)
    share = ROTATION_UNITS.value
    if parts == 1:
        share = min(share, NEAR * share // max(bytes_of(together * queries.tokens * group, dim), 1))
    tiles = torch.empty(number + tail + programs * ordered, FIELDS.value, dtype=torch.int32, device=device)
    strides = shared_strides(counts, heads)
    skipped = None if shift is None else torch.empty(batch, heads, keys.number, dtype=torch.int32, device=device)
    numbers: tuple[int, ...] = (*strides, *keys.strides(kv_heads), *queries.strides(heads), kv_heads, group, keys.number, keys.length,
                                keys.tokens, queries.length, queries.tokens, width, parts, together, shift or 0)
    constants = dict(M=QUERIES, N=KEYS, SEGMENT=SEGMENT, PARTS=power_of_2(parts), CAUSAL=shift is not None)
    launch(_tiles_kernel, (keys.number, batch * kv_heads, 1), (*flipped.tensors, tiles, skipped), numbers, constants)
    constants = dict(OWN=16, OTHERS=128)
    launch(_order_kernel, (-(-tail // constants["OWN"]), 1, 1), (tiles,), (number, tail), constants)
    times = None
    if ordered:
        times = torch.empty(number, dtype=torch.int32, device=device)
        launch(_assign_kernel, (1, 1, 1), (tiles, times), (number, programs, group, STAGGER, tail, share),
               dict(PROGRAMS=power_of_2(programs), WINDOW=1024))
    return DqSchedule(tiles, number, tail, times, skipped, width, parts, together)


def lock_values(work: DqSchedule, listed: Listed, flipped: Listed, batch: int, heads: int, kv_heads: int) -> Tensor:
    """int32 [B, Hq, key blocks, parts, width]: how many tiles of ordered ``work`` add to a query block before this one does."""
    (own_counts, own_indices, queries, keys), (counts, indices, *_) = listed, flipped
    capacity = own_indices.shape[3]
    # And behind the times of a query block's tiles, where their lock values stand.
    whens = torch.empty(batch, heads, queries.number, 2, capacity, work.parts, dtype=torch.int64, device=counts.device)
    values = torch.empty(batch, heads, keys.number, work.parts, work.width, dtype=torch.int32, device=counts.device)
    numbers = (*shared_strides(own_counts, heads), *shared_strides(counts, heads), kv_heads, heads // kv_heads, keys.number, capacity,
               work.width, work.parts, work.together, work.width.bit_length())
    launch(_lock_value_kernel, (queries.number, heads, batch),
           (own_counts, own_indices, counts, indices, work.tiles, work.times, work.skipped, whens, values), numbers,
           dict(SEGMENT=32, OTHERS=32, CAUSAL=work.skipped is not None), dict(num_warps=1))
    return values
