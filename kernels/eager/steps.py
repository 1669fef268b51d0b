"""What the plain torch implementation iterates over: some query blocks at a time, and where their keys are.

On a CPU a step is a few query blocks of as many tokens and as many keys, none of them padded. On other devices, where reading lengths and
counts would wait for the device, a step is several blocks of all heads, padded to the longest list that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block_forms import in_range, per_query_head, prefix_mask
from ..blocks import BlockLists

# Elements of keys that a padded step gathers at once: 64 MiB of float32.
GATHER_ELEMENTS = 1 << 24
# Elements of keys or of scores, whichever are more, that a step on a CPU has at once: 4 MiB of float32, which caches hold. Larger steps
# make threads meet less often, which counts where other programs take cores away, and take a fifth longer where none does.
CACHED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class RoundsStep:
    """R rounds of W query blocks each. Blocks of one round have no keys in common.

    Attributes:
        q_rows: int64 ``[R, W, L]``, where the blocks' tokens are in ``rows_of(q)``; the spare row in unused slots.
        k_rows: int64 ``[R, W, n]``, where their keys are in ``rows_of(k)``; likewise.
        visible: bool ``[R, W, L, n]``, or None where all is.
    """

    q_rows: Tensor
    k_rows: Tensor
    visible: Tensor | None

    def of_queries(self, x: Tensor) -> Tensor:
        """``[R, W, L, ...]``: the step's rows of x, which are those of q."""
        return x.index_select(0, self.q_rows.flatten()).unflatten(0, self.q_rows.shape)

    def of_keys(self, x: Tensor) -> Tensor:
        """``[R, W, n, ...]``, likewise."""
        return x.index_select(0, self.k_rows.flatten()).unflatten(0, self.k_rows.shape)

    def write(self, x: Tensor, part: Tensor) -> None:
        """x takes ``part`` ``[R, W, L, ...]`` in the step's rows."""
        x[self.q_rows] = part

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """total gains ``part`` ``[R, W, n, D]`` in the step's keys: one round after the other, so that the order of additions is fixed."""
        for rows, piece in zip(self.k_rows.flatten(1), part.flatten(1, 2)):
            total.index_add_(0, rows, piece)


def rows_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``[B * H * S + 1, ...]``: the rows of x ``[B, H, S, ...]``, and a spare one of zeros."""
    rows = torch.zeros(x.shape[:3].numel() + 1, *x.shape[3:], dtype=dtype or x.dtype, device=x.device)
    rows[:-1].view(x.shape).copy_(x)
    return rows


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The other way, with the shape, dtype and memory order of ``like``."""
    return torch.empty_like(like).copy_(rows[:-1].view(like.shape))


def steps(q: Tensor, k: Tensor, blocks: BlockLists, causal: bool, padded: bool | None = None) -> Iterator[RoundsStep]:
    """Steps that together cover every query block with at least one key, in a fixed order; ``padded`` to one size, so that no list is
    read: by default everywhere but on a CPU."""
    if not (q.numel() and k.numel() and blocks.capacity):
        return iter(())
    padded = q.device.type != "cpu" if padded is None else padded
    return (_padded_steps if padded else _exact_steps)(q, k, blocks, causal)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend(scores: Tensor, values: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(softmax(scores) @ values ``[..., L, D]``, lse ``[..., L]``) of scores ``[..., L, n]``; a row of -inf alone gives 0 and -inf.

    Where scores lack what is not ``visible`` and is masked here, a value that is not finite reaches just the rows that see it.
    """
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    top, weights = scores.amax(-1), scores.softmax(-1)
    empty = top == float("-inf")
    if visible is None:
        out = weights @ values
    else:
        # Zero times a NaN is NaN.
        bad = ~values.isfinite()
        out = (weights @ values.masked_fill(bad, 0.0)).masked_fill_(visible.to(scores.dtype) @ bad.to(scores.dtype) > 0, float("nan"))
    # The largest weight is one over the sum of e^(score - top).
    return out.masked_fill_(empty[..., None], 0.0), torch.where(empty, top, top - weights.amax(-1).log())


def _exact_steps(q: Tensor, k: Tensor, blocks: BlockLists, causal: bool) -> Iterator[RoundsStep]:
    q_first, q_sizes, k_first, k_sizes = _places(q, k, blocks)
    kinds, kind_of, number = torch.stack([q_sizes, k_sizes.sum(-1)]).unique(dim=1, return_inverse=True, return_counts=True)
    for (length, keys), alike in zip(kinds.mT.tolist(), kind_of.argsort(stable=True).split(number.tolist())):
        if not (length and keys):
            continue
        for some in alike.split(max(1, CACHED_ELEMENTS // (keys * max(length, k.shape[3])))):
            q_rows = q_first[some, None] + torch.arange(length, device=q.device)
            first, sizes = k_first[some].flatten(), k_sizes[some].flatten()
            k_rows = (first - sizes.cumsum(0) + sizes).repeat_interleave(sizes) + torch.arange(len(some) * keys, device=q.device)
            k_rows = k_rows.view(len(some), keys)
            yield RoundsStep(q_rows[:, None], k_rows[:, None], _past(q, k, q_rows, k_rows)[:, None] if causal else None)


def _padded_steps(q: Tensor, k: Tensor, blocks: BlockLists, causal: bool) -> Iterator[RoundsStep]:
    q_first, q_sizes, k_first, k_sizes = _places(q, k, blocks)
    # A bound that came from offsets of any values may lie far beyond the tensors.
    q_slot = torch.arange(min(blocks.max_q_length, q.shape[2]), device=q.device)
    k_slot = torch.arange(min(blocks.max_kv_length, k.shape[2]), device=q.device)
    # One query head of each group and one query block: a list names a key block once, so their keys are not the same.
    apart = torch.arange(len(q_first), device=q.device).view(q.shape[0], k.shape[1], -1, blocks.num_q_blocks).permute(2, 3, 0, 1)
    at_once = max(1, GATHER_ELEMENTS // (q.shape[:2].numel() * q.shape[3] * blocks.capacity * len(k_slot)))
    for some in apart.flatten(2).split(at_once, dim=1):
        some = some.flatten(0, 1)
        q_used, k_used = q_slot < q_sizes[some, None], (k_slot < k_sizes[some, :, None]).flatten(2)
        q_rows = (q_first[some, None] + q_slot).where(q_used, q.shape[:3].numel())
        k_rows = (k_first[some, :, None] + k_slot).flatten(2).where(k_used, k.shape[:3].numel())
        visible = q_used[..., None] & k_used[..., None, :]
        yield RoundsStep(q_rows, k_rows, visible & _past(q, k, q_rows, k_rows) if causal else visible)


def _places(q: Tensor, k: Tensor, blocks: BlockLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First row and number of tokens of each query block, int64 ``[B * Hq * Nq]``, and of each key block that it lists, ``[B * Hq * Nq,
    capacity]``, ids ascending and absent ones without tokens."""
    (batch, heads, q_len), (kv_heads, kv_len) = q.shape[:3], k.shape[1:3]
    counts, indices = (per_query_head(x, heads, batch) for x in (blocks.counts, blocks.indices))
    q_starts, q_sizes, kv_starts, kv_sizes = (per_query_head(x, heads, batch).long()
                                              for x in (*blocks.q_bounds(q_len), *blocks.kv_bounds(kv_len)))
    sequence = torch.arange(batch * heads, device=q.device).view(batch, heads, 1)
    listed = in_range(indices, prefix_mask(counts, blocks.capacity), kv_starts.shape[2])
    # Ids past the last have no tokens.
    ids = indices.where(listed, kv_starts.shape[2]).sort(-1).values.long().flatten(2)
    kv_first = kv_starts + sequence // (heads // kv_heads) * kv_len
    k_first, k_sizes = (torch.nn.functional.pad(x, (0, 1)).gather(2, ids).view(indices.shape).flatten(0, 2) for x in (kv_first, kv_sizes))
    return (q_starts + sequence * q_len).flatten(), q_sizes.flatten(), k_first, k_sizes


def _past(q: Tensor, k: Tensor, q_rows: Tensor, k_rows: Tensor) -> Tensor:
    """bool ``[..., L, n]``: which keys come no later than each query, where both sequences end together."""
    q_len, kv_len = q.shape[2], k.shape[2]
    return (k_rows % kv_len)[..., None, :] <= (q_rows % q_len)[..., None] + (kv_len - q_len)
