"""SeerAttention's block-sparse flash-decoding under its own names: one query token a sequence, a padded cache, blocks by mask or by index.

Selections are per key/value head. No gradient. The programs share long lists and merge by lse (flash-decoding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import INTEGERS, check_tensor, check_token_inputs, require_bool, require_int
from ...routing import choose_token_impl
from ...token_attention import token_attention
from ...token_lists import PaddedCache, TokenLists, lists_from_rows


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

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    cache = _Cache(q, k_cache, v_cache, cache_seqlens, block_size)
    cache.check_capacity(max_cache_seqlen)
    cache.check_indices(block_indices)
    if require_int("max_selected_blocks", max_selected_blocks, 0) != block_indices.shape[2]:
        raise ValueError(f"max_selected_blocks must be block_indices' {block_indices.shape[2]}, got {max_selected_blocks}")
    return cache.attend(cache.listed(block_indices, left=False), sm_scale, impl)


def block_sparse_flash_decode_gqa_mask(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, max_cache_seqlen: int, block_mask: Tensor, block_size: int,
    sm_scale: float | None = None, *, impl: str = "auto",
) -> Tensor:
    """Decoding by a mask of blocks in a right-padded cache.

    Args:
        block_mask: bool ``[B, Hkv, ceil(Smax / block_size)]``, True keeps the block.
        The others, the result and the differences: as in ``block_sparse_flash_decode_gqa_indice``.
    """
    cache = _Cache(q, k_cache, v_cache, cache_seqlens, block_size)
    cache.check_capacity(max_cache_seqlen)
    cache.check_mask(block_mask)
    return cache.attend(cache.masked(block_mask, left=False, impl=impl), sm_scale, impl)


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
    cache = _Cache(q, k_cache, v_cache, cache_seqlens, block_size)
    cache.check_indices(block_indices)
    return cache.attend(cache.listed(block_indices, left=True), sm_scale, impl)


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
    cache = _Cache(q, k_cache, v_cache, cache_seqlens, block_size)
    cache.check_mask(block_mask)
    if first_block_unmasked:
        block = torch.arange(block_mask.shape[2], device=block_mask.device)
        first = (cache.capacity - cache.lengths.clamp(0, cache.capacity)) // block_size
        block_mask = block_mask | (block == first[:, None, None])
    return cache.attend(cache.masked(block_mask, left=True, impl=impl), sm_scale, impl)


class _Cache:
    """Checked arguments of a decode call, with the caches flat: [rows, Hkv, D], a sequence every ``pitch`` rows."""

    def __init__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_size: int) -> None:
        if isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] == 1:
            q = q[:, 0]
        if not isinstance(q, Tensor) or q.dim() != 3:
            raise ValueError(f"q must be [batch, heads, head_dim] or [batch, 1, heads, head_dim], got "
                             f"{tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__}")
        q, k, v = check_token_inputs(q[:, None], k_cache, v_cache, dims="[batch, tokens, heads, head_dim]", key_name="k_cache",
                                     value_name="v_cache")
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k_cache must have q's batch {q.shape[0]}, got {k.shape[0]}")
        check_tensor("cache_seqlens", cache_seqlens, INTEGERS, (q.shape[0],), "[B]", q.device)
        self.q, self.lengths, self.block_size = q[:, 0], cache_seqlens, require_int("block_size", block_size, 1)
        self.capacity, self.kv_heads = k.shape[1], k.shape[2]
        self.pitch = _pitch(k)
        if self.pitch is None or _pitch(v) != self.pitch:
            # A tensor with a dimension of 1 may call itself contiguous whatever its stride there, which a clone does not keep.
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
            self.pitch = self.capacity
        rows = (len(k) - 1) * self.pitch + self.capacity if len(k) and self.capacity else 0
        self.k, self.v = (x.as_strided((rows, *x.shape[2:]), x.stride()[1:]) for x in (k, v))

    def check_capacity(self, max_cache_seqlen: int) -> None:
        if require_int("max_cache_seqlen", max_cache_seqlen, 0) != self.capacity:
            raise ValueError(f"max_cache_seqlen must be k_cache's {self.capacity} tokens, got {max_cache_seqlen}")

    def check_indices(self, block_indices: Tensor) -> None:
        check_tensor("block_indices", block_indices, (torch.int32,), (self.q.shape[0], self.kv_heads, None), "[B, Hkv, S]", self.q.device)

    def check_mask(self, block_mask: Tensor) -> None:
        blocks = -(-self.capacity // self.block_size)
        check_tensor("block_mask", block_mask, (torch.bool,), (self.q.shape[0], self.kv_heads, blocks), "[B, Hkv, blocks]", self.q.device)

    def listed(self, block_indices: Tensor, left: bool) -> TokenLists:
        return TokenLists(block_indices.contiguous(), None, self.lengths, self.block_size, cache=self.padded(left))

    def masked(self, block_mask: Tensor, left: bool, impl: str) -> TokenLists:
        impl = choose_token_impl(impl, self.q.device, self.q.dtype, self.q.shape[-1], self.v.shape[-1])
        return lists_from_rows(block_mask, self.lengths, self.padded(left), self.block_size, impl)

    def padded(self, left: bool) -> PaddedCache:
        return PaddedCache(self.pitch, self.capacity, left)

    def attend(self, lists: TokenLists, scale: float | None, impl: str) -> Tensor:
        with torch.no_grad():
            return token_attention(self.q, self.k, self.v, lists, scale=scale, impl=impl)[0]


def _pitch(x: Tensor) -> int | None:
    """Rows from one sequence of x [B, S, H, D] to the next, or None where that is no whole number."""
    batch, row = x.stride()[:2]
    return batch // row if row and batch % row == 0 else None
