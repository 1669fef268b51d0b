"""What the tiles that were not selected are worth: an estimate of their part of attention, merged with the exact part by lse.

In words of ``kernels``, tiles are blocks; the formulas stand in ``kernels/eager/tail.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .kernels import BlockEstimates, add_tail, estimate_blocks, kernels_run, known_share

if TYPE_CHECKING:
    from .config import SSTAConfig
    from .kernels import BlockLists
    from .layout import TiledQKV, TileLayout


def estimate_tiles(tiled: TiledQKV, config: SSTAConfig, scale: float, useful: Tensor | None = None) -> BlockEstimates:
    """What the selection and the estimate need to know of a layer's N video tiles, of which there is at least one.

    Args:
        tiled: q, k and v in the order of the tiles.
        config: its compensation, which is not "none", and its parts.
        scale: factor on the scores.
        useful: ``BlockEstimates.useful`` of the call whose selection is attended to again.
    """
    q, layout = tiled.held_q(), tiled.layout
    return estimate_blocks(q, tiled.k, tiled.v, layout.offsets, layout.num_video_tiles, _longest(layout), scale=scale,
                           parts=config.compensation_parts, useful=useful, kernels=kernels_run(q))


def compensate(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, blocks: BlockLists, estimates: BlockEstimates,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the tiles that ``blocks`` leaves out estimated, from attention to those that it lists.

    Args:
        out: ``[B, H, P, D]`` in tiled order, over the listed tiles; may be written over where no gradient is asked for.
        lse: ``[B, H, P]``, float32 or float64, its log-sum-exp; likewise.
        q, k, v: ``[B, H, P, D]`` and ``[B, Hkv, P, D]``, those of ``estimates``.
        layout: the tiled order.
        blocks: the tiles that each tile attends to exactly.

    Returns:
        (out, lse), as the arguments of these names, differentiable in out, lse, q, k and v; rows that leave nothing out, and those of
        text, are the same bits as before. And ``[B, H, N]`` in lse's dtype, the share of the softmax that was computed exactly, mean of a
        query tile's rows, NaN where a head does without the estimate of what is left out; a constant.
    """
    out, lse, share = add_tail(out, lse, q, k, v, layout.offsets, layout.num_video_tiles, _longest(layout), blocks, estimates, scale=scale,
                               owned=True, kernels=kernels_run(q))
    return out, lse, known_share(share, blocks.counts, estimates.useful, layout.num_tiles)


def mass_summary(exact_mass: Tensor) -> tuple[float, float, float] | None:
    """Of shares ``[B, H, N]`` that were computed exactly: the mean, the 5th percentile over query tiles of all heads, and the mean of the
    worst head, leaving out heads without an estimate; None if all are. Synchronises the device."""
    shares = exact_mass.double().cpu()
    shares = shares[~shares.isnan().any(2)]
    if not shares.numel():
        return None
    lowest = shares.flatten().sort().values
    return float(shares.mean()), float(lowest[int(0.05 * (len(lowest) - 1))]), float(shares.mean(1).min())


def _longest(layout: TileLayout) -> int:
    return max([segment.longest_tile for segment in layout.video])
