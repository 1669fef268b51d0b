"""The yardstick of the interfaces with a list for every token: dense float64 attention under a mask of tokens."""

import pytest
import torch
from oracles import FACTOR

INTERPRETED = [] if torch.cuda.is_available() else [pytest.param("cpu", "triton", id="interpreter")]
everywhere = pytest.mark.parametrize("device, impl", [
    pytest.param("cpu", "torch", id="torch"), *INTERPRETED,
    pytest.param("cuda", "triton", id="gpu-triton", marks=pytest.mark.gpu),
    pytest.param("cuda", "torch", id="gpu-torch", marks=pytest.mark.gpu)])


def dense(q, k, v, visible, scale):
    """(out [T, Hq, Dv], lse [T, Hq]) by the definition, in the inputs' own dtype; visible bool [Hq, T, R]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.mT * scale).masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), -1)
    return (weights @ values).transpose(0, 1), lse.T


def run(attention, q, k, v, dout, dlse):
    """{name: tensor}: out, lse if there is one, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    out, lse = out if isinstance(out, tuple) else (out, None)
    loss = (out * dout.to(out.dtype)).sum(dtype=torch.float64)
    if lse is not None and dlse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * dlse.to(lse.dtype), 0.0).sum(dtype=torch.float64)
    grads = torch.autograd.grad(loss, (q, k, v))
    return {"out": out.detach(), **({} if lse is None else {"lse": lse.detach()}), **dict(zip(("dq", "dk", "dv"), grads))}


def assert_as_exact_as_torch(attention, q, k, v, visible, scale, with_lse=False):
    """``attention(q, k, v) -> out or (out, lse)`` and its gradients against float64: no worse than FACTOR times eager torch in the
    same dtype plus rounding, for whole tensors (largest error) and for every token (root mean square)."""
    dout = torch.randn(*q.shape[:2], v.shape[2], device=q.device, dtype=q.dtype)
    dlse = torch.randn(q.shape[:2], device=q.device) if with_lse else None
    truths = run(lambda *x: dense(*x, visible, scale), *(x.double() for x in (q, k, v)), dout, dlse)
    plains = run(lambda *x: dense(*x, visible, scale), q, k, v, dout, dlse)
    for name, got in run(attention, q, k, v, dout, dlse).items():
        plain, truth = plains[name], truths[name]
        assert got.shape == truth.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(truth.shape)}"
        if name == "lse":
            assert torch.equal(got == float("-inf"), truth == float("-inf"))
            got, plain, truth = (x.masked_fill(truth == float("-inf"), 0.0) for x in (got, plain, truth))
        assert got.isfinite().all(), f"{name} is not finite"
        assert_close(name, got, plain, truth)


def assert_close(name, got, plain, truth):
    rounding = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps * 16)
    error, allowed = (got.double() - truth).abs(), FACTOR * (plain.double() - truth).abs()
    worst = allowed.max() + rounding * truth.abs().max()
    assert error.max() <= worst, f"{name} is off by {error.max():.3e}; {worst:.3e} is allowed"
    error, allowed, size = (x.flatten(1).pow(2).mean(1).sqrt() for x in (error, allowed, truth))
    allowed = allowed + rounding * torch.maximum(size, size.mean())
    assert (error <= allowed).all(), f"{name}: token {int((error / allowed).argmax())} is off by {(error / allowed).max():.2f} of that"
