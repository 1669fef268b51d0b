"""Attention to lists of single keys, or of very short blocks: the listed keys are compacted (packed KV), then taken as tiles.

For some query blocks at a time, the keys and values of each list are copied behind one another, and an implementation that reads tiles
attends to these runs as to one long block each. A copy is read by all rows that share the list, so it costs little where they are many.
Gradients of the copies go back to the keys by the inverse of the lists: for each key its places in them, added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import BlockLists, Route
from ....kernels.launch import FUSED
from ....kernels.lowering.chunks import q_partition
from ....kernels.lowering.inputs import strided
from ....kernels.lowering.outputs import empty_outputs
from .config import COMPACTED_BYTES

# List entries read at once by one program.
SEGMENT = 1024
# Keys copied by one program.
COPY_KEYS = 64
# Keys whose gradients one program adds up, and query blocks of which it looks up the copies at once.
ADD_KEYS, ADD_BLOCKS = 16, 32
# Lists times query heads of a part: a grid's second dimension must stay below 65,536.
MOST_LISTS = 32_768


@triton.jit
def _source_kernel(counts, indices, bounds, source, places, list_head, first_head, head_share, first_block, items, length, kv_len, capacity,
                   width, INVERSE: tl.constexpr, SEGMENT: tl.constexpr):
    """The keys that a list names, in order, and their number; with INVERSE also where in the copies each key stands."""
    block, head = tl.program_id(0), tl.program_id(1)
    number, heads = tl.num_programs(0), tl.num_programs(1)
    list_row = ((first_head + head) // head_share).to(tl.int64) * list_head + first_block + block
    count = tl.minimum(tl.load(counts + list_row), capacity)
    indices += list_row * capacity
    row = block * heads + head
    found = 0
    for first in range(0, count * length, SEGMENT):
        slot = first + tl.arange(0, SEGMENT)
        item = tl.load(indices + slot // length, mask=slot < count * length, other=-1)
        # Ids out of range count as absent.
        known = (item >= 0) & (item < items)
        key = tl.where(known, item, 0) * length + slot % length
        there = known & (key < kv_len)
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        # A list that names a block twice may not lead out of its run.
        there = there & (place < width)
        tl.store(source + row.to(tl.int64) * width + place, key, mask=there)
        if INVERSE:
            tl.store(places + (head.to(tl.int64) * kv_len + key) * number + block, place, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
    tl.store(bounds + row * 2, 0)
    tl.store(bounds + row * 2 + 1, found)


@triton.jit
def _copy_kernel(k, v, keys, values, bounds, source, k_head, k_row, v_head, v_row, number, heads, first_head, head_share, width,
                 ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # Head after head: the keys of one, which many lists name, stay in the L2 cache.
    block, head = tl.program_id(1) % number, tl.program_id(1) // number
    row = block * heads + head
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place < tl.load(bounds + row * 2 + 1)
    at = row.to(tl.int64) * width + place
    key = tl.load(source + at, mask=there, other=0).to(tl.int64)
    kv_head = ((first_head + head) // head_share).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    mask = there[:, None] & (dims < DIM)[None, :]
    to = at[:, None] * DIM + dims[None, :]
    tl.store(keys + to, tl.load(k + kv_head * k_head + key[:, None] * k_row + dims[None, :], mask=mask), mask=mask)
    tl.store(values + to, tl.load(v + kv_head * v_head + key[:, None] * v_row + dims[None, :], mask=mask), mask=mask)


@triton.jit
def _add_kernel(dkeys, dvalues, places, dk, dv, kv_len, width, number, heads, first_head, head_share,
                KEYS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Adds to dk and dv of KEYS keys, float32, the gradients of their copies: the first of each key, then the second, and so on."""
    kv_head = first_head // head_share + tl.program_id(1)
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_PAD)
    to = (kv_head.to(tl.int64) * kv_len + keys.to(tl.int64))[:, None] * DIM + dims[None, :]
    mask = (keys < kv_len)[:, None] & (dims < DIM)[None, :]
    dk_acc = tl.load(dk + to, mask=mask, other=0.0)
    dv_acc = tl.load(dv + to, mask=mask, other=0.0)
    for head in range(tl.maximum(kv_head * head_share - first_head, 0), tl.minimum((kv_head + 1) * head_share - first_head, heads)):
        for first in range(0, number, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            at = (tl.cast(head, tl.int64) * kv_len + keys)[:, None] * number + block[None, :]
            place = tl.load(places + at, mask=(keys < kv_len)[:, None] & (block < number)[None, :], other=-1)
            copied = place >= 0
            rank = tl.cumsum(copied.to(tl.int32), 1)
            # Rows of the copies, which a list's run of ``width`` need not fill.
            row = (block * heads + head).to(tl.int64)[None, :] * width + place
            for copy in range(1, tl.max(tl.max(rank, 1), 0) + 1):
                chosen = copied & (rank == copy)
                source = tl.sum(tl.where(chosen, row, 0), 1)[:, None] * DIM + dims[None, :]
                there = (tl.sum(chosen.to(tl.int32), 1) > 0)[:, None] & (dims < DIM)[None, :]
                dk_acc += tl.load(dkeys + source, mask=there, other=0.0)
                dv_acc += tl.load(dvalues + source, mask=there, other=0.0)
    tl.store(dk + to, dk_acc, mask=mask)
    tl.store(dv + to, dv_acc, mask=mask)


@dataclass(frozen=True)
class QueryPart:
    """The query blocks and heads that are taken at once. A head of the copies is one of k's, or of the lists where these have more."""

    batch: int
    first_block: int
    blocks: int
    tokens: int      # tokens of each query block
    first_row: int   # query row of the first one
    first_head: int
    heads: int
    group: int       # query heads that read the same copies

    def rows(self, x: Tensor) -> Tensor:
        """The part's rows of x [B, Hq, Sq, ...] as [blocks, query heads, tokens, ...]."""
        heads = slice(self.first_head * self.group, (self.first_head + self.heads) * self.group)
        x = x[self.batch, heads, self.first_row:self.first_row + self.blocks * self.tokens]
        return x.unflatten(1, (self.blocks, self.tokens)).transpose(0, 1)


def compacted_forward(
    route: Route, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, *, room: int = COMPACTED_BYTES,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; ``route`` attends to the copies, which know no positions.

    The copies take ``room`` bytes, or those of one list if that is more.
    """
    out, lse = empty_outputs(q, q_partition(blocks, q.shape[2]))
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    k, v = strided(k), strided(v)
    for part in _parts(q, k, blocks, room):
        keys, values, bounds, _ = _compact(part, k, v, blocks, inverse=False)
        part_out, part_lse = route.run(part.rows(q), keys, values, _one_block_each(part, bounds, keys.shape[2]), scale)
        part.rows(out).copy_(part_out)
        part.rows(lse).copy_(part_lse)
    return out, lse


def compacted_backward(
    route: Route, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    scale: float, deterministic: bool, *, room: int = COMPACTED_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). Copies and their gradients take twice ``room``, the sums of dk and dv as much again as k and v."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    k, v = strided(k), strided(v)
    (kv_heads, kv_len, dim), dq = k.shape[1:], torch.empty_like(q)
    dk, dv = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
    for part in _parts(q, k, blocks, room):
        keys, values, bounds, places = _compact(part, k, v, blocks, inverse=True)
        lists = _one_block_each(part, bounds, keys.shape[2])
        part_dq, dkeys, dvalues = route.run_backward(
            part.rows(dout), None if dlse is None else part.rows(dlse), part.rows(q), keys, values, part.rows(out),
            part.rows(lse).contiguous(), lists, scale, False, deterministic)
        part.rows(dq).copy_(part_dq)
        share = _copy_heads(k, blocks) // kv_heads
        first, last = part.first_head // share, (part.first_head + part.heads - 1) // share
        _add_kernel[(triton.cdiv(kv_len, ADD_KEYS), last - first + 1)](
            dkeys, dvalues, places, dk[part.batch], dv[part.batch], kv_len, keys.shape[2], part.blocks, part.heads, part.first_head, share,
            KEYS=ADD_KEYS, BLOCKS=ADD_BLOCKS, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16), **FUSED)
    return dq, torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _copy_heads(k: Tensor, blocks: BlockLists) -> int:
    return max(k.shape[1], blocks.counts.shape[1])


def _width(k: Tensor, blocks: BlockLists) -> int:
    """The longest run of copied keys; a multiple of 8 so that TMA can load from the runs."""
    return max(-(-min(blocks.capacity * blocks.max_kv_length, k.shape[2]) // 8) * 8, 8)


def _parts(q: Tensor, k: Tensor, blocks: BlockLists, room: int) -> Iterator[QueryPart]:
    """Parts of equal size that together are all query blocks; a last block that is shorter is a part of its own."""
    copy_heads, tokens = _copy_heads(k, blocks), blocks.max_q_length
    group, (whole, rest) = q.shape[1] // copy_heads, divmod(q.shape[2], tokens)
    lists = room // (2 * _width(k, blocks) * k.shape[3] * k.element_size())
    lists = max(1, min(lists, MOST_LISTS // group))
    heads = min(copy_heads, lists)
    at_once = lists // heads
    # As few parts as fit, of about equal size.
    at_once = -(-whole // -(-whole // at_once)) if whole else 0
    for batch in range(q.shape[0]):
        for head in range(0, copy_heads, heads):
            some = min(heads, copy_heads - head)
            for first in range(0, whole, max(at_once, 1)):
                yield QueryPart(batch, first, min(at_once, whole - first), tokens, first * tokens, head, some, group)
            if rest:
                yield QueryPart(batch, whole, 1, rest, whole * tokens, head, some, group)


def _compact(part: QueryPart, k: Tensor, v: Tensor, blocks: BlockLists, inverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(keys, values [blocks, heads, width, D], bounds int32 [blocks, heads, 2]: 0 and the length of each run,
    places int32 [heads, Skv, blocks]: where in a run a key stands, or -1)."""
    (kv_heads, kv_len, dim), device = k.shape[1:], k.device
    copy_heads, width, number = _copy_heads(k, blocks), _width(k, blocks), part.blocks
    counts, indices = blocks.counts.contiguous(), blocks.indices.contiguous()
    batch = part.batch if counts.shape[0] > 1 else 0
    bounds = torch.empty(number, part.heads, 2, dtype=torch.int32, device=device)
    source = torch.empty(number, part.heads, width, dtype=torch.int32, device=device)
    places = torch.full((part.heads, kv_len, number), -1, dtype=torch.int32, device=device) if inverse else None
    length = blocks.max_kv_length
    _source_kernel[(number, part.heads)](
        counts[batch], indices[batch], bounds, source, places, counts.shape[2], part.first_head, copy_heads // counts.shape[1],
        part.first_block, -(-kv_len // length), length, kv_len, blocks.capacity, width, INVERSE=inverse, SEGMENT=SEGMENT, **FUSED)
    keys, values = torch.empty(2, number, part.heads, width, dim, dtype=k.dtype, device=device).unbind()
    _copy_kernel[(triton.cdiv(width, COPY_KEYS), number * part.heads)](
        k[part.batch], v[part.batch], keys, values, bounds, source, *k.stride()[1:3], *v.stride()[1:3], number, part.heads,
        part.first_head, copy_heads // kv_heads, width, ROWS=COPY_KEYS, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16), **FUSED)
    return keys, values, bounds, places


def _one_block_each(part: QueryPart, bounds: Tensor, width: int) -> BlockLists:
    """Every query block attends to the one key block that its run is; the query blocks are the batch."""
    one = torch.ones(1, 1, 1, dtype=torch.int32, device=bounds.device)
    return BlockLists(one, torch.zeros_like(one)[..., None], part.tokens, bounds, max_kv_length=width)
