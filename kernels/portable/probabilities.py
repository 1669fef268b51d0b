"""What native sparse attention's selection asks of attention: a token's probabilities by key, summed over heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lowering.primitives import LN2, LOG2E, load_rows
from ..lowering.quick_launch import FUSED
from ..operators import operator

# Rows of a tile, which are the query heads of some tokens, and keys that are multiplied with it at once.
TILE = 128
KEYS = 64
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
    """float32 ``[Hkv, T, R]`` of q ``[T, Hq, D]``, k ``[R, Hkv, D]`` and lse float32 ``[T, Hq]``, contiguous.

    A token's entries ``firsts`` up to ``firsts + seen``, int64 ``[T]`` both, are the sums over its group of exp(scale * score - lse); the
    others may be anything.
    """
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
