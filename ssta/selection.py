"""Which tiles a tile attends to: the budget of best-scored tiles, united with the window and the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .config import SSTAConfig
from .kernels import BlockLists
from .layout import TileLayout
from .memo import remember
from .scoring import descriptors, importance, score_tiles, similarity
from .window import near

# Of the threshold's budget, as the published implementation of HunyuanVideo-1.5 has them.
TEMPERATURE = 0.01
LEAST_TILES = 8


@torch.no_grad()
def select_tiles(q: Tensor, k: Tensor, layout: TileLayout, config: SSTAConfig, text_mask: Tensor | None = None) -> BlockLists:
    """The tiles that each tile attends to, as lists over ``layout``'s N video and M dense tiles. Never waits for the device.

    Args:
        q: ``[B, H, P, D]`` in tiled order.
        k: ``[B, Hkv, P, D]`` in tiled order; H is a multiple of Hkv.
        layout: made with ``config``'s tiles and padding.
        config: without variants, which ``SSTAConfig.for_canvas`` resolves.
        text_mask: bool or integer ``[B, dense tokens]``, nonzero = valid, in each dense run the valid tokens first.

    Returns:
        Lists ``[B or 1, H or 1, N + M]``; the leading dimensions are 1 where nothing depends on them.

    Raises:
        TypeError, ValueError: a text_mask that does not fit, or what a scorer or budget of the user's own returned.
    """
    if text_mask is not None:
        check_text_mask(text_mask, q.shape[0], layout.tokens.dense_length, q.device)
    same_for_all = config.sparse_type == "sta" or not layout.num_video_tiles
    drops_tiles = text_mask is not None and layout.padding != "none"
    if same_for_all and not drops_tiles:
        lists = _window_lists(layout, config.kernel_thw)
    else:
        keep = _window(layout.tile_grids, config.kernel_thw, layout.device)[None, None]
        if not same_for_all:
            best_tiles = budget_mask(q, k, layout, config)
            keep = keep | best_tiles if config.sparse_type == "ssta" else best_tiles
        mask = _with_dense(keep, layout)
        lists = _lists(_without_tiles(mask, layout, text_mask) if drops_tiles else mask, layout)
    return lists if text_mask is None or drops_tiles else _with_lengths(lists, layout, text_mask)


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


def budget_mask(q: Tensor, k: Tensor, layout: TileLayout, config: SSTAConfig) -> Tensor:
    """What the budget alone gives to each video tile: bool ``[B, H, N, N]``, H = 1 where heads share. Arguments as in ``select_tiles``."""
    # Autocast would compute the scores in half precision.
    with torch.autocast(q.device.type, enabled=False):
        q_descriptors, k_descriptors = (descriptors(x.detach(), layout, config.pool_cells) for x in (q, k))
        if config.mask_share_within_head:
            q_descriptors, k_descriptors = q_descriptors.mean(1, keepdim=True), k_descriptors.mean(1, keepdim=True)
        else:
            k_descriptors = k_descriptors.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = score_tiles(q_descriptors, k_descriptors, _scorer(config))
        return _checked_keep(config.budget, scores) if config.budget else best(scores, config.topk, config.threshold)


def best(scores: Tensor, topk: int, threshold: float = 0.0) -> Tensor:
    """The budget: True at the best ``scores`` of each row, bool of their shape ``[..., N]``; of equal scores the first.

    Without threshold the ``topk`` best. With it as many of the best as bring the cumulative softmax of scores / 0.01 to ``threshold``, and
    ``topk`` where that is never reached; at least 8, at most ``topk``. At most N in any case.
    """
    limit = min(topk, scores.shape[-1])
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    if threshold > 0:
        reached = (ranked / TEMPERATURE).softmax(-1).cumsum(-1) >= threshold
        needed = reached.shape[-1] - reached.sum(-1, keepdim=True) + 1
        limit = needed.clamp(min=LEAST_TILES, max=limit).masked_fill(~reached.any(-1, keepdim=True), limit)
    taken = (rank < limit).expand(scores.shape)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, taken)


def _scorer(config: SSTAConfig) -> Callable[[Tensor, Tensor], Tensor]:
    if callable(config.sampling_type):
        return config.sampling_type
    return similarity if config.sampling_type == "similarity" else partial(importance, lambda_=config.lambda_)


def _checked_keep(budget: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    keep = budget(scores)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError(f"budget must return a bool tensor, got {getattr(keep, 'dtype', type(keep).__name__)}")
    if keep.shape != scores.shape:
        raise ValueError(f"budget must return the scores' shape {tuple(scores.shape)}, got {tuple(keep.shape)}")
    return keep


_window = remember(64)(near)


@remember(64)
def _window_lists(layout: TileLayout, kernel_thw: tuple[int, int, int]) -> BlockLists:
    """Window and text for all batch elements and heads at once."""
    keep = near(layout.tile_grids, kernel_thw, layout.device)[None, None]
    lists = _lists(_with_dense(keep, layout), layout)
    if not torch.compiler.is_compiling():
        # A backward pass would make the transpose later and keep it on these lists, perhaps in the memory of a CUDA graph being captured.
        lists.transpose()
    return lists


def _with_dense(keep: Tensor, layout: TileLayout) -> Tensor:
    """``[B, H, N, N]`` -> ``[B, H, N + M, N + M]``: every dense row and every dense column is kept."""
    return torch.nn.functional.pad(keep, (0, layout.num_dense_tiles, 0, layout.num_dense_tiles), value=True)


def _lists(mask: Tensor, layout: TileLayout) -> BlockLists:
    longest = layout.max_tile_length
    return BlockLists.from_mask(mask, layout.offsets, layout.offsets, max_q_length=longest, max_kv_length=longest)


def _valid_from(layout: TileLayout, text_mask: Tensor, least: int) -> Tensor:
    """int64 ``[B, M]``: the valid tokens from a dense tile's first one to its run's end, negative where they end before the tile.

    A run counts at least ``least`` valid tokens.
    """
    counts, first = [], 0
    for run in layout.dense:
        tokens, size = run.extent[2], run.tile[2]
        valid = (text_mask[:, first:first + tokens] != 0).sum(1, keepdim=True).clamp(min=least)
        counts.append(valid - torch.arange(0, tokens, size, device=layout.device))
        first += tokens
    return torch.cat(counts, 1) if counts else torch.zeros(text_mask.shape, dtype=torch.int64, device=layout.device)


def _with_lengths(lists: BlockLists, layout: TileLayout, text_mask: Tensor) -> BlockLists:
    """``lists`` in which the invalid tokens of a dense tile are neither attended to nor computed."""
    slots = layout.offsets.diff()
    valid = _valid_from(layout, text_mask, least=0).clamp(min=0)
    video = slots[:layout.num_video_tiles].expand(len(valid), -1)
    lengths = torch.cat([video, torch.minimum(valid, slots[layout.num_video_tiles:])], 1).int()[:, None]
    return replace(lists, q_lengths=lengths, kv_lengths=lengths)


def _without_tiles(mask: Tensor, layout: TileLayout, text_mask: Tensor) -> Tensor:
    """``mask`` in which a dense tile past its run's valid tokens attends only to itself, and nothing else to it."""
    used = _valid_from(layout, text_mask, least=1) > 0
    used = torch.nn.functional.pad(used, (layout.num_video_tiles, 0), value=True)
    both = used[:, None, :, None] & used[:, None, None, :]
    alone = torch.eye(layout.num_tiles, dtype=torch.bool, device=layout.device) & ~used[:, None, :, None]
    return mask & both | alone
