"""SeerAttention's block-sparse flash-decoding under its own names: one query token a sequence, a padded cache, blocks by mask or by index.

Selections are per key/value head. No gradient. The programs share long lists and merge by lse (flash-decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import INTEGERS, check_tensor, check_token_inputs, require_bool, require_int
from ...routing import choose_token_impl
from ...tokens import PaddedCache, TokenLists, lists_from_rows, token_attention


def block_sparse_flash_decode_gqa_indice(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, max_cache_seqlen: int, max_selected_blocks: int,
    block_indices: Tensor, block_size: int, sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by lists of block numbers in a right-padded cache: sequence b's keys are the first ``cache_seqlens[b]``.

    Args:
        q: ``[B, Hq, D]`` or ``[B, 1, Hq, D]``, float16 or bfloat16; in plain torch also float32 and float64.
        k_cache: ``[B, Smax, Hkv, D]``, Hq a multiple of Hkv; a slice of a longer cache costs no copy.
        v_cache: ``[B, Smax, Hkv, Dv]``.
        cache_seqlens: int32 or int64 ``[B]``. Values are not read; those outside [0, Smax] count as the nearer bound.
        max_cache_seqlen: Smax.
        max_selected_blocks: S.
        block_indices: int32 ``[B, Hkv, S]`` in any order, each at most once; negative ones and blocks past the sequence are skipped.
        block_size: tokens of a block; block n holds the cache's places from n * block_size on.
        sm_scale: factor on the scores; default 1 / sqrt(D).
        impl: "auto", "triton" (GPUs; float16 or bfloat16; head dimensions 16 to 256) or "torch" (plain torch, any device).

    Returns:
        ``[B, Hq, Dv]`` in q's dtype. Bitwise deterministic; does not wait for the device (synchronise).

    Differs from upstream on purpose: a sequence without a visible key gives 0, not NaN; parts are merged in float32, not in q's dtype;
    the number of splits follows the GPU's multiprocessors.
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
        The others, the result and the differences: as in ``block_sparse_flash_decode_gqa_indice``.
    """
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_mask", block_mask, block_size, sm_scale, impl, left=False,
                   max_cache_seqlen=max_cache_seqlen)


def block_sparse_flash_decode_leftpad_gqa_indice(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_indices: Tensor, block_size: int = 32,
    sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by lists of block numbers in a left-padded cache: sequence b's keys are the last ``cache_seqlens[b]``.

    Args:
        block_indices: int32 ``[B, Hkv, S]``. Blocks are counted from the padded cache's first place, so that the first one with keys may
            hold padding too; its padding is skipped.
        The others, the result and the differences: as in ``block_sparse_flash_decode_gqa_indice``. Upstream has no such function; it
        completes the four.
    """
    return _attend(q, k_cache, v_cache, cache_seqlens, "block_indices", block_indices, block_size, sm_scale, impl, left=True)


def block_sparse_flash_decode_leftpad_gqa_mask(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_mask: Tensor, block_size: int = 32,
    sm_scale: float | None = None, first_block_unmasked: bool = False, debug: bool = False, *, impl: str = "auto",
) -> Tensor:
    """Decoding by a mask of blocks in a left-padded cache: sequence b's keys are the last ``cache_seqlens[b]``.

    Args:
        block_mask: bool ``[B, Hkv, ceil(Smax / block_size)]``. Blocks are counted from the padded cache's first place, so that the first
            one with keys may hold padding too; its padding is skipped.
        first_block_unmasked: also keep the first block with keys, whatever block_mask says of it.
        debug: must be False: upstream then returns buffers of its own kernel, which this one does not have.
        The others, the result and the differences: as in ``block_sparse_flash_decode_gqa_indice``.
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
