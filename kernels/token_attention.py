"""token_attention: check the arguments, choose an implementation, call it; its torch.library registration.

What block_sparse_attention is to lists of query blocks, this is to lists of single query tokens. The interfaces of libraries that have
such lists stand on it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .attention import autocast_inputs, resolve_impl, resolve_scale
from .operators import watched
from .token_lists import KeyLists, PaddedCache, TokenLists

TOKEN_IMPLEMENTATIONS = ("auto", "gather", "triton")


def token_attention(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, *, scale: float | None = None, impl: str = "auto"
                    ) -> tuple[Tensor, Tensor]:
    """Softmax attention in which every query token attends to its own list of key blocks, within its own span of keys.

    Args:
        q: ``[T, Hq, D]``, checked by ``check_token_inputs``, as k and v are.
        k: ``[R, Hkv, D]``; query head h reads head h // (Hq / Hkv).
        v: ``[R, Hkv, Dv]``.
        lists: made by ``lists_from_ids`` or ``lists_from_mask``.
        scale: factor on the scores, positive; default 1 / sqrt(D).
        impl: "auto", "gather" or "triton", as ``resolve_token_impl`` reads it.

    Returns:
        out ``[T, Hq, Dv]`` in q's dtype and lse float32 ``[T, Hq]`` (float64 for float64 inputs), natural logarithm. A token that attends
        to nothing gives out = 0, lse = -inf and zero gradients.

    Differentiable in q, k and v, also through lse, where the lists have ``invert``. Same inputs, same bits. Never waits for a GPU.
    """
    scale = resolve_scale(scale, q.shape[-1])
    impl = resolve_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    inverse = None
    if impl == "triton" and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        inverse = lists.invert()
    elif not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad) or watched(q, k, v)):
        # The operator would cost more than a step of decoding.
        return _run(q, k, v, lists, scale, impl)
    keys = (None,) * 5 if inverse is None else (inverse.starts, inverse.sizes, inverse.tokens, inverse.firsts, inverse.counts)
    cache = None if lists.cache is None else list(map(int, lists.cache))
    return _forward(q, k, v, lists.ids, lists.counts, lists.spans, lists.whole, *keys, cache, lists.block_size, scale, impl)


def resolve_token_impl(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: int) -> str:
    """"auto" is "triton" on a GPU with float16 or bfloat16 and head dimensions of 16 to 256, else "gather", plain torch.

    Raises:
        ValueError: an unknown name, or an explicit choice that cannot run on such tensors.
    """
    if impl not in TOKEN_IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, TOKEN_IMPLEMENTATIONS))}, got {impl!r}")
    # A query block of one token never goes to Hopper's kernel.
    chosen = {resolve_impl(impl, device, dtype, dim, 1) for dim in head_dims}
    return "triton" if chosen == {"triton"} else "gather"


def check_token_inputs(q: Tensor, k: Tensor, v: Tensor, *, dims: str = "[tokens, heads, head_dim]", key_name: str = "k",
                       value_name: str = "v") -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) in autocast's dtype where that is on, with a last stride of 1; ``dims`` says what their dimensions are.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    names, wanted = {"q": q, key_name: k, value_name: v}, dims.count(",") + 1
    q, k, v = autocast_inputs(**names)
    for name, x in zip(names, (q, k, v)):
        if x.dim() != wanted:
            raise ValueError(f"{name} must be {dims}, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{value_name} must have {key_name}'s shape {tuple(k.shape)} but for the head_dim, got {tuple(v.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{key_name} must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q's heads must be a multiple of {key_name}'s {k.shape[-2]}, got {q.shape[-2]}")
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))


def check_tensor(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], what: str, device: torch.device
                 ) -> None:
    """Refuses what is not a tensor of such a dtype, shape (None: any size) and device; ``what`` names the dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, got {x.dtype}")
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape)):
        wanted = [size if size is not None else "any" for size in shape]
        raise ValueError(f"{name} must be {what} = [{', '.join(map(str, wanted))}], got shape {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {x.device}")


@lru_cache
def _implementation(impl: str):
    """(forward, backward) of an implementation, imported when first chosen."""
    if impl == "gather":
        from .eager.tokens import gather_tokens_backward, gather_tokens_forward

        return gather_tokens_forward, gather_tokens_backward
    from .portable.token_backward import triton_token_backward
    from .portable.token_forward import triton_token_forward

    return triton_token_forward, triton_token_backward


def _run(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    if not torch.is_autocast_enabled(q.device.type):
        return _implementation(impl)[0](q, k, v, lists, scale)
    # What is summed in float32 must stay so under autocast.
    with torch.autocast(q.device.type, enabled=False):
        return _implementation(impl)[0](q, k, v, lists, scale)


@torch.library.custom_op("ssta::token_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, counts: Tensor | None, spans: Tensor, whole: Tensor | None, starts: Tensor | None,
    sizes: Tensor | None, tokens: Tensor | None, firsts: Tensor | None, key_counts: Tensor | None, cache: list[int] | None,
    block_size: int, scale: float, impl: str,
) -> tuple[Tensor, Tensor]:
    padded = None if cache is None else PaddedCache(cache[0], cache[1], bool(cache[2]))
    return _run(q, k, v, TokenLists(ids, counts, spans, block_size, whole=whole, cache=padded), scale, impl)


@_forward.register_fake
def _(q, k, v, *_):
    lse = q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


@torch.library.custom_op("ssta::token_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ids: Tensor, counts: Tensor,
    spans: Tensor, whole: Tensor | None, starts: Tensor | None, sizes: Tensor | None, tokens: Tensor | None, firsts: Tensor | None,
    key_counts: Tensor | None, block_size: int, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inverse = None if starts is None else KeyLists(starts, sizes, tokens, firsts, key_counts)
    lists = TokenLists(ids, counts, spans, block_size, whole=whole)
    with torch.autocast(q.device.type, enabled=False):
        return _implementation(impl)[1](dout, dlse, q, k, v, out, lse, lists, inverse, scale)


@_backward.register_fake
def _(dout, dlse, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    *tensors, cache, block_size, scale, impl = inputs
    assert cache is None, "no gradient through a cache"
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.options = block_size, scale, impl
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    q, k, v, out, *rest = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 16
    dout = torch.zeros_like(out) if dout is None else dout
    return (*_backward(dout, dlse, q, k, v, out, *rest, *ctx.options), *(None,) * 13)


_forward.register_autograd(_differentiate, setup_context=_save)
