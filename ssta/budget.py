"""How many of the best-scored tiles each query tile gets: topk, a threshold, a density, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .kernels.checks import check_tensor
from .kernels.memo import remember
from .window import window_size

if TYPE_CHECKING:
    from .config import SSTAConfig
    from .cut import Cut

# Constants of the threshold's budget in the published implementation of HunyuanVideo-1.5.
TEMPERATURE = 0.01
LEAST_TILES = 8
# Added to sums of fractions before they are cut off, so that whole numbers stay whole: far above the rounding of float64, far below a
# fraction that means something.
SLACK = 1e-6


class Budget(NamedTuple):
    """What a query tile gets.

    Attributes:
        k_per_row: how many of the best-scored tiles, as ``Backend.select`` takes it; None where ``own`` says which.
        own: bool ``[B, H, N, K]``, what a function of the user's own keeps; else None.
        beyond: whether k_per_row counts tiles outside the window.
    """

    k_per_row: int | Tensor | None
    own: Tensor | None = None
    beyond: bool = False


def budget_of(config: SSTAConfig, grids: tuple[tuple[int, int], ...], columns: int, device: torch.device) -> Callable[[Tensor], Budget]:
    """``config``'s budget: a function of scores, float32 ``[B, H, N, K]``. grids, columns: as ``row_counts`` takes them."""
    own, density = config.budget, config.density
    if own is not None:
        def kept(scores: Tensor) -> Budget:
            keep = own(scores)
            check_tensor("budget's result", keep, (torch.bool,), scores.shape, "[B, H, N, N]", scores.device)
            return Budget(None, keep)

        return kept
    if density is not None:
        fixed = Budget(row_counts(grids, density, columns, device), beyond=True)
        return lambda scores: fixed
    if config.threshold:
        return lambda scores: Budget(threshold_counts(scores, config.row_topk, config.threshold))
    best = Budget(min(config.row_topk, columns))
    return lambda scores: best


def most_tiles(config: SSTAConfig, cut: Cut, kv_cut: Cut) -> int:
    """How many tiles, with the window and the dense runs, a tile of ``cut`` is given at most of those of ``kv_cut``."""
    if config.budget is not None or cut.num_dense_tiles:
        return kv_cut.num_tiles
    window = 0 if config.selected_by == "block_attn" else max([window_size(grid, config.window) for grid in cut.tile_grids])
    if config.density is None:
        most = window + config.row_topk
    else:
        most = max(floor(config.density * kv_cut.num_video_tiles + SLACK) + 1, window)
    return min(most, kv_cut.num_video_tiles) + kv_cut.num_dense_tiles


def threshold_counts(scores: Tensor, topk: int, threshold: float) -> Tensor:
    """How many of the best tiles each row of ``scores [..., K]`` gets until their softmax reaches the threshold: int32 ``[...]``."""
    most = min(topk, scores.shape[-1])
    ranked = scores.sort(dim=-1, descending=True, stable=True).values
    reached = (ranked / TEMPERATURE).softmax(-1).cumsum(-1) >= threshold
    needed = reached.shape[-1] - reached.sum(-1) + 1
    return needed.clamp(min=LEAST_TILES, max=most).masked_fill(~reached.any(-1), most).int()


def counts_at(rows: Tensor, level: float | Tensor, window: int) -> Tensor:
    """Tiles beyond their window of consecutive rows that have ``level`` each in the mean, window included: float64 ``[N]``, whole numbers.
    ``rows``: float64 ``[N + 1]``, the rows' numbers, and the one after them."""
    bounds = (rows * level + SLACK).floor()
    return bounds.diff().clamp(min=max(window, 1)) - window


@remember(64)
def row_counts(grids: tuple[tuple[int, int], ...], density: float, columns: int, device: torch.device) -> Tensor:
    """How many tiles beyond its window each row gets, all heads alike: int32 ``[1, 1, N]``.

    Row i has floor((i + 1) L) - floor(i L) tiles in all, L = density x K; at least 1, at least its window. Where windows of some grids are
    more than L, the rows of the others get less, so that the density is met nevertheless.

    Args:
        grids: of each video grid of the queries (its tiles, N in all; the tiles in the window of each).
        columns: K, the keys' video tiles.
    """
    rows = sum([tiles for tiles, _ in grids])
    left = density * rows * columns
    for window, tiles in sorted([(window, tiles) for tiles, window in grids], reverse=True):
        if window * rows <= left:
            break
        left, rows = left - window * tiles, rows - tiles
    level, first, counts = left / rows if rows else 0.0, 0, []
    for tiles, window in grids:
        if window > level + SLACK:
            counts.append(torch.full((tiles,), max(window, 1) - window, dtype=torch.float64, device=device))
            continue
        counts.append(counts_at(torch.arange(first, first + tiles + 1, dtype=torch.float64, device=device), level, window))
        first += tiles
    return torch.cat(counts).int()[None, None]
