"""SeerAttention's prefill kernels (Gao et al. 2024) under their own names: attention on packed sequences, and attention pooling.

Its decode kernels are in decode.py. Arguments stand in upstream's order, cu_seqlens_k before cu_seqlens_q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import block_sparse_attention
from ...checks import INTEGERS, check_tensor, check_token_inputs, require_int, require_values, resolve_scale
from ...routing import choose_token_impl
from ...token_attention import token_attention
from ...token_lists import Packed, lists_from_mask
from ..packed import BlockSpans, packed_blocks


def block_1d_gqa_sparse_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, max_seqlen: int, sm_scale: float, block_mask: Tensor,
    block_size: int = 64, *, impl: str = "auto",
) -> Tensor:
    """Causal attention on packed sequences in which every query token has its own row of key blocks, shared within a GQA group.

    Args:
        q: ``[T, Hq, D]``, float16 or bfloat16; in plain torch also float32 and float64.
        k: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        v: ``[T, Hkv, Dv]``.
        cu_seqlens_k, cu_seqlens_q: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends. Both hold the same values,
            which are not read to check it; what leads outside the tensors is cut.
        max_seqlen: tokens of the longest sequence. Tokens past it attend to nothing.
        sm_scale: factor on the scores.
        block_mask: bool ``[B, Hkv, max_seqlen, ceil(max_seqlen / block_size)]``; blocks begin anew in every sequence. Token t sees key j
            where its entry for block j // block_size is True and j <= t. The token's own block counts just where its entry is True.
        block_size: tokens of a key block.
        impl: "auto", "triton" (GPUs; float16 or bfloat16; head dimensions 16 to 256) or "torch" (plain torch, any device).

    Returns:
        ``[T, Hq, Dv]`` in q's dtype; 0 for a token that sees nothing.

    Differentiable in q, k and v for any group size; bitwise deterministic. Does not synchronise, where upstream reads
    cu_seqlens back; takes 4 bytes an entry of block_mask, twice that with gradients. Keyword arguments work, unlike upstream.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    max_seqlen, block_size = require_int("max_seqlen", max_seqlen, 1), require_int("block_size", block_size, 1)
    q, k, v, packed = _check_packed(q, k, v, cu_seqlens_k, cu_seqlens_q)
    blocks = -(-max_seqlen // block_size)
    check_tensor("block_mask", block_mask, (torch.bool,), (packed.sequences, k.shape[1], max_seqlen, blocks),
                 "[B, Hkv, max_seqlen, blocks]", q.device)
    lists_impl = choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    lists = lists_from_mask(block_mask, packed, packed.spans(), block_size, lists_impl)
    return token_attention(q, k, v, lists, scale=sm_scale, impl=impl)[0]


# Upstream's second name, under which it computes every block and hides the others by adding -1e6. Here a token that selects none gives 0,
# not nearly dense attention, and block_mask need not have a head for each of q's.
block_1d_gqa_sparse_attn_varlen_sim_func = block_1d_gqa_sparse_attn_varlen_func


def block_2d_sparse_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, max_seqlen: int, sm_scale: float, block_mask: Tensor,
    block_size: int = 64, *, impl: str = "auto",
) -> Tensor:
    """Causal attention on packed sequences by a mask of query blocks by key blocks.

    Args:
        q, k, v, cu_seqlens_k, cu_seqlens_q, max_seqlen, sm_scale: as in ``block_1d_gqa_sparse_attn_varlen_func``, v with k's head_dim.
        block_mask: bool ``[B, Hq, N, N]`` or ``[B, Hkv, N, N]``, N = ceil(max_seqlen / block_size). Token i sees key j where the entry for
            (i // block_size, j // block_size) is True and j <= i, both counted from the sequence's start.
        block_size: tokens of a block.
        impl: as in ``block_sparse_attention``.

    Returns:
        ``[T, Hq, D]`` in q's dtype; 0 for a token that sees nothing.

    Differentiable in q, k and v. Differs from upstream on purpose: k and v need not be repeated to Hq heads, and their gradients are right
    without; cu_seqlens are not read back.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    max_seqlen, block_size = require_int("max_seqlen", max_seqlen, 1), require_int("block_size", block_size, 1)
    q, k, v, packed = _check_packed(q, k, v, cu_seqlens_k, cu_seqlens_q)
    number = -(-max_seqlen // block_size)
    check_tensor("block_mask", block_mask, (torch.bool,), (packed.sequences, None, number, number), "[B, Hq or Hkv, N, N]", q.device)
    if block_mask.shape[1] not in (k.shape[1], q.shape[1]):
        raise ValueError(f"block_mask must have {k.shape[1]} or {q.shape[1]} heads, got {block_mask.shape[1]}")
    # Causality between tokens of one sequence is that of their places in the whole.
    q_cut, kv_cut = (BlockSpans.of(cu[:-1], cu, block_size, number) for cu in (packed.cu_q, packed.cu_k))
    blocks = packed_blocks(block_mask.tril(), q_cut, kv_cut, block_size)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = block_sparse_attention(q, k, v, blocks, scale=sm_scale, causal=True, impl=impl)
    return out[0].transpose(0, 1)


def attn_pooling(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen: int, sm_scale: float, block_size: int = 64, *, impl: str = "auto",
) -> tuple[Tensor, list[Tensor]]:
    """The target for training a gate: the largest causal attention probability in every block, by query block (2-D) and by token (1-D).

    Args:
        q: ``[T, Hq, D]``, float16 or bfloat16; in plain torch also float32 and float64.
        k: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        cu_seqlens: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends.
        max_seqlen: tokens of the longest sequence.
        sm_scale: factor on the scores.
        block_size: tokens of a block; at most 128 with "triton".
        impl: "auto", "triton" (GPUs; float16 or bfloat16; head_dim 16 to 256) or "torch" (plain torch, any device).

    Returns:
        (pooling_gt_2d, pooling_gt_1d) in q's dtype. ``pooling_gt_1d`` is a list of ``[1, Hq, t_i, ceil(t_i / block_size)]``, a tensor for
        each sequence: max over the keys of a block of the softmax over all keys j <= i; 0 for blocks in the future. ``pooling_gt_2d``
        ``[B, Hq, N, N]``, N = ceil(max_seqlen / block_size): its max over the rows of a query block, each row divided by its sum + 1e-6.

    No gradient, as upstream; never a matrix of tokens by tokens. Reads cu_seqlens back, because the list's shapes depend on it.
    Differs from upstream on purpose: float16 inputs give float16, not bfloat16, and scores are not rounded to it before the exponential.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    q, k, _ = check_token_inputs(q, k, k)
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, (None,), "[B + 1]", q.device)
    max_seqlen, block_size = require_int("max_seqlen", max_seqlen, 1), require_int("block_size", block_size, 1)
    scale, impl = resolve_scale(sm_scale, q.shape[-1]), choose_token_impl(impl, q.device, q.dtype, q.shape[-1])
    if impl == "triton":
        from ...portable.probabilities import LARGEST_BLOCK
        from ...portable.probabilities import triton_pooling as pool

        if block_size > LARGEST_BLOCK:
            raise ValueError(f"block_size must be at most {LARGEST_BLOCK} with impl='triton', got {block_size}")
    else:
        from ...eager.probabilities import torch_pooling as pool
    bounds = require_values("cu_seqlens", cu_seqlens).tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:])]
    if not lengths or bounds[0] < 0 or min(lengths) < 0 or bounds[-1] > min(q.shape[0], k.shape[0]):
        raise ValueError(f"cu_seqlens must ascend within the {min(q.shape[0], k.shape[0])} tokens of q and k, got {bounds}")
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence's {max(lengths)} tokens, got {max_seqlen}")
    number = -(-max_seqlen // block_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_block = torch.zeros(len(lengths), q.shape[1], number, number, dtype=dtype, device=q.device)
    by_token = []
    with torch.no_grad():
        for into, start, end in zip(by_block, bounds, bounds[1:]):
            by_token.append(pool(q[start:end], k[start:end], scale, block_size, into)[None])
        by_block /= by_block.sum(-1, keepdim=True) + 1e-6
    return by_block.to(q.dtype), by_token


# The name of attn_pooling in SeerAttention's code, where its documents call it so.
attn_pooling_qk_varlen = attn_pooling


def attn_pooling_qkv_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, sm_scale: float, block_size: int = 64, *, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Dense causal attention together with the 1-D pooling, which SeerAttention-R trains its gates on.

    Args:
        v: ``[T, Hkv, D]``.
        The others: as in ``attn_pooling``; ``impl`` holds for the attention too.

    Returns:
        out ``[T, Hq, D]`` in q's dtype, which is differentiable here, and Pool1D ``[B, Hq, max_seqlen, ceil(max_seqlen / block_size)]``,
        the second result of ``attn_pooling`` with 0 past a sequence's end.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    by_token = attn_pooling(q, k, cu_seqlens, max_seqlen, sm_scale, block_size, impl=impl)[1]
    number = -(-max_seqlen // block_size)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device).expand(len(by_token), k.shape[1], number, number)
    out = block_2d_sparse_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, sm_scale, everything, block_size, impl=impl)
    pooled = torch.zeros(len(by_token), q.shape[1], max_seqlen, number, dtype=q.dtype, device=q.device)
    for into, part in zip(pooled, by_token):
        into[:, :part.shape[2], :part.shape[3]] = part[0]
    return out, pooled


def _check_packed(q: Tensor, k: Tensor, v: Tensor, cu_k: Tensor, cu_q: Tensor) -> tuple[Tensor, Tensor, Tensor, Packed]:
    q, k, v = check_token_inputs(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} tokens, got {k.shape[0]}")
    return q, k, v, Packed.checked(cu_q, cu_k, q.shape[0], k.shape[0], q.device)
