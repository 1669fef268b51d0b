"""What models without published SSTA settings get: by default, and by name, how near to the dense video or how fast."""

from __future__ import annotations

from ssta import SSTAConfig

from .changes import changed
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


# Time is best spent on a second part of the estimate, then on density, and on dense steps last: on the noisiest steps attention is so
# diffuse that the estimate is nearly exact. benchmark/quality.md has what was measured; the decibels are means of a small model's three
# trainings, those for few steps of one that was trained for so few, and no promise about others. Of all configurations there none takes as
# little time and is more than 0.5 dB nearer to the dense video.
#
# By name the share of the video's tile pairs that is computed exactly, for weights that were trained densely. Tile, window and dense layers
# are the family's; the tiles that are left out are estimated in two parts each.
PRESETS: dict[str, float] = {
    "near": 0.30,      # to stay with the dense model's video: 43 dB from it
    "balanced": 0.15,  # the family's default: 35 dB
    "fast": 0.10,      # for drafts, and to choose among many seeds: 32 dB
    "8 steps": 0.15,   # for models distilled to about 8 steps, all sparse: the default's density, 47 dB
    "4 steps": 0.20,   # for 3 to 5 steps, all sparse; each is a larger part of the way, and time is short: 50 dB
}

# Names of those that families have of their own, which can be told without importing these.
OWN_PRESETS = ("hunyuan_video_15_sparse",)


def apply_preset(name: str, default: SSTAConfig) -> SSTAConfig:
    """What one of ``PRESETS`` makes of a model's default configuration, whose tiles and window stay."""
    return changed(default, density=PRESETS[name], compensation="linear", compensation_parts=2)
