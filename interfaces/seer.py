"""SeerAttention's functions (Gao et al. 2024) under their own names: prefill on packed sequences, pooling, and decoding in padded caches.

Decoding has no gradient, and selections per key/value head; its programs share long lists and merge by lse (flash-decoding). Arguments
stand in upstream's order, cu_seqlens_k before cu_seqlens_q. But where something else is said, ``impl`` is "auto", "triton" (GPUs; float16
or bfloat16; head dimensions 16 to 256) or "torch" (plain torch, any device, also float32 and float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import INTEGERS, check_tensor, check_token_inputs, require_bool, require_int, require_values, resolve_scale
from .packed import BlockSpans, packed_blocks
from .tokens import (
    Packed,
    PaddedCache,
    TokenLists,
    block_attention,
    choose_token_impl,
    lists_from_mask,
    lists_from_rows,
    pooling,
    token_attention,
)


def block_1d_gqa_sparse_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, max_seqlen: int, sm_scale: float, block_mask: Tensor,
    block_size: int = 64, *, impl: str = "auto",
) -> Tensor:
    """Causal attention on packed sequences in which every query token has its own row of key blocks, shared within a GQA group.

    Args:
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        v: ``[T, Hkv, Dv]``.
        cu_seqlens_k, cu_seqlens_q: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends. Both hold the same values,
            which are not read to check it; what leads outside the tensors is cut.
        max_seqlen: tokens of the longest sequence. Tokens past it attend to nothing.
        sm_scale: factor on the scores.
        block_mask: bool ``[B, Hkv, max_seqlen, ceil(max_seqlen / block_size)]``; blocks begin anew in every sequence. Token t sees key j
            where its entry for block j // block_size is True and j <= t. The token's own block counts just where its entry is True.
        block_size: tokens of a key block.

    Returns:
        ``[T, Hq, Dv]`` in q's dtype. Takes 4 bytes for each entry of block_mask, twice that with gradients.
    """
    max_seqlen, block_size = require_int("max_seqlen", max_seqlen, 1), require_int("block_size", block_size, 1)
    q, k, v, packed = _check_packed(q, k, v, cu_seqlens_k, cu_seqlens_q)
    number = -(-max_seqlen // block_size)
    check_tensor("block_mask", block_mask, (torch.bool,), (packed.sequences, k.shape[1], max_seqlen, number),
                 "[B, Hkv, max_seqlen, blocks]", q.device)
    impl = choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    lists = lists_from_mask(block_mask, packed, packed.spans(), block_size, impl)
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
        ``[T, Hq, D]`` in q's dtype.
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
    out, _ = block_attention(q, k, v, blocks, scale=sm_scale, causal=True, impl=impl)
    return out[0].transpose(0, 1)


def attn_pooling(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen: int, sm_scale: float, block_size: int = 64, *, impl: str = "auto",
) -> tuple[Tensor, list[Tensor]]:
    """The target for training a gate: the largest causal attention probability in every block, by query block (2-D) and by token (1-D).

    Args:
        q: ``[T, Hq, D]``.
        k: ``[T, Hkv, D]``, Hq a multiple of Hkv.
        cu_seqlens: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends.
        max_seqlen: tokens of the longest sequence.
        sm_scale: factor on the scores.
        block_size: tokens of a block; at most 128 with "triton".

    Returns:
        (pooling_gt_2d, pooling_gt_1d) in q's dtype. ``pooling_gt_1d`` is a list of ``[1, Hq, t_i, ceil(t_i / block_size)]``, a tensor for
        each sequence: max over the keys of a block of the softmax over all keys j <= i; 0 for blocks in the future. ``pooling_gt_2d``
        ``[B, Hq, N, N]``, N = ceil(max_seqlen / block_size): its max over the rows of a query block, each row divided by its sum + 1e-6.

    No gradient, as upstream; never a matrix of tokens by tokens. Reads cu_seqlens back, because the list's shapes depend on it.
    """
    q, k, _ = check_token_inputs(q, k, k)
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, (None,), "[B + 1]", q.device)
    max_seqlen, block_size = require_int("max_seqlen", max_seqlen, 1), require_int("block_size", block_size, 1)
    scale, impl = resolve_scale(sm_scale, q.shape[-1]), choose_token_impl(impl, q.device, q.dtype, q.shape[-1])
    bounds = require_values("cu_seqlens", cu_seqlens).tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:])]
    if not lengths or bounds[0] < 0 or min(lengths) < 0 or bounds[-1] > min(q.shape[0], k.shape[0]):
        raise ValueError(f"cu_seqlens must ascend within the {min(q.shape[0], k.shape[0])} tokens of q and k, got {bounds}")
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence's {max(lengths)} tokens, got {max_seqlen}")
    number = -(-max_seqlen // block_size)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_block = torch.zeros(len(lengths), q.shape[1], number, number, dtype=dtype, device=q.device)
    by_token = pooling(q, k, bounds, scale, block_size, by_block, impl)
    by_block /= by_block.sum(-1, keepdim=True) + 1e-6
    return by_block.to(q.dtype), [x[None] for x in by_token]


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


def block_sparse_flash_decode_gqa_indice(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, max_cache_seqlen: int, max_selected_blocks: int,
    block_indices: Tensor, block_size: int, sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by lists of block numbers in a right-padded cache: sequence b's keys are the first ``cache_seqlens[b]``.

    Args:
        q: ``[B, Hq, D]`` or ``[B, 1, Hq, D]``.
        k_cache: ``[B, Smax, Hkv, D]``, Hq a multiple of Hkv; a slice of a longer cache costs no copy.
        v_cache: ``[B, Smax, Hkv, Dv]``.
        cache_seqlens: int32 or int64 ``[B]``. Values are not read; those outside [0, Smax] count as the nearer bound.
        max_cache_seqlen: Smax.
        max_selected_blocks: S.
        block_indices: int32 ``[B, Hkv, S]`` in any order, each at most once; negative ones and blocks past the sequence are skipped.
        block_size: tokens of a block; block n holds the cache's places from n * block_size on.
        sm_scale: factor on the scores; default 1 / sqrt(D).

    Returns:
        ``[B, Hq, Dv]`` in q's dtype.
    """
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_indices", block_indices, block_size, sm_scale, impl, left=False,
                   max_cache_seqlen=max_cache_seqlen, max_selected_blocks=max_selected_blocks)


def block_sparse_flash_decode_gqa_mask(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, max_cache_seqlen: int, block_mask: Tensor, block_size: int,
    sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by a mask of blocks in a right-padded cache.

    Args:
        block_mask: bool ``[B, Hkv, ceil(Smax / block_size)]``, True keeps the block.
        The others and the result: as in ``block_sparse_flash_decode_gqa_indice``.
    """
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_mask", block_mask, block_size, sm_scale, impl, left=False,
                   max_cache_seqlen=max_cache_seqlen)


def block_sparse_flash_decode_leftpad_gqa_indice(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_indices: Tensor, block_size: int = 32,
    sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by lists of block numbers in a left-padded cache: sequence b's keys are the last ``cache_seqlens[b]``.

    Args:
        block_indices: int32 ``[B, Hkv, S]``. Blocks are counted from the padded cache's first place; padding is skipped.
        The others and the result: as in ``block_sparse_flash_decode_gqa_indice``. Upstream has no such function.
    """
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_indices", block_indices, block_size, sm_scale, impl, left=True)


def block_sparse_flash_decode_leftpad_gqa_mask(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_mask: Tensor, block_size: int = 32,
    sm_scale: float | None = None, first_block_unmasked: bool = False, debug: bool = False, *, impl: str = "auto",
) -> Tensor:
    """Decoding by a mask of blocks in a left-padded cache: sequence b's keys are the last ``cache_seqlens[b]``.

    Args:
        block_mask: bool ``[B, Hkv, ceil(Smax / block_size)]``, whose blocks are counted so too.
        first_block_unmasked: also keep the first block with keys, whatever block_mask says of it.
        debug: must be False: upstream then returns buffers of its own kernel, which this one does not have.
        The others and the result: as in ``block_sparse_flash_decode_gqa_indice``.
    """
    require_bool("first_block_unmasked", first_block_unmasked)
    require_bool("debug", debug)
    if debug:
        raise ValueError("debug must be False: upstream's internal buffers do not exist here, got True")
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_mask", block_mask, block_size, sm_scale, impl, left=True,
                   keep_first=first_block_unmasked)


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, name: str, chosen: Tensor, block_size: int, scale: float | None,
            impl: str, *, left: bool, keep_first: bool = False, **sizes: int) -> Tensor:
    """Each token's attention to the blocks of its cache, padded on the ``left`` or behind, that ``chosen`` keeps: a mask, or where ``name``
    says so indices. ``sizes``: what else the caller says of the cache and of these, by name."""
    if isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] == 1:
        q = q[:, 0]
    if not isinstance(q, Tensor) or q.dim() != 3:
        raise ValueError(f"q must be [batch, heads, head_dim] or [batch, 1, heads, head_dim], got "
                         f"{tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__}")
    q, k, v = check_token_inputs(q[:, None], k_cache, v_cache, dims="[batch, tokens, heads, head_dim]", key_name="k_cache",
                                 value_name="v_cache")
    (batch, room, kv_heads), listed = k.shape[:3], name == "block_indices"
    if batch != q.shape[0]:
        raise ValueError(f"k_cache must have q's batch {q.shape[0]}, got {batch}")
    check_tensor("cache_seqlens", lengths, INTEGERS, (batch,), "[B]", q.device)
    block_size = require_int("block_size", block_size, 1)
    check_tensor(name, chosen, (torch.int32 if listed else torch.bool,), (batch, kv_heads, None if listed else -(-room // block_size)),
                 "[B, Hkv, S]" if listed else "[B, Hkv, blocks]", q.device)
    for size, given in sizes.items():
        there, whose = (room, f"k_cache's {room} tokens") if size == "max_cache_seqlen" else (chosen.shape[2], f"{name}' {chosen.shape[2]}")
        if require_int(size, given, 0) != there:
            raise ValueError(f"{size} must be {whose}, got {given}")
    if keep_first:
        first = (room - lengths.clamp(0, room)) // block_size
        chosen = chosen | (torch.arange(chosen.shape[2], device=chosen.device) == first[:, None, None])
    # The caches flat, [rows, Hkv, D], a sequence every ``pitch`` rows.
    pitch = _pitch(k)
    if pitch is None or _pitch(v) != pitch:
        # A tensor with a dimension of 1 may call itself contiguous whatever its stride there, which a clone does not keep.
        k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        pitch = room
    rows = (batch - 1) * pitch + room if batch and room else 0
    q, k, v = q[:, 0], *(x.as_strided((rows, *x.shape[2:]), x.stride()[1:]) for x in (k, v))
    cache = PaddedCache(pitch, room, left)
    if listed:
        lists = TokenLists(chosen.contiguous(), None, lengths, block_size, cache=cache)
    else:
        lists = lists_from_rows(chosen, lengths, cache, block_size, choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1]))
    with torch.no_grad():
        return token_attention(q, k, v, lists, scale=scale, impl=impl)[0]


def _pitch(x: Tensor) -> int | None:
    """Rows from one sequence of x [B, S, H, D] to the next, or None where that is no whole number."""
    batch, row = x.stride()[:2]
    return batch // row if row and batch % row == 0 else None
