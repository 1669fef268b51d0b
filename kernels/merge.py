"""merge_attention: partial results of attention, each over its own keys, become the result over all their keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import DTYPES, check_tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over each of two or more disjoint sets of them: the mean of the parts weighted by exp(lse).

    Args:
        outs: the parts' results, ``[B, H, S, D]`` each, of one shape, dtype and device; float16, bfloat16, float32 or float64.
        lses: for each part the log-sum-exp of each row's scaled scores, natural logarithm, ``[B, H, S]``; float32, or float64 where outs
            are float64. A row of -inf says that the part has nothing for it, and what its out holds there is ignored.

    Returns:
        out with the parts' shape and dtype and the first one's memory order, computed in float32 (float64 for float64); and lse, like the
        parts'. A row that has nothing in any part gives out = 0, lse = -inf and zero gradients. NaN and inf stay in their row.

    Differentiable in outs and lses, any number of times: plain torch, which torch.compile and torch.func see through. Never waits for the
    device.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    _check(outs, lses)
    every = torch.stack(tuple(lses))
    lse_max = every.detach().amax(0)
    # Measured from 0, the weights of a row that has nothing are 0 instead of NaN.
    safe_max = torch.where(lse_max == float("-inf"), 0.0, lse_max)
    weights = torch.exp(every - safe_max)
    total = weights.sum(0)
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    out: Tensor | int = 0
    for x, lse, weight in zip(outs, lses, weights):
        out = out + x.to(every.dtype).masked_fill((lse == float("-inf"))[..., None], 0.0) * weight[..., None]
    merged = (out / divisor[..., None]).to(outs[0].dtype)
    return merged, (safe_max + divisor.log()).masked_fill(empty, float("-inf"))


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of tensors, got {type(parts).__name__}")
    if len(outs) < 2 or len(lses) != len(outs):
        raise ValueError(f"outs and lses must be two or more parts, as many of one as of the other, got {len(outs)} and {len(lses)}")
    check_tensor("outs[0]", outs[0], DTYPES, (None,) * 4, "[batch, heads, tokens, head_dim]", None)
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for i, (x, lse) in enumerate(zip(outs, lses)):
        check_tensor(f"outs[{i}]", x, (dtype,), shape, "[batch, heads, tokens, head_dim]", device)
        check_tensor(f"lses[{i}]", lse, (wide,), shape[:3], "[batch, heads, tokens]", device)
