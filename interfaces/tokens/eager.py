"""Attention that is decided token by token, in plain torch, with sums and maxima of its probabilities; the specification of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import BlockLists
from ...kernels.block_forms import per_query_head
from ...kernels.eager.steps import GATHER_ELEMENTS, attend, compute_dtype
from .lists import KeyLists, TokenLists


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
    if q.device.type == "cpu" and lists.counts is not None and lists.counts.numel():
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


def torch_within(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, soft_cap: float, mask: Tensor | None,
                 first_entry: Tensor | None, total: Tensor | None, packed: int) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``attention_within_blocks`` describes them; causal order where ``total``, the listed keys, is given.

    One query block of one head after the other. Reads the lists, so it synchronises where they are on a GPU.
    """
    batch, heads = q.shape[:2]
    group, dtype = heads // k.shape[1], compute_dtype(q)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    first_entry = torch.zeros_like(blocks.counts) if first_entry is None else first_entry
    fields = (blocks.counts, blocks.indices, first_entry, *blocks.q_bounds(q.shape[2]), *blocks.kv_bounds(k.shape[2]))
    counts, indices, firsts, q_starts, q_sizes, kv_starts, kv_sizes = [per_query_head(x, heads, batch).tolist() for x in fields]
    for b in range(batch):
        for h in range(heads):
            for i, count in enumerate(counts[b][h]):
                starts, sizes = kv_starts[b][h], kv_sizes[b][h]
                entries = [(e, x) for e, x in enumerate(indices[b][h][i][:max(count, 0)]) if 0 <= x < len(starts) and sizes[x] > 0]
                rows = slice(q_starts[b][h][i], q_starts[b][h][i] + q_sizes[b][h][i])
                if not entries or rows.stop <= rows.start:
                    continue
                tokens = (rows.stop - rows.start) // packed
                spans = [slice(starts[x], starts[x] + sizes[x]) for _, x in entries]
                key, value = (torch.cat([x[b, h // group, span] for span in spans]).to(dtype) for x in (k, v))
                scores = (q[b, h, rows].to(dtype) @ key.mT) * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                visible = torch.ones(tokens, len(key), dtype=torch.bool, device=q.device)
                if mask is not None:
                    visible = torch.cat([mask[firsts[b][h][i] + e, :tokens, :sizes[x]] for e, x in entries], 1)
                if total is not None:
                    visible = visible.tril(len(key) - tokens)
                visible = visible.repeat_interleave(packed, 0)
                part, row_lse = attend(scores, value, visible)
                out[b, h, rows], lse[b, h, rows] = part.to(q.dtype), row_lse
    return out, lse


def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float) -> Tensor:
    """See ``tokens.importance``; any floating-point inputs. ``firsts`` and ``seen`` are not needed: all rows are computed."""
    group = q.shape[1] // k.shape[1]
    queries = (q.float() * scale).unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
    row_lse = lse.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)[..., None]
    return torch.baddbmm(-row_lse, queries, k.permute(1, 2, 0).float()).exp_().unflatten(1, (-1, group)).sum(2)


def torch_pooling(q: Tensor, k: Tensor, scale: float, block_size: int, by_block: Tensor) -> Tensor:
    """Maxima of blocks per token, [Hq, L, ceil(L / block_size)] in q's dtype, of q [L, Hq, D] and k [L, Hkv, D] of one sequence;
    ``by_block`` [Hq, N, N] takes those per query block."""
    length, heads, _ = q.shape
    number = -(-length // block_size)
    keys = k.to(compute_dtype(q)).transpose(0, 1).repeat_interleave(heads // k.shape[1], 0)
    by_token = torch.zeros(heads, length, number, dtype=q.dtype, device=q.device)
    position = torch.arange(number * block_size, device=q.device)
    at_once = max(1, GATHER_ELEMENTS // max(heads * block_size * length, 1))
    for block in range(0, number, at_once):
        rows = slice(block * block_size, min((block + at_once) * block_size, length))
        past = min(block + at_once, number)
        scores = (q[rows].to(keys.dtype).transpose(0, 1) @ keys[:, :past * block_size].mT) * scale
        scores = torch.nn.functional.pad(scores, (0, past * block_size - scores.shape[-1]), value=float("-inf"))
        future = position[:past * block_size] > position[rows, None]
        peaks = scores.masked_fill(future, float("-inf")).softmax(-1).unflatten(-1, (past, block_size)).amax(-1)
        by_token[:, rows, :past] = peaks.to(q.dtype)
        peaks = torch.nn.functional.pad(peaks, (0, 0, 0, -peaks.shape[1] % block_size)).unflatten(1, (-1, block_size)).amax(2)
        by_block[:, block:past, :past] = peaks
    return by_token
