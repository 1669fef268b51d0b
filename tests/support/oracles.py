"""The yardstick of the kernel tests: float64 truth, and the error that plain torch makes in the same dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ssta.kernels.op import RecordedAttention
from ssta.kernels.reference import reference_attention, token_mask

# On the error of torch's own attention in the same dtype; the one constant of the rule.
FACTOR = 2.0


def attention_with_gradients(attention, q, k, v, dout, dlse):
    """(out, lse, dq, dk, dv) of ``attention(q, k, v) -> (out, lse)``; lse gradients of empty rows are left out."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v)
    finite = lse.isfinite()
    loss = (out * dout.to(out.dtype)).sum(dtype=torch.float64) + torch.where(finite, lse * dlse.to(lse.dtype), 0.0).sum(dtype=torch.float64)
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))


@dataclass
class Functions:
    """In the place of a Route: two functions with what they are given."""

    run: Callable
    backward: Callable

    def run_backward(self, *arguments):
        *arguments, _ = arguments
        return self.backward(*arguments)


def attention_by(run, backward, blocks, scale, causal=False):
    """``attention(q, k, v) -> (out, lse)`` with a gradient, of a forward and a backward."""
    return lambda q, k, v: RecordedAttention.apply(q, k, v, blocks, scale, causal, True, Functions(run, backward))


def eager_attention(q, k, v, blocks, scale, causal):
    """Dense masked softmax attention in the inputs' own dtype, as plain torch code would write it."""
    group = q.shape[1] // k.shape[1]
    visible = token_mask(q, k, blocks, causal)
    scores = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.float(), -1)
    return weights @ v.repeat_interleave(group, 1), lse


def assert_as_exact_as_torch(attention, q, k, v, blocks, scale=None, causal=False, block=16, slack=1.0):
    """out, lse and all gradients of ``attention`` against float64: no worse than FACTOR times eager torch in the same dtype, plus rounding.

    Checked over whole tensors (largest error) and in every run of ``block`` rows (root mean square), so that one wrong block shows;
    ``slack`` times as much is allowed there.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=q.device)
    exact = attention_with_gradients(lambda q, k, v: reference_attention(q, k, v, blocks, scale, causal),
                                     *(x.double() for x in (q, k, v)), dout, dlse)
    eager = attention_with_gradients(lambda q, k, v: eager_attention(q, k, v, blocks, scale, causal), q, k, v, dout, dlse)
    mine = attention_with_gradients(attention, q, k, v, dout, dlse)
    for name, got, plain, truth in zip(("out", "lse", "dq", "dk", "dv"), mine, eager, exact):
        assert_no_worse(name, got, plain, truth, block, slack)


def assert_no_worse(name, got, plain, truth, block, slack=1.0):
    """``got`` is no farther from ``truth`` than FACTOR times ``plain`` is, plus rounding; as a whole and, of ``[B, H, S, D]``, in every run
    of ``block`` rows. ``[B, H, S]`` is a log-sum-exp, which is -inf in empty rows."""
    assert got.shape == truth.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(truth.shape)}"
    if got.dim() == 3:
        assert torch.equal(got == float("-inf"), truth == float("-inf")), f"{name} is -inf in other rows than the empty ones"
        got, plain, truth = (x.masked_fill(truth == float("-inf"), 0.0)[..., None] for x in (got, plain, truth))
    assert got.isfinite().all(), f"{name} is not finite at {_first(~got.isfinite())}"
    # Half a unit in the last place of the result, and of float32 for what is summed before it.
    rounding = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps * 16)
    error, allowed = (got.double() - truth).abs(), FACTOR * (plain.double() - truth).abs()
    worst = allowed.max() + rounding * truth.abs().max()
    assert error.max() <= worst, f"{name} is off by {error.max():.3e} at {_first(error == error.max())}; {worst:.3e} is allowed"
    error, allowed, size = (_block_rms(x if x.dim() == 4 else x.flatten()[None, None, :, None], block) for x in (error, allowed, truth))
    # A block's own rounding; of the typical block for those that cancel to nearly nothing.
    allowed = slack * (allowed + rounding * torch.maximum(size, size.mean()))
    wrong = error > allowed
    assert not wrong.any(), f"{name}: block {_first(wrong)} is off by {(error / allowed).max():.2f} of what is allowed"


def _block_rms(x, block):
    rows = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return rows.unflatten(2, (-1, block)).pow(2).mean((3, 4)).sqrt()


def _first(mask):
    return tuple(mask.nonzero()[0].tolist())
