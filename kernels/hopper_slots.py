"""What surrounds the one-pass backward kernel: the lists that it walks, the rows that it reads, and dQ once everything is added up.

Query tokens are cut into chunks of at most QUERIES inside their block, and chunk p of block b, which starts at token s, owns the slot
s // QUERIES + b: no two chunks share one, whatever the blocks look like, and there are fewer than tokens / QUERIES + blocks + 1 of them.
lse, delta and the float32 sums of dQ stand slot by slot, so that every access of the kernel is whole and aligned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import BlockLists
from .triton_chunks import Cut, shared_strides
from .triton_primitives import block_bounds, load_rows, store_rows

QUERIES = 64
# Keys of a program of the backward kernel.
KEYS = 128
SEGMENT = 128


class Slots(NamedTuple):
    """For each query chunk, by batch, head and slot."""

    side: Tensor   # bfloat16 [B, H, slots, QUERIES, 16]: in columns 0 to 2 three terms whose sum is -lse / scale, or -1e30 for empty rows
    #                and for rows past the chunk's end; in columns 8 to 10 three whose sum is dlse - rowsum(dO * O); zeros elsewhere
    dq: Tensor     # float32 [B, H, slots, QUERIES, D], zeros

    @property
    def number(self) -> int:
        """Slots of a head."""
        return self.side.shape[2]


class Visits(NamedTuple):
    """For each key block, the query chunks that attend to it, those of all query heads that share the key/value head one after another."""

    chunks: Tensor   # int32 [B|1, Hkv|1, Nk, width]: first token * QUERIES + tokens - 1
    slots: Tensor    # int32, same shape: head within the group * slots of a head + slot
    ranks: Tensor    # int32, same shape: programs that add to the chunk's dQ before those of this key block; any tensor where not asked for
    numbers: Tensor  # int32 [B|1, Hkv|1, Nk]: entries in use


@triton.jit
def _fill_kernel(out, dout, dlse, lse, side, dq, q_starts, q_sizes, out_batch, out_head, out_row, do_batch, do_head, do_row,
                 dlse_batch, dlse_head, dlse_row, bound_batch, bound_head, bound_group, heads, q_len, block_length, slots, scale,
                 UNIFORM: tl.constexpr, PARTS: tl.constexpr, HAS_DLSE: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr):
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    bound = batch * bound_batch + (head // bound_group) * bound_head
    row, rows = block_bounds(q_starts, q_sizes, bound, block, block_length, q_len, UNIFORM)
    slot = row // M + block + part
    row, rows = row + part * M, rows - part * M
    if rows <= 0:
        return
    o = load_rows(out + batch * out_batch + head.to(tl.int64) * out_head, row, out_row, rows, M, DIM, DIM, True)
    do = load_rows(dout + batch * do_batch + head.to(tl.int64) * do_head, row, do_row, rows, M, DIM, DIM, True)
    lines = tl.arange(0, M)
    mask = lines < rows
    row_lse = tl.load(lse + (batch * heads + head) * q_len + row + lines, mask=mask, other=float("-inf"))
    row_delta = -tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    empty = row_lse == float("-inf")
    if HAS_DLSE:
        row_dlse = tl.load(dlse + batch * dlse_batch + head * dlse_head + (row + lines).to(tl.int64) * dlse_row, mask=mask, other=0.0)
        row_delta += row_dlse
    at = (batch * heads + head) * slots + slot
    # An empty row has no gradient, whatever arrives for it: its weights must be 0, and so must delta be. Not by -inf: the kernel
    # multiplies the other three columns by zero.
    bias = tl.where(empty, -1e30, -row_lse / scale)
    row_delta = tl.where(empty, 0.0, row_delta)
    columns = tl.arange(0, 16)[None, :]
    value = tl.where(columns < 8, bias[:, None], row_delta[:, None])
    # Three bfloat16 terms hold the 24 bits of a float32; what is not finite stands in the first.
    high = value.to(tl.bfloat16)
    rest = tl.where(tl.abs(value) < float("inf"), value - high.to(tl.float32), 0.0)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    term = columns % 8
    zero = tl.zeros_like(high)
    tl.store(side + at * (M * 16) + lines[:, None] * 16 + columns,
             tl.where(term == 0, high, tl.where(term == 1, middle, tl.where(term == 2, low, zero))))
    tl.store(dq + at * (M * DIM) + tl.arange(0, M * DIM), tl.zeros([M * DIM], tl.float32))


@triton.jit
def _finish_kernel(sums, dq, q_starts, q_sizes, dq_batch, dq_head, dq_row, bound_batch, bound_head, bound_group,
                   heads, q_len, block_length, slots, scale,
                   UNIFORM: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr):
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    bound = batch * bound_batch + (head // bound_group) * bound_head
    row, rows = block_bounds(q_starts, q_sizes, bound, block, block_length, q_len, UNIFORM)
    slot = row // M + block + part
    row, rows = row + part * M, rows - part * M
    if rows <= 0:
        return
    at = (batch * heads + head) * slots + slot
    x = tl.load(sums + at * (M * DIM) + tl.arange(0, M)[:, None] * DIM + tl.arange(0, DIM)[None, :])
    store_rows(dq + batch * dq_batch + head.to(tl.int64) * dq_head, row, dq_row, rows, x * scale, M, DIM, DIM)


@triton.jit
def _visits_kernel(counts, indices, listed_counts, listed_indices, row_starts, row_sizes, item_starts, item_sizes,
                   chunks, slots, ranks, numbers,
                   list_batch, list_head, list_group, listed_batch, listed_head, listed_group,
                   row_batch, row_head, row_group, item_batch, item_head, item_group,
                   rows, items, row_length, row_tokens, item_length, item_tokens, capacity, listed_capacity, width, parts,
                   slots_a_head, group,
                   M: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr, UNIFORM_ROWS: tl.constexpr, UNIFORM_ITEMS: tl.constexpr,
                   RANKED: tl.constexpr):
    row, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_at = batch * row_batch + (kv_head // row_group) * row_head
    first_key, row_size = block_bounds(row_starts, row_sizes, row_at, row, row_length, row_tokens, UNIFORM_ROWS)
    out_row = (batch.to(tl.int64) * tl.num_programs(1) + kv_head) * rows + row
    number = 0
    for member in range(group):
        head = kv_head * group + member
        list_row = batch.to(tl.int64) * list_batch + (head // list_group) * list_head + row
        listed_row = batch.to(tl.int64) * listed_batch + (head // listed_group) * listed_head
        item_at = batch * item_batch + (head // item_group) * item_head
        entries = tl.minimum(tl.load(counts + list_row), capacity) * parts
        for first in range(0, entries, SEGMENT):
            entry = first + tl.arange(0, SEGMENT)
            item = tl.load(indices + list_row * capacity + entry // parts, mask=entry < entries, other=-1)
            # Ids out of range count as absent.
            known = (item >= 0) & (item < items)
            item = tl.where(known, item, 0)
            start, size = block_bounds(item_starts, item_sizes, item_at, item, item_length, item_tokens, UNIFORM_ITEMS)
            part = entry % parts
            seen = known & (size > part * M)
            to = out_row * width + number + tl.cumsum(seen.to(tl.int32), 0) - 1
            tl.store(chunks + to, (start + part * M) * M + tl.minimum(size - part * M, M) - 1, mask=seen)
            tl.store(slots + to, member * slots_a_head + start // M + item + part, mask=seen)
            if RANKED:
                # Programs are launched from the last key block to the first: those of later blocks come before.
                before = tl.zeros([SEGMENT], tl.int32)
                listed_count = tl.minimum(tl.load(listed_counts + listed_row + item, mask=known, other=0), listed_capacity)
                for at in range(0, tl.max(listed_count, 0), 16):
                    place = at + tl.arange(0, 16)
                    other = tl.load(listed_indices + (listed_row + item)[:, None] * listed_capacity + place[None, :],
                                    mask=place[None, :] < listed_count[:, None], other=-1)
                    later = (other > row) & (other < rows)
                    other_start, other_size = block_bounds(row_starts, row_sizes, row_at, tl.where(later, other, 0), row_length, row_tokens,
                                                           UNIFORM_ROWS)
                    before += tl.sum(tl.where(later, (tl.maximum(other_size, 0) + N - 1) // N, 0), 1)
                tl.store(ranks + to, before, mask=seen)
            number += tl.sum(seen.to(tl.int32), 0)
    tl.store(numbers + out_row, tl.where(row_size > 0, number, 0))


def fill_slots(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, scale: float, cut: Cut) -> Slots:
    """The rows that the backward kernel reads, and zeros where it adds."""
    batch, heads, q_len, dim = out.shape
    slots = q_len // QUERIES + cut.number + 1
    side = torch.empty(batch, heads, slots, QUERIES, 16, dtype=torch.bfloat16, device=out.device)
    dq = torch.empty(batch, heads, slots, QUERIES, dim, dtype=torch.float32, device=out.device)
    parts = triton.cdiv(cut.length, QUERIES)
    given = lse if dlse is None else dlse
    _fill_kernel[(cut.number * parts, batch * heads)](
        out, dout, given, lse, side, dq, cut.starts, cut.sizes,
        *out.stride()[:3], *dout.stride()[:3], *given.stride(), *cut.strides(heads), heads, q_len, cut.length, slots, scale,
        UNIFORM=cut.uniform, PARTS=parts, HAS_DLSE=dlse is not None, M=QUERIES, DIM=dim)
    return Slots(side, dq)


def finish_dq(slots: Slots, dq: Tensor, scale: float, cut: Cut) -> None:
    """Writes the sums, times ``scale``, to dq [B, H, tokens, D] in its dtype."""
    batch, heads, q_len, dim = dq.shape
    parts = triton.cdiv(cut.length, QUERIES)
    _finish_kernel[(cut.number * parts, batch * heads)](
        slots.dq, dq, cut.starts, cut.sizes, *dq.stride()[:3], *cut.strides(heads), heads, q_len, cut.length, slots.number, scale,
        UNIFORM=cut.uniform, PARTS=parts, M=QUERIES, DIM=dim)


def list_visits(blocks: BlockLists, flipped: BlockLists, queries: Cut, keys: Cut, heads: int, kv_heads: int, slots: int,
                ranked: bool) -> Visits:
    """Which query chunks each key block's programs visit; ``flipped`` is ``blocks.transpose()``, ``slots`` those of a head."""
    counts, indices = flipped.counts.contiguous(), flipped.indices.contiguous()
    listed_counts, listed_indices = blocks.counts.contiguous(), blocks.indices.contiguous()
    group = heads // kv_heads
    known = [counts, *(cut.starts for cut in (queries, keys) if not cut.uniform)]
    batch = max(x.shape[0] for x in known)
    # Lists of the query heads of a group are joined, so only lists shared by all heads stay shared.
    own = kv_heads if any(x.shape[1] > 1 for x in known) else 1
    parts = triton.cdiv(queries.length, QUERIES)
    width = max(group * indices.shape[3] * parts, 1)
    chunks, where, *ranks = torch.empty(2 + ranked, batch, own, keys.number, width, dtype=torch.int32, device=counts.device)
    ranks = ranks[0] if ranked else where
    numbers = torch.empty(batch, own, keys.number, dtype=torch.int32, device=counts.device)
    heads = own * group
    _visits_kernel[(keys.number, own, batch)](
        counts, indices, listed_counts, listed_indices, keys.starts, keys.sizes, queries.starts, queries.sizes,
        chunks, where, ranks, numbers,
        *shared_strides(counts, heads), *shared_strides(listed_counts, heads), *keys.strides(own), *queries.strides(heads),
        keys.number, queries.number, keys.length, keys.tokens, queries.length, queries.tokens, indices.shape[3], listed_indices.shape[3],
        width, parts, slots, group,
        M=QUERIES, N=KEYS, SEGMENT=SEGMENT, UNIFORM_ROWS=keys.uniform, UNIFORM_ITEMS=queries.uniform, RANKED=ranked)
    return Visits(chunks, where, ranks, numbers)


