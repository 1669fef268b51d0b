"""Evaluation: a comparison's measurements, with means, spreads and paired differences over the clips; prints as two tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from ..patch.report import aligned
from .record import Clip, Measurement, plain

# The measures that are compared pair by pair, and whether more is better.
METRICS = {"psnr": True, "ssim": True, "lpips": False, "latent_difference": False, "seconds": False}
# The columns of numbers: their titles and formats.
_COLUMNS = {"seconds": ("s per step", ".3f"), "speed_up": ("speed-up", ".2f"), "latent_difference": ("latents", ".2e"),
            "psnr": ("PSNR, dB", ".2f"), "ssim": ("SSIM", ".4f"), "lpips": ("LPIPS", ".4f")}


@dataclass(frozen=True)
class Spread:
    """The mean of several clips' numbers, infinite where one of them is; their standard deviation (n - 1) and the mean's standard error,
    None for a single clip or an infinite mean; and how many clips they are."""

    mean: float
    deviation: float | None
    error: float | None
    clips: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        mean = fmean(values)
        if len(values) == 1 or not math.isfinite(mean):
            return cls(mean, None, None, len(values))
        deviation = stdev(values)
        return cls(mean, deviation, deviation / math.sqrt(len(values)), len(values))

    def text(self, style: str, sign: str = "") -> str:
        return f"{self.mean:{sign}{style}}" + ("" if self.error is None else f" ± {self.error:{style}}")


@dataclass(frozen=True)
class Pair:
    """One of ``METRICS`` for two configurations, by name: the ``difference``, first minus second, of the clips that both have, and on how
    many of them the first is ``better``; a draw is not."""

    first: str
    second: str
    metric: str
    difference: Spread
    better: int


@dataclass(frozen=True)
class Evaluation:
    """A comparison's outcome.

    Attributes:
        settings: as JSON: model, call, versions, device, configurations; see docs/evaluation.md.
        measurements: ``{configuration: {clip: Measurement}}``, the reference first.
    """

    settings: Mapping[str, Any]
    measurements: Mapping[str, Mapping[Clip, Measurement]]

    @property
    def reference(self) -> str:
        return next(iter(self.measurements))

    def values(self, name: str, metric: str) -> dict[Clip, float]:
        """By clip, a field of ``Measurement`` of configuration ``name``, or "speed_up": the reference's seconds over its own. Clips without
        are left out."""
        found = self.measurements[name]
        if metric == "speed_up":
            reference = self.measurements[self.reference]
            return {clip: reference[clip].seconds / measured.seconds for clip, measured in found.items() if clip in reference}
        return {clip: getattr(measured, metric) for clip, measured in found.items() if getattr(measured, metric) is not None}

    def spread(self, name: str, metric: str) -> Spread | None:
        return Spread.of(list(self.values(name, metric).values()))

    def pair(self, first: str, second: str, metric: str) -> Pair | None:
        """None where no clip has the metric for both."""
        one, other = self.values(first, metric), self.values(second, metric)
        # Equal first: inf - inf is not a number.
        differences = [0.0 if one[clip] == other[clip] else one[clip] - other[clip] for clip in one if clip in other]
        spread = Spread.of(differences)
        if spread is None:
            return None
        return Pair(first, second, metric, spread, sum(difference > 0 if METRICS[metric] else difference < 0 for difference in differences))

    def pairs(self) -> list[Pair]:
        """Every metric of every two configurations other than the reference, in their order."""
        others = list(self.measurements)[1:]
        found = [self.pair(first, second, metric) for first, second in combinations(others, 2) for metric in METRICS]
        return [pair for pair in found if pair is not None]

    def record(self) -> dict[str, Any]:
        """As JSON holds it: the settings, every clip with each configuration's measurement, means and paired differences with their
        spread; docs/evaluation.md documents every key."""
        clips: dict[Clip, dict[str, Any]] = {}
        for name, found in self.measurements.items():
            for clip, measured in found.items():
                clips.setdefault(clip, {})[name] = plain(measured)
        means = {name: {metric: plain(spread) for metric in (*METRICS, "speed_up", "density")
                        if (spread := self.spread(name, metric)) is not None} for name in self.measurements}
        return {**self.settings, "clips": [plain(clip) | {"results": results} for clip, results in clips.items()],
                "aggregates": means, "pairs": [plain(pair) for pair in self.pairs()]}

    def __str__(self) -> str:
        """The table of configurations, the table of their differences, and notes on both."""
        others = list(self.measurements)[1:]
        parts = [aligned([["configuration", "dense steps by", "clips", "density", "exact mass (worst head)",
                           *(title for title, _ in _COLUMNS.values())], *map(self._row, self.measurements)], left=2)]
        if len(others) > 1:
            parts.append(aligned([["paired difference", *(text for metric in METRICS for text in (_COLUMNS[metric][0], "better"))],
                                  *(self._differences(first, second) for first, second in combinations(others, 2))]))
        if max(map(len, self.measurements.values())) > 1:
            parts.append("± is the standard error over the clips")
        for name in others:
            values = self.values(name, "latent_difference")
            if values and self.settings["configurations"][name]["config"] is None and not any(values.values()):
                parts.append(f"{name} gave exactly what {self.reference} did: it ran the same kernels and is no noise floor")
        return "\n\n".join(parts)

    def _row(self, name: str) -> list[str]:
        clips = self.measurements[name].values()
        kernels = dict.fromkeys(kernel for measured in clips for kernel in measured.dense_kernels)
        density = self.spread(name, "density")
        masses = [measured.exact_mass for measured in clips if measured.exact_mass is not None]
        mass = f"{fmean(mean for mean, *_ in masses):.1%} ({min(worst for *_, worst in masses):.1%})" if masses else "-"
        dropped = sum(measured.without_estimate or 0 for measured in clips) / len(clips)
        if dropped:
            mass += f", {dropped:.1%} of heads without an estimate"
        spreads = [(self.spread(name, metric), style) for metric, (_, style) in _COLUMNS.items()]
        return [name, ", ".join(kernels) or "-", str(len(clips)), "-" if density is None else f"{density.mean:.1%}", mass,
                *("-" if spread is None else spread.text(style) for spread, style in spreads)]

    def _differences(self, first: str, second: str) -> list[str]:
        row = [f"({first}) - ({second})"]
        for metric in METRICS:
            pair = self.pair(first, second, metric)
            style = _COLUMNS[metric][1]
            row += ["-", "-"] if pair is None else [pair.difference.text(style, "+"), f"{pair.better} of {pair.difference.clips}"]
        return row
