"""Which blocks to attend to by their descriptors: scores, how many each row gets, and lists of the best and the forced ones."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..blocks import BlockLists
from ..operators import kernels_run, operator


def score_blocks(q: Tensor, k: Tensor, lambda_: float | None = None) -> Tensor:
    """Scores of key blocks for query blocks, by Triton's kernels on a GPU: float32 ``[B, Hq, N, N]``.

    Args:
        q: float32 ``[B, Hq, N, C]``.
        k: float32 ``[B, Hkv, N, C]``; query head h is compared with key head h // (Hq / Hkv).
        lambda_: None scores by the dot product. A number scores by lambda * cos(q_a, k_b) - (1 - lambda) * mean over c != b of
            cos(k_c, k_b), cosines mapped to [0, 1] by (x + 1) / 2; a zero descriptor has cosine 0 with everything.

    A descriptor that is not finite counts as zero; as a key block it scores -inf.
    """
    return _score(q.contiguous(), k.contiguous(), float(lambda_ or 0), lambda_ is not None)


def select_blocks(
    forced: Tensor, scores: Tensor | None, k_per_row: int | Tensor = 0, active: Tensor | None = None, *, beyond: bool = False,
) -> tuple[Tensor, Tensor]:
    """Lists of the blocks that are forced, united with the best-scored ones: (counts, indices) of BlockLists, ids ascending.

    Args:
        forced: bool ``[T, T]``; True keeps the block for all batch elements and heads.
        scores: float32 ``[B, H, N, N]`` of the first N of T blocks; None = no more than ``forced``, with H = 1.
        k_per_row: how many of the best-scored blocks each of the first N rows gets, at most N: an int or int32 ``[B, H, N]``, or
            ``[1, 1, N]`` for all alike. Of equal scores the first is better; NaN counts as -inf.
        active: bool ``[B, T]``. A block that is not active attends only to itself, and no other to it. With scores None it is
            required.
        beyond: ``k_per_row`` counts blocks that are not forced, instead of the best whether they are forced or not.

    Runs by Triton's kernel on a GPU, else in plain torch; the result is the same.
    """
    per_row, k = (k_per_row, 0) if isinstance(k_per_row, Tensor) else (None, k_per_row)
    if kernels_run(forced):
        scores, active, per_row = (None if x is None else x.contiguous() for x in (scores, active, per_row))
        return _select(forced.contiguous(), scores, active, per_row, k, beyond)
    return _select_in_torch(forced, scores, active, k_per_row, beyond)


def topk_blocks(scores: Tensor, k_per_row: int | Tensor, apart: Tensor | None = None) -> Tensor:
    """True at the ``k_per_row`` best of each row of ``scores [..., N]``, as ``select_blocks`` takes them: bool of their shape.

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


def keep_blocks(forced: Tensor, keep: Tensor | None, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``select_blocks`` with the blocks themselves in place of scores; in plain torch, and without waiting for the device.

    Args:
        forced, active: as there.
        keep: bool ``[B, H, N, N]``, the kept ones of the first N blocks; None = no more than ``forced``.
    """
    kept = forced[None, None]
    if keep is not None:
        rest = len(forced) - keep.shape[-1]
        kept = kept | torch.nn.functional.pad(keep, (0, rest, 0, rest))
    if active is not None:
        both = active[:, None, :, None] & active[:, None, None, :]
        alone = torch.eye(len(forced), dtype=torch.bool, device=forced.device) & ~active[:, None, :, None]
        kept = kept & both | alone
    lists = BlockLists.from_mask(kept, 1, 1)
    return lists.counts, lists.indices


def _select_in_torch(
    forced: Tensor, scores: Tensor | None, active: Tensor | None, k_per_row: int | Tensor, beyond: bool = False,
) -> tuple[Tensor, Tensor]:
    if scores is None:
        return keep_blocks(forced, None, active)
    apart = forced[:scores.shape[-1], :scores.shape[-1]] if beyond else None
    return keep_blocks(forced, topk_blocks(scores, k_per_row, apart), active)


@lru_cache
def _kernels() -> ModuleType:
    """Loaded when first asked for, because triton is; an import in place of it would take half a microsecond of every call."""
    return import_module(".select_kernel", __package__)


@operator("score_blocks", lambda q, k, lambda_, cosine: q.new_empty(*q.shape[:3], k.shape[2]))
def _score(q: Tensor, k: Tensor, lambda_: float, cosine: bool) -> Tensor:
    return _kernels().score(q, k, lambda_, cosine)


def _new_lists(
    forced: Tensor, scores: Tensor | None, active: Tensor | None, per_row: Tensor | None, k: int, beyond: bool,
) -> tuple[Tensor, Tensor]:
    blocks = len(forced)
    batch, heads = (1 if active is None else active.shape[0], 1) if scores is None else scores.shape[:2]
    new = [forced.new_empty(batch, heads, blocks, *shape, dtype=torch.int32) for shape in ((), (blocks,))]
    return new[0], new[1]


@operator("select_blocks", _new_lists)
def _select(
    forced: Tensor, scores: Tensor | None, active: Tensor | None, per_row: Tensor | None, k: int, beyond: bool,
) -> tuple[Tensor, Tensor]:
    counts, indices = _new_lists(forced, scores, active, per_row, k, beyond)
    _kernels().select(forced, scores, active, per_row, k, beyond, counts, indices)
    return counts, indices
