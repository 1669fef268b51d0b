"""Block-sparse attention in plain torch (impl="torch"): gather the listed keys of a few query blocks, attend, move on.

Time grows with the selected blocks, and memory with those of a few query blocks. It runs wherever torch runs: the default on a CPU
and for float32 and float64. On a GPU a list costs its whole capacity, because its count stays on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BlockLists
from .steps import compute_dtype, softmax, steps


def torch_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them."""
    # One row past the end takes what unused slots write.
    out = q.new_zeros(*q.shape[:2], q.shape[2] + 1, q.shape[3])
    lse = torch.full(out.shape[:3], float("-inf"), dtype=compute_dtype(q), device=q.device)
    for step in steps(q, k, v, blocks, causal):
        scores = (step.q @ step.k.mT).mul_(scale)
        if step.visible is not None:
            scores.masked_fill_(~step.visible, float("-inf"))
        weights, total, row_lse = softmax(scores)
        if causal and step.visible is not None:
            # Zero times a NaN is NaN: a value that is not finite may reach just the rows that see it.
            bad = ~step.v.isfinite()
            seen = step.visible.to(step.v.dtype) @ bad.to(step.v.dtype) > 0
            part = torch.where(seen, float("nan"), weights @ step.v.masked_fill(bad, 0.0))
        else:
            part = weights @ step.v
        step.write(out, (part / total).to(q.dtype))
        step.write(lse, row_lse)
    return torch.empty_like(q).copy_(out[:, :, :-1]), lse[:, :, :-1].contiguous()


def torch_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    flipped: BlockLists | None, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). Recomputes the weights from lse. ``flipped`` is not needed here: the key gradients are scattered."""
    dtype = compute_dtype(q)
    # The delta of Dao et al. 2022 (FlashAttention, appendix B.2), less the gradient that arrives through lse.
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype).masked_fill(lse == float("-inf"), 0.0)
    # Empty rows: their weights are exp(score - inf) = 0.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq, dk, dv = (torch.zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3], dtype=dtype, device=x.device) for x in (q, k, v))
    for step in steps(q, k, v, blocks, causal):
        weights = torch.exp((step.q @ step.k.mT).mul_(scale).sub_(step.read(lse)[..., None]))
        if step.visible is not None:
            weights.masked_fill_(~step.visible, 0.0)
        step_dout = step.read(dout).to(dtype)
        step.add_to_keys(dv, weights.mT @ step_dout)
        dscores = (step_dout @ step.v.mT).sub_(step.read(delta)[..., None]).mul_(weights).mul_(scale)
        query, key = step.q, step.k
        if step.visible is not None:
            # As in the forward: zero times a NaN is NaN. Where a pair sees one, its score is NaN already.
            dscores.masked_fill_(~step.visible, 0.0)
        if causal:
            query, key = (x.masked_fill(~x.isfinite(), 0.0) for x in (query, key))
        step.write(dq, dscores @ key)
        step.add_to_keys(dk, dscores.mT @ query)
    dq, dk, dv = (torch.empty_like(x).copy_(grad[:, :, :-1]) for x, grad in ((q, dq), (k, dk), (v, dv)))
    return dq, dk, dv
