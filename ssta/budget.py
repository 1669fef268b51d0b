"""How many of the best-scored tiles each query tile gets: topk, a threshold, or a density."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .kernels import topk_blocks
from .memo import remember

# Constants of the threshold's budget in the published implementation of HunyuanVideo-1.5.
TEMPERATURE = 0.01
LEAST_TILES = 8
# Added to sums of fractions before they are cut off, so that whole numbers stay whole: far above the rounding of float64, far below a
# fraction that means something.
SLACK = 1e-6


def best(scores: Tensor, topk: int, threshold: float = 0.0) -> Tensor:
    """The budget: True at the best ``scores`` of each row, bool of their shape ``[..., N]``; of equal scores the first.

    Without threshold the ``topk`` best. With it as many of the best as bring the cumulative softmax of scores / 0.01 to ``threshold``, and
    ``topk`` where that is never reached; at least 8, at most ``topk``. At most N in any case. Of tiles whose softmax underflows the better
    scored come first; the published code leaves that to an unstable sort.
    """
    return topk_blocks(scores, topk_counts(scores, topk, threshold))


def topk_counts(scores: Tensor, topk: int, threshold: float) -> int | Tensor:
    """How many of the best tiles each row gets: an int, or int32 ``[...]`` with a threshold."""
    most = min(topk, scores.shape[-1])
    if threshold == 0:
        return most
    ranked = scores.sort(dim=-1, descending=True, stable=True).values
    reached = (ranked / TEMPERATURE).softmax(-1).cumsum(-1) >= threshold
    needed = reached.shape[-1] - reached.sum(-1) + 1
    return needed.clamp(min=LEAST_TILES, max=most).masked_fill(~reached.any(-1), most).int()


def row_level(grids: Sequence[tuple[int, int]], density: float) -> float:
    """The tiles of a row, such that rows with so many have ``density`` of all tile pairs, together with rows whose window is more.

    Args:
        grids: of each video grid (its tiles, the tiles in the window of each).
    """
    total = sum([tiles for tiles, _ in grids])
    left, rows = density * total * total, total
    for window, tiles in sorted([(window, tiles) for tiles, window in grids], reverse=True):
        if window * rows <= left:
            break
        left, rows = left - window * tiles, rows - tiles
    return left / rows if rows else 0.0


@remember(64)
def _row_counts(grids: tuple[tuple[int, int], ...], density: float, device: torch.device) -> Tensor:
    level, rows, counts = row_level(grids, density), 0, []
    for tiles, window in grids:
        if window > level + 1e-6:
            counts.append(torch.full((tiles,), max(window, 1) - window, dtype=torch.float64, device=device))
            continue
        bounds = (torch.arange(rows, rows + tiles + 1, dtype=torch.float64, device=device) * level + SLACK).floor()
        counts.append(bounds.diff().clamp(min=max(window, 1)) - window)
        rows += tiles
    return torch.cat(counts).int()[None, None]


def row_counts(
    tile_grids: Sequence[tuple[int, int, int]], window: Sequence[int], density: float, device: torch.device,
) -> Tensor:
    """How many tiles beyond its window each row gets, all heads alike: int32 ``[1, 1, N]``.

    Row i has floor((i + 1) K) - floor(i K) tiles in all, K = density x N; at least 1, at least its window. Where windows of some grids are
    more than K, the rows of the others get less, so that the density is met nevertheless.

    Args:
        tile_grids: tiles along (t, h, w) of each video grid, N in all.
        window: the tiles in the window of each tile of a grid.
    """
    return _row_counts(_sizes(tile_grids, window), density, device)


def checked_keep(budget: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """What a budget of the user's own keeps.

    Raises:
        TypeError, ValueError: what it returned does not fit.
    """
    keep = budget(scores)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"budget must return a bool tensor, got {getattr(keep, 'dtype', type(keep).__name__)}")
    if keep.shape != scores.shape:
        raise ValueError(f"budget must return the scores' shape {tuple(scores.shape)}, got {tuple(keep.shape)}")
    if keep.device != scores.device:
        raise ValueError(f"budget must return a tensor on the scores' device {scores.device}, got {keep.device}")
    return keep


def _sizes(tile_grids: Sequence[tuple[int, int, int]], window: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple([(t * h * w, inside) for (t, h, w), inside in zip(tile_grids, window)])
