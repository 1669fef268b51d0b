"""block_sparse_attention: check the arguments, choose a route, run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from .blocks import BlockLists
from .checks import autocast_inputs, require_bool, resolve_scale
from .notices import warn_once
from .op import RecordedAttention, attention_operator, route_of, run_forward
from .operators import refuse_transforms, watched
from .routing import require_impl


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = ..., causal: bool = ...,
    return_lse: Literal[False] = ..., deterministic: bool = ..., impl: str = ...,
) -> Tensor: ...


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = ..., causal: bool = ...,
    return_lse: Literal[True], deterministic: bool = ..., impl: str = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = ..., causal: bool = ...,
    return_lse: bool, deterministic: bool = ..., impl: str = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *,
    scale: float | None = None, causal: bool = False, return_lse: bool = False, deterministic: bool = True, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in which every query block attends to its own list of key blocks.

    Args:
        q: ``[B, Hq, Sq, D]``, any strides whose last is 1, so ``[B, S, H, D].transpose(1, 2)`` costs nothing.
            float16 or bfloat16; on the "torch" and "reference" implementations float32 and float64 too. Under autocast q, k and v are
            cast to its dtype, as by ``torch.nn.functional.scaled_dot_product_attention``.
        k: ``[B, Hkv, Skv, D]``, q's dtype and device. Hq must be a multiple of Hkv; query head h reads head h // (Hq / Hkv).
        v: ``[B, Hkv, Skv, D]``.
        blocks: the pattern, on q's device.
        scale: factor on the scores, positive; default 1 / sqrt(D).
        causal: query i then sees the keys up to i + Skv - Sq, within the listed blocks.
        return_lse: also return the log-sum-exp of each row's scaled scores.
        deterministic: the backward gives bitwise the same gradients: dQ is added up in a fixed order, which on "hopper" a semaphore holds.
            Should Hopper's backward wait too long for that order, as where a list names a block twice, it goes on without it, the next
            backward warns once, and ``ssta.kernels.hopper.backward.spin_timeouts(device)`` counts that. False lets "hopper" add up dQ in
            whatever order it comes (non-deterministic dQ), and over key blocks of up to 128 tokens dK and dV too, in 0.8 to 1.01 of the
            time, and lets "cudnn" use its own backward, which has no fixed order; the others have only one order.
        impl: which implementation runs: "auto", "reference", "torch", "triton", "cudnn" or "hopper"; see
            ``choose_route``. A choice that cannot run raises.

    Returns:
        out with q's shape, dtype and memory order; with ``return_lse`` also lse, float32 ``[B, Hq, Sq]`` (float64 for float64 inputs),
        natural logarithm.
        A row that attends to nothing gives out = 0, lse = -inf and zero gradients.

    Differentiable in q, k and v, also through lse; not twice, not in forward mode, and not by torch.func, all of which
    ``impl="reference"`` is. Same inputs, same bits.
    Never waits for the device, that is, never synchronises ("torch" on a CPU reads the counts, where there is nothing to wait for). The
    values in ``blocks`` are not read here: ``BlockLists.check_values`` checks them. Ids out of range are treated as absent.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        require_bool(name, flag)
    q, k, v = autocast_inputs(q=q, k=k, v=v)
    check_inputs(q, k, v, blocks)
    out, lse = _attend(q, k, v, blocks, resolve_scale(scale, q.shape[3]), causal, deterministic, impl)
    return (out, lse) if return_lse else out


def check_inputs(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists) -> None:
    """Refuses tensors and lists that do not belong together, as ``block_sparse_attention`` says; ``autocast_inputs`` goes before."""
    # Asked for once: every question to a tensor costs a tenth of a microsecond, and there are fifty.
    dtype, device, q_shape, k_shape = q.dtype, q.device, q.shape, k.shape
    for name, x, shape in (("q", q, q_shape), ("k", k, k_shape), ("v", v, v.shape)):
        if len(shape) != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
        if shape[0] != q_shape[0] or shape[3] != q_shape[3]:
            raise ValueError(f"{name} must have q's batch and head_dim {q_shape[0]} and {q_shape[3]}, got shape {tuple(shape)}")
        if x.stride(-1) != 1 and shape[3] > 1 and x.numel():
            raise ValueError(f"{name} must have stride 1 in its last dimension, got {x.stride(-1)}; call .contiguous() on it")
    if shape != k_shape:
        raise ValueError(f"v must have k's shape {tuple(k_shape)}, got {tuple(shape)}")
    batch, heads, q_len, _ = q_shape
    kv_heads, kv_len = k_shape[1], k_shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of k's {kv_heads}, got {heads}")
    if not isinstance(blocks, BlockLists):
        raise TypeError(f"blocks must be BlockLists, got {type(blocks).__name__}")
    if blocks.device != device:
        raise ValueError(f"blocks must be on q's device {device}, got {blocks.device}")
    for name, allowed in (("counts", (1, kv_heads, heads)), ("q_offsets", (1, kv_heads, heads)), ("q_lengths", (1, kv_heads, heads)),
                          ("kv_offsets", (1, kv_heads)), ("kv_lengths", (1, kv_heads))):
        x = getattr(blocks, name)
        if isinstance(x, Tensor) and (x.shape[0] not in (1, batch) or x.shape[1] not in allowed):
            batches, choices = (" or ".join(map(str, sorted(set(of)))) for of in ((1, batch), allowed))
            raise ValueError(f"blocks.{name} must have batch {batches} and heads {choices}, got shape {tuple(x.shape)}"
                             + _tokens_first(q_shape, blocks))
    for axis, offsets, count, tokens in (("q", blocks.q_offsets, blocks.num_q_blocks, q_len),
                                         ("kv", blocks.kv_offsets, blocks.num_kv_blocks, kv_len)):
        if isinstance(offsets, int) and count is not None and count != -(-tokens // offsets):
            raise ValueError(f"blocks must have {-(-tokens // offsets)} {axis} blocks of {offsets} for {tokens} tokens, got {count}"
                             + _tokens_first(q_shape, blocks))


def _tokens_first(shape: Sequence[int], blocks: BlockLists) -> str:
    """A hint for an error where blocks fit q ``[B, H, S, D]`` if its tokens stand where its heads should."""
    size, heads = blocks.q_offsets, blocks.counts.shape[1]
    if not isinstance(size, int) or shape[2] % heads or -(-shape[1] // size) != blocks.num_q_blocks:
        return ""
    return ("; the order of axes is [batch, heads, tokens, head_dim], so transpose(1, 2) of q, k and v may be meant, of which q came in "
            f"the shape {tuple(shape)}")


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, deterministic: bool, impl: str
            ) -> tuple[Tensor, Tensor]:
    """(out, lse) of arguments that have been checked."""
    name, route = require_impl(impl), None
    # Who watches sees an operator, which asks the GPU when it runs.
    if not watched(q, k, v):
        route = route_of(name, q, k, blocks, causal, deterministic)
        name = route.name
        if route.slow_fallback:
            warn_once("torch on a GPU", route.slow_fallback)
    if name == "reference":
        from .reference import reference_attention

        return reference_attention(q, k, v, blocks, scale, causal)
    if route is None:
        refuse_transforms("block_sparse_attention", q=q, k=k, v=v)
        return attention_operator(q, k, v, *blocks.to_fields(), float(scale), causal, deterministic, name)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return RecordedAttention.apply(q, k, v, blocks, scale, causal, deterministic, route)
    return run_forward(route, q, k, v, blocks, scale, causal)
