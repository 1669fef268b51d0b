"""What interfaces ask of attention's probabilities: a token's by key, summed over heads, and the maxima of blocks of one sequence.

For the maxima scores are computed twice and kept nowhere: attention gives the lse of every row first, against which each block's largest
score is taken then. Storing block maxima of the first pass would take more memory than the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import BlockLists, block_sparse_attention
from ....kernels.launch import FUSED
from ....kernels.lowering.primitives import LN2, LOG2E, load_rows
from ....kernels.operators import operator

# Importance is computed in tiles of so many rows, which are the query heads of some tokens, times so many keys at once.
TILE = 128
KEYS = 64
# A block of maxima is one tile of a product on the tensor cores.
LARGEST_BLOCK = 128
# Columns of the maxima that are stored together.
COLUMNS = 16
# Elements of a tile of keys that is loaded ahead; a larger one would not leave room for itself in 99 KiB beside the queries.
PREFETCHED = 64 * 128


@triton.jit
def _importance_kernel(q, k, lse, firsts, seen, out, q_token, q_head, k_row, k_head, lse_token, tokens, rows, scale_log2,
                       GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
                       DIM_PAD: tl.constexpr):
    """Sums of exp(score - lse) of TOKENS tokens, [heads, tokens, rows]; what none of the tokens sees is not written."""
    first, head = tl.program_id(0) * TOKENS, tl.program_id(1)
    token = first + tl.arange(0, TOKENS)
    real = token < tokens
    low = tl.min(tl.load(firsts + token, mask=real, other=rows), 0)
    high = tl.max(tl.load(firsts + token, mask=real, other=0) + tl.load(seen + token, mask=real, other=0), 0)
    row = tl.arange(0, TOKENS * GROUP_PAD)
    in_group, of_token = row % GROUP_PAD, first + row // GROUP_PAD
    inside = (in_group < GROUP) & (of_token < tokens)
    dims = tl.arange(0, DIM_PAD)
    query_head = head * GROUP + in_group
    at = of_token.to(tl.int64) * q_token + query_head * q_head
    queries = tl.load(q + at[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    # exp2 of a score less infinity is 0 in rows of no query head.
    row_lse2 = tl.load(lse + of_token.to(tl.int64) * lse_token + query_head, mask=inside, other=float("inf")) * (1 / LN2)
    k += head.to(tl.int64) * k_head
    out += (head.to(tl.int64) * tokens + token)[:, None] * rows
    for start in range(low // KEYS * KEYS, high, KEYS):
        keys = load_rows(k, start, k_row, rows - start, KEYS, DIM, DIM_PAD, True)
        parts = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale_log2 - row_lse2[:, None])
        column = start + tl.arange(0, KEYS)
        tl.store(out + column[None, :], tl.sum(tl.reshape(parts, [TOKENS, GROUP_PAD, KEYS]), 1),
                 mask=real[:, None] & (column < rows)[None, :])


def _like_importance(q: Tensor, k: Tensor, *_) -> Tensor:
    return q.new_empty((k.shape[1], q.shape[0], k.shape[0]), dtype=torch.float32)


@operator("importance", _like_importance)
def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float) -> Tensor:
    """See ``tokens.importance``."""
    out = _like_importance(q, k)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    if out.numel():
        group_pad = triton.next_power_of_2(heads // kv_heads)
        at_once = max(1, TILE // group_pad)
        # A tensor core takes 16 rows at least.
        group_pad = max(group_pad, 16 // at_once)
        dim_pad = max(triton.next_power_of_2(dim), 16)
        _importance_kernel[(triton.cdiv(tokens, at_once), kv_heads)](
            q, k, lse, firsts, seen, out, *q.stride()[:2], *k.stride()[:2], lse.stride(0), tokens, k.shape[0], scale * LOG2E,
            GROUP=heads // kv_heads, GROUP_PAD=group_pad, TOKENS=at_once, KEYS=KEYS, DIM=dim, DIM_PAD=dim_pad,
            num_warps=8, num_stages=3 if KEYS * dim_pad <= PREFETCHED else 1, **FUSED)
    return out


@triton.jit
def _peaks_kernel(q, k, lse, by_token, by_block, q_row, q_head, k_row, k_head, block_head, block_row, group, length, number, scale_log2,
                  BLOCK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # From the last block to the first: the longest rows must not end the launch.
    block, head = number - 1 - tl.program_id(0), tl.program_id(1)
    row, rows = block * BLOCK, tl.minimum(length - block * BLOCK, BLOCK)
    in_block, column = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    queries = load_rows(q + head.to(tl.int64) * q_head, row, q_row, rows, TILE, DIM, DIM_PAD, True)
    k += (head // group).to(tl.int64) * k_head
    row_lse2 = tl.load(lse + head.to(tl.int64) * length + row + in_block, mask=in_block < rows, other=float("inf")) * (1 / LN2)
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
    before = torch.ones(triton.cdiv(length, LARGEST_BLOCK), triton.cdiv(length, LARGEST_BLOCK), dtype=torch.bool, device=q.device).tril()
    whole = BlockLists.from_mask(before, LARGEST_BLOCK, LARGEST_BLOCK)
    queries, keys = (x.transpose(0, 1)[None] for x in (q, k))
    _, lse = block_sparse_attention(queries, keys, keys, whole, scale=scale, causal=True, return_lse=True)
    dim_pad, tile = max(triton.next_power_of_2(dim), 16), max(triton.next_power_of_2(block_size), 16)
    _peaks_kernel[(number, heads)](
        q, k, lse, by_token, by_block, *q.stride()[:2], *k.stride()[:2], *by_block.stride()[:2], heads // k.shape[1], length, number,
        scale * LOG2E, BLOCK=block_size, TILE=tile, COLUMNS=COLUMNS, DIM=dim, DIM_PAD=dim_pad, num_warps=8 if tile > 64 else 4,
        num_stages=3 if tile * dim_pad <= PREFETCHED else 1, **FUSED)
    return by_token
