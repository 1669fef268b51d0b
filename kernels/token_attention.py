"""token_attention: check the arguments, choose an implementation, call it; its torch.library registration.

What block_sparse_attention is to lists of query blocks, this is to lists of single query tokens. The interfaces of libraries that have
such lists stand on it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .checks import resolve_scale, without_autocast
from .operators import NAMESPACE, differentiate_by, recorded, refuse_transforms, watched
from .routing import choose_token_impl
from .token_lists import KeyLists, PaddedCache, TokenLists


def token_attention(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, *, scale: float | None = None, impl: str = "auto"
                    ) -> tuple[Tensor, Tensor]:
    """Softmax attention in which every query token attends to its own list of key blocks, within its own span of keys.

    Args:
        q: ``[T, Hq, D]``, checked by ``check_token_inputs``, as k and v are.
        k: ``[R, Hkv, D]``; query head h reads head h // (Hq / Hkv).
        v: ``[R, Hkv, Dv]``.
        lists: made by ``lists_from_ids`` or ``lists_from_mask``.
        scale: factor on the scores, positive; default 1 / sqrt(D).
        impl: "auto", "torch" or "triton", as ``choose_token_impl`` reads it.

    Returns:
        out ``[T, Hq, Dv]`` in q's dtype and lse float32 ``[T, Hq]`` (float64 for float64 inputs), natural logarithm. A token that attends
        to nothing gives out = 0, lse = -inf and zero gradients.

    Differentiable in q, k and v, also through lse, where the lists have ``invert``. Same inputs, same bits. Never waits for a GPU.
    """
    scale = resolve_scale(scale, q.shape[-1])
    impl = choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    refuse_transforms("token_attention", q=q, k=k, v=v)
    inverse = None
    if impl == "triton" and recorded(q, k, v):
        assert lists.invert is not None, "no gradient through these lists"
        inverse = lists.invert()
    elif not (recorded(q, k, v) or watched(q, k, v)):
        # The operator would cost more than a step of decoding.
        return _run(q, k, v, lists, scale, impl)
    keys = (None,) * 5 if inverse is None else (inverse.starts, inverse.sizes, inverse.tokens, inverse.firsts, inverse.counts)
    cache = None if lists.cache is None else list(map(int, lists.cache))
    return _forward(q, k, v, lists.ids, lists.counts, lists.spans, lists.full, *keys, cache, lists.block_size, scale, impl)


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
