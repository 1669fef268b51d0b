"""What the forward kernels write to: out and lse, and the rows of them that no block covers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import view
from .chunks import Partition
from .primitives import of_head

# Rows that a program clears at once.
ROWS = 32


@triton.jit
def _clear_kernel(out, lse, bounds, heads, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # The gap before block ``place``; the last place is the end of the sequence.
    place, number = tl.program_id(0), tl.num_programs(0) - 1
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    at = batch * bounds.batch + (head // bounds.group) * bounds.head + place
    first = tl.load(bounds.starts + at - 1, mask=place > 0, other=0)
    first += tl.maximum(tl.load(bounds.sizes + at - 1, mask=place > 0, other=0), 0)
    last = tl.minimum(tl.load(bounds.starts + at, mask=place < number, other=bounds.tokens), bounds.tokens)
    out_head = of_head(out, batch, head)
    lse += (batch * heads + head) * bounds.tokens
    lines, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    for row in range(first, last, ROWS):
        inside = row + lines < last
        tl.store(out_head + (row + lines).to(tl.int64)[:, None] * out.row + dims[None, :],
                 tl.zeros([ROWS, DIM_PAD], out_head.dtype.element_ty), mask=inside[:, None] & (dims < DIM)[None, :])
        tl.store(lse + row + lines, tl.full([ROWS], float("-inf"), tl.float32), mask=inside)


def empty_outputs(q: Tensor, rows: Partition, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) before a forward kernel, unwritten but for the rows outside all blocks, which get what they must give.

    ``in_place``: out is q itself. That is right for kernels whose programs write rows of one block and head and nothing else, and have
    read these rows of q before; what a program reads of rows that are not its own must not reach its result.
    """
    batch, heads, tokens, dim = q.shape
    out = q if in_place else torch.empty_like(q)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    if not rows.uniform and batch * heads:
        _clear_kernel[(rows.number + 1, batch * heads)](
            view(out), lse, rows.bounds(heads), heads, ROWS=ROWS, DIM=dim, DIM_PAD=triton.next_power_of_2(dim))
    return out, lse
