"""Slots: blocks of any length laid out for kernels whose blocks all have one, and the lists of blocks as lists of slots.

A block of up to ``parts`` times ``slot`` tokens has ``parts`` slots, whichever of them it fills: its tokens stand in them from the first
one on, and behind them zeros. So every block begins with a slot, and only its last one that holds tokens is partly filled. Slots without
tokens are in no list. Blocks of one size, a multiple of ``slot``, lie in slots as they are, and nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from ..launch import launch, power_of_2
from ..lowering.chunks import Partition, block_lists, kv_partition, q_partition
from ..lowering.inputs import loadable, strided
from ..lowering.primitives import block_bounds, row_of_lists

# List entries that a program reads at once, and rows that it copies.
SEGMENT, ROWS = 256, 64


class Axis(NamedTuple):
    """The slots of one axis."""

    blocks: Partition
    slot: int         # tokens
    parts: int        # slots of a block
    as_is: bool       # whether tokens lie in slots as they are

    @classmethod
    def of(cls, blocks: Partition, slot: int) -> Axis:
        return cls(blocks, slot, -(-blocks.length // slot), blocks.uniform and blocks.length % slot == blocks.tokens % slot == 0)

    @property
    def number(self) -> int:
        """Slots of the axis."""
        return self.blocks.tokens // self.slot if self.as_is else self.blocks.number * self.parts

    def fill(self, x: Tensor) -> Tensor:
        """x ``[B, H, tokens, D]`` in slots, ``[B, H, number * slot, D]``: x itself where it lies so, at an address that is a multiple of
        128 bytes and with strides of 16, else a copy."""
        if self.as_is:
            return x if loadable(x) and x.data_ptr() % 128 == 0 else x.clone(memory_format=torch.contiguous_format)
        filled = x.new_empty(*x.shape[:2], self.number * self.slot, x.shape[3])
        self._copy(strided(x), filled, True)
        return filled

    def empty(self, filled: Tensor, like: Tensor, other: float = 0.0) -> Tensor:
        """The tokens of ``filled``, in the shape and memory order of ``like``; ``other`` for tokens of no block."""
        if self.as_is:
            return filled if filled.stride() == like.stride() else torch.empty_like(like).copy_(filled)
        out = torch.empty_like(like) if self.blocks.covers else torch.full_like(like, other)
        self._copy(out, filled, False)
        return out

    def fill_results(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(out, dout, lse) of a forward in slots, lse 0 behind a block's tokens. With dlse, out and dout are changed so that
        sum(dout * out) over D is less by dlse, which is all that a gradient of the log-sum-exp adds to a backward: from out, dout is taken
        away as often as that needs; where dout is zero, both get one entry, which in dout is 2 ** -30 of dlse."""
        if dlse is not None:
            out, dout = _less(out, dout, dlse[..., None])
        return self.fill(out), self.fill(dout), lse if self.as_is else self.fill(lse[..., None])[..., 0]

    def _copy(self, x: Tensor, filled: Tensor, fill: bool) -> None:
        batch, heads, _, dim = x.shape
        rows = min(ROWS, self.slot)
        launch(_copy_kernel, (self.number * self.slot // rows, batch * heads, 1), (x, filled, self.blocks.bounds(heads)),
               (*x.stride()[:3], *filled.stride()[:3], heads, self.parts * self.slot),
               dict(FILL=fill, ROWS=rows, DIM=dim, DIM_PAD=power_of_2(dim)))


def _less(out: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """out and dout as ``Axis.fill_results`` changes them; dlse ``[B, H, tokens, 1]``."""
    wide = dout.float()
    squared = wide.square().sum(-1, keepdim=True)
    short, entry = squared < 1e-30, (dlse * 2.0**-30).to(dout.dtype)
    alone = short & (entry != 0) & (torch.arange(out.shape[3], device=out.device) == 0)
    less = out.float() - torch.where(short, 0.0, dlse / squared.masked_fill(short, 1.0)) * wide
    less = torch.where(alone, -dlse / entry.float().masked_fill(entry == 0, 1.0), less)
    return less.to(out.dtype), torch.where(alone, entry, dout)


class SlotLists(NamedTuple):
    """Lists of slots, as ``cudnn.BSA`` takes them, and the axes that they are of. The lists of batch elements and heads are spelled out.

    Attributes:
        counts: int32 ``[B, H, query slots]``.
        indices: int32 ``[B, H, query slots, capacity]``; what lies past a count is unwritten.
        sizes: int32 ``[key slots]``, tokens of each; 0 only where no list has it.
        rows, items: query and key slots.
    """

    counts: Tensor
    indices: Tensor
    sizes: Tensor
    rows: Axis
    items: Axis


def slot_lists(blocks: BlockLists, q: Tensor, k: Tensor, slot: int) -> SlotLists:
    """The lists for q ``[B, H, tokens, D]`` and k ``[B, Hkv, tokens', D]`` by one launch. The key blocks must lie at the same tokens for
    all batch elements and heads."""
    batch, heads = q.shape[:2]
    rows, items = Axis.of(q_partition(blocks, q.shape[2]), slot), Axis.of(kv_partition(blocks, k.shape[2]), slot)
    width = max(blocks.capacity * items.parts, 1)
    counts = torch.empty(batch, heads, rows.number, dtype=torch.int32, device=q.device)
    indices = torch.empty(batch, heads, rows.number, width, dtype=torch.int32, device=q.device)
    sizes = torch.empty(items.number, dtype=torch.int32, device=q.device)
    lists = block_lists(blocks.counts, blocks.indices, heads, items.blocks.number)
    launch(_lists_kernel, (max(rows.blocks.number, items.blocks.number), heads, batch),
           (lists, rows.blocks.bounds(heads), items.blocks.bounds(1), counts, indices, sizes),
           (rows.blocks.number, rows.number, items.number, rows.parts, items.parts, width), dict(SLOT=slot, SEGMENT=SEGMENT))
    return SlotLists(counts, indices, sizes, rows, items)


@triton.jit
def _lists_kernel(lists, bounds, item_bounds, counts, indices, sizes, rows, row_slots, item_slots, row_parts, item_parts, width,
                  SLOT: tl.constexpr, SEGMENT: tl.constexpr):
    """A program writes the lists of a query block's slots; those of the first head also the sizes of a key block's."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if (head == 0) & (batch == 0) & (block < lists.items):
        _, block_size = block_bounds(item_bounds, 0, block)
        for part in range(item_parts):
            slot = block * item_parts + part
            tl.store(sizes + slot, tl.minimum(tl.maximum(block_size - part * SLOT, 0), SLOT), mask=slot < item_slots)
    if block >= rows:
        return
    heads = tl.num_programs(1)
    row_at = batch * bounds.batch + head // bounds.group * bounds.head
    _, tokens = block_bounds(bounds, row_at, block)
    list_row = row_of_lists(lists, batch, head, block)
    first_slot = (batch * heads + head) * row_slots + block * row_parts
    # The slots of a block beyond its tokens have no lists.
    used = tl.minimum(tl.cdiv(tl.maximum(tokens, 0), SLOT), row_parts)
    entries = tl.minimum(tl.load(lists.counts + list_row), lists.capacity) * item_parts
    found = 0
    for first in range(0, entries, SEGMENT):
        entry = first + tl.arange(0, SEGMENT)
        part = entry % item_parts
        item = tl.load(lists.indices + list_row * lists.capacity + entry // item_parts, mask=entry < entries, other=-1)
        # Ids out of range count as absent.
        known = (item >= 0) & (item < lists.items)
        _starts, size = block_bounds(item_bounds, 0, tl.where(known, item, 0))
        there = known & (size > part * SLOT)
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        # A list that names a block twice may not lead out of its row.
        there = there & (place < width)
        for number in range(used):
            tl.store(indices + (first_slot + number) * width + place, item * item_parts + part, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
    for number in range(row_parts):
        tl.store(counts + first_slot + number, tl.where(number < used, found, 0), mask=block * row_parts + number < row_slots)


@triton.jit
def _copy_kernel(x, filled, bounds, x_batch, x_head, x_row, filled_batch, filled_head, filled_row, heads, length,
                 FILL: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Between the tokens x of blocks and their slots, ``length`` tokens a block: into the slots with FILL, else out of them."""
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    block = (first // length).to(tl.int32)
    start, size = block_bounds(bounds, batch * bounds.batch + head // bounds.group * bounds.head, block)
    row = (first - block * tl.cast(length, tl.int64)).to(tl.int32) + tl.arange(0, ROWS)
    token, dims = (start + row).to(tl.int64), tl.arange(0, DIM_PAD)
    tokens = x + batch * x_batch + head * x_head + token[:, None] * x_row + dims[None, :]
    places = filled + batch * filled_batch + head * filled_head + (first + tl.arange(0, ROWS))[:, None] * filled_row + dims[None, :]
    inside = dims[None, :] < DIM
    real = (row < size)[:, None] & inside
    if FILL:
        tl.store(places, tl.load(tokens, mask=real, other=0.0), mask=inside)
    else:
        tl.store(tokens, tl.load(places, mask=real, other=0.0), mask=real)
