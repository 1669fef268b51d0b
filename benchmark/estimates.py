"""Other estimates of self-attention, as gate.py takes them by name: functions of q, k, v, the canvas and a density."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ssta import TokenLayout, tile_layout

TILE = (4, 4, 8)


def flex_top_tiles(q: Tensor, k: Tensor, v: Tensor, thw: tuple[int, int, int], density: float) -> Tensor:
    """What FlexAttention alone gives: of each tile's keys those whose mean is most like its mean query, and nothing of the others.

    Args:
        q, k, v: ``[B, H, S, D]`` over the canvas ``thw``, which TILE divides evenly.
        density: share of the tile pairs that is computed.

    Returns:
        ``[B, H, S, D]``.
    """
    tiles = tile_layout(TokenLayout.video_text(thw), TILE, "none", q.device)
    q, k, v = (tiles.tile(x) for x in (q, k, v))
    number = tiles.num_video_tiles
    mean_q, mean_k = (x.unflatten(2, (number, -1)).float().mean(3) for x in (q, k))
    best = (mean_q @ mean_k.mT).topk(max(1, round(density * number)), sorted=False).indices
    counts = torch.full(best.shape[:-1], best.shape[-1], dtype=torch.int32, device=q.device)
    whole = torch.nn.functional.pad(best.int(), (0, number - best.shape[-1]))
    size = q.shape[2] // number
    computed = torch.zeros(*best.shape[:-1], number, dtype=torch.bool, device=q.device).scatter_(-1, best, True)
    # Compiled, blocks that are whole never ask which pairs to leave out; eagerly that is all that counts.
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), torch.zeros_like(whole), counts, whole, size,
                                    mask_mod=lambda b, h, i, j: computed[b, h, i // size, j // size])
    return tiles.untile(_attention(q.is_cuda)(q, k, v, block_mask=mask))


@cache
def _attention(compiled: bool):
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
