"""Block-sparse attention in plain torch: gather the listed keys of a few query blocks at a time, attend, move on.

Time grows with the selected blocks, and memory with those of a few query blocks. It runs wherever torch runs: the default on a CPU
and for float32 and float64. On a GPU, where reading the counts would wait for the device, a list costs its whole capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import BlockLists, per_query_head

# Elements of keys and scores gathered at once; 64 MiB of float32 stays inside what a laptop shrugs at.
GATHER_ELEMENTS = 1 << 24


class _Step(NamedTuple):
    """Some query blocks and everything that they attend to. G blocks of L query slots, each with n key slots."""

    q: Tensor          # [B, Hq, G, L, D], zero in unused slots
    k: Tensor          # [B, Hq, G, n, D], likewise
    v: Tensor          # [B, Hq, G, n, D], likewise
    q_position: Tensor # int64 [B, Hq, G, L]; Sq in unused slots
    k_position: Tensor # int64 [B, Hq, G, n]; Skv in unused slots
    visible: Tensor    # bool, broadcastable to [B, Hq, G, L, n]


def gather_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them."""
    # One row past the end takes what unused slots write.
    out = q.new_zeros(*q.shape[:2], q.shape[2] + 1, q.shape[3])
    lse = torch.full(out.shape[:3], float("-inf"), dtype=_compute_dtype(q), device=q.device)
    at = _head_grid(q)
    for step in _steps(q, k, v, blocks, causal):
        scores = (step.q @ step.k.mT).mul_(scale).masked_fill_(~step.visible, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == float("-inf"), 0.0, top)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        block_out = weights @ step.v
        if causal:
            # Zero times a NaN is NaN: a value that is not finite may reach just the rows that see it.
            bad = ~step.v.isfinite()
            seen = step.visible.to(step.v.dtype) @ bad.to(step.v.dtype) > 0
            block_out = torch.where(seen, float("nan"), weights @ step.v.masked_fill(bad, 0.0))
        out[(*at, step.q_position)] = (block_out / total).to(q.dtype)
        lse[(*at, step.q_position)] = (total.log() + top).masked_fill(empty, float("-inf")).squeeze(-1)
    return torch.empty_like(q).copy_(out[:, :, :-1]), lse[:, :, :-1].contiguous()


def gather_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    flipped: BlockLists | None, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). Recomputes the weights from lse. ``flipped`` is not needed here: the key gradients are scattered."""
    dtype = _compute_dtype(q)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = heads // kv_heads
    # The delta of Dao et al. 2022 (FlashAttention, appendix B.2), less the gradient that arrives through lse.
    delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    dq = torch.zeros(batch, heads, q_len + 1, dim, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(batch, kv_heads, kv_len + 1, dim, dtype=dtype, device=q.device) for _ in range(2))
    at, kv_at = _head_grid(q), _head_grid(k, dims=1)
    for step in _steps(q, k, v, blocks, causal):
        rows = (*at, step.q_position.clamp(max=q_len - 1))
        used = (step.q_position < q_len)[..., None]
        block_lse, block_delta = lse[rows][..., None].to(dtype), delta[rows][..., None]
        block_dout = dout[rows].to(dtype).masked_fill(~used, 0.0)
        weights = torch.exp((step.q @ step.k.mT).mul_(scale) - torch.where(block_lse == float("-inf"), 0.0, block_lse))
        weights = weights.masked_fill(~(step.visible & used & (block_lse != float("-inf"))), 0.0)
        dscores = weights * (block_dout @ step.v.mT - block_delta) * scale
        dscores = dscores.masked_fill(weights == 0, 0.0)
        dq[(*at, step.q_position)] = dscores @ step.k
        _add_to_keys(dk, dscores.mT @ step.q, step.k_position, kv_at, group)
        _add_to_keys(dv, weights.mT @ block_dout, step.k_position, kv_at, group)
    return tuple(torch.empty_like(x).copy_(grad[:, :, :-1]) for x, grad in ((q, dq), (k, dk), (v, dv)))


def _add_to_keys(total: Tensor, part: Tensor, position: Tensor, at: tuple[Tensor, Tensor], group: int) -> None:
    """total[b, h, position] += part, one query head of a group and one query block at a time: a list names a key block once, so no
    two additions meet and their order is fixed."""
    batch, heads, blocks, keys, dim = part.shape
    part = part.view(batch, heads // group, group, blocks, keys, dim)
    position = position.view(batch, heads // group, group, blocks, keys)
    for member in range(group):
        for block in range(blocks):
            where = (*at, position[:, :, member, block])
            total[where] = total[where] + part[:, :, member, block]


def _steps(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, causal: bool) -> Iterator[_Step]:
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype = _compute_dtype(q)
    counts, indices = (per_query_head(x, batch, heads) for x in (blocks.counts, blocks.indices))
    q_starts, q_sizes = (per_query_head(x, batch, heads) for x in blocks.q_bounds(q_len))
    kv_starts, kv_sizes = (per_query_head(x, batch, heads) for x in blocks.kv_bounds(kv_len))
    q_at = _head_grid(q)
    kv_at = (q_at[0], q_at[1] // (heads // kv_heads))
    q_slot = torch.arange(blocks.max_q_length, device=q.device)
    kv_slot = torch.arange(blocks.max_kv_length, device=q.device)
    for some, width in _groups(blocks, batch * heads * dim):
        if width == 0 or q_len == 0 or kv_len == 0:
            continue
        size = q_sizes[:, :, some, None]
        q_position = torch.where(q_slot < size, q_starts[:, :, some, None] + q_slot, q_len).long()
        ids = indices[:, :, some, :width]
        known = (torch.arange(width, device=q.device) < counts[:, :, some, None]) & (ids >= 0) & (ids < kv_starts.shape[-1])
        ids = ids.where(known, 0).long().flatten(2)
        start, size = kv_starts.gather(2, ids)[..., None], kv_sizes.gather(2, ids).where(known.flatten(2), 0)[..., None]
        k_position = torch.where(kv_slot < size, start + kv_slot, kv_len).long().reshape(batch, heads, q_position.shape[2], -1)
        q_used, k_used = q_position < q_len, k_position < kv_len
        visible = k_used[..., None, :]
        if causal:
            visible = visible & (k_position[..., None, :] <= q_position[..., None] + (kv_len - q_len))
        query = q[(*q_at, q_position.clamp(max=q_len - 1))].to(dtype).masked_fill(~q_used[..., None], 0.0)
        key, value = (x[(*kv_at, k_position.clamp(max=kv_len - 1))].to(dtype).masked_fill(~k_used[..., None], 0.0) for x in (k, v))
        yield _Step(query, key, value, q_position, k_position, visible)


def _groups(blocks: BlockLists, row: int) -> Iterator[tuple[slice, int]]:
    """Runs of query blocks that are gathered together, and the longest list among them. ``row`` is batch * heads * head_dim."""
    if blocks.device.type == "cpu":
        widths = blocks.counts.amax((0, 1)).clamp(0, blocks.capacity).tolist()
    else:
        widths = [blocks.capacity] * blocks.num_q_blocks
    first = 0
    while first < len(widths):
        last, width = first + 1, widths[first]
        while last < len(widths) and (last + 1 - first) * max(width, widths[last]) * blocks.max_kv_length * row <= GATHER_ELEMENTS:
            width = max(width, widths[last])
            last += 1
        yield slice(first, last), width
        first = last


def _head_grid(x: Tensor, dims: int = 2) -> tuple[Tensor, Tensor]:
    """Index tensors for x's batch and heads, with ``dims`` more dimensions to broadcast against."""
    batch = torch.arange(x.shape[0], device=x.device).view(-1, 1, *(1,) * dims)
    return batch, torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * dims)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
