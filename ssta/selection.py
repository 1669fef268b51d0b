"""Which tiles a tile attends to: the budget of best-scored tiles, united with the window and the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .config import SSTAConfig
from .kernels import BlockLists, select_blocks, topk_blocks
from .layout import TileLayout
from .memo import remember
from .scoring import descriptors, tile_scores
from .window import near

# Of the threshold's budget, as the published implementation of HunyuanVideo-1.5 has them.
TEMPERATURE = 0.01
LEAST_TILES = 8


@torch.no_grad()
def select_tiles(q: Tensor, k: Tensor, layout: TileLayout, config: SSTAConfig, text_mask: Tensor | None = None,
                 means: tuple[Tensor, Tensor] | None = None) -> BlockLists:
    """The tiles that each tile attends to, as lists over ``layout``'s N video and M dense tiles. Never waits for the device.

    Args:
        q: ``[B, H, P, D]`` in tiled order.
        k: ``[B, Hkv, P, D]`` in tiled order; H is a multiple of Hkv.
        layout: made with ``config``'s tiles and padding.
        config: without variants, which ``SSTAConfig.for_canvas`` resolves.
        text_mask: bool or integer ``[B, dense tokens]``, nonzero = valid, in each dense run the valid tokens first.
        means: of q's and k's video tiles, where ``TileLayout.tile_qkv`` has made them.

    Returns:
        Lists ``[B or 1, H or 1, N + M]``; the leading dimensions are 1 where nothing depends on them.

    Raises:
        TypeError, ValueError: a text_mask that does not fit, or what a scorer or budget of the user's own returned.
    """
    if text_mask is not None:
        check_text_mask(text_mask, q.shape[0], layout.tokens.dense_length, q.device)
    scores, k_per_row = None, 0
    if config.sparse_type != "sta" and layout.num_video_tiles:
        scores, k_per_row = budget(q, k, layout, config, means)
    masked = text_mask is not None and layout.dense
    lengths, active = None, None
    if masked and layout.padding == "none":
        # The invalid tokens of a dense tile are neither attended to nor computed.
        lengths = _reach(layout, text_mask, least=0).minimum(layout.lengths).clamp(min=0)[:, None]
    elif masked:
        active = _reach(layout, text_mask, least=1) > 0
    if scores is not None or active is not None:
        return _lists(*select_blocks(_forced(layout, config.kernel_thw, config.sparse_type), scores, k_per_row, active), layout, lengths)
    lists = _window_lists(layout, config.kernel_thw)
    return lists if lengths is None else replace(lists, q_lengths=lengths, kv_lengths=lengths)


def check_text_mask(text_mask: Tensor, batch: int, dense_length: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless ``text_mask`` is a bool or integer ``[batch, dense_length]`` on ``device``."""
    if not isinstance(text_mask, Tensor):
        raise TypeError(f"text_mask must be a bool or integer tensor, got {type(text_mask).__name__}")
    if text_mask.is_floating_point() or text_mask.is_complex():
        raise TypeError(f"text_mask must be bool or integer (nonzero = valid token), got {text_mask.dtype}")
    if tuple(text_mask.shape) != (batch, dense_length):
        raise ValueError(f"text_mask must be [batch, dense tokens] = {(batch, dense_length)}, got {tuple(text_mask.shape)}")
    if text_mask.device != device:
        raise ValueError(f"text_mask must be on query's device {device}, got {text_mask.device}")


def budget(q: Tensor, k: Tensor, layout: TileLayout, config: SSTAConfig,
           means: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, int | Tensor]:
    """(scores float32 ``[B, H, N, N]``, how many of the best each row gets: an int or int32 ``[B, H, N]``); H = 1 where heads share.

    Arguments as in ``select_tiles``.
    """
    # Autocast would compute the scores in half precision.
    with torch.autocast(q.device.type, enabled=False):
        if means is None or config.pool_cells is not None:
            means = tuple(descriptors(x.detach(), layout, config.pool_cells) for x in (q, k))
        if config.mask_share_within_head:
            means = tuple(x.mean(1, keepdim=True) for x in means)
        scores = tile_scores(*means, config)
        if config.budget is not None:
            keep = _checked_keep(config.budget, scores)
            return keep.float(), keep.sum(-1, dtype=torch.int32)
        return scores, _k_per_row(scores, config.topk, config.threshold)


def best(scores: Tensor, topk: int, threshold: float = 0.0) -> Tensor:
    """The budget: True at the best ``scores`` of each row, bool of their shape ``[..., N]``; of equal scores the first.

    Without threshold the ``topk`` best. With it as many of the best as bring the cumulative softmax of scores / 0.01 to ``threshold``, and
    ``topk`` where that is never reached; at least 8, at most ``topk``. At most N in any case.
    """
    return topk_blocks(scores, _k_per_row(scores, topk, threshold))


def _k_per_row(scores: Tensor, topk: int, threshold: float) -> int | Tensor:
    """How many of the best tiles each row gets: an int, or int32 ``[...]`` with a threshold."""
    most = min(topk, scores.shape[-1])
    if threshold == 0:
        return most
    ranked = scores.sort(dim=-1, descending=True, stable=True).values
    reached = (ranked / TEMPERATURE).softmax(-1).cumsum(-1) >= threshold
    needed = reached.shape[-1] - reached.sum(-1) + 1
    return needed.clamp(min=LEAST_TILES, max=most).masked_fill(~reached.any(-1), most).int()


def _checked_keep(budget: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    keep = budget(scores)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"budget must return a bool tensor, got {getattr(keep, 'dtype', type(keep).__name__)}")
    if keep.shape != scores.shape:
        raise ValueError(f"budget must return the scores' shape {tuple(scores.shape)}, got {tuple(keep.shape)}")
    return keep


@remember(64)
def _forced(layout: TileLayout, kernel_thw: tuple[int, int, int], sparse_type: str) -> Tensor:
    """What does not depend on scores, bool ``[N + M, N + M]``: the window, every dense row and every dense column."""
    keep = near(layout.tile_grids, kernel_thw, layout.device)
    if sparse_type == "block_attn":
        keep = torch.zeros_like(keep)
    return torch.nn.functional.pad(keep, (0, layout.num_dense_tiles, 0, layout.num_dense_tiles), value=True)


@remember(64)
def _window_lists(layout: TileLayout, kernel_thw: tuple[int, int, int]) -> BlockLists:
    """Window and text for all batch elements and heads at once."""
    lists = _lists(*select_blocks(_forced(layout, kernel_thw, "sta"), None), layout)
    if not torch.compiler.is_compiling():
        # A backward pass would make the transpose later and keep it on these lists, perhaps in the memory of a CUDA graph being captured.
        lists.transpose()
    return lists


def _lists(counts: Tensor, indices: Tensor, layout: TileLayout, lengths: Tensor | None = None) -> BlockLists:
    # Kernels find tiles of one length by arithmetic, and need less memory for their work.
    offsets, longest = layout.tile_length or layout.offsets, layout.max_tile_length
    return BlockLists(counts, indices, offsets, offsets, lengths, lengths, num_kv_blocks=layout.num_tiles,
                      max_q_length=longest, max_kv_length=longest)


@remember(64)
def _places(layout: TileLayout) -> tuple[Tensor, Tensor]:
    """For each tile the number of its dense run, int64 ``[N + M]``, and the run's tokens before it, int32; a video tile counts as one that
    stands far before the first run."""
    options = dict(device=layout.device, dtype=torch.int32)
    runs = [torch.zeros(layout.num_video_tiles, **options)]
    starts = [torch.full((layout.num_video_tiles,), -1 << 30, **options)]
    for number, run in enumerate(layout.dense):
        runs.append(torch.full((run.num_tiles,), number, **options))
        starts.append(torch.arange(0, run.extent[2], run.tile[2], **options))
    return torch.cat(runs).long(), torch.cat(starts)


def _reach(layout: TileLayout, text_mask: Tensor, least: int) -> Tensor:
    """int32 ``[B, N + M]``: the valid tokens from a dense tile's first one to its run's end, negative where they end before the tile; far
    beyond its length for a video tile. A run counts at least ``least`` valid tokens."""
    runs, starts = _places(layout)
    valid = text_mask if text_mask.dtype == torch.bool else text_mask != 0
    counts = [part.sum(1, keepdim=True, dtype=torch.int32) for part in valid.split([run.extent[2] for run in layout.dense], 1)]
    counts = torch.cat(counts, 1)[:, runs] if len(counts) > 1 else counts[0]
    return (counts.clamp(min=least) if least else counts) - starts
