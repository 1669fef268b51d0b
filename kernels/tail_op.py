"""The tail where a gradient is wanted: ``add_tail`` as a function of autograd, and its backward as an operator of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocks import BlockLists
from .checks import without_autocast
from .operators import operator, refuse_forward_mode
from .tail import TAIL_ROOM, BlockEstimates, _by_kv_head, _head_groups, _kernels, tail_forward
from .tail import add_tail as add_constant_tail


def add_tail(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
    estimates: BlockEstimates, *, scale: float, owned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``tail.add_tail``, differentiable in out, lse, q, k and v: once, and not in forward mode. Where a gradient is asked for, nothing is
    written over, even if ``owned``.

    The weights, means and covariances of units are differentiated. Nothing that ``estimates`` hold is, nor are the mixtures of covariances:
    constants. The same inputs give the same bits. Beside arguments and results the backward keeps six bytes for each pair of a query block
    and a unit, and the units' means.

    Raises:
        ValueError: a tensor has a forward-mode tangent, which the kernels would lose.
    """
    refuse_forward_mode(out=out, lse=lse, q=q, k=k, v=v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, lse, q, k, v)):
        return _AddTail.apply(out, lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale)
    return add_constant_tail(out, lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale=scale, owned=owned)


class _AddTail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
        estimates: BlockEstimates, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Kernels write rows of unit stride.
        merged = out.clone() if out.stride(-1) == 1 else out.clone(memory_format=torch.contiguous_format)
        merged_lse = lse.clone(memory_format=torch.contiguous_format)
        tail = tail_forward(merged, merged_lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale=scale)
        ctx.save_for_backward(out, lse, merged, merged_lse, tail.tail_lse, q, k, v, offsets, tail.bias, tail.mixture, estimates.log_count,
                              estimates.order, estimates.k_mean, estimates.v_mean)
        ctx.longest, ctx.scale = longest, scale
        ctx.mark_non_differentiable(tail.share)
        ctx.set_materialize_grads(False)
        return merged, merged_lse, tail.share

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, _) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 11
        dout = torch.zeros_like(ctx.saved_tensors[0]) if dout is None else dout
        return *_backward(dout, dlse, *ctx.saved_tensors, ctx.longest, ctx.scale), *(None,) * 6


def _new_gradients(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *_,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What rows get that no estimate has touched: what arrives passes on, and nothing is added."""
    dexact = dout.clone(memory_format=torch.contiguous_format if dout.stride(-1) != 1 else torch.preserve_format)
    dexact_lse = torch.zeros_like(lse) if dlse is None else dlse.clone(memory_format=torch.contiguous_format)
    return dexact, dexact_lse, torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@operator("add_tail_backward", _new_gradients)
def _backward(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, mixture: Tensor, log_count: Tensor, order: Tensor | None,
    k_mean: Tensor, v_mean: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients for exact, exact_lse, q, k and v; arguments as for ``triton_tail_backward``."""
    grads = _new_gradients(dout, dlse, exact, exact_lse, out, lse, tail_lse, q, k, v)
    if not q.numel() or not k.numel():
        return grads
    dexact, dexact_lse, dq, dk, dv = grads
    kv_heads, (blocks, units) = k.shape[1], bias.shape[2:]
    parts = units // blocks
    backward, statistics = _kernels("backward"), _kernels("statistics")
    exact_lse = exact_lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    # Those of a block's units, and of its queries with their gradients.
    matrices = blocks * (parts + 2 * q.shape[1] // kv_heads)
    with torch.no_grad(), without_autocast(q.device.type), torch.cuda.device_of(q):
        for own, shared in _head_groups(q, kv_heads, matrices, TAIL_ROOM):
            halves = None if order is None else order[shared]
            covariances = statistics.covariances(
                k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared], halves, None, parts)
            mixed = _by_kv_head(mixture[own], covariances.shape[1])
            matrix = torch.bmm(mixed, covariances.flatten(0, 1))
            del covariances
            backward.triton_tail_backward(
                dexact[own], dexact_lse[own], dq[own], dk[shared], dv[shared], dout[own], None if dlse is None else dlse[own], exact[own],
                exact_lse[own], out[own], lse[own], tail_lse[own], q[own], k[shared], v[shared], offsets, longest, bias[own],
                log_count[shared], halves, k_mean[shared], v_mean[shared], matrix, mixed, scale)
            del matrix
    return grads
