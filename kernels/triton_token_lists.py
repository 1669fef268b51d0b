"""From a bool mask of query tokens by key blocks to lists, one way and the other, without asking how long the longest list is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Mask entries read at once by one program.
SEGMENT = 256


@triton.jit
def _lists_kernel(mask, ids, counts, cu_seqlens, mask_batch, mask_head, mask_row, mask_item, heads, rows, items, tokens, block_size,
                  ROWS_ARE_TOKENS: tl.constexpr, CAUSAL: tl.constexpr, SEGMENT: tl.constexpr):
    """The items of a row whose entry is True, ascending. A row is a token and its items blocks, or the other way round."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens + batch)
    size = tl.minimum(tl.load(cu_seqlens + batch + 1), tokens) - start
    if ROWS_ARE_TOKENS:
        if row >= size:
            return
        first, last, base = 0, items, 0
        if CAUSAL:
            last = tl.minimum(items, row // block_size + 1)
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
    tl.store(counts + out_row, count)


def token_blocks(mask: Tensor, cu_seqlens: Tensor, tokens: int, block_size: int, causal: bool = True) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, H, N], counts int32 [T, H]): the blocks that each token of a mask [B, H, L, N] keeps, up to its own if causal."""
    batch, heads, rows, items = mask.shape
    ids = torch.empty(tokens, heads, items, dtype=torch.int32, device=mask.device)
    # Tokens outside every sequence have no row.
    counts = torch.zeros(tokens, heads, dtype=torch.int32, device=mask.device)
    _launch(mask, mask.stride(), ids, counts, cu_seqlens, rows, items, tokens, block_size, True, causal)
    return ids, counts


def key_tokens(mask: Tensor, cu_seqlens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int32 [H * B * N * L], firsts int64 [H, B * N], counts int32 [H, B * N]) of a causal mask [B, H, L, N], as KeyLists."""
    batch, heads, items, rows = mask.shape
    tokens = torch.empty(heads * batch * rows, items, dtype=torch.int32, device=mask.device)
    counts = torch.empty(heads, batch * rows, dtype=torch.int32, device=mask.device)
    b, h, item, row = mask.stride()
    _launch(mask, (b, h, row, item), tokens, counts, cu_seqlens, rows, items, torch.iinfo(torch.int32).max, block_size, False, True)
    firsts = torch.arange(heads * batch * rows, device=mask.device).view(heads, batch * rows) * items
    return tokens.flatten(), firsts, counts


def _launch(mask, strides, ids, counts, cu_seqlens, rows, items, tokens, block_size, rows_are_tokens, causal) -> None:
    if mask.numel():
        _lists_kernel[(rows, mask.shape[1], mask.shape[0])](
            mask.view(torch.uint8), ids, counts, cu_seqlens.int(), *strides, mask.shape[1], rows, items, tokens, block_size,
            ROWS_ARE_TOKENS=rows_are_tokens, CAUSAL=causal, SEGMENT=SEGMENT)
    else:
        counts.zero_()
