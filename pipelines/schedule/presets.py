"""Presets: how near to the dense video or how fast, by name, for every family: one table of densities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssta import SSTAConfig

from .schedule import Schedule

if TYPE_CHECKING:
    from ..patch.family import Family


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
# The fields that a preset takes from a variant for short videos.
_SHAPE = ("tile_thw", "kernel_thw", "sparse_type")


def preset_names(family: Family) -> tuple[str, ...]:
    """The presets that a family's models take: its own, then those that all have."""
    return *family.presets, *(name for name in PRESETS if name not in family.presets)


def preset_settings(family: Family, name: str) -> tuple[SSTAConfig, Schedule]:
    """The configuration and schedule that ``name`` stands for; a family's own preset comes before one that all families have."""
    if name in family.presets:
        made: Any = family.presets[name]()
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{family.model}'s preset {name!r} must return (SSTAConfig, Schedule), got {type(made).__name__}")
        return made
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, preset_names(family)))} for {family.model}, got {name!r}")
    return apply_preset(name, family.default_config()), family.default_schedule()


def apply_preset(name: str, default: SSTAConfig) -> SSTAConfig:
    """What one of ``PRESETS`` makes of a model's default configuration, whose tiles and window stay."""
    shapes = tuple([(frames, {field: value for field, value in dict(overrides).items() if field in _SHAPE})
                    for frames, overrides in default.variants])
    return SSTAConfig(tile_thw=default.tile_thw, kernel_thw=default.kernel_thw, sparse_type=default.sparse_type, density=PRESETS[name],
                      compensation="linear", compensation_parts=2, variants=shapes)
