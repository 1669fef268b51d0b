"""Presets: how near to the dense video or how fast, by name, for every family; one table of densities, warm-ups and compensation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ssta import SSTAConfig

from .schedule import Schedule

if TYPE_CHECKING:
    from ..patch.family import Family


@dataclass(frozen=True)
class Preset:
    """Settings for weights that were trained densely. Tile and window are the family's: its default's, which fit how many tokens it has.

    Attributes:
        density: share of the video's tile pairs that is computed exactly at the steps that are not dense.
        warm_up: first share of the steps that is dense. The first layers that the family keeps dense stay so.
        compensation: what the other tiles contribute.
        reason: why these.
    """

    density: float
    warm_up: float
    compensation: str
    reason: str


# All estimate the tiles that they leave out; without that, a small model's video is lost at any of these densities (18 to 22 dB from its
# dense one; benchmark/quality.md). A warm-up decides which video is made, so it is saved on last. The decibels are that model's,
# means of two trainings in tiles of 4 x 4 x 8; no promise about others.
PRESETS: dict[str, Preset] = {
    "near": Preset(density=0.30, warm_up=0.20, compensation="linear", reason=(
        "to stay with the dense model's video: 43 dB from it; most published methods keep the first fifth of the steps dense")),
    "balanced": Preset(density=0.15, warm_up=0.15, compensation="linear", reason=(
        "the family's default: 36 dB")),
    "fast": Preset(density=0.10, warm_up=0.10, compensation="linear", reason=(
        "32 dB; the warm-up is the shortest that published methods have")),
}
# The fields that a preset takes from a variant for short videos.
_SHAPE = ("tile_thw", "kernel_thw", "sparse_type")


def preset_names(family: Family) -> tuple[str, ...]:
    """The presets that a family's models take: its own, then those that all have."""
    return *family.presets, *(name for name in PRESETS if name not in family.presets)


def preset_settings(family: Family, name: str) -> tuple[SSTAConfig, Schedule]:
    """The configuration and schedule that ``name`` stands for; a family's own preset comes before one that all families have.

    Raises:
        TypeError: a preset of the family returns something else.
        ValueError: there is none of that name; the message names those there are.
    """
    if name in family.presets:
        made: Any = family.presets[name]()
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{family.model}'s preset {name!r} must return (SSTAConfig, Schedule), got {type(made).__name__}")
        return made
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, preset_names(family)))} for {family.model}, got {name!r}")
    return apply_preset(name, family.default_config(), family.default_schedule())


def apply_preset(name: str, default: SSTAConfig, schedule: Schedule) -> tuple[SSTAConfig, Schedule]:
    """What one of ``PRESETS`` makes of a model's default configuration and schedule, whose tiles, window and dense layers stay."""
    preset = PRESETS[name]
    shapes = tuple([(frames, {field: value for field, value in dict(overrides).items() if field in _SHAPE})
                    for frames, overrides in default.variants])
    config = SSTAConfig(tile_thw=default.tile_thw, kernel_thw=default.kernel_thw, sparse_type=default.sparse_type, density=preset.density,
                        compensation=preset.compensation, variants=shapes)
    return config, replace(schedule, dense_steps=preset.warm_up)
