"""Outputs of the forward kernels: out and lse, and the rows of them that no block covers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2
from .chunks import Partition

# Rows that a program clears at once.
ROWS = 32


# Flat numbers, which are quicker to launch than tuples: this runs before every forward over ragged blocks.
_NUMBERS = ["out_batch", "out_head", "out_row", "bound_batch", "bound_head", "bound_group", "heads", "tokens"]


@triton.jit(do_not_specialize=_NUMBERS)
def _clear_kernel(out, lse, starts, sizes, out_batch, out_head, out_row, bound_batch, bound_head, bound_group, heads, tokens,
                  ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # The gap before block ``place``; the last place is the end of the sequence.
    place, number = tl.program_id(0), tl.num_programs(0) - 1
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    at = batch * bound_batch + (head // bound_group) * bound_head + place
    first = tl.load(starts + at - 1, mask=place > 0, other=0)
    first += tl.maximum(tl.load(sizes + at - 1, mask=place > 0, other=0), 0)
    last = tl.minimum(tl.load(starts + at, mask=place < number, other=tokens), tokens)
    out += batch * out_batch + head * out_head
    lse += (batch * heads + head) * tokens
    lines, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    for row in range(first, last, ROWS):
        inside = row + lines < last
        tl.store(out + (row + lines).to(tl.int64)[:, None] * out_row + dims[None, :], tl.zeros([ROWS, DIM_PAD], out.dtype.element_ty),
                 mask=inside[:, None] & (dims < DIM)[None, :])
        tl.store(lse + row + lines, tl.full([ROWS], float("-inf"), tl.float32), mask=inside)


def empty_outputs(q: Tensor, rows: Partition, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) before a forward kernel, unwritten but for the rows outside all blocks, which get what they must give.

    ``in_place``: out is q itself. That is right for kernels whose programs write rows of one block and head and nothing else, and have
    read these rows of q before; what a program reads of rows that are not its own must not reach its result.
    """
    batch, heads, tokens, dim = q.shape
    out = q if in_place else torch.empty_like(q)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    if not rows.covers and batch * heads:
        numbers = (*out.stride()[:3], *rows.strides(heads), heads, tokens)
        launch(_clear_kernel, (rows.number + 1, batch * heads, 1), (out, lse, rows.starts, rows.sizes), numbers,
               dict(ROWS=ROWS, DIM=dim, DIM_PAD=power_of_2(dim)))
    return out, lse


def nothing_attended(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) where there is no key."""
    return out.zero_(), lse.fill_(float("-inf"))
