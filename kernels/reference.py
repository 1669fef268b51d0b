"""The specification: dense masked softmax attention, a screen long. Tests and benchmarks import it; implementations never do."""

from __future__ import annotations

import torch
from torch import Tensor

from .block_forms import per_query_head
from .blocks import BlockLists
from .checks import without_autocast


def reference_attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, differentiable through plain autograd. Time and memory grow with Sq * Skv.

    Arguments and results as in ``block_sparse_attention``. Computes in float64 for float64 inputs and in float32 for all
    others, autocast or not; out comes back in q's dtype and lse in float32 (float64 for float64 inputs). That a NaN reaches just the
    rows that see it holds for out and lse; autograd spreads it in the gradients.
    """
    with without_autocast(q.device.type):
        return _attention(q, k, v, blocks, scale, causal)


def _attention(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    visible = token_mask(q, k, blocks, causal)
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)

    scores = (q.to(dtype) @ keys.mT) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)

    # A weight of zero times a NaN would be NaN: a value that is not finite reaches just the rows that see it.
    bad = ~values.isfinite()
    out = weights @ values.masked_fill(bad, 0.0) / total
    out = out.masked_fill(visible.to(dtype) @ bad.to(dtype) > 0, float("nan"))
    lse = (total.log() + top).masked_fill(empty, float("-inf")).squeeze(-1)
    return out.to(q.dtype), lse


def token_mask(q: Tensor, k: Tensor, blocks: BlockLists, causal: bool = False) -> Tensor:
    """bool ``[B, Hq, Sq, Skv]``: which query token sees which key token."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    q_block, q_real = _block_of(*blocks.q_bounds(q_len), batch, heads, q_len)
    kv_block, kv_real = _block_of(*blocks.kv_bounds(kv_len), batch, heads, kv_len)
    kept = torch.zeros(batch, heads, blocks.num_q_blocks, blocks.kv_bounds(kv_len)[0].shape[-1] + 1, dtype=torch.bool, device=q.device)
    used = torch.arange(blocks.capacity, device=q.device) < blocks.counts[..., None]
    used = used & (blocks.indices >= 0) & (blocks.indices < kept.shape[-1] - 1)
    kept.scatter_(-1, per_query_head(blocks.indices.where(used, kept.shape[-1] - 1), heads, batch).long(), True)
    rows = kept.gather(2, q_block[..., None].expand(-1, -1, -1, kept.shape[-1]))
    visible = rows.gather(3, kv_block[:, :, None].expand(-1, -1, q_len, -1))
    visible &= q_real[..., None] & kv_real[..., None, :]
    if causal:
        visible &= torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
    return visible


def _block_of(starts: Tensor, sizes: Tensor, batch: int, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Which block each token is in, int64 [batch, heads, tokens], and whether it is one of the block's real tokens."""
    starts, sizes = per_query_head(starts, heads, batch).contiguous(), per_query_head(sizes, heads, batch)
    position = torch.arange(tokens, dtype=torch.int32, device=starts.device).expand(batch, heads, -1)
    block = torch.searchsorted(starts, position.contiguous(), right=True) - 1
    real = (block >= 0) & (position < starts.gather(-1, block.clamp(min=0)) + sizes.gather(-1, block.clamp(min=0)))
    return block.clamp(min=0), real
