"""Which blocks to attend to, in plain torch: the specification of the steps "score" and "select"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..block_forms import mask_lists


def importance(q_means: Tensor, k_means: Tensor, lambda_: float) -> Tensor:
    """Similarity against redundancy: ``[B, H, N, C]`` and ``[B, H, K, C]`` -> ``[B, H, N, K]``.

    With cosines mapped to [0, 1] by (x + 1) / 2: lambda * cos(q_a, k_b) - (1 - lambda) * mean over c != b of cos(k_c, k_b), the score of
    HunyuanVideo-1.5. A zero vector has cosine 0 with everything; a lone block has redundancy 0.
    """
    q, k = _unit(q_means), _unit(k_means)
    alike = (q @ k.mT + 1) / 2
    # The sum of cosines with all blocks is one product with the sum of their directions; the block's own is taken out again.
    others = k.shape[2] - 1
    cosines = ((k.sum(2, keepdim=True) - k) * k).sum(-1) / max(others, 1)
    redundancy = (cosines + 1) / 2 if others else torch.zeros_like(cosines)
    return lambda_ * alike - (1 - lambda_) * redundancy[..., None, :]


def finite_scores(q_means: Tensor, k_means: Tensor, scorer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``scorer``'s scores, float32 ``[B, H, N, K]``, from which NaN and inf in one block cannot spread to another.

    A mean that is not finite counts as zero. As a key block it scores -inf: it is taken only when nothing else is left. A score that is NaN
    counts as -inf too.

    Raises:
        TypeError, ValueError: what a scorer of the user's own returned does not fit.
    """
    q_finite, k_finite = q_means.isfinite().all(-1), k_means.isfinite().all(-1)
    q = q_means.masked_fill(~q_finite[..., None], 0)
    k = k_means.masked_fill(~k_finite[..., None], 0)
    scores = scorer(q, k)
    expected = (*q.shape[:3], k.shape[2])
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"sampling_type's scores must be a floating-point tensor, got {getattr(scores, 'dtype', type(scores).__name__)}")
    if tuple(scores.shape) != expected:
        raise ValueError(f"sampling_type's scores must have shape {expected}, got {tuple(scores.shape)}")
    if scores.device != q.device:
        raise ValueError(f"sampling_type's scores must be on the descriptors' device {q.device}, got {scores.device}")
    return scores.float().masked_fill(scores.isnan() | ~k_finite[..., None, :], -torch.inf)


def score(q_means: Tensor, k_means: Tensor, lambda_: float | None) -> Tensor:
    """See ``Backend.score``."""
    k_means = k_means.repeat_interleave(q_means.shape[1] // k_means.shape[1], 1)
    return finite_scores(q_means, k_means, lambda q, k: q @ k.mT if lambda_ is None else importance(q, k, lambda_))


def valid_lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
    """See ``Backend.valid_lengths``."""
    upto = torch.nn.functional.pad(valid.cumsum(1, dtype=torch.int32), (1, 0))
    first, last = (upto[:, end] for end in runs.long().unbind())
    return ((last - first).clamp(min=least) - before).clamp(min=0).minimum(lengths)[:, None]


def topk_blocks(scores: Tensor, k_per_row: int | Tensor, apart: Tensor | None = None) -> Tensor:
    """True at the ``k_per_row`` best of each row of ``scores [..., K]``, as ``select`` takes them: bool of their shape.

    ``apart``: bool, broadcast to the scores; True = neither taken nor counted.
    """
    order = scores.masked_fill(scores.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    number = k_per_row[..., None] if isinstance(k_per_row, Tensor) else k_per_row
    if apart is None:
        taken = torch.arange(scores.shape[-1], device=scores.device) < number
    else:
        free = ~apart.expand(scores.shape).gather(-1, order)
        taken = free & (free.cumsum(-1) <= number)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, taken.expand(scores.shape))


def keep_blocks(forced: Tensor, keep: Tensor | None, active: Tensor | None = None, room: int | None = None) -> tuple[Tensor, Tensor]:
    """``select`` with the blocks themselves in place of scores; does not wait for the device.

    Args:
        forced, active, room: as there; room None = all blocks.
        keep: bool ``[B, H, N, K]``, the kept ones among the first N query and K key blocks; None = no more than ``forced``.
    """
    kept = forced[None, None]
    if keep is not None:
        kept = kept | torch.nn.functional.pad(keep, (0, forced.shape[1] - keep.shape[-1], 0, forced.shape[0] - keep.shape[-2]))
    if active is not None:
        active = (active != 0).flatten(1)
        both = active[:, None, :, None] & active[:, None, None, :]
        alone = torch.eye(len(forced), dtype=torch.bool, device=forced.device) & ~active[:, None, :, None]
        kept = kept & both | alone
    return mask_lists(kept, room)


def select(forced: Tensor, scores: Tensor | None, k_per_row: int | Tensor, active: Tensor | None, beyond: bool, room: int
           ) -> tuple[Tensor, Tensor]:
    """See ``Backend.select``."""
    if scores is None:
        return keep_blocks(forced, None, active, room)
    apart = forced[:scores.shape[-2], :scores.shape[-1]] if beyond else None
    return keep_blocks(forced, topk_blocks(scores, k_per_row, apart), active, room)


def _unit(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1)
