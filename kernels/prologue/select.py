"""Which blocks to attend to by their descriptors: score_blocks compares them, pick_blocks makes lists of the best and of fixed ones."""

from __future__ import annotations

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


def pick_blocks(always: Tensor, scores: Tensor | None, limit: int | Tensor = 0, used: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lists of the blocks that are always kept, united with the best-scored ones: (counts, indices) of BlockLists, ids ascending.

    Args:
        always: bool ``[T, T]``; True keeps the block for all batch elements and heads.
        scores: float32 ``[B, H, N, N]`` of the first N of T blocks; None = no more than ``always``, with H = 1.
        limit: how many of the best-scored blocks each of the first N rows gets, at most N: an int or int32 ``[B, H, N]``. Of
            equal scores the first is better; NaN counts as -inf.
        used: bool ``[B, T]``. A block that is not used attends only to itself, and no other to it. With scores None it is
            required.

    Runs by Triton's kernel on a GPU, else in plain torch; the result is the same.
    """
    limits = limit if isinstance(limit, Tensor) else None
    if kernels_run(always):
        scores, used, limits = (None if x is None else x.contiguous() for x in (scores, used, limits))
        return _pick(always.contiguous(), scores, used, limits, 0 if limits is not None else limit)
    return _pick_in_torch(always, scores, used, limit)


def best_blocks(scores: Tensor, limit: int | Tensor) -> Tensor:
    """True at the ``limit`` best of each row of ``scores [..., N]``, as ``pick_blocks`` takes them: bool of their shape."""
    order = scores.masked_fill(scores.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(scores.shape[-1], device=scores.device)
    taken = rank < (limit[..., None] if isinstance(limit, Tensor) else limit)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, taken.expand(scores.shape))


def _pick_in_torch(always: Tensor, scores: Tensor | None, used: Tensor | None, limit: int | Tensor) -> tuple[Tensor, Tensor]:
    keep = always[None, None]
    if scores is not None:
        rest = len(always) - scores.shape[-1]
        keep = keep | torch.nn.functional.pad(best_blocks(scores, limit), (0, rest, 0, rest))
    if used is not None:
        both = used[:, None, :, None] & used[:, None, None, :]
        alone = torch.eye(len(always), dtype=torch.bool, device=always.device) & ~used[:, None, :, None]
        keep = keep & both | alone
    lists = BlockLists.from_mask(keep, 1, 1)
    return lists.counts, lists.indices


@operator("score_blocks", lambda q, k, lambda_, cosine: q.new_empty(*q.shape[:3], k.shape[2]))
def _score(q: Tensor, k: Tensor, lambda_: float, cosine: bool) -> Tensor:
    from .select_kernel import score

    return score(q, k, lambda_, cosine)


def _new_lists(always: Tensor, scores: Tensor | None, used: Tensor | None, limits: Tensor | None, limit: int) -> tuple[Tensor, Tensor]:
    blocks = len(always)
    batch, heads = (1 if used is None else used.shape[0], 1) if scores is None else scores.shape[:2]
    new = [always.new_empty(batch, heads, blocks, *shape, dtype=torch.int32) for shape in ((), (blocks,))]
    return new[0], new[1]


@operator("pick_blocks", _new_lists)
def _pick(always: Tensor, scores: Tensor | None, used: Tensor | None, limits: Tensor | None, limit: int) -> tuple[Tensor, Tensor]:
    from .select_kernel import pick

    counts, indices = _new_lists(always, scores, used, limits, limit)
    pick(always, scores, used, limits, limit, counts, indices)
    return counts, indices
