"""The portable kernel that cuts each block's tokens into two units across the first principal direction of its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..estimate import CUTS, ITERATIONS
from ..launch import launch, power_of_2
from .estimate_config import estimate_config, strides
from .estimate_statistics import centred_moments, fold, head_at, load_tokens, own_block, padded, shifted, unit_rows

# Tokens whose projections are looked at at once, in large blocks.
WIDTH = 512


@triton.jit
def _in_two(direction, DTYPE: tl.constexpr):
    """[D, 16] of DTYPE, two columns of which sum to float32 ``direction`` at whatever length the type holds; the others are 0."""
    direction *= 1.0 / tl.maximum(tl.sum(tl.abs(direction), 0), 1e-30)
    large = direction.to(DTYPE)
    small = (direction - large.to(tl.float32)).to(DTYPE)
    column = tl.arange(0, 16)[None, :]
    return tl.where(column == 0, large[:, None], tl.where(column == 1, small[:, None], 0.0)).to(DTYPE)


@triton.jit
def _chunk(x, start, size, WIDTH: tl.constexpr):
    """WIDTH of ``size`` numbers from ``start`` on, +inf from the ``size``-th on."""
    place = start + tl.arange(0, WIDTH)
    return tl.load(x + place, mask=place < size, other=float("inf"))


@triton.jit
def _below(x, bound):
    """(How many are below, their sum)."""
    below = x < bound
    return tl.sum(below.to(tl.int32), 0), tl.sum(tl.where(below, x, 0.0), 0)


@triton.jit
def _order_kernel(k, offsets, projections, order, log_count, k_batch, k_head, k_row, heads, tokens, units,
                  ITERATIONS: tl.constexpr, CUTS: tl.constexpr, WIDTH: tl.constexpr, SHIFTED: tl.constexpr,
                  ROWS: tl.constexpr, FOLD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A block's tokens, those that lie lower on its first principal key direction before the others, either in their own order, as are all
    where keys are equal or one is not finite; and the log of how many."""
    block, head, batch = own_block(heads)
    at = batch * heads + head
    first, size = unit_rows(offsets, None, block, 1)
    k = head_at(k, batch, head, k_batch, k_head)
    _, acc, _ = centred_moments(k, None, None, first, size, k_row, 0, 0, SHIFTED, True, ROWS, FOLD, DIM_PAD, DIM, DIM_PAD)
    # From the diagonal, so that nothing is drawn; 1 keeps blocks of one key apart from 0 / 0. The trace is no less than the first principal
    # variance, and no more than DIM times that: so nothing grows, and what shrinks stays far above the least float32. Sums over rows need
    # few exchanges between threads, and bringing the direction back to the columns fewer than sums over columns.
    dims = tl.arange(0, DIM_PAD)
    diagonal = tl.sum(tl.where(dims[:, None] == dims[None, :], acc, 0.0), 1)
    direction = 1.0 + diagonal * (1.0 / tl.maximum(size, 1))
    inverse = 1.0 / tl.maximum(tl.sum(tl.abs(diagonal), 0), 1e-20)
    for _step in range(ITERATIONS):
        direction = tl.sum(acc * direction[None, :], 1) * inverse
    projections += at * tokens + first
    order += at * tokens + first
    rows = tl.arange(0, ROWS)
    # On tensor cores, for which keys need not be unpacked.
    ON_TENSOR_CORES: tl.constexpr = k.dtype.element_ty != tl.float32
    if ON_TENSOR_CORES:
        directions = _in_two(direction, k.dtype.element_ty)
    for row in range(0, size, ROWS):
        x = load_tokens(k, None, first + row, None, k_row, size - row, 0, ROWS, DIM_PAD, DIM)
        if ON_TENSOR_CORES:
            projected = tl.sum(tl.dot(x, directions), 1)
        else:
            projected = tl.sum(x * direction[None, :], 1)
        tl.store(projections + row + rows, projected, mask=row + rows < size)
    # Other threads read them.
    tl.debug_barrier()
    # First at the mean, then half way between both parts' means; what is not finite is never below.
    own = _chunk(projections, 0, size, WIDTH)
    total = tl.zeros([], tl.float32)
    middle = tl.full([], float("inf"), tl.float32)
    for cut in range(CUTS + 1):
        number, some = _below(own, middle)
        for start in range(WIDTH, size, WIDTH):
            more = _below(_chunk(projections, start, size, WIDTH), middle)
            number += more[0]
            some += more[1]
        if cut == 0:
            total = some
            middle = total / tl.maximum(number, 1)
        else:
            rest = size - number
            between = (some / tl.maximum(number, 1) + (total - some) / tl.maximum(rest, 1)) * 0.5
            middle = tl.where((number > 0) & (rest > 0), between, middle)
    lower_size, _ = _below(own, middle)
    for start in range(WIDTH, size, WIDTH):
        lower_size += _below(_chunk(projections, start, size, WIDTH), middle)[0]
    # How many projections of the chunks before lie below the middle.
    lowers = tl.full([], 0, tl.int32)
    for start in range(0, size, WIDTH):
        place = start + tl.arange(0, WIDTH)
        lower = _chunk(projections, start, size, WIDTH) < middle
        marks = lower.to(tl.int32)
        lowers_before = lowers + tl.cumsum(marks, 0) - marks
        tl.store(order + tl.where(lower, lowers_before, lower_size + place - lowers_before), first + place, mask=place < size)
        lowers += tl.sum(marks, 0)
    part = tl.arange(0, 2)
    number = tl.where(part == 0, lower_size, size - lower_size)
    known = tl.where(number > 0, tl.log(tl.maximum(number, 1).to(tl.float32)), float("-inf"))
    tl.store(log_count + at * units + 2 * block + part, known)


def principal_order(k: Tensor, offsets: Tensor, num_blocks: int, log_count: Tensor) -> Tensor:
    """``order`` of ``Estimate`` for two units of a block; writes its ``log_count``."""
    batch, heads, tokens, dim = k.shape
    order = torch.empty(batch, heads, tokens, dtype=torch.int32, device=k.device)
    projections = torch.empty(batch, heads, tokens, dtype=torch.float32, device=k.device)
    config = estimate_config("order", dim, k.dtype, device_limits(k.device))
    # Blocks of the usual size fit; larger ones are looked at piece by piece.
    width = min(WIDTH, max(128, power_of_2(-(-tokens // max(num_blocks, 1)))))
    constants = dict(ITERATIONS=ITERATIONS, CUTS=CUTS, WIDTH=width, SHIFTED=shifted(k), ROWS=config.block_n, FOLD=fold(config, dim),
                     **padded(dim))
    launch(_order_kernel, (num_blocks * heads, batch, 1), (k, offsets, projections, order, log_count),
           (*strides(k), heads, tokens, log_count.shape[2]), constants, config.options())
    return order
