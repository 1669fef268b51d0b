"""Which video tiles are near a tile: the sliding window of SSTA."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor


def near(
    tile_grids: Sequence[tuple[int, int, int]], kernel_thw: tuple[int, int, int], device: torch.device | str = "cpu",
    kv_grids: Sequence[tuple[int, int, int]] | None = None, same: Sequence[int | None] | None = None,
) -> Tensor:
    """bool ``[N, K]``: True where the key tile (column) lies in the window of the query tile (row).

    Along an axis of n tiles with window k, the window of query tile a is centred at clip(a, k//2, n-1-k//2), as numpy clips (the
    upper bound wins when they cross), and reaches k//2 tiles to both sides. Windows shift inwards at a border rather than shrink, and
    never leave their own grid. N is the number of tiles of all grids, in their order; a grid's tiles are t-major, then h, then w.

    Args:
        tile_grids: tiles along (t, h, w) of each video grid of the queries.
        kernel_thw: the window in tiles.
        kv_grids: those of the keys, K tiles in all; None = the same.
        same: for each of tile_grids the number of the same grid among kv_grids; None = there is none, and so no window.
    """
    kv_grids = tile_grids if kv_grids is None else kv_grids
    same = range(len(tile_grids)) if same is None else same
    kv_first = list(accumulate([prod(grid) for grid in kv_grids], initial=0))
    mask = torch.zeros(sum([prod(grid) for grid in tile_grids]), kv_first[-1], dtype=torch.bool, device=device)
    first = 0
    for grid, of in zip(tile_grids, same):
        tiles = prod(grid)
        if of is not None:
            t, h, w = (_near_along(n, k, device) for n, k in zip(grid, kernel_thw))
            inside = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None, :]
            mask[first:first + tiles, kv_first[of]:kv_first[of] + tiles] = inside.reshape(tiles, tiles)
        first += tiles
    return mask


def window_size(tile_grid: tuple[int, int, int], kernel_thw: tuple[int, int, int]) -> int:
    """How many tiles ``near`` has for each tile of a grid of (t, h, w) tiles; they are as many for all."""
    return prod([min(n, 2 * (k // 2) + 1) for n, k in zip(tile_grid, kernel_thw)])


def _near_along(n: int, k: int, device: torch.device | str) -> Tensor:
    # Farther than the last tile there is nothing.
    tile, reach = torch.arange(n, device=device), min(k // 2, n)
    centre = tile.clamp(min=reach).clamp(max=n - 1 - reach)
    return (centre[:, None] - tile).abs() <= reach
