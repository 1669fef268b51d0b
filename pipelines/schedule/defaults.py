"""What models without published SSTA settings get by default, whatever program runs them."""

from __future__ import annotations

from ssta import SSTAConfig

from .schedule import Schedule


def small_tiles() -> SSTAConfig:
    """For models without published SSTA settings: tiles of 128 tokens, of which 15 % of the pairs are computed exactly, those whose
    estimate is worst, and the rest estimated in two parts each, because such models were trained with all of it. A single frame has flat
    tiles of as many. A window would take up pairs that an estimate does well enough.

    Of all tiles, parts and densities of ``benchmark/quality.md`` none is nearer to a small model's dense videos in the same time.
    """
    return SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.15, compensation="linear",
                      compensation_parts=2, variants=((1, {"tile_thw": (1, 8, 16)}),))


def first_layer_dense() -> Schedule:
    """For the same models: their first layer is dense, as nearly all published methods have it, and no step is."""
    return Schedule(dense_layers=(0,))
