"""Block-sparse attention in plain torch (impl="torch"): gather the listed keys of a few query blocks, attend, move on.

Time grows with the selected blocks, and memory with those of a few query blocks. It runs wherever torch runs: the default on a CPU
and for float32 and float64. On a GPU a list costs its whole capacity, because its count stays on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BlockLists
from .steps import attend, compute_dtype, from_rows, rows_of, steps


def torch_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, *, padded: bool | None = None
                  ) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them. ``padded``: see ``steps``."""
    dtype = compute_dtype(q)
    queries, keys, values = (rows_of(x, dtype) for x in (q, k, v))
    out, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:1], float("-inf"))
    for step in steps(q, k, blocks, causal, padded):
        scores = (step.of_queries(queries) * scale) @ step.of_keys(keys).mT
        if step.visible is not None and not causal:
            scores.masked_fill_(~step.visible, float("-inf"))
        part, row_lse = attend(scores, step.of_keys(values), step.visible if causal else None)
        step.write(out, part)
        step.write(lse, row_lse)
    return from_rows(out, q), lse[:-1].view(q.shape[:3])


def torch_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    scale: float, causal: bool, *, padded: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). Recomputes the weights from lse. ``padded``: see ``steps``."""
    dtype = compute_dtype(q)
    # The delta of Dao et al. 2022 (FlashAttention, appendix B.2), less the gradient that arrives through lse.
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype).masked_fill(lse == float("-inf"), 0.0)
    # Empty rows: their weights are exp(score - inf) = 0.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    queries, keys, values, douts, lse, delta = (rows_of(x, dtype) for x in (q, k, v, dout, lse, delta))
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
    for step in steps(q, k, blocks, causal, padded):
        query, key, step_dout = step.of_queries(queries) * scale, step.of_keys(keys), step.of_queries(douts)
        weights = (query @ key.mT).sub_(step.of_queries(lse)[..., None]).exp_()
        if step.visible is not None:
            weights.masked_fill_(~step.visible, 0.0)
        step.add_to_keys(dv, weights.mT @ step_dout)
        dscores = (step_dout @ step.of_keys(values).mT).sub_(step.of_queries(delta)[..., None]).mul_(weights)
        if step.visible is not None:
            # As in the forward: zero times a NaN is NaN. Where a pair sees one, its score is NaN already.
            dscores.masked_fill_(~step.visible, 0.0)
        if causal:
            query, key = (x.masked_fill(~x.isfinite(), 0.0) for x in (query, key))
        step.write(dq, (dscores @ key).mul_(scale))
        step.add_to_keys(dk, dscores.mT @ query)
    return from_rows(dq, q), from_rows(dk, k), from_rows(dv, v)
