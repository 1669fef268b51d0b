"""The tail as a function of autograd, by one of its implementations, each step of which is an operator of torch.library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocks import BlockLists
from .checks import without_autocast
from .device import capability
from .eager import tail as eager
from .operators import NAMESPACE, operator, refuse_forward_mode, watched
from .tail import BlockEstimates, covariances_wait, why_not_hopper_merge, why_not_hopper_statistics


def estimate_blocks(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, *, scale: float, parts: int,
                    useful: Tensor | None = None, kernels: bool) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``, a constant to autograd; ``kernels``: whether Triton's compute it."""
    with torch.no_grad(), without_autocast(q.device.type):
        if not kernels:
            return eager.estimate(q, k, v, offsets, num_blocks, longest, scale, parts, useful)
        hopper = q.is_cuda and why_not_hopper_statistics(capability(q.device), k.dtype, k.shape[3], parts) is None
        log_count, half_variance, mass, order, k_mean, v_mean, known, covariances = _estimate(
            q, k, v, offsets, num_blocks, longest, scale, parts, useful, hopper)
        return BlockEstimates(parts, log_count, half_variance, mass, order if parts > 1 else None, k_mean, v_mean,
                              known if useful is None else useful, covariances if covariances.numel() else None)


def block_scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    """``scores`` of ``eager/tail.py``, by whoever made the estimates."""
    with torch.no_grad():
        if mass.dtype != torch.bfloat16:
            return eager.scores(mass, half_variance, log_count, parts)
        return _scores(mass, half_variance, log_count, parts)


def add_tail(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
    estimates: BlockEstimates, *, scale: float, owned: bool, kernels: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the blocks that ``blocks`` leaves out estimated: (out, lse, share), as ``combine`` of ``eager/tail.py`` computes them.

    Differentiable in out, lse, q, k and v: once, and not in forward mode. The weights, means and covariances of units are differentiated.
    Nothing that ``estimates`` hold is, nor are the mixtures of covariances: constants. Beside arguments and results the backward keeps
    numbers for each pair of a query block and a unit, and the units' means.

    Args:
        out, lse, q, k, v, offsets, num_blocks, longest, estimates, scale: as for ``combine``.
        blocks: the lists.
        owned: whether out and lse may be written over; where a gradient is asked for, nothing is.
        kernels: whether Triton's compute it, as they must if they made the estimates.

    Raises:
        ValueError: a tensor has a forward-mode tangent, which would be lost.
    """
    refuse_forward_mode(out=out, lse=lse, q=q, k=k, v=v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, lse, q, k, v)):
        return _AddTail.apply(out, lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale, kernels)
    with torch.no_grad(), without_autocast(q.device.type):
        out, lse = (out, lse) if owned else (out.clone(), lse.clone())
        # Kernels write rows of unit stride.
        out, lse = out if out.stride(-1) == 1 else out.contiguous(), lse.contiguous()
        share, _, _, _ = _combine(out, lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale, False, kernels)
    return out, lse, share


class _AddTail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
        estimates: BlockEstimates, scale: float, kernels: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Kernels write rows of unit stride.
        merged = out.clone() if out.stride(-1) == 1 else out.clone(memory_format=torch.contiguous_format)
        merged_lse = lse.clone(memory_format=torch.contiguous_format)
        with without_autocast(q.device.type):
            share, tail_lse, bias, mixture = _combine(merged, merged_lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale,
                                                      True, kernels)
        ctx.save_for_backward(out, lse, merged, merged_lse, tail_lse, q, k, v, offsets, bias, mixture, estimates.log_count,
                              estimates.order, estimates.k_mean, estimates.v_mean)
        ctx.longest, ctx.scale, ctx.kernels = longest, scale, kernels
        ctx.mark_non_differentiable(share)
        ctx.set_materialize_grads(False)
        return merged, merged_lse, share

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, _) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 12
        dout = torch.zeros_like(ctx.saved_tensors[0]) if dout is None else dout
        run: Callable[..., tuple[Tensor, ...]] = _backward if ctx.kernels else eager.combine_backward
        with without_autocast(dout.device.type):
            return *run(dout, dlse, *ctx.saved_tensors, ctx.longest, ctx.scale), *(None,) * 7


def _combine(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
    estimates: BlockEstimates, scale: float, keep: bool, kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not kernels:
        return eager.combine(out, lse, q, k, v, offsets, num_blocks, longest, blocks.counts, blocks.indices, estimates, scale, keep)
    hopper = q.is_cuda and why_not_hopper_merge(capability(q.device), q.dtype, q.shape[3]) is None
    run = _add_operator if watched(out) else _add
    return run(out, lse, q, k, v, offsets, blocks.counts, blocks.indices, estimates.log_count, estimates.half_variance, estimates.mass,
               estimates.useful, estimates.order, estimates.k_mean, estimates.v_mean, estimates.covariances, num_blocks, longest,
               estimates.parts, scale, keep, hopper)


def _portable() -> ModuleType:
    """Loaded when first asked for, because triton is."""
    return import_module(".portable.tail", __package__)


def _new_estimates(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, scale: float, parts: int, useful: Tensor | None,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of BlockEstimates but for the parts; what is not there is empty."""
    (batch, heads, tokens, dim), kv_heads, units = q.shape, k.shape[1], num_blocks * parts
    pairs = batch, heads, num_blocks, units
    waits = hopper and covariances_wait(q, k, num_blocks)
    return (q.new_empty(batch, kv_heads, units, dtype=torch.float32),
            q.new_empty(pairs, dtype=torch.bfloat16), q.new_empty(pairs, dtype=torch.bfloat16),
            q.new_empty((batch, kv_heads, tokens) if parts > 1 else (0,), dtype=torch.int32),
            k.new_empty(batch, kv_heads, units, dim), v.new_empty(batch, kv_heads, units, dim),
            q.new_empty((batch, heads) if useful is None else (0,), dtype=torch.bool),
            k.new_empty((batch, kv_heads, units, dim * dim) if waits else (0,), dtype=torch.bfloat16))


@operator("estimate_blocks", _new_estimates)
def _estimate(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, scale: float, parts: int, useful: Tensor | None,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    more: dict[str, Any] = {}
    if hopper:
        more = dict(key_statistics=import_module(".hopper.tail_statistics", __package__).hopper_key_statistics)
    found = _portable().estimate(q, k, v, offsets, num_blocks, longest, scale, parts, useful, **more)

    def empty(dtype: torch.dtype) -> Tensor:
        return q.new_empty(0, dtype=dtype)

    return (found.log_count, found.half_variance, found.mass, empty(torch.int32) if found.order is None else found.order, found.k_mean,
            found.v_mean, found.useful if useful is None else empty(torch.bool),
            empty(torch.bfloat16) if found.covariances is None else found.covariances)


def _new_scores(mass: Tensor, *_) -> Tensor:
    return mass.new_empty(*mass.shape[:3], mass.shape[2], dtype=torch.float32)


@operator("block_scores", _new_scores)
def _scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    return _portable().scores(mass, half_variance, log_count, parts)


def _new_tail(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, indices: Tensor, log_count: Tensor,
    half_variance: Tensor, mass: Tensor, useful: Tensor, order: Tensor | None, k_mean: Tensor, v_mean: Tensor,
    covariances: Tensor | None, num_blocks: int, longest: int, parts: int, scale: float, keep: bool, hopper: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, tokens, _), units = q.shape, num_blocks * parts
    kept = heads if keep else 0
    # As portable/tail.py lays it out.
    mixture = q.new_empty(batch, kept, num_blocks, -(-units // 8) * 8, dtype=torch.bfloat16)
    return (q.new_empty(batch, heads, num_blocks, dtype=torch.float32), q.new_empty(batch, heads, tokens, dtype=torch.float32),
            q.new_empty(batch, kept, num_blocks, units, dtype=torch.float32), mixture[..., :units])


def _add(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, indices: Tensor, log_count: Tensor,
    half_variance: Tensor, mass: Tensor, useful: Tensor, order: Tensor | None, k_mean: Tensor, v_mean: Tensor,
    covariances: Tensor | None, num_blocks: int, longest: int, parts: int, scale: float, keep: bool, hopper: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    estimates = BlockEstimates(parts, log_count, half_variance, mass, order, k_mean, v_mean, useful, covariances)
    more: dict[str, Any] = {}
    if hopper:
        more = dict(merge=import_module(".hopper.tail_merge", __package__).hopper_tail_merge)
    return _portable().combine(out, lse, q, k, v, offsets, num_blocks, longest, counts, indices, estimates, scale, keep, **more)


_add_operator = torch.library.custom_op(f"{NAMESPACE}::add_tail", _add, mutates_args=("out", "lse"))
_add_operator.register_fake(_new_tail)


def _new_gradients(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *_,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dexact = dout.clone(memory_format=torch.contiguous_format if dout.stride(-1) != 1 else torch.preserve_format)
    dexact_lse = torch.zeros_like(lse) if dlse is None else dlse.clone(memory_format=torch.contiguous_format)
    return dexact, dexact_lse, torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@operator("add_tail_backward", _new_gradients)
def _backward(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, mixture: Tensor, log_count: Tensor, order: Tensor | None,
    k_mean: Tensor, v_mean: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _portable().combine_backward(dout, dlse, exact, exact_lse, out, lse, tail_lse, q, k, v, offsets, bias, mixture, log_count, order,
                                        k_mean, v_mean, longest, scale)
