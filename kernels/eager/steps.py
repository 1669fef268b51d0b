"""What the plain torch implementation iterates over: some query blocks at a time, with the keys that they attend to beside them.

On a CPU a step is one query block of one head with exactly its keys, which keeps the scores in the cache. On other devices, where
reading lengths and counts would wait for the device, a step is several blocks of all heads, padded to the longest list that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import BlockLists, per_query_head

# Elements of keys that a padded step gathers at once: 64 MiB of float32.
GATHER_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class ExactStep:
    """One query block of one head: q [L, D], k and v [n, D]; ``visible`` bool [L, n], or None where all is."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    rows: tuple[int, int, slice]
    spans: list[tuple[int, int]]
    kv_at: tuple[int, int]

    def read(self, x: Tensor) -> Tensor:
        """The step's rows of x [B, Hq, Sq, ...]."""
        return x[self.rows]

    def write(self, x: Tensor, part: Tensor) -> None:
        """x [B, Hq, Sq + 1, ...] takes ``part`` in the step's rows."""
        x[self.rows] = part

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """total [B, Hkv, Skv + 1, D] gains ``part`` in the step's keys."""
        for (first, last), piece in zip(self.spans, part.split([last - first for first, last in self.spans])):
            total[(*self.kv_at, slice(first, last))] += piece


@dataclass(frozen=True)
class PaddedStep:
    """G query blocks of all heads: q [B, Hq, G, L, D], k and v [B, Hq, G, n, D], zero in unused slots; ``visible`` as the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    q_position: Tensor  # int64 [B, Hq, G, L]; Sq in unused slots, where a spare row takes what is written
    k_position: Tensor  # int64 [B, Hq, G, n]; Skv in unused slots
    group: int          # query heads of a key/value head

    def read(self, x: Tensor) -> Tensor:
        """The step's rows of x [B, Hq, Sq, ...], zero in unused slots."""
        rows = x[(*_heads(x, 2), self.q_position.clamp(max=x.shape[2] - 1))]
        unused = self.q_position >= x.shape[2]
        return rows.masked_fill(unused[(...,) + (None,) * (rows.dim() - unused.dim())], 0.0)

    def write(self, x: Tensor, part: Tensor) -> None:
        """x [B, Hq, Sq + 1, ...] takes ``part`` in the step's rows."""
        x[(*_heads(x, 2), self.q_position)] = part

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """total [B, Hkv, Skv + 1, D] gains ``part`` in the step's keys.

        One query head of a group and one query block at a time: a list names a key block once, so no two additions meet and their
        order is fixed.
        """
        part, position = (x.unflatten(1, (-1, self.group)) for x in (part, self.k_position))
        for member in range(self.group):
            for block in range(part.shape[3]):
                where = (*_heads(total, 1), position[:, :, member, block])
                total[where] = total[where] + part[:, :, member, block]


def steps(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, causal: bool) -> Iterator[ExactStep | PaddedStep]:
    """Steps that together cover every query block with at least one key, in a fixed order; float32, or float64 for float64."""
    if not (q.numel() and k.numel()):
        return iter(())
    return _exact_steps(q, k, v, blocks, causal) if q.device.type == "cpu" else _padded_steps(q, k, v, blocks, causal)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, their sums [..., 1], lse [...]) of scores [..., n], over which the weights are written; a row of -inf alone has weights
    of 0, a sum of 1 and an lse of -inf."""
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(row_max == float("-inf"), 0.0, row_max)
    weights = scores.sub_(row_max).exp_()
    row_sum = weights.sum(-1, keepdim=True)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    return weights, row_sum, (row_sum.log() + row_max).masked_fill(empty, float("-inf")).squeeze(-1)


def read_lists(q: Tensor, k: Tensor, blocks: BlockLists) -> list[list]:
    """[counts, indices, first token and tokens of the query blocks, and of the key blocks], each nested by batch element and query head.

    Synchronises where they are on a GPU.
    """
    fields = (blocks.counts, blocks.indices, *blocks.q_bounds(q.shape[2]), *blocks.kv_bounds(k.shape[2]))
    return [per_query_head(x, q.shape[0], q.shape[1]).tolist() for x in fields]


def _exact_steps(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, causal: bool) -> Iterator[ExactStep]:
    batch, heads, q_len, _ = q.shape
    group, shift, dtype = heads // k.shape[1], k.shape[2] - q_len, compute_dtype(q)
    counts, indices, q_starts, q_sizes, kv_starts, kv_sizes = read_lists(q, k, blocks)
    for b in range(batch):
        for h in range(heads):
            for row, count in enumerate(counts[b][h]):
                first, size = q_starts[b][h][row], q_sizes[b][h][row]
                ids = [i for i in indices[b][h][row][:max(count, 0)] if 0 <= i < len(kv_starts[b][h])]
                spans = _spans((kv_starts[b][h][i], kv_sizes[b][h][i]) for i in sorted(ids))
                if size < 1 or not spans:
                    continue
                rows = (b, h, slice(first, first + size))
                key, value = (torch.cat([x[b, h // group, start:end] for start, end in spans]).to(dtype) for x in (k, v))
                visible = None
                if causal:
                    positions = torch.cat([torch.arange(start, end) for start, end in spans])
                    visible = positions <= torch.arange(first, first + size)[:, None] + shift
                yield ExactStep(q[rows].to(dtype), key, value, visible, rows, spans, (b, h // group))


def _spans(pieces: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of the runs that ascending (start, size) pieces form; neighbours become one."""
    spans: list[tuple[int, int]] = []
    for start, size in pieces:
        if size < 1:
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], start + size)
        else:
            spans.append((start, start + size))
    return spans


def _padded_steps(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, causal: bool) -> Iterator[PaddedStep]:
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype, width = compute_dtype(q), blocks.capacity
    if width == 0:
        return
    counts, indices = (per_query_head(x, batch, heads) for x in (blocks.counts, blocks.indices))
    q_starts, q_sizes = (per_query_head(x, batch, heads) for x in blocks.q_bounds(q_len))
    kv_starts, kv_sizes = (per_query_head(x, batch, heads) for x in blocks.kv_bounds(kv_len))
    q_at = _heads(q, 2)
    kv_at = (q_at[0], q_at[1] // (heads // kv_heads))
    # A bound that came from offsets of any values may lie far beyond the tensors.
    q_slot = torch.arange(min(blocks.max_q_length, q_len), device=q.device)
    kv_slot = torch.arange(min(blocks.max_kv_length, kv_len), device=q.device)
    at_once = max(1, GATHER_ELEMENTS // (batch * heads * dim * width * len(kv_slot)))
    for first in range(0, blocks.num_q_blocks, at_once):
        some = slice(first, first + at_once)
        q_position = torch.where(q_slot < q_sizes[:, :, some, None], q_starts[:, :, some, None] + q_slot, q_len).long()
        ids = indices[:, :, some]
        known = (torch.arange(width, device=q.device) < counts[:, :, some, None]) & (ids >= 0) & (ids < kv_starts.shape[-1])
        ids = ids.where(known, 0).long().flatten(2)
        start, size = kv_starts.gather(2, ids)[..., None], kv_sizes.gather(2, ids).where(known.flatten(2), 0)[..., None]
        k_position = torch.where(kv_slot < size, start + kv_slot, kv_len).long().reshape(batch, heads, q_position.shape[2], -1)
        visible = (k_position < kv_len)[..., None, :] & (q_position < q_len)[..., None]
        if causal:
            visible &= k_position[..., None, :] <= q_position[..., None] + (kv_len - q_len)
        unused = (k_position >= kv_len)[..., None]
        key, value = (x[(*kv_at, k_position.clamp(max=kv_len - 1))].to(dtype).masked_fill(unused, 0.0) for x in (k, v))
        query = q[(*q_at, q_position.clamp(max=q_len - 1))].to(dtype).masked_fill((q_position >= q_len)[..., None], 0.0)
        yield PaddedStep(query, key, value, visible, q_position, k_position, heads // kv_heads)


def _heads(x: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Index tensors for x's batch and heads, with ``dims`` more dimensions to broadcast against."""
    batch = torch.arange(x.shape[0], device=x.device).view(-1, 1, *(1,) * dims)
    return batch, torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * dims)
