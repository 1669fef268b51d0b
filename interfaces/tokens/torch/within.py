"""Attention over blocks of which a token sees a part, in plain torch: one query block of one head after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels import BlockLists
from ....kernels.block_forms import per_query_head
from ....kernels.eager.steps import attend, compute_dtype


def torch_within(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, soft_cap: float, mask: Tensor | None,
                 first_entry: Tensor | None, total: Tensor | None, packed: int) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``attention_within_blocks`` describes them; causal order where ``total``, the listed keys, is given.

    One query block of one head after the other. Reads the lists, so it synchronises where they are on a GPU.
    """
    batch, heads = q.shape[:2]
    group, dtype = heads // k.shape[1], compute_dtype(q)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    fields = (blocks.counts, blocks.indices, *blocks.q_bounds(q.shape[2]), *blocks.kv_bounds(k.shape[2]))
    counts, indices, q_starts, q_sizes, kv_starts, kv_sizes = [per_query_head(x, heads, batch).tolist() for x in fields]
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
                    assert first_entry is not None
                    visible = torch.cat([mask[first_entry[i] + e, :tokens, :sizes[x]] for e, x in entries], 1)
                if total is not None:
                    visible = visible.tril(len(key) - tokens)
                visible = visible.repeat_interleave(packed, 0)
                part, row_lse = attend(scores, value, visible)
                out[b, h, rows], lse[b, h, rows] = part.to(q.dtype), row_lse
    return out, lse
