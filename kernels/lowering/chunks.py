"""Lists of blocks become lists of chunks: runs of at most CHUNK tokens that a kernel loads in one step, full ones apart from partial ones.

The kernels then have one simple loop over full chunks, with no mask or with one that the compiler knows (see ``full_chunk``), and one over
the partial chunks, which a ragged tail or the causal diagonal crosses, whatever the blocks looked like. The order inside a list is free, so
this costs nothing but one small launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from ..launch import launch
from .arguments import Bounds, ChunkLists, Lists
from .primitives import block_bounds, row_of_lists

# List entries read at once by one program.
SEGMENT = 256
# Parts of a work queue, in numbers of 4 bytes.
HEADER = tl.constexpr(8)
ENTRY = tl.constexpr(8)
# No chunk has so many tokens.
SIZES = tl.constexpr(256)


class Partition(NamedTuple):
    """How the tokens of one axis are partitioned into blocks, as the kernels take it."""

    starts: Tensor | None   # int32 [B|1, H|1, number], first token of a block; None: each has ``length`` tokens, but for the last one
    sizes: Tensor | None    # int32, same shape, real tokens of a block
    length: int             # tokens of the longest block
    tokens: int
    number: int             # how many blocks
    covers: bool            # every token lies in a block

    @classmethod
    def of(cls, offsets: int | Tensor, lengths: Tensor | None, bounds: Callable[[int], tuple[Tensor, Tensor]], longest: int, tokens: int,
           covered: int) -> Partition:
        """The partition of an axis of BlockLists; ``covered``: each of the first so many tokens is known to lie in a block."""
        if isinstance(offsets, int) and lengths is None:
            return cls(None, None, offsets, tokens, -(-tokens // offsets), True)
        starts, sizes = bounds(tokens)
        # Offsets past the end, which are cut there, may make the bound on a block's length as large as an int32.
        return cls(starts, sizes, min(longest, max(tokens, 1)), tokens, starts.shape[2], tokens <= covered)

    @property
    def uniform(self) -> bool:
        return self.starts is None

    def strides(self, heads: int) -> tuple[int, int, int]:
        return (0, 0, 1) if self.starts is None else shared_strides(self.starts, heads)

    def bounds(self, heads: int) -> Bounds:
        """As a kernel of ``heads`` heads takes them."""
        return Bounds(*self.tensors, *self.strides(heads), self.length, self.tokens)

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """starts and sizes."""
        return self[:2]


class Listed(NamedTuple):
    """Lists of blocks and the partitions that give them tokens: query blocks list key blocks, or, of a transpose, the other way round."""

    counts: Tensor
    indices: Tensor
    rows: Partition
    items: Partition

    @classmethod
    def of(cls, blocks: BlockLists, q_len: int, kv_len: int) -> Listed:
        """The lists of blocks of sequences of so many tokens."""
        return cls(blocks.counts.contiguous(), blocks.indices.contiguous(), q_partition(blocks, q_len), kv_partition(blocks, kv_len))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that kernels read, in the order in which they take it."""
        return self.counts, self.indices, *self.rows.tensors, *self.items.tensors


def full_chunk(length: int, room: int) -> int:
    """Tokens of a full chunk, of blocks of ``length`` tokens in a kernel that has room for ``room`` in a step.

    ``room`` itself, or, where the longest blocks do not end with a full step, an equal share of such a block, so that all of it lies in
    full chunks: then the kernel knows when it is compiled which columns of a full chunk to hide. Not where more than a quarter of the room
    would stay empty, as several shorter chunks may fit into it.
    """
    share, rest = divmod(length, -(-length // room))
    return room if rest or 4 * share <= 3 * room else share


def q_partition(blocks: BlockLists, tokens: int) -> Partition:
    """How the query tokens are partitioned."""
    return Partition.of(blocks.q_offsets, blocks.q_lengths, blocks.q_bounds, blocks.max_q_length, tokens, blocks._covers[0])


def kv_partition(blocks: BlockLists, tokens: int) -> Partition:
    """How the key tokens are partitioned."""
    return Partition.of(blocks.kv_offsets, blocks.kv_lengths, blocks.kv_bounds, blocks.max_kv_length, tokens, blocks._covers[1])


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker. Members of a tuple cannot be left
# out (see arguments.py), so the numbers of these kernels come one by one and get their names inside.
_NUMBERS = ["list_batch", "list_head", "list_group", "row_batch", "row_head", "row_group", "item_batch", "item_head", "item_group", "heads",
            "rows", "items", "row_length", "row_tokens", "item_length", "item_tokens", "capacity", "width", "parts", "shift"]


@triton.jit
def _list_chunks(lists, bounds, item_bounds, row, head, batch, starts, sizes, width, parts, shift,
                 CHUNK: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, SEGMENT: tl.constexpr, CAUSAL: tl.constexpr,
                 ROWS_ARE_QUERIES: tl.constexpr):
    """Writes the chunks of one row to its ``starts`` and ``sizes``: (first token of the row, its tokens, full chunks, partial chunks,
    packed chunks)."""
    list_row = row_of_lists(lists, batch.to(tl.int64), head, row)
    row_at = batch * bounds.batch + head // bounds.group * bounds.head
    item_at = batch * item_bounds.batch + head // item_bounds.group * item_bounds.head
    row_start, row_size = block_bounds(bounds, row_at, row)
    count = tl.minimum(tl.load(lists.counts + list_row), lists.capacity)
    n_full, n_partial, n_pieces = 0, 0, 0
    for first in range(0, count * parts, SEGMENT):
        slot = first + tl.arange(0, SEGMENT)
        item = tl.load(lists.indices + list_row * lists.capacity + slot // parts, mask=slot < count * parts, other=-1)
        # Ids out of range count as absent.
        known = (item >= 0) & (item < lists.items)
        item_start, item_size = block_bounds(item_bounds, item_at, tl.where(known, item, 0))
        offset = (slot % parts) * CHUNK
        start, size = item_start + offset, tl.minimum(item_size - offset, CHUNK)
        seen, complete = known & (size > 0), size == CHUNK
        if CAUSAL:
            # Key j is visible to query i when j <= i + shift.
            if ROWS_ARE_QUERIES:
                seen = seen & (start <= row_start + row_size - 1 + shift)
                complete = complete & (start + CHUNK - 1 <= row_start + shift)
            else:
                seen = seen & (row_start <= start + size - 1 + shift)
                complete = complete & (row_start + row_size - 1 <= start + shift)
        is_full, is_partial = seen & complete, seen & (complete == 0)
        at_front = n_full + tl.cumsum(is_full.to(tl.int32), 0) - 1
        before = n_partial + tl.cumsum(is_partial.to(tl.int32), 0) - 1
        at_back = width - 1 - before
        tl.store(starts + at_front, start, mask=is_full)
        tl.store(starts + at_back, start, mask=is_partial)
        tl.store(sizes + at_back, size, mask=is_partial)
        pieces = tl.where(is_partial, tl.cdiv(size, PIECE), 0)
        if PIECES > 1:
            pieces_before = n_pieces + tl.cumsum(pieces, 0) - pieces
            # No two packed chunks begin in one partial one, and its number is not below theirs: the size that theirs adds to is stored.
            packed = tl.cdiv(pieces_before, PIECES)
            within = packed * PIECES - pieces_before
            tl.debug_barrier()
            place = sizes + width - 1 - packed
            tl.store(place, tl.load(place, mask=within < pieces) + (before * PIECES + within) * SIZES, mask=within < pieces)
        n_full += tl.sum(is_full.to(tl.int32), 0)
        n_partial += tl.sum(is_partial.to(tl.int32), 0)
        n_pieces += tl.sum(pieces, 0)
    # A row without real tokens attends to nothing.
    seen = (row_size > 0).to(tl.int32)
    return row_start, row_size, n_full * seen, n_partial * seen, tl.cdiv(n_pieces, PIECES) * seen


@triton.jit(do_not_specialize=_NUMBERS)
def _chunks_kernel(counts, indices, row_starts, row_sizes, item_starts, item_sizes, starts, sizes, full, partial,
                   list_batch, list_head, list_group, row_batch, row_head, row_group, item_batch, item_head, item_group,
                   heads, rows, items, row_length, row_tokens, item_length, item_tokens, capacity, width, parts, shift,
                   CHUNK: tl.constexpr, SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, ROWS_ARE_QUERIES: tl.constexpr):
    lists = Lists(counts, indices, list_batch, list_head, list_group, capacity, items)
    bounds = Bounds(row_starts, row_sizes, row_batch, row_head, row_group, row_length, row_tokens)
    item_bounds = Bounds(item_starts, item_sizes, item_batch, item_head, item_group, item_length, item_tokens)
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_row = (batch.to(tl.int64) * heads + head) * rows + row
    _, _, n_full, n_partial, _ = _list_chunks(lists, bounds, item_bounds, row, head, batch, starts + out_row * width,
                                              sizes + out_row * width, width, parts, shift, CHUNK, CHUNK, 1, SEGMENT,
                                              CAUSAL, ROWS_ARE_QUERIES)
    tl.store(full + out_row, n_full)
    tl.store(partial + out_row, n_partial)


@triton.jit(do_not_specialize=_NUMBERS)
def _queue_kernel(counts, indices, row_starts, row_sizes, item_starts, item_sizes, queue,
                  list_batch, list_head, list_group, row_batch, row_head, row_group, item_batch, item_head, item_group,
                  heads, rows, items, row_length, row_tokens, item_length, item_tokens, capacity, width, parts, shift,
                  CHUNK: tl.constexpr, SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
                  EARLY: tl.constexpr):
    """The same as ``work_queue`` says."""
    if EARLY:
        # A kernel that waits by itself for what this one writes may come onto the GPU.
        tl.extra.cuda.gdc_launch_dependents()
    lists = Lists(counts, indices, list_batch, list_head, list_group, capacity, items)
    bounds = Bounds(row_starts, row_sizes, row_batch, row_head, row_group, row_length, row_tokens)
    item_bounds = Bounds(item_starts, item_sizes, item_batch, item_head, item_group, item_length, item_tokens)
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = (batch.to(tl.int64) * heads + head) * rows
    total = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    starts = queue + HEADER + total * ENTRY
    sizes = starts + total * width
    at = (first_row + row) * width
    row_start, row_size, n_full, n_partial, n_packed = _list_chunks(
        lists, bounds, item_bounds, row, head, batch, starts + at, sizes + at, width, parts, shift, CHUNK, PIECE, PIECES, SEGMENT, CAUSAL,
        True)
    rank = _rank(lists, row_of_lists(lists, batch.to(tl.int64), head, 0), row, rows, SEGMENT)
    entry = queue + HEADER + (first_row + rank) * ENTRY
    tl.store(entry, row_start)
    tl.store(entry + 1, row_size)
    tl.store(entry + 2, n_full)
    tl.store(entry + 3, n_packed)
    tl.store(entry + 4, row)
    tl.store(entry + 5, n_partial)
    if first_row + row == 0:
        tl.store(queue, 0)


@triton.jit
def _rank(lists, first_list, row, rows, SEGMENT: tl.constexpr):
    """How many rows go before ``row``: those with longer lists, and of equally long ones the later, which under a causal mask see more."""
    count = tl.minimum(tl.load(lists.counts + first_list + row), lists.capacity)
    rank = 0
    for first in range(0, rows, SEGMENT):
        other = first + tl.arange(0, SEGMENT)
        length = tl.minimum(tl.load(lists.counts + first_list + other, mask=other < rows, other=-1), lists.capacity)
        sooner = (length > count) | ((length == count) & (other > row))
        rank += tl.sum((sooner & (other < rows)).to(tl.int32), 0)
    return rank


def chunk_lists(listed: Listed, heads: int, chunk: int, causal_shift: int | None = None, rows_are_queries: bool = True) -> ChunkLists:
    """Cuts every listed block into chunks of ``chunk`` tokens.

    Args:
        listed: the lists; of a transpose, rows are key blocks and items query blocks.
        heads: of the kernel that reads the chunks.
        chunk: tokens of a full chunk.
        causal_shift: Skv - Sq under a causal mask, else None. Chunks that no row sees are dropped.
        rows_are_queries: False for a transpose.
    """
    batch, lists, width = extent(listed, chunk)
    shape = batch, lists, listed.rows.number
    starts, sizes = (torch.empty(*shape, width, dtype=torch.int32, device=listed.counts.device) for _ in range(2))
    full, partial = (torch.empty(shape, dtype=torch.int32, device=listed.counts.device) for _ in range(2))
    _launch(_chunks_kernel, listed, chunk, causal_shift, dict(ROWS_ARE_QUERIES=rows_are_queries), (starts, sizes, full, partial))
    return ChunkLists(starts, sizes, full, partial, *shared_strides(full, heads), starts.shape[3])


def block_lists(counts: Tensor, indices: Tensor, heads: int, items: int) -> Lists:
    """As a kernel of ``heads`` heads takes lists, in which the first ``items`` ids count."""
    return Lists(counts.contiguous(), indices.contiguous(), *shared_strides(counts, heads), indices.shape[3], items)


def work_queue(listed: Listed, chunk: int, causal_shift: int | None, room: int, pieces: int = 1) -> Tensor:
    """The result of ``chunk_lists`` for query rows in one tensor, together with the order in which to take the rows: for each
    (batch, head) the longest list first.

    Made anew in every call, whatever the lists are: whoever takes rows counts in it, so it serves one launch.

    Packed chunks: every partial chunk is cut into pieces, of which ``pieces`` fill a packed chunk of ``room`` tokens; the last one may be
    shorter. As all these follow one another they make packed chunks. With one piece that is the partial chunk itself.

    int32: HEADER numbers, the first of which is 0; then for every (batch, head, rank) an entry of ENTRY numbers, of which six are used:
    first token, tokens, full chunks, packed chunks, row, partial chunks; then, as in ``ChunkLists`` and indexed by row, all starts; then
    all sizes, but where no chunk can be partial. Where ``pieces`` is more than 1, to the size of a row's i-th partial chunk SIZES times the
    piece is added with which the i-th packed one begins: ``pieces`` times the number of its partial chunk, plus its own number in that.
    """
    (batch, heads, width), (_, _, rows, items) = extent(listed, chunk), listed
    partial = not items.uniform or items.length % chunk > 0 or items.tokens % chunk > 0 or causal_shift is not None
    size = HEADER.value + batch * heads * rows.number * (ENTRY.value + (2 if partial else 1) * width)
    queue = torch.empty(size, dtype=torch.int32, device=listed.counts.device)
    # The kernel that is launched after this one may begin before the queue is written.
    more = dict(PIECE=room // pieces, PIECES=pieces, EARLY=queue.is_cuda)
    _launch(_queue_kernel, listed, chunk, causal_shift, more, (queue,))
    return queue


def extent(listed: Listed, chunk: int) -> tuple[int, int, int]:
    """(Batch, heads, most chunks that a row can have) of the chunks of ``listed``."""
    batch, heads = listed.counts.shape[:2]
    for axis in (listed.rows, listed.items):
        if axis.starts is not None:
            batch, heads = max(batch, axis.starts.shape[0]), max(heads, axis.starts.shape[1])
    return batch, heads, max(listed.indices.shape[3] * -(-listed.items.length // chunk), 1)


def _launch(kernel: Any, listed: Listed, chunk: int, causal_shift: int | None, more: dict, out: Sequence[Tensor]) -> None:
    (batch, heads, width), (_, indices, rows, items) = extent(listed, chunk), listed
    numbers = (*shared_strides(listed.counts, heads), *rows.strides(heads), *items.strides(heads), heads, rows.number, items.number,
               rows.length, rows.tokens, items.length, items.tokens, indices.shape[3], width, -(-items.length // chunk), causal_shift or 0)
    launch(kernel, (rows.number, heads, batch), (*listed.tensors, *out), numbers,
           dict(CHUNK=chunk, SEGMENT=SEGMENT, CAUSAL=causal_shift is not None) | more)



def shared_strides(x: Tensor, heads: int) -> tuple[int, int, int]:
    """(batch stride, head stride, heads that share one entry) of a contiguous ``[B|1, H|1, n]`` tensor read by ``heads`` heads."""
    return (x.shape[1] * x.shape[2] if x.shape[0] > 1 else 0), x.shape[2], heads // x.shape[1]
