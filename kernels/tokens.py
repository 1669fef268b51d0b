"""The second door: attention that is decided token by token, and what libraries with such attention ask of its probabilities.

What block_sparse_attention is to lists of query blocks, ``token_attention`` is to lists of single query tokens, and
``attention_within_blocks`` to blocks of which a token sees a part. The implementation of each is loaded when it is first chosen.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .block_forms import in_range, prefix_mask
from .blocks import BlockLists
from .checks import resolve_scale, without_autocast
from .operators import NAMESPACE, differentiate_by, recorded, refuse_transforms, watched
from .routing import TOKEN_IMPLEMENTATIONS, choose_route, choose_token_impl, require_impl
from .token_lists import KeyLists, Packed, PaddedCache, TokenLists, lists_from_ids, lists_from_mask, lists_from_rows

__all__ = ["Packed", "PaddedCache", "TokenLists", "attention_within_blocks", "importance", "listed_keys", "lists_from_ids",
           "lists_from_mask", "lists_from_rows", "pooling", "token_attention"]


def token_attention(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, *, scale: float | None = None, impl: str = "auto"
                    ) -> tuple[Tensor, Tensor]:
    """Softmax attention in which every query token attends to its own list of key blocks, within its own span of keys.

    Args:
        q: ``[T, Hq, D]``, checked by ``check_token_inputs``, as k and v are.
        k: ``[R, Hkv, D]``; query head h reads head h // (Hq / Hkv).
        v: ``[R, Hkv, Dv]``.
        lists: made by ``lists_from_ids``, ``lists_from_mask`` or ``lists_from_rows``.
        scale: factor on the scores, positive; default 1 / sqrt(D).
        impl: "auto", "torch" or "triton", as ``choose_token_impl`` reads it.

    Returns:
        out ``[T, Hq, Dv]`` in q's dtype and lse float32 ``[T, Hq]`` (float64 for float64 inputs), natural logarithm. A token that attends
        to nothing gives out = 0, lse = -inf and zero gradients.

    Differentiable in q, k and v, also through lse, where the lists have ``packed``. Same inputs, same bits. Never waits for a GPU.
    """
    scale = resolve_scale(scale, q.shape[-1])
    impl = choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    refuse_transforms("token_attention", q=q, k=k, v=v)
    inverse, wanted = None, recorded(q, k, v)
    if impl == "triton" and wanted:
        inverse = lists.invert()
    elif not (wanted or watched(q, k, v)):
        # The operator would cost more than a step of decoding.
        return _run(q, k, v, lists, scale, impl)
    keys = (None,) * 5 if inverse is None else (inverse.starts, inverse.sizes, inverse.tokens, inverse.firsts, inverse.counts)
    cache = None if lists.cache is None else list(map(int, lists.cache))
    return _forward(q, k, v, lists.ids, lists.counts, lists.spans, lists.full, *keys, cache, lists.block_size, scale, impl)


def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float, impl: str) -> Tensor:
    """How much each key matters to a token: float32 ``[Hkv, T, R]`` of q ``[T, Hq, D]``, k ``[R, Hkv, D]`` and lse float32 ``[T, Hq]``,
    contiguous.

    A token's entries ``firsts`` up to ``firsts + seen``, int64 ``[T]`` both, are the sums over its group of exp(scale * score - lse); the
    others may be anything. ``impl`` is "triton" or "torch". No gradient.
    """
    if impl == "triton":
        from .portable.probabilities import importance as found
    else:
        from .eager.probabilities import importance as found
    return found(q, k, lse, firsts, seen, scale)


def pooling(q: Tensor, k: Tensor, bounds: list[int], scale: float, block_size: int, by_block: Tensor, impl: str) -> list[Tensor]:
    """The largest causal attention probability in every block of keys, by token: for each sequence ``[Hq, L, ceil(L / block_size)]`` in q's
    dtype, of the tokens from one of ``bounds`` up to the next in q ``[T, Hq, D]`` and k ``[T, Hkv, D]``.

    ``by_block [B, Hq, N, N]``, zeros, takes the same by query block. ``impl`` is "triton" or "torch". No gradient.

    Raises:
        ValueError: blocks too large for "triton".
    """
    if impl == "triton":
        from .portable.probabilities import LARGEST_BLOCK
        from .portable.probabilities import triton_pooling as found

        if block_size > LARGEST_BLOCK:
            raise ValueError(f"block_size must be at most {LARGEST_BLOCK} with impl='triton', got {block_size}")
    else:
        from .eager.probabilities import torch_pooling as found
    with torch.no_grad():
        return [found(q[start:end], k[start:end], scale, block_size, into) for into, start, end in zip(by_block, bounds, bounds[1:])]


@lru_cache
def _implementation(impl: str):
    """(forward, backward) of an implementation, imported when first chosen."""
    if impl == "torch":
        from .eager.tokens import torch_tokens_backward, torch_tokens_forward

        return torch_tokens_forward, torch_tokens_backward
    from .portable.token_backward import triton_token_backward
    from .portable.token_forward import triton_token_forward

    return triton_token_forward, triton_token_backward


def _run(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    if not torch.is_autocast_enabled(q.device.type):
        return _implementation(impl)[0](q, k, v, lists, scale)
    with without_autocast(q.device.type):
        return _implementation(impl)[0](q, k, v, lists, scale)


@torch.library.custom_op(f"{NAMESPACE}::token_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, counts: Tensor | None, spans: Tensor, full: Tensor | None, starts: Tensor | None,
    sizes: Tensor | None, tokens: Tensor | None, firsts: Tensor | None, key_counts: Tensor | None, cache: list[int] | None,
    block_size: int, scale: float, impl: str,
) -> tuple[Tensor, Tensor]:
    padded = None if cache is None else PaddedCache(cache[0], cache[1], bool(cache[2]))
    return _run(q, k, v, TokenLists(ids, counts, spans, block_size, full=full, cache=padded), scale, impl)


@_forward.register_fake
def _(q, k, v, *_):
    lse = q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


@torch.library.custom_op(f"{NAMESPACE}::token_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ids: Tensor, counts: Tensor,
    spans: Tensor, full: Tensor | None, starts: Tensor | None, sizes: Tensor | None, tokens: Tensor | None, firsts: Tensor | None,
    key_counts: Tensor | None, cache: list[int] | None, block_size: int, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    assert cache is None, "no gradient through a cache"
    # All five are given, or none.
    inverse = None if starts is None else KeyLists(starts, sizes, tokens, firsts, key_counts)  # type: ignore[arg-type]
    lists = TokenLists(ids, counts, spans, block_size, full=full)
    with without_autocast(q.device.type):
        return _implementation(impl)[1](dout, dlse, q, k, v, out, lse, lists, inverse, scale)


differentiate_by(_backward, _forward, "token_attention")


def attention_within_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, *, soft_cap: float = 0.0, mask: Tensor | None = None,
    first_entry: Tensor | None = None, listed: tuple[Tensor, Tensor] | None = None, packed: int = 1, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, of scores and keys that are further limited. Arguments are not checked.

    Args:
        q: ``[B, Hq, Sq, D]``; k and v ``[B, Hkv, Skv, D]``; ``blocks`` as in ``block_sparse_attention``.
        soft_cap: c > 0 caps a scaled score x to c * tanh(x / c); 0 does not.
        mask: bool ``[entries, R, C]``: of its e-th listed block, token u of query block i sees token c where
            ``mask[first_entry[i] + e, u, c]``.
        first_entry: int32 ``[Nq]``, with ``mask``; lists shared by batch and heads.
        listed: ``listed_keys(blocks, Skv)``: of a query block of L tokens with n listed keys, in the order of the list, token u sees the
            first n - L + u + 1.
        packed: that many neighbouring rows of q are one token, seen by several heads; q's block sizes are in rows.
        impl: "auto" is "triton" on a GPU and "torch", a loop in plain torch, on a CPU. No other is there.
    """
    if require_impl(impl) not in TOKEN_IMPLEMENTATIONS:
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch' with a soft cap, masks inside blocks or causal order, got {impl!r}")
    if impl == "auto":
        impl = "torch" if q.device.type == "cpu" else "triton"
    if impl == "triton":
        choose_route(impl, q.device, q.dtype, q.shape[-1])
    order, total = listed or (None, None)
    with torch.no_grad():
        return _within_blocks(q, k, v, *blocks.to_fields(), mask, first_entry, order, total, scale, soft_cap, packed, impl)


def listed_keys(blocks: BlockLists, kv_len: int) -> tuple[Tensor, Tensor]:
    """(listed keys before each listed block, int32 as the indices; listed keys, int32 as the counts). The lists' heads are those of the
    key blocks' bounds, where these have several."""
    sizes = blocks.kv_bounds(kv_len)[1].expand(*blocks.counts.shape[:2], -1)
    ids = blocks.indices
    known = in_range(ids, prefix_mask(blocks.counts, blocks.capacity), sizes.shape[-1])
    size = sizes.gather(2, ids.where(known, 0).flatten(2).long()).view(ids.shape).where(known, 0)
    behind = size.cumsum(-1, dtype=torch.int32)
    return behind - size, size.sum(-1, dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::attention_within_blocks", mutates_args=())
def _within_blocks(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    mask: Tensor | None, first_entry: Tensor | None, order: Tensor | None, total: Tensor | None,
    scale: float, soft_cap: float, packed: int, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with without_autocast(q.device.type):
        if impl == "triton":
            from .portable.gathered import ElementMask, gathered_forward

            return gathered_forward(q, k, v, blocks, scale, False, ElementMask(soft_cap, mask, first_entry, order, total, packed))
        from .eager.blocks import torch_within

        return torch_within(q, k, v, blocks, scale, soft_cap, mask, first_entry, total, packed)


@_within_blocks.register_fake
def _(q, k, v, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
