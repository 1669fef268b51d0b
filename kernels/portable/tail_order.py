"""The portable kernel that cuts each block's tokens into two halves across the first principal direction of its keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..lowering.plans import Plan
from ..lowering.primitives import ordered
from ..lowering.quick_launch import power_of_2
from .tail_config import launcher, strides, tail_config
from .tail_statistics import centred_moments, fold, head_at, load_tokens, own_block, padded, shifted, unit_rows

# Tokens whose projections are looked at at once, in large blocks; fewer than 1024.
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
def _ordered_chunk(x, start, size, WIDTH: tl.constexpr):
    """int32 in the order of WIDTH of ``size`` numbers from ``start`` on, the largest integer from the ``size``-th on."""
    place = start + tl.arange(0, WIDTH)
    inside = place < size
    return tl.where(inside, ordered(tl.load(x + place, mask=inside, other=0.0)), 0x7FFFFFFF)


@triton.jit
def _below_three(keys, bound, step):
    """How many are below of bound + step, of bound + 2 step and of bound + 3 step: three sums of up to 1023 in one."""
    counts = (keys < bound + step).to(tl.int32)
    counts += (keys < bound + 2 * step).to(tl.int32) << 10
    counts += (keys < bound + 3 * step).to(tl.int32) << 20
    total = tl.sum(counts, 0)
    return total & 1023, total >> 10 & 1023, total >> 20


@triton.jit
def _order_kernel(k, offsets, projections, order, k_batch, k_head, k_row, heads, tokens, ITERATIONS: tl.constexpr, WIDTH: tl.constexpr,
                  SHIFTED: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A block's tokens, those of the lower half of the projections on its first principal key direction before the others, as a stable
    sort would cut them; each half in its own order, as are all where keys are equal or one is not finite."""
    block, head, batch = own_block(heads)
    at = batch * heads + head
    first, size = unit_rows(offsets, block, 1)
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
    # The middle one in order: the largest number that no more than the lower half's are below of, found two bits at a time, until just the
    # lower half's are. Of those that equal it the first fill the lower half.
    lower_size = size // 2
    own = _ordered_chunk(projections, 0, size, WIDTH)
    middle = tl.full([], -(1 << 31), tl.int32)
    wanted = lower_size
    step = tl.full([], 1 << 30, tl.int32)
    while (step > 0) & (wanted > 0):
        one, two, three = _below_three(own, middle, step)
        for start in range(WIDTH, size, WIDTH):
            more = _below_three(_ordered_chunk(projections, start, size, WIDTH), middle, step)
            one += more[0]
            two += more[1]
            three += more[2]
        below = tl.where(three <= lower_size, three, tl.where(two <= lower_size, two, one))
        wanted = tl.where(one <= lower_size, lower_size - below, wanted)
        middle += step * ((one <= lower_size).to(tl.int32) + (two <= lower_size).to(tl.int32) + (three <= lower_size).to(tl.int32))
        step >>= 2
    # Of the chunks before.
    lowers, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, size, WIDTH):
        place = start + tl.arange(0, WIDTH)
        keys = _ordered_chunk(projections, start, size, WIDTH)
        # Both are counted at once.
        marks = (keys < middle).to(tl.int32) + ((keys == middle).to(tl.int32) << 16)
        before = tl.cumsum(marks, 0) - marks
        equals_before = equals + (before >> 16)
        lowers_before = lowers + (before & 0xFFFF) + tl.minimum(equals_before, wanted)
        lower = (keys < middle) | (keys == middle) & (equals_before < wanted)
        tl.store(order + tl.where(lower, lowers_before, lower_size + place - lowers_before), first + place, mask=place < size)
        if start + WIDTH < size:
            total = tl.sum(marks, 0)
            lowers += total & 0xFFFF
            equals += total >> 16


_launch_order = launcher(_order_kernel)


def principal_order(plan: Plan, k: Tensor, offsets: Tensor, num_blocks: int, iterations: int, order: Tensor) -> None:
    """Writes order of ``BlockEstimates`` for two units of a block."""
    batch, heads, tokens, dim = k.shape
    projections = plan.working(batch, heads, tokens, dtype=torch.float32)
    config = tail_config("order", dim, k.dtype, device_limits(plan.device))
    # Blocks of the usual size fit; larger ones are looked at piece by piece.
    width = min(WIDTH, max(128, power_of_2(-(-tokens // max(num_blocks, 1)))))
    constants = dict(ITERATIONS=iterations, WIDTH=width, SHIFTED=shifted(k), ROWS=config.block_n, FOLD=fold(config, dim), **padded(dim))
    _launch_order(plan, (num_blocks * heads, batch, 1), (k, offsets, projections, order), (*strides(k), heads, tokens), (), constants,
                  config)
