"""Evaluation: what a comparison measured, with means, spreads and paired differences over the clips; prints as two tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..patch.report import aligned
from .measurement import Clip, Measurement, plain

# The measures that are compared pair by pair, and whether more is better.
METRICS = {"psnr": True, "ssim": True, "lpips": False, "latent_difference": False, "seconds": False}
_STYLES = {"psnr": ".2f", "ssim": ".4f", "lpips": ".4f", "latent_difference": ".2e", "seconds": ".3f", "speed_up": ".2f"}
_HEADS = {"psnr": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS", "latent_difference": "latents", "seconds": "s per step",
          "speed_up": "speed-up"}


@dataclass(frozen=True)
class Spread:
    """Numbers of several clips.

    Attributes:
        mean: over the clips; infinite where one of them is.
        deviation: standard deviation, of n - 1; None for a single clip or an infinite mean.
        error: standard error of the mean, deviation / sqrt(n).
        clips: how many.
    """

    mean: float
    deviation: float | None
    error: float | None
    clips: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        mean = sum(values) / len(values)
        if len(values) == 1 or not math.isfinite(mean):
            return cls(mean, None, None, len(values))
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        return cls(mean, deviation, deviation / math.sqrt(len(values)), len(values))

    def text(self, style: str, sign: str = "") -> str:
        return f"{self.mean:{sign}{style}}" + ("" if self.error is None else f" ± {self.error:{style}}")


@dataclass(frozen=True)
class Pair:
    """One metric of two configurations: ``first`` minus ``second`` on each clip that both have.

    Attributes:
        first, second: their names.
        metric: a name of ``METRICS``.
        difference: over the clips.
        better: on how many of them ``first`` is better; a draw is not.
    """

    first: str
    second: str
    metric: str
    difference: Spread
    better: int


@dataclass(frozen=True)
class Evaluation:
    """A comparison's outcome.

    Attributes:
        settings: what it was made with, as JSON: model, call, versions, device, configurations; see docs/evaluation.md.
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
        """As JSON holds it: the settings, every clip with what each configuration gave for it, means and paired differences with their
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
        """The table of configurations; then that of their differences; then what has to be said about them."""
        metrics = ("seconds", "speed_up", "latent_difference", "psnr", "ssim", "lpips")
        head = ["configuration", "dense steps by", "clips", "density", "exact mass (worst head)", *(_HEADS[metric] for metric in metrics)]
        rows = [head]
        for name, found in self.measurements.items():
            density, masses = self.spread(name, "density"), [m.exact_mass for m in found.values() if m.exact_mass is not None]
            mass = "-" if not masses else f"{sum(m[0] for m in masses) / len(masses):.1%} ({min(m[2] for m in masses):.1%})"
            dropped = [m.without_estimate for m in found.values() if m.without_estimate]
            if dropped:
                mass += f", {sum(dropped) / len(found):.1%} of heads without an estimate"
            dense = ", ".join(dict.fromkeys(kernel for m in found.values() for kernel in m.dense_kernels))
            rows.append([name, dense or "-", str(len(found)), "-" if density is None else f"{density.mean:.1%}", mass,
                         *(self._cell(name, metric) for metric in metrics)])
        parts = [aligned(rows, left=2)]
        pairs = {(pair.first, pair.second, pair.metric): pair for pair in self.pairs()}
        if pairs:
            table = [["paired difference", *(title for metric in METRICS for title in (_HEADS[metric], "better"))]]
            for first, second in dict.fromkeys(key[:2] for key in pairs):
                row = [f"({first}) - ({second})"]
                for metric in METRICS:
                    pair = pairs.get((first, second, metric))
                    row += ["-", "-"] if pair is None else [pair.difference.text(_STYLES[metric], "+"),
                                                            f"{pair.better} of {pair.difference.clips}"]
                table.append(row)
            parts.append(aligned(table))
        clips = max(map(len, self.measurements.values()))
        if clips > 1:
            parts.append("± is the standard error over the clips")
        for name in list(self.measurements)[1:]:
            values = self.values(name, "latent_difference")
            if values and self.settings["configurations"][name]["config"] is None and not any(values.values()):
                parts.append(f"{name} gave exactly what {self.reference} did: it ran the same kernels and is no noise floor")
        return "\n\n".join(parts)

    def _cell(self, name: str, metric: str) -> str:
        spread = self.spread(name, metric)
        return "-" if spread is None else spread.text(_STYLES[metric])
