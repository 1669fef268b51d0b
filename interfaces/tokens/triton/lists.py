"""The True entries of a mask's rows as lists, without asking how long the longest list is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.launch import FUSED

# Mask entries read at once by one program.
SEGMENT = 256


@triton.jit
def _lists_kernel(mask, rows, ids, counts, mask_row, mask_head, mask_item, heads, items, SEGMENT: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, first, end, added = row * mask_row, 0, items, 0
    if rows is not None:
        rows += row * 4
        start, first, end, added = tl.load(rows), tl.load(rows + 1), tl.load(rows + 2), tl.load(rows + 3)
    mask += start + head.to(tl.int64) * mask_head
    ids += (row * heads + head) * items
    count = 0
    for at in range(first, end, SEGMENT):
        item = at + tl.arange(0, SEGMENT)
        kept = tl.load(mask + item.to(tl.int64) * mask_item, mask=item < end, other=0) != 0
        tl.store(ids + count + tl.cumsum(kept.to(tl.int32), 0) - 1, (item + added).to(tl.int32), mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    tl.store(counts + row * heads + head, count)


def row_lists(mask: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(ids int32 ``[R, H, n]``, ascending; counts int32 ``[R, H]``) of the True entries of each row and head of a mask.

    Args:
        mask: bool ``[R, H, n]``; with ``rows`` ``[any, H, n]``.
        rows: int64 ``[R, 4]``: where the row begins in the mask's memory, its first entry that counts, the end of these, and a number to
            add to each id.
    """
    number, heads, items = mask.shape if rows is None else (len(rows), *mask.shape[1:])
    ids = torch.empty(number, heads, items, dtype=torch.int32, device=mask.device)
    counts = torch.zeros(number, heads, dtype=torch.int32, device=mask.device)
    if mask.numel() and number:
        _lists_kernel[(number, heads)](mask.view(torch.uint8), rows, ids, counts, *mask.stride(), heads, items, SEGMENT=SEGMENT, **FUSED)
    return ids, counts
