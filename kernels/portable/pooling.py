"""Block maxima of causal attention probabilities, for one sequence: lse of every row first, then each block's largest score against it.

The scores are computed twice and kept nowhere: storing block maxima of the first pass would take more memory than the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lowering.primitives import LOG2E, load_rows, softmax_step
from ..lowering.quick_launch import FUSED

# A block is one tile of a product on the tensor cores.
LARGEST_BLOCK = 128
# Elements of a tile of keys that is loaded ahead; a larger one would not leave room for itself in 99 KiB beside the queries.
PREFETCHED = 64 * 128
# Columns of the result that are stored together.
COLUMNS = 16


@triton.jit
def _lse_kernel(q, k, lse2, q_row, q_head, k_row, k_head, group, length, scale_log2,
                M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    row, head = tl.program_id(0) * M, tl.program_id(1)
    query = row + tl.arange(0, M)
    queries = load_rows(q + head.to(tl.int64) * q_head, row, q_row, length - row, M, DIM, DIM_PAD, True)
    k += (head // group).to(tl.int64) * k_head
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    last = tl.minimum(row + M, length)
    for start in range(0, last, N):
        keys = load_rows(k, start, k_row, length - start, N, DIM, DIM_PAD, True)
        key = start + tl.arange(0, N)
        seen = (key[None, :] <= query[:, None]) & (key < length)[None, :]
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys)), float("-inf"))
        _, _, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
    tl.store(lse2 + head.to(tl.int64) * length + query, row_max + tl.log2(row_sum), mask=query < length)


@triton.jit
def _peaks_kernel(q, k, lse2, by_token, by_block, q_row, q_head, k_row, k_head, block_head, block_row, group, length, number, scale_log2,
                  BLOCK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # From the last block to the first: the longest rows must not end the launch.
    block, head = number - 1 - tl.program_id(0), tl.program_id(1)
    row, rows = block * BLOCK, tl.minimum(length - block * BLOCK, BLOCK)
    in_block, column = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    queries = load_rows(q + head.to(tl.int64) * q_head, row, q_row, rows, TILE, DIM, DIM_PAD, True)
    k += (head // group).to(tl.int64) * k_head
    row_lse2 = tl.load(lse2 + head.to(tl.int64) * length + row + in_block, mask=in_block < rows, other=float("inf"))
    by_token += (head.to(tl.int64) * length + row) * number
    by_block += head.to(tl.int64) * block_head + block * block_row
    for first in range(0, block + 1, COLUMNS):
        peaks = tl.zeros([TILE, COLUMNS], tl.float32)
        for item in range(first, tl.minimum(first + COLUMNS, block + 1)):
            start = item * BLOCK
            size = tl.minimum(length - start, BLOCK)
            keys = load_rows(k, start, k_row, size, TILE, DIM, DIM_PAD, True)
            seen = (start + in_block[None, :] <= row + in_block[:, None]) & (in_block < size)[None, :]
            scores = tl.where(seen, tl.dot(queries, tl.trans(keys)), float("-inf"))
            peak = tl.exp2(tl.max(scores, 1) * scale_log2 - row_lse2)
            peaks = tl.where((column == item - first)[None, :], peak[:, None], peaks)
        known = first + column < block + 1
        tl.store(by_token + in_block[:, None].to(tl.int64) * number + (first + column)[None, :], peaks.to(by_token.dtype.element_ty),
                 mask=(in_block < rows)[:, None] & known[None, :])
        tl.store(by_block + first + column, tl.max(peaks, 0), mask=known)


def triton_pooling(q: Tensor, k: Tensor, scale: float, block_size: int, by_block: Tensor) -> Tensor:
    """Per token [Hq, L, ceil(L / block_size)] in q's dtype, of q [L, Hq, D] and k [L, Hkv, D]; ``by_block`` float32 [Hq, N, N] takes the
    maxima per query block."""
    length, heads, dim = q.shape
    number = triton.cdiv(length, block_size)
    # Blocks in the future are never written.
    by_token = torch.zeros(heads, length, number, dtype=q.dtype, device=q.device)
    if by_token.numel() == 0:
        return by_token
    lse2 = torch.empty(heads, length, dtype=torch.float32, device=q.device)
    shape = dict(DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16))
    strides, group = (*q.stride()[:2], *k.stride()[:2]), heads // k.shape[1]

    def stages(rows: int) -> int:
        return 3 if rows * shape["DIM_PAD"] <= PREFETCHED else 1

    _lse_kernel[(triton.cdiv(length, 64), heads)](
        q, k, lse2, *strides, group, length, scale * LOG2E, M=64, N=64, **shape, num_stages=stages(64), **FUSED)
    tile = max(triton.next_power_of_2(block_size), 16)
    _peaks_kernel[(number, heads)](
        q, k, lse2, by_token, by_block, *strides, *by_block.stride()[:2], group, length, number, scale * LOG2E,
        BLOCK=block_size, TILE=tile, COLUMNS=COLUMNS, **shape, num_warps=8 if tile > 64 else 4,
        num_stages=stages(tile), **FUSED)
    return by_token
