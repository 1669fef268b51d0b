"""Attention by lists of single query tokens, and sums and maxima of its probabilities.

The implementation of each function is loaded when it is first chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import PatternFacts, choose_route
from ...kernels.checks import resolve_scale
from ...kernels.operators import NAMESPACE, differentiate_by, on_device, recorded, refuse_transforms, watched
from ...kernels.routing import require_impl
from .lists import KeyLists, PaddedCache, TokenLists

TOKEN_IMPLEMENTATIONS = ("auto", "torch", "triton")
# One token fills no tile of "hopper", however long the key blocks are.
SINGLE_TOKENS = PatternFacts(1, 128)


def choose_token_impl(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: int) -> str:
    """"auto" is "triton" on a GPU from sm_80 on with float16 or bfloat16 and head dimensions of 16 to 256, else "torch".

    Raises:
        ValueError: an unknown name, or an explicit choice that cannot run on such tensors.
    """
    name = require_impl(impl, TOKEN_IMPLEMENTATIONS)
    routes = {choose_route(name, device, dtype, dim, SINGLE_TOKENS).name for dim in head_dims}
    return "triton" if routes == {"triton"} else "torch"


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
    wanted = recorded(q, k, v)
    if not (wanted or watched(q, k, v)):
        # The operator would cost more than a step of decoding.
        return _run(q, k, v, lists, scale, impl)
    inverse = lists.invert() if impl == "triton" and wanted else (None,) * 5
    cache = None if lists.cache is None else list(map(int, lists.cache))
    return _forward(q, k, v, lists.ids, lists.counts, lists.spans, lists.full, *inverse, cache, lists.block_size, scale, impl)


def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float, impl: str) -> Tensor:
    """How much each key matters to a token: float32 ``[Hkv, T, R]`` of q ``[T, Hq, D]``, k ``[R, Hkv, D]`` and lse float32 ``[T, Hq]``,
    contiguous.

    A token's entries ``firsts`` up to ``firsts + seen``, int64 ``[T]`` both, are the sums over its group of exp(scale * score - lse); the
    others may be anything. ``impl`` is "triton" or "torch". No gradient.
    """
    if impl == "triton":
        from .triton.probabilities import importance as found
    else:
        from .eager import importance as found
    return found(q, k, lse, firsts, seen, scale)


def pooling(q: Tensor, k: Tensor, bounds: list[int], scale: float, block_size: int, by_block: Tensor, impl: str) -> list[Tensor]:
    """The largest causal attention probability in every block of keys, by token: for each sequence ``[Hq, L, ceil(L / block_size)]`` in q's
    dtype, of the tokens from one of ``bounds`` up to the next in q ``[T, Hq, D]`` and k ``[T, Hkv, D]``.

    ``by_block [B, Hq, N, N]``, zeros, takes the same by query block. ``impl`` is "triton" or "torch". No gradient.

    Raises:
        ValueError: blocks too large for "triton".
    """
    if impl == "triton":
        from .triton.probabilities import LARGEST_BLOCK
        from .triton.probabilities import triton_pooling as found

        if block_size > LARGEST_BLOCK:
            raise ValueError(f"block_size must be at most {LARGEST_BLOCK} with impl='triton', got {block_size}")
    else:
        from .eager import torch_pooling as found
    with torch.no_grad():
        return [found(q[start:end], k[start:end], scale, block_size, into) for into, start, end in zip(by_block, bounds, bounds[1:])]


def _run(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    if impl == "triton":
        from .triton.forward import triton_token_forward as run
    else:
        from .eager import torch_tokens_forward as run  # type: ignore[assignment]
    with on_device(q):
        return run(q, k, v, lists, scale)


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
    if impl == "triton":
        from .triton.backward import triton_token_backward as run
    else:
        from .eager import torch_tokens_backward as run
    with on_device(q):
        return run(dout, dlse, q, k, v, out, lse, lists, inverse, scale)  # type: ignore[arg-type]


differentiate_by(_backward, _forward, "token_attention")
