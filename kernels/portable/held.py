"""What a cache holds, by Triton's kernels: units' statistics, covariances in two bits an entry, and what is written to a ring.

Arguments are those of ``eager/held.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..estimate import Estimate
from ..launch import launch, power_of_2
from . import coded
from .estimate_config import strides

# Numbers that a program moves at once.
MOVED = 8192


@triton.jit
def _ring_kernel(x, source, at, place, x_batch, x_head, x_row, heads, rows, each, size, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                 WIDTH_PAD: tl.constexpr):
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    row, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_PAD)
    there = row < rows
    found = tl.load(source + row, mask=there, other=0) + size
    own = (tl.load(at + row, mask=there, other=0) + tl.load(place) * each) % size
    x += batch * x_batch + head * x_head
    mask = there[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + own[:, None] * x_row + columns[None, :], tl.load(x + found[:, None] * x_row + columns[None, :], mask=mask), mask=mask)


def room_for_statistics(k: Tensor, blocks: int, parts: int) -> Estimate:
    """See ``eager/held.py``; of kernels' statistics, with covariances as ``coded`` says."""
    batch, heads, _, dim = k.shape

    def room(*shape: int, dtype: torch.dtype = k.dtype) -> Tensor:
        return torch.zeros(batch, heads, blocks * parts, *shape, dtype=dtype, device=k.device)

    moments, covariances, scales = coded.code_sizes(dim)
    return Estimate(parts, room(dtype=torch.float32), None, room(dim), room(dim), room(moments, dtype=torch.uint8),
                         room(covariances, dtype=torch.uint8), room(scales, dtype=torch.bfloat16))


def write_statistics(found: Estimate, into: Estimate, places: Tensor | int) -> None:
    """See ``eager/held.py``."""
    coded.write([x.contiguous() for x in found.cached.values()], list(into.cached.values()), places)


def write_ring(xs: Sequence[Tensor], source: Tensor, at: Tensor, place: Tensor, each: int, size: int) -> None:
    """See ``eager/held.py``."""
    # Plain torch, which estimates in the interpreter, has covariances of two dimensions.
    xs = [x.flatten(3) if x.dim() > 4 else x for x in xs]
    for x in xs:
        x = x[..., None] if x.dim() == 3 else x
        batch, heads, _, width = x.shape
        pad = power_of_2(width)
        rows = max(1, MOVED // pad)
        launch(_ring_kernel, (-(-len(source) // rows), batch * heads, 1), (x, source, at, place),
               (*strides(x), heads, len(source), each, size), dict(ROWS=rows, WIDTH=width, WIDTH_PAD=pad),
               dict(num_warps=4, num_stages=1))
