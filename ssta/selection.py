"""Which tiles a tile attends to: the budget of best-scored tiles, united with the window and the dense runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .budget import Budget
from .kernels import BlockLists
from .kernels.memo import remember
from .layout import TileLayout
from .text import TextMask, tile_places, tile_starts
from .window import near, window_size

if TYPE_CHECKING:
    from .kernels import Backend


@dataclass(frozen=True, eq=False)
class Selection:
    """Which tiles each tile attends to.

    Args:
        blocks: lists ``[B or 1, H or 1, tiles]``, of the window, the budget and the dense runs together; the leading dimensions are 1 where
            nothing depends on them.
        useful: bool ``[B, H]``, the heads whose unselected tiles are estimated, which calls that attend to this selection again need not
            find out; None = all, or none where nothing is estimated.
    """

    blocks: BlockLists
    useful: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FixedTiles:
    """What of a layer's selection does not depend on its tensors' values. Made by ``fixed_tiles``.

    Attributes:
        tiles, kv_tiles: the queries' and the keys'.
        forced: bool ``[T, T']``: the window, every dense row and every dense column.
        blocks: the tiles as blocks, with empty lists.
        window: how many tiles of the window are forced for each tile of each video grid of the queries.
        lists: window and dense runs alone, for all batch elements and heads at once.
    """

    tiles: TileLayout
    kv_tiles: TileLayout
    forced: Tensor
    blocks: BlockLists
    window: tuple[int, ...]
    lists: BlockLists

    def chosen(self, backend: Backend, scores: Tensor | None, budget: Budget | None, room: int, active: Tensor | None,
               lengths: Tensor | None, useful: Tensor | None) -> Selection:
        """The selection that a budget makes of scores; without either nothing is chosen.

        Args:
            room: how many tiles a list has at most, as of the ``LayerSpec``.
            active, lengths: what is left of the dense runs, as ``text_lengths`` gives it.
            useful: as of the Selection.
        """
        if budget is None:
            lists = self.lists.counts, self.lists.indices
            if active is not None:
                lists = backend.select(self.forced, None, 0, active, False, room)
        elif budget.k_per_row is None:
            lists = backend.keep(self.forced, budget.own, active)
        else:
            lists = backend.select(self.forced, scores, budget.k_per_row, active, budget.beyond, room)
        return Selection(self.relisted(*lists, lengths), useful)

    def relisted(self, counts: Tensor, indices: Tensor, lengths: Tensor | None) -> BlockLists:
        """The tiles as blocks with these lists, less the keys past ``lengths``."""
        if lengths is None:
            return self.blocks.relisted(counts, indices)
        starts, tokens = tile_starts(self.kv_tiles, len(lengths)), self.kv_tiles.num_slots
        if self.tiles is not self.kv_tiles:
            return self.blocks.relisted(counts, indices, None, starts, tokens, kv_lengths=lengths)
        return self.blocks.relisted(counts, indices, lengths, starts, tokens)


@remember(64)
def fixed_tiles(tiles: TileLayout, kv_tiles: TileLayout, kernel_thw: tuple[int, int, int], selects: str) -> FixedTiles:
    """Those of queries in ``tiles`` and keys in ``kv_tiles``.

    A window stays inside a grid that both sequences have: their video grids are compared from the last one backwards, and one of the same
    (t, h, w) on both sides is the same grid. Tiles of another grid have no window.
    """
    grids, kv_grids = tiles.tokens.video, kv_tiles.tokens.video
    shift = len(kv_grids) - len(grids)
    same = [shift + i if shift + i >= 0 and kv_grids[shift + i].thw == grid.thw else None for i, grid in enumerate(grids)]
    if selects == "block_attn":
        same = [None] * len(grids)
    forced = torch.ones(tiles.num_tiles, kv_tiles.num_tiles, dtype=torch.bool, device=tiles.device)
    forced[:tiles.num_video_tiles, :kv_tiles.num_video_tiles] = near(tiles.tile_grids, kernel_thw, tiles.device, kv_tiles.tile_grids, same)
    window = tuple([0 if of is None else window_size(grid, kernel_thw) for grid, of in zip(tiles.tile_grids, same)])
    counts = torch.zeros(1, 1, tiles.num_tiles, dtype=torch.int32, device=tiles.device)
    # Kernels find tiles of one length by arithmetic, and need less memory for their work.
    blocks = BlockLists(counts, counts[..., None][..., :0], tiles.tile_length or tiles.offsets, kv_tiles.tile_length or kv_tiles.offsets,
                        num_kv_blocks=kv_tiles.num_tiles, max_q_length=tiles.max_tile_length, max_kv_length=kv_tiles.max_tile_length)
    blocks.covering(max(tiles.num_slots, kv_tiles.num_slots))
    every = BlockLists.from_mask(forced, 1, 1)
    return FixedTiles(tiles, kv_tiles, forced, blocks, window, blocks.relisted(every.counts, every.indices))


class Left(NamedTuple):
    """What a mask leaves of dense runs, as ``Backend.select`` and ``BlockLists`` take it: with padding a tile counts whole or not at all,
    without it the invalid tokens of a tile are neither attended to nor computed."""

    active: Tensor | None
    lengths: Tensor | None


def text_lengths(tiles: TileLayout, text_mask: TextMask | Tensor | None, backend: Backend) -> Left:
    """What a checked mask over ``tiles``' dense runs leaves of them; None = every token is valid."""
    if text_mask is None or not tiles.dense:
        return Left(None, None)
    whole = tiles.padding != "none"
    if isinstance(text_mask, TextMask):
        left = text_mask.left(tiles, backend)
    else:
        valid = text_mask if text_mask.dtype == torch.bool else text_mask != 0
        left = backend.valid_lengths(valid, *tile_places(tiles), tiles.lengths, int(whole))
    return Left(left, None) if whole else Left(None, left)
