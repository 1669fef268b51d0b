"""The lists of query tokens by key blocks, from masks and from ids, and the way back, without asking how long the longest list is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.launch import FUSED
from ....kernels.operators import operator

# Mask entries read at once by one program.
SEGMENT = 256
# Lists of ids that one program goes through, of up to 32 ids each.
LISTS = 32


@triton.jit
def _lists_kernel(mask, ids, counts, full, cu_seqlens, mask_batch, mask_head, mask_row, mask_item, heads, rows, items, tokens, block_size,
                  ROWS_ARE_TOKENS: tl.constexpr, SEGMENT: tl.constexpr):
    """The items of a row whose entry is True, ascending. A row is a token and its items blocks, or the other way round.

    Of a token's blocks its own, which it sees up to itself, stands at the back.
    """
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + batch)
    size = tl.minimum(tl.load(cu_seqlens + batch + 1), tokens) - start
    if ROWS_ARE_TOKENS:
        if row >= size:
            return
        first, last, base = 0, tl.minimum(items, row // block_size), 0
        out_row = (start + row).to(tl.int64) * heads + head
    else:
        # A block is seen by the tokens from its own first one on.
        first, last, base = row * block_size, tl.minimum(items, size), start
        out_row = (head * tl.num_programs(2) + batch).to(tl.int64) * rows + row
    mask += batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head + row.to(tl.int64) * mask_row
    ids += out_row * items
    count = 0
    for at in range(first, last, SEGMENT):
        item = at + tl.arange(0, SEGMENT)
        kept = tl.load(mask + item.to(tl.int64) * mask_item, mask=item < last, other=0) != 0
        tl.store(ids + count + tl.cumsum(kept.to(tl.int32), 0) - 1, base + item, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    if ROWS_ARE_TOKENS:
        tl.store(full + out_row, count)
        own = row // block_size
        if own < items:
            if tl.load(mask + tl.cast(own, tl.int64) * mask_item) != 0:
                tl.store(ids + items - 1, own)
                count += 1
    tl.store(counts + out_row, count)


@triton.jit
def _rows_kernel(mask, ids, counts, mask_token, mask_head, mask_item, heads, items, SEGMENT: tl.constexpr):
    """The items of a row whose entry is True, ascending."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mask += token * mask_token + head * mask_head
    ids += (token * heads + head) * items
    count = 0
    for at in range(0, items, SEGMENT):
        item = at + tl.arange(0, SEGMENT)
        kept = tl.load(mask + item.to(tl.int64) * mask_item, mask=item < items, other=0) != 0
        tl.store(ids + count + tl.cumsum(kept.to(tl.int32), 0) - 1, item, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    tl.store(counts + token * heads + head, count)


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


def token_blocks(mask: Tensor, cu_seqlens: Tensor, tokens: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [T, H, N], counts int32 [T, H], full int32 [T, H]), as TokenLists: the blocks up to its own that each token of a causal
    mask [B, H, L, N] keeps."""
    batch, heads, rows, items = mask.shape
    ids = torch.empty(tokens, heads, items, dtype=torch.int32, device=mask.device)
    # Tokens outside every sequence have no row.
    counts, full = torch.zeros(2, tokens, heads, dtype=torch.int32, device=mask.device)
    _launch(mask, mask.stride(), ids, counts, full, cu_seqlens, rows, items, tokens, block_size, True)
    return ids, counts, full


def row_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, H, N], counts int32 [T, H]): the blocks that each row of a mask [T, H, N] keeps."""
    tokens, heads, items = mask.shape
    ids = torch.empty(tokens, heads, items, dtype=torch.int32, device=mask.device)
    counts = torch.empty(tokens, heads, dtype=torch.int32, device=mask.device)
    if not mask.numel():
        return ids, counts.zero_()
    _rows_kernel[(tokens, heads)](mask.view(torch.uint8), ids, counts, *mask.stride(), heads, items, SEGMENT=SEGMENT, **FUSED)
    return ids, counts


def key_tokens(mask: Tensor, cu_seqlens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int32 [H * B * N * L], firsts int64 [H, B * N], counts int32 [H, B * N]) of a causal mask [B, H, L, N], as KeyLists."""
    batch, heads, items, rows = mask.shape
    tokens = torch.empty(heads * batch * rows, items, dtype=torch.int32, device=mask.device)
    counts = torch.empty(heads, batch * rows, dtype=torch.int32, device=mask.device)
    b, h, item, row = mask.stride()
    _launch(mask, (b, h, row, item), tokens, counts, None, cu_seqlens, rows, items, torch.iinfo(torch.int32).max, block_size, False)
    firsts = torch.arange(heads * batch * rows, device=mask.device).view(heads, batch * rows) * items
    return tokens.flatten(), firsts, counts


def _launch(mask, strides, ids, counts, full, cu_seqlens, rows, items, tokens, block_size, rows_are_tokens) -> None:
    if mask.numel():
        _lists_kernel[(rows, mask.shape[1], mask.shape[0])](
            mask.view(torch.uint8), ids, counts, full, cu_seqlens.int(), *strides, mask.shape[1], rows, items, tokens, block_size,
            ROWS_ARE_TOKENS=rows_are_tokens, SEGMENT=SEGMENT, **FUSED)
    else:
        counts.zero_()
