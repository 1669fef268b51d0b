"""What the interfaces' tests compare with: dense attention under a token mask, written out anew, in float64 and in the inputs' dtype."""

import pytest
import torch

# (device, dtype): plain torch in float64, and the kernels on a GPU.
EVERYWHERE = [pytest.param("cpu", torch.float64, id="cpu"),
              pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu),
              pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu)]
FACTOR = 2.0


def dense(q, k, v, visible, scale=None, soft_cap=0.0):
    """(out, lse) of [B, H, S, D] under a bool mask [B|1, H|1, Sq, Skv], in q's dtype."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], float("-inf"))
    return weights @ v.repeat_interleave(group, 1), lse


def with_gradients(attend, inputs, weights):
    """attend(*inputs) = (out, lse), and the inputs' gradients of their products with ``weights``; lse of empty rows left out."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*inputs)
    loss = (out * weights[0].to(out.dtype)).sum(dtype=torch.float64)
    loss = loss + torch.where(lse.isfinite(), lse * weights[1].to(lse.dtype), 0.0).sum(dtype=torch.float64)
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def assert_exact(got, plain, truth):
    """Each of ``got`` is no further from ``truth`` (float64) than twice what ``plain`` (the same dtype, dense) is, plus rounding."""
    for number, (mine, eager, exact) in enumerate(zip(got, plain, truth, strict=True)):
        assert mine.shape == exact.shape, f"result {number} has shape {tuple(mine.shape)}, not {tuple(exact.shape)}"
        assert torch.equal(mine == float("-inf"), exact == float("-inf")), f"result {number} is -inf elsewhere"
        mine, eager, exact = (x.double().masked_fill(exact == float("-inf"), 0.0) for x in (mine, eager, exact))
        assert mine.isfinite().all(), f"result {number} is not finite"
        rounding = max(torch.finfo(got[number].dtype).eps, torch.finfo(torch.float32).eps * (got[0].dtype != torch.float64) * 16, 1e-12)
        allowed = FACTOR * (eager - exact).abs().max() + rounding * exact.abs().max().clamp(min=1e-3)
        error = (mine - exact).abs()
        assert error.max() <= allowed, f"result {number} is off by {error.max():.3e}, {allowed:.3e} is allowed"
