"""The portable kernel that tells a block's two units apart: on which side of its mean a token's key lies, along the first principal
direction of the block's keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..lowering.plans import Plan
from .tail_config import launcher, strides, tail_config
from .tail_statistics import block_rows, centred_moments, fold, head_at, load_tokens, own_block, padded, shifted


@triton.jit
def _in_two(direction, DTYPE: tl.constexpr):
    """[D, 16] of DTYPE, two columns of which sum to float32 ``direction``; the others are 0."""
    large = direction.to(DTYPE)
    small = (direction - large.to(tl.float32)).to(DTYPE)
    column = tl.arange(0, 16)[None, :]
    return tl.where(column == 0, large[:, None], tl.where(column == 1, small[:, None], 0.0)).to(DTYPE)


@triton.jit
def _halves_kernel(k, offsets, halves, k_batch, k_head, k_row, heads, tokens, ITERATIONS: tl.constexpr, SHIFTED: tl.constexpr,
                   ROWS: tl.constexpr, FOLD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Of which unit a block's tokens are; all of the first where a key is not finite."""
    block, head, batch = own_block(heads)
    first, size = block_rows(offsets, block)
    k = head_at(k, batch, head, k_batch, k_head)
    acc, mean, _, _, _, _ = centred_moments(k, None, None, first, size, k_row, 0, 0, SHIFTED, True, ROWS, FOLD, DIM_PAD, DIM, DIM_PAD)
    # From the diagonal, so that nothing is drawn; 1 keeps blocks of one key apart from 0 / 0. The trace is no less than the first principal
    # variance, and no more than DIM times that: so nothing grows, and what shrinks stays far above the least float32. Sums over rows need
    # few exchanges between threads, and bringing the direction back to the columns fewer than sums over columns.
    dims = tl.arange(0, DIM_PAD)
    diagonal = tl.sum(tl.where(dims[:, None] == dims[None, :], acc, 0.0), 1)
    direction = 1.0 + diagonal * (1.0 / tl.maximum(size, 1))
    inverse = 1.0 / tl.maximum(tl.sum(tl.abs(diagonal), 0), 1e-20)
    for _step in range(ITERATIONS):
        direction = tl.sum(acc * direction[None, :], 1) * inverse
    # At whatever length float16 holds.
    direction *= 1.0 / tl.maximum(tl.sum(tl.abs(direction), 0), 1e-30)
    middle = tl.sum(mean * direction, 0)
    halves += (batch * heads + head) * tokens + first
    rows = tl.arange(0, ROWS)
    # On tensor cores, for which keys need not be unpacked.
    ON_TENSOR_CORES: tl.constexpr = k.dtype.element_ty != tl.float32
    if ON_TENSOR_CORES:
        directions = _in_two(direction, k.dtype.element_ty)
    for row in range(0, size, ROWS):
        x = load_tokens(k, first + row, k_row, size - row, 0, ROWS, DIM_PAD, DIM)
        if ON_TENSOR_CORES:
            projected = tl.sum(tl.dot(x, directions), 1)
        else:
            projected = tl.sum(x * direction[None, :], 1)
        tl.store(halves + row + rows, (projected > middle).to(tl.int8), mask=row + rows < size)


_launch_halves = launcher(_halves_kernel)


def principal_halves(plan: Plan, k: Tensor, offsets: Tensor, num_blocks: int, iterations: int, halves: Tensor) -> None:
    """Writes halves of ``BlockEstimates``; nothing of other blocks' tokens."""
    batch, heads, tokens, dim = k.shape
    config = tail_config("halves", dim, k.dtype, device_limits(plan.device))
    constants = dict(ITERATIONS=iterations, SHIFTED=shifted(k), ROWS=config.block_n, FOLD=fold(config, dim), **padded(dim))
    _launch_halves(plan, (num_blocks * heads, batch, 1), (k, offsets, halves), (*strides(k), heads, tokens), (), constants, config)
