"""Which tiles a tile attends to: the budget of best-scored tiles, united with the window and the text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .budget import checked_keep, row_counts, topk_counts
from .config import SSTAConfig
from .kernels import BlockLists, keep_blocks, select_blocks, topk_blocks, without_autocast
from .layout import TiledQKV, TileLayout
from .memo import remember
from .parallel import Exchanged
from .scoring import descriptors, tile_scores
from .text import TextMask
from .window import near, window_size


@dataclass(frozen=True, eq=False)
class Selection:
    """Which of the N video and M dense tiles each tile attends to, and what the budget's part in it was.

    Args:
        blocks: lists ``[B or 1, H or 1, N + M]``, of the window, the budget and the text together; the leading dimensions are 1 where
            nothing depends on them.
        scores: float32 ``[B, H, N, N]``, of key tiles (columns) for query tiles; H = 1 where heads share. None where no budget was asked
            for ("sta", or no video), or where scores were not to be kept.
        k_per_row: how many of the best scored each query tile got: an int, int32 ``[B, H, N]`` with a threshold, or with a density
            int32 ``[1, 1, N]``, how many of them beyond the window. None where a budget of the user's own chose, and where scores
            are None.
        own: bool ``[B, H, N, N]``, what a budget of the user's own kept; else None.
        apart: bool ``[N, N]``, the tiles that ``k_per_row`` leaves out of account, which with a density are those of the window; else None.
        useful: bool ``[B, H]``, the heads whose unselected tiles are estimated, which calls that attend to this selection again need not
            find out; None = all, or none where nothing is estimated.
    """

    blocks: BlockLists
    scores: Tensor | None = None
    k_per_row: int | Tensor | None = None
    own: Tensor | None = None
    apart: Tensor | None = None
    useful: Tensor | None = None

    @cached_property
    def kept(self) -> Tensor | None:
        """bool ``[B, H, N, N]``: the tiles that the budget kept, whether or not the window has them too, which with a density it does not;
        None where scores are."""
        if self.own is not None or self.scores is None or self.k_per_row is None:
            return self.own
        return topk_blocks(self.scores, self.k_per_row, self.apart)


def select_tiles(
    tiled: TiledQKV, config: SSTAConfig, text_mask: Tensor | TextMask | None = None, *, scores: Tensor | None = None,
    keep_scores: bool = True, exchanged: Exchanged | None = None,
) -> Selection:
    """The tiles that each tile attends to. Never waits for the device, and is never differentiated.

    Args:
        tiled: q and k in the order of a layout that was made with ``config``'s tiles and padding.
        config: without variants, which ``SSTAConfig.for_canvas`` resolves.
        text_mask: a TextMask, or what ``TextMask.of`` takes.
        scores: float32 ``[B, H, N, N]`` in place of those of descriptors: what "error" selects by, which ``BlockEstimates.scores`` gives.
        keep_scores: False frees the scores' memory; the Selection then has its ``blocks`` only.
        exchanged: the ranks that have the other heads, where heads are shared out.

    Raises:
        TypeError, ValueError: a text_mask that does not fit, or what a scorer or budget of the user's own returned.
        RuntimeError: ``tiled.q`` was released.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return select_tiles(tiled, config, text_mask, scores=scores, keep_scores=keep_scores, exchanged=exchanged)
    layout, q = tiled.layout, tiled.held_q()
    active = k_per_row = own = apart = None
    text = None if text_mask is None else TextMask.of(text_mask, q.shape[0], layout.tokens, q.device)
    if text is not None and (not layout.dense or layout.padding != "none"):
        active = text.active_tiles(layout) if layout.dense else None
        text = None
    # What is left of the text: the invalid tokens of a dense tile are neither attended to nor computed.
    chosen = config.selected_by != "sta" and layout.num_video_tiles > 0
    if not chosen and active is None:
        return Selection(window_lists(layout, config.kernel_thw, text))
    fixed = fixed_tiles(layout, config.kernel_thw, config.selected_by)
    if chosen:
        # Autocast would compute the scores in half precision.
        with without_autocast(q.device.type):
            scores = _scores(tiled, config, scores, exchanged)
            if config.budget is not None:
                own = checked_keep(config.budget, scores)
            elif config.density is None:
                k_per_row = topk_counts(scores, config.row_topk, config.threshold)
            else:
                apart = fixed.forced[:layout.num_video_tiles, :layout.num_video_tiles]
                k_per_row = row_counts(layout.tile_grids, fixed.window, config.density, layout.device)
    else:
        scores = None
    if scores is None or k_per_row is None:
        lists = keep_blocks(fixed.forced, own, active)
    else:
        lists = select_blocks(fixed.forced, scores, k_per_row, active, beyond=apart is not None)
    blocks = fixed.blocks.relisted(*lists) if text is None else text.relisted(fixed.blocks, *lists, layout)
    return Selection(blocks, scores, k_per_row, own, apart) if keep_scores else Selection(blocks)


def _scores(tiled: TiledQKV, config: SSTAConfig, given: Tensor | None, exchanged: Exchanged | None) -> Tensor:
    """float32 ``[B, H, N, N]``; H = 1 where heads share."""
    if given is not None:
        return given
    q_means, k_means = tiled.q_mean, tiled.k_mean
    if q_means is None or k_means is None or config.pool_cells is not None:
        q_means, k_means = (descriptors(x.detach(), tiled.layout, config.pool_cells) for x in (tiled.held_q(), tiled.k))
    if config.mask_share_within_head:
        if exchanged is not None:
            # The heads themselves and not their sums, so that the means are the same bits on all ranks and in one process.
            q_means, k_means = exchanged.all_heads(q_means, k_means)
        q_means, k_means = q_means.mean(1, keepdim=True), k_means.mean(1, keepdim=True)
    return tile_scores(q_means, k_means, config)


class FixedTiles(NamedTuple):
    """What does not depend on scores.

    Attributes:
        forced: bool ``[N + M, N + M]``: the window, every dense row and every dense column.
        blocks: the tiles as blocks, with empty lists.
        window: how many tiles of the window are forced for each tile of each video grid.
    """

    forced: Tensor
    blocks: BlockLists
    window: tuple[int, ...]


@remember(64)
def fixed_tiles(layout: TileLayout, kernel_thw: tuple[int, int, int], sparse_type: str) -> FixedTiles:
    keep = near(layout.tile_grids, kernel_thw, layout.device)
    window = tuple([window_size(grid, kernel_thw) for grid in layout.tile_grids])
    if sparse_type == "block_attn":
        keep, window = torch.zeros_like(keep), (0,) * len(window)
    forced = torch.nn.functional.pad(keep, (0, layout.num_dense_tiles, 0, layout.num_dense_tiles), value=True)
    counts = torch.zeros(1, 1, layout.num_tiles, dtype=torch.int32, device=layout.device)
    # Kernels find tiles of one length by arithmetic, and need less memory for their work.
    offsets, longest = layout.tile_length or layout.offsets, layout.max_tile_length
    blocks = BlockLists(counts, counts[..., None][..., :0], offsets, offsets, num_kv_blocks=layout.num_tiles, max_q_length=longest,
                        max_kv_length=longest)
    return FixedTiles(forced, blocks.covering(layout.num_slots), window)


def window_lists(layout: TileLayout, kernel_thw: tuple[int, int, int], text: TextMask | None = None) -> BlockLists:
    """Window and text alone, for all batch elements and heads at once; less the text that is not valid."""
    blocks = _window_lists(layout, kernel_thw)
    return blocks if text is None else text.relisted(blocks, blocks.counts, blocks.indices, layout)


@remember(64)
def _window_lists(layout: TileLayout, kernel_thw: tuple[int, int, int]) -> BlockLists:
    fixed = fixed_tiles(layout, kernel_thw, "sta")
    blocks = fixed.blocks.relisted(*select_blocks(fixed.forced, None))
    if not torch.compiler.is_compiling():
        # A backward pass would make the transpose later and keep it on these lists, perhaps in the memory of a CUDA graph being captured.
        blocks.transpose()
    return blocks
