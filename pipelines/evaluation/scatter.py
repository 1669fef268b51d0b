"""The picture of a comparison: each configuration's speed-up against what it changes in the video."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .table import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"lpips": "LPIPS against {} (less is better)", "psnr": "PSNR against {}, dB (more is better)",
         "latent_difference": "relative difference of the latents from {} (less is better)"}


def plot_evaluation(evaluation: Evaluation, path: str | Path | None = None) -> Figure:
    """Speed-up against LPIPS; where that was not measured against PSNR, and where nothing was decoded against the latents' difference. Bars
    are standard errors over the clips; what runs without SSTA is a line, the noise floor. Where that is far from all configurations, the
    axis ends before it, and words at the edge say where it is. A configuration that changed nothing has no place on an axis of dB, and is
    left out there.

    Args:
        evaluation: of at least one configuration besides the reference.
        path: where to save the figure as well; the ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no configuration has any such measure.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a scatter needs matplotlib, which is not installed: pip install matplotlib") from error
    others = list(evaluation.measurements)[1:]
    metric = next((name for name in _AXES if any(evaluation.values(other, name) for other in others)), None)
    if metric is None:
        raise ValueError("evaluation must have a configuration that was measured against the reference, got none")
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    points: list[float] = []
    floors: list[tuple[float, str, str]] = []
    for index, name in enumerate(others):
        quality, speed = evaluation.spread(name, metric), evaluation.spread(name, "speed_up")
        if quality is None or not math.isfinite(quality.mean):
            continue
        colour = f"C{index % 10}"
        if evaluation.settings["configurations"][name]["config"] is None:
            times = "" if speed is None else f" ({speed.mean:.2f} x)"
            axes.axvline(quality.mean, color=colour, linestyle="--", label=f"{name}{times}")
            floors.append((quality.mean, name, colour))
        elif speed is not None:
            points += [quality.mean - (quality.error or 0), quality.mean + (quality.error or 0)]
            axes.errorbar(quality.mean, speed.mean, xerr=quality.error, yerr=speed.error, fmt="o", color=colour, capsize=3, label=name)
    if points:
        _leave_out(axes, points, floors)
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_xlabel(_AXES[metric].format(evaluation.reference))
    axes.set_ylabel(f"speed-up over {evaluation.reference}, denoising")
    axes.legend(fontsize="small")
    axes.set_title(f"{evaluation.settings['model']}, {evaluation.settings['device']}", fontsize="small")
    if path is not None:
        figure.savefig(path)
    return figure


def _leave_out(axes: Axes, points: Sequence[float], floors: Sequence[tuple[float, str, str]]) -> None:
    """Ends the axis before floors (value, name, colour) whose distance from the points is more than twice the points' span."""
    low, high = min(points), max(points)
    span = max(high - low, 0.1 * abs(high))
    far = [floor for floor in floors if not low - 2 * span <= floor[0] <= high + 2 * span]
    if not far:
        return
    near = [value for value, *_ in floors if low - 2 * span <= value <= high + 2 * span]
    axes.set_xlim(min([low, *near]) - span / 4, max([high, *near]) + span / 4)
    for number, (value, name, colour) in enumerate(far):
        right = value > high
        arrow = "\u2192" if right else "\u2190"
        axes.text(0.99 if right else 0.01, 0.02 + 0.05 * number, f"{name}: {value:.3g} {arrow}", color=colour,
                  fontsize="small", ha="right" if right else "left", transform=axes.transAxes)
