"""Block-Sparse-Attention's three functions: every head of a packed batch is dense, block sparse by a mask, or streaming."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import block_sparse_attention
from ...checks import INTEGERS, check_tensor, check_token_inputs, require_bool, require_int, require_number, resolve_scale
from ...tokens import Packed
from ..packed import packed_blocks
from .patterns import BLOCK, Sequences, masked
from .token_streaming import WithoutGradient, attend_partly_seen


def block_sparse_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor | None,
    base_blockmask: Tensor | None, max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float, deterministic: bool = False,
    softmax_scale: float | None = None, is_causal: bool = False, exact_streaming: bool = False, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention on packed sequences in blocks of 128 x 128 tokens, each head with a pattern of its own;
    ``block_sparse_attn.block_sparse_attn_func``.

    Args:
        q: ``[Tq, Hq, D]``; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[Tk, Hkv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[Tk, Hkv, D]``.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends. What leads outside the
            tensors is cut, and tokens of no sequence see nothing. Blocks begin anew in every sequence.
        head_mask_type: int32 or int64 ``[Hq]``. 0: dense. 1: block sparse, the first such head by ``base_blockmask[:, 0]``, the second by
            ``base_blockmask[:, 1]`` and so on; n > 1: by ``base_blockmask[:, n - 1]``. Negative: streaming.
        streaming_info: int32 or int64 ``[2 * Hq]``, (sink, local) of each head; only those of streaming heads count. The first ``sink`` and
            the last ``local`` blocks of those that a query block sees. None: streaming heads see nothing.
        base_blockmask: bool or integers, not 0 where a block is kept, ``[B, heads, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)]``.
            None: block-sparse heads see nothing, nor does a head whose number is beyond the mask's heads.
        max_seqlen_q_, max_seqlen_k_: tokens of the longest sequence. Queries and keys past them are left out.
        p_dropout: 0.
        deterministic: as in ``block_sparse_attention``.
        softmax_scale: factor on the scores; default 1 / sqrt(D).
        is_causal: the last query of a sequence sees its last key, the one before it all but that, and so on.
        exact_streaming: sink and local are tokens, the last one being the query's own. Needs ``is_causal`` and ``streaming_info``; no
            gradient, as upstream: a backward raises a RuntimeError.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        ``[Tq, Hq, D]`` in q's dtype; 0 for a query that sees nothing. With ``return_attn_probs`` also the log-sum-exp of each query's
        scaled scores, float32 ``[B, Hq, max_seqlen_q_]`` (float64 for float64 inputs), natural logarithm, +inf where nothing is seen and
        past a sequence's end; and, in the place of upstream's probabilities, which exist with dropout alone, an empty tensor.
        Differentiable in q, k and v, also through the log-sum-exp. Never waits for the device, where upstream does, and fits into CUDA
        graphs.

    What differs from upstream: any GPU, head dimension and dtype; no dropout; ``base_blockmask`` may have more heads than there are ones,
    as numbers may be counted up beforehand; empty queries are zeros also past a sequence's end. Under a causal mask queries are copied to
    the rows of their keys and back unless ``cu_seqlens_q is cu_seqlens_k``.
    """
    for name, flag in (("deterministic", deterministic), ("is_causal", is_causal), ("exact_streaming", exact_streaming),
                       ("return_attn_probs", return_attn_probs)):
        require_bool(name, flag)
    if require_number("p_dropout", p_dropout) != 0:
        raise ValueError(f"p_dropout must be 0, got {p_dropout}")
    q, k, v = check_token_inputs(q, k, v)
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    packed = Packed.checked(cu_seqlens_q, cu_seqlens_k, len(q), len(k), q.device)
    batch, heads = packed.sequences, q.shape[1]
    check_tensor("head_mask_type", head_mask_type, INTEGERS, (heads,), "[heads]", q.device)
    longest = require_int("max_seqlen_q_", max_seqlen_q_, 1)
    rows, columns = -(-longest // BLOCK), -(-require_int("max_seqlen_k_", max_seqlen_k_, 1) // BLOCK)
    if base_blockmask is not None:
        check_tensor("base_blockmask", base_blockmask, (torch.bool, torch.uint8, torch.int8, *INTEGERS), (batch, None, rows, columns),
                     "[batch, heads, query blocks, key blocks]", q.device)
    if streaming_info is not None:
        check_tensor("streaming_info", streaming_info, INTEGERS, (2 * heads,), "[2 * heads]", q.device)
        streaming_info = streaming_info.view(heads, 2)

    sequences = Sequences.of(packed, rows, columns, is_causal)
    streaming = (head_mask_type < 0)[:, None, None]
    kept = masked(head_mask_type, base_blockmask) | (head_mask_type == 0)[:, None, None]
    partly = None
    if exact_streaming:
        if streaming_info is None or not is_causal:
            raise ValueError(f"exact_streaming must be False unless is_causal is True and streaming_info given, got is_causal={is_causal} "
                             f"and streaming_info {'None' if streaming_info is None else 'given'}")
        near, partly = sequences.near_tokens(streaming_info)
        kept, partly = torch.where(streaming, near, kept), partly & streaming
    elif streaming_info is not None:
        kept = torch.where(streaming, sequences.near(streaming_info, is_causal), kept)
    blocks = packed_blocks(kept.expand(batch, heads, rows, columns), sequences.q_cut(), sequences.kv_cut(), BLOCK)

    # Under a causal mask one diagonal is right for all sequences where queries lie beside their keys.
    moved = is_causal and (cu_seqlens_q is not cu_seqlens_k or len(q) != len(k)) and bool(q.numel() and k.numel())
    beside = q.index_select(0, sequences.queries(packed)) if moved else q
    inputs = beside.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    scale = resolve_scale(softmax_scale, q.shape[2])
    out, lse = block_sparse_attention(*inputs, blocks, scale=scale, causal=is_causal, return_lse=True, deterministic=deterministic)
    if partly is not None and streaming_info is not None:
        out, lse = WithoutGradient.apply(*attend_partly_seen(*inputs, out, lse, sequences, partly, streaming_info, scale), *inputs)
    out, lse = out[0].transpose(0, 1), lse[0].T
    if moved:
        row, there = sequences.rows_of_queries(packed)
        out = out.index_select(0, row).masked_fill(~there[:, None, None], 0)
        lse = lse.index_select(0, row).masked_fill(~there[:, None], float("-inf"))
    return (out, _by_sequence(lse, packed, longest), q.new_empty(0)) if return_attn_probs else out


def token_streaming_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor,
    max_seqlen_q_: int, max_seqlen_k_: int, deterministic: bool = False, softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Causal ``block_sparse_attn_func`` of dense heads and streaming ones, whose sink and local are tokens; no gradient, as upstream.

    Arguments, results and errors as there; ``block_sparse_attn.token_streaming_attn_func``.
    """
    return block_sparse_attn_func(q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
                                  0.0, deterministic, softmax_scale, True, True, return_attn_probs)


def block_streaming_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor,
    max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float, deterministic: bool = False, softmax_scale: float | None = None,
    is_causal: bool = True, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``block_sparse_attn_func`` of dense heads and streaming ones, whose sink and local are blocks.

    Arguments, results and errors as there; ``block_sparse_attn.block_streaming_attn_func``.
    """
    return block_sparse_attn_func(q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
                                  p_dropout, deterministic, softmax_scale, is_causal, False, return_attn_probs)


def _by_sequence(lse: Tensor, packed: Packed, longest: int) -> Tensor:
    """``[Tq, H]`` as ``[B, H, longest]``, upstream's way: +inf where nothing is seen."""
    position = packed.cu_q[:-1, None] + torch.arange(longest, device=lse.device)
    padded = torch.cat([lse, lse.new_full((1, lse.shape[1]), float("-inf"))])
    padded = padded[position.where(position < packed.cu_q[1:, None], len(lse))].transpose(1, 2)
    return padded.masked_fill(padded == float("-inf"), float("inf"))
