"""Attention by TokenLists in plain torch: gather the listed keys of a few query tokens, attend, move on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....kernels.eager.steps import GATHER_ELEMENTS, attend, compute_dtype
from ..lists import KeyLists, TokenLists


def torch_tokens_forward(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``token_attention`` describes them."""
    dtype, group = compute_dtype(q), q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for some, rows, seen in _steps(q, k, v, lists):
        keys, values = _gather(k, rows, seen), _gather(v, rows, seen)
        scores = (_grouped(q[some], group).to(dtype) @ keys.mT) * scale
        scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
        part, row_lse = attend(scores, values)
        out[some] = part.flatten(1, 2).to(q.dtype)
        lse[some] = row_lse.flatten(1)
    return out, lse


def torch_tokens_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: TokenLists,
    inverse: KeyLists | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). ``inverse`` is not needed here: the key gradients are scattered, in a fixed order."""
    dtype, (heads, group) = compute_dtype(q), (k.shape[1], q.shape[1] // k.shape[1])
    # The delta of Dao et al. 2022 (FlashAttention, appendix B.2), less the gradient that arrives through lse.
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype).masked_fill(lse == float("-inf"), 0.0)
    # Empty rows: their weights are exp(score - inf) = 0.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    head = torch.arange(heads, device=q.device)[:, None]
    for some, rows, seen in _steps(q, k, v, lists):
        keys, values = _gather(k, rows, seen), _gather(v, rows, seen)
        queries, step_dout = (_grouped(x[some], group).to(dtype) for x in (q, dout))
        step_lse, step_delta = (_grouped(x[some], group)[..., None] for x in (lse, delta))
        weights = torch.exp((queries @ keys.mT) * scale - step_lse).masked_fill(~seen[:, :, None], 0.0)
        dscores = (weights * (step_dout @ values.mT - step_delta) * scale).masked_fill(~seen[:, :, None], 0.0)
        dq[some] = (dscores @ keys).flatten(1, 2).to(q.dtype)
        # Zero times a NaN is NaN: where the token sees the key, the weight is NaN already.
        queries = queries.masked_fill(~queries.isfinite(), 0.0)
        # index_put_ sums in the order of its indices, where index_add_ would use atomics on a GPU.
        where = (rows, head)
        dv.index_put_(where, (weights.mT @ step_dout).masked_fill(~seen[..., None], 0.0), accumulate=True)
        dk.index_put_(where, (dscores.mT @ queries).masked_fill(~seen[..., None], 0.0), accumulate=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _steps(q: Tensor, k: Tensor, v: Tensor, lists: TokenLists) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(query tokens, rows of k int64 [G, Hkv, n], which of them are seen, bool) of some tokens at a time."""
    tokens, size = q.shape[0], lists.block_size
    capacity = lists.ids.shape[2]
    if q.device.type == "cpu" and lists.counts is not None and lists.full is None and lists.counts.numel():
        # Reading it costs nothing where there is no device to wait for.
        capacity = min(capacity, int(lists.counts.max()))
    if not (tokens and k.numel() and capacity > 0):
        return
    within = torch.arange(size, device=q.device)
    used, spans = lists.used(), lists.token_spans()
    at_once = max(1, GATHER_ELEMENTS // (k.shape[1] * capacity * size * max(k.shape[2], v.shape[2])))
    for first in range(0, tokens, at_once):
        some = slice(first, first + at_once)
        origin, low, high = spans[some, :, None, None].long().unbind(1)
        ids = lists.ids[some, :, :capacity].long()
        known = used[some, :, :capacity] & (ids >= 0)
        keys = (ids[..., None] * size + within).flatten(2)
        seen = known.repeat_interleave(size, dim=2) & (keys >= low) & (keys < high)
        yield some, (origin + keys).where(seen, 0), seen


def _gather(x: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """[G, Hkv, n, D]: the rows of x [R, Hkv, D], zero where not seen."""
    rows_seen = x[rows, torch.arange(x.shape[1], device=x.device)[:, None]]
    return rows_seen.to(compute_dtype(x)).masked_fill(~seen[..., None], 0.0)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[G, Hq, ...] as [G, Hkv, query heads of a key/value head, ...]."""
    return x.unflatten(1, (-1, group))
