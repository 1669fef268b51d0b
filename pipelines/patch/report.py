"""What ran: LayerRun and the table of them that ``SSTAHandle.report`` returns, and the stopwatches behind its times."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LayerRun:
    """What one layer ran last.

    Attributes:
        layer: the attention module's dotted name; in a pipeline after the transformer's.
        implementation: the kernels, as ``Route`` prints itself, which begins with the name ``block_sparse_attention`` has for them; after
            "dense, " where the layer attended densely, then that or the attention backend of diffusers.
        thw: the canvas, in tokens.
        tokens: length of the attended sequence, conditions included.
        tiles: how many tiles that makes, conditions included; None where it attended densely.
        density: fraction of the (query tile, key tile) pairs that were attended to.
        steps: denoising steps that the model has seen in the generation in progress or last finished; where no scheduler counts them,
            forwards since ``apply_ssta``. None under a torch.compile of the whole model, which leaves no trace.
        dense_steps: in how many of them the layer was dense.
        seconds: time of the last attention, from q, k and v to its output; None where it ran inside a compiled or captured graph.
        explanation: for each faster implementation that was not taken, why.
        exact_mass: share of the softmax mass that was computed exactly, an estimate carried the rest: the mean, the 5th percentile over
            (head, query tile) pairs, and the mean of the worst head, of the heads that have an estimate. None where none has, without
            compensation, and where it attended densely.
        without_estimate: (how many heads had no estimate, of how many), over the batch elements. What such a head does not compute exactly
            is dropped, and ``exact_mass`` leaves it out. None without compensation, and where it attended densely.
        by: (step, implementation) of the layer's other steps; empty where it attended densely.
        rank, ranks: which of how many ranks it ran on. Everything here is this rank's own; so a report on one of them waits for no other.
        own_heads, heads: how many heads it attended with there, of how many that the layer has; None on one rank.
        exchange_seconds: time in ``seconds`` that heads and tokens were exchanged for, waiting for other ranks included; None on one rank
            and where ``seconds`` is.
        dense_by: ``implementation``, without "dense, ", of the layer's last dense step; None before there was one.
    """

    layer: str
    implementation: str
    thw: tuple[int, int, int]
    tokens: int
    tiles: int | None
    density: float
    steps: int | None = None
    dense_steps: int | None = None
    seconds: float | None = None
    explanation: tuple[str, ...] = ()
    exact_mass: tuple[float, float, float] | None = None
    without_estimate: tuple[int, int] | None = None
    by: tuple[tuple[str, str], ...] = ()
    rank: int = 0
    ranks: int = 1
    own_heads: int | None = None
    heads: int | None = None
    exchange_seconds: float | None = None
    dense_by: str | None = None

    @property
    def where(self) -> str:
        """``implementation``, and on several ranks with how many heads it ran on which."""
        if self.ranks == 1:
            return self.implementation
        return f"{self.implementation}, {self.own_heads} of {self.heads} heads, rank {self.rank} of {self.ranks}"


class RunReport(list):
    """A list of ``LayerRun``, in the order of the layers, which prints as a table and, below it, why nothing faster ran."""

    def mean_density(self) -> float:
        """Attended share of the tile pairs, the mean over layers and over the steps that were seen, dense ones included.

        Raises:
            ValueError: no layer has run with SSTA yet.
        """
        if not self:
            raise ValueError("mean_density must come after a forward with SSTA, got a report of no layers")
        return sum(map(_mean_density, self)) / len(self)

    def exact_mass(self) -> tuple[float, float, float] | None:
        """``LayerRun.exact_mass`` over the layers: the mean, the lowest 5th percentile, and the worst head; None where no layer has it."""
        masses = [run.exact_mass for run in self if run.exact_mass is not None]
        if not masses:
            return None
        mean, fifth, worst = zip(*masses)
        return sum(mean) / len(mean), min(fifth), min(worst)

    def without_estimate(self) -> float | None:
        """``LayerRun.without_estimate`` as a share of all layers' heads; None where no layer has it."""
        heads = [run.without_estimate for run in self if run.without_estimate is not None]
        return sum(without for without, _ in heads) / sum(count for _, count in heads) if heads else None

    def __str__(self) -> str:
        if not self:
            return "no layer has run with SSTA yet"
        seconds = [run.seconds for run in self if run.seconds is not None]
        total = {"layer": "all, dense steps included", "density": f"{self.mean_density():.1%}", "ms": _ms(sum(seconds) or None)}
        lines = [*map(_cells, self), total]
        # Columns that only some configurations have are left out where they are empty.
        head = [name for name in lines[0] if name not in _OPTIONAL or any(line.get(name, "-") != "-" for line in lines)]
        rows = [tuple(head), *(tuple(line.get(name, "") for name in head) for line in lines)]
        legend = [f"{name}: {meaning}" for name, meaning in _LEGEND.items() if name in head]
        steps = dict.fromkeys("other steps of sparse layers: " + ", ".join([f"{step} by {name}" for step, name in run.by])
                              for run in self if run.by)
        return "\n".join([aligned(rows, left=3), *legend, *steps, *_reasons(self)])

    __repr__ = __str__


def _mean_density(run: LayerRun) -> float:
    """Over the steps that were seen, dense ones included."""
    if not run.steps or run.dense_steps is None:
        return run.density
    return (run.dense_steps + (run.steps - run.dense_steps) * run.density) / run.steps


# The meaning of columns, below the table.
_LEGEND = {"density": "share of the pairs of a layer's tiles that is computed exactly, conditions included",
           "exact mass": "share of the softmax that is computed exactly, the rest being estimated: mean / 5th percentile / worst head",
           "no estimate": "heads that look at single tokens; tiles that they do not compute are dropped"}
# Columns of the table that are left out where they are empty.
_OPTIONAL = ("exact mass", "no estimate", "exchange, ms")


def _reasons(runs: Sequence[LayerRun]) -> list[str]:
    """Why nothing faster ran: each reason once, with the names of the implementations."""
    kept: dict[tuple[str, str], dict[str, None]] = {}
    for run in runs:
        for reason in run.explanation:
            name, _, why = reason.partition(", which ")
            kept.setdefault((run.implementation.removeprefix("dense, "), why), {})[name] = None
    return [f"{ran}: {' and '.join(names)}{f', which {why}' if why else ''}" for (ran, why), names in kept.items()]


def _cells(run: LayerRun) -> dict[str, str]:
    return {
        "layer": run.layer, "implementation": run.where, "canvas": " x ".join(map(str, run.thw)), "tokens": f"{run.tokens:,}",
        "tiles": "-" if run.tiles is None else str(run.tiles), "density": f"{run.density:.1%}",
        "dense steps": "-" if run.steps is None else f"all {run.steps}" if run.dense_steps == run.steps else f"{run.dense_steps} of "
                                                                                                         f"{run.steps}",
        "exact mass": "-" if run.exact_mass is None else " / ".join(f"{100 * share:.0f} %" for share in run.exact_mass),
        "no estimate": "{} of {} heads".format(*run.without_estimate) if run.without_estimate and run.without_estimate[0] else "-",
        "ms": _ms(run.seconds), "exchange, ms": _ms(run.exchange_seconds)}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """One line a row; the first ``left`` columns begin at their left edge, the others, which are numbers, end at their right one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths)))
             for row in rows)
    return "\n".join(line.rstrip() for line in lines)


class Stopwatch:
    """Times what was done between ``start`` and ``stop`` on a device, each thread for itself, and only waits for it when asked."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._last: tuple[torch.device, Any, Any] | None = None

    def __reduce__(self) -> tuple:
        return Stopwatch, ()

    def start(self, device: torch.device) -> None:
        """Does nothing while a CUDA graph is captured, whose replays pass no Python."""
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._threads.begun = None if captured else (device, _now(device))
        self._last = None

    def stop(self) -> None:
        begun = getattr(self._threads, "begun", None)
        if begun is not None:
            self._last = *begun, _now(begun[0])

    def seconds(self) -> float | None:
        """The time that was stopped last; None if nothing was stopped since the last start. Waits for the device."""
        if self._last is None:
            return None
        device, start, stop = self._last
        if device.type != "cuda":
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class ExchangeTimer:
    """Times the exchange before attention from when q is sent, which is last and has nothing left to hide under, and the one after it."""

    def __init__(self) -> None:
        self._before, self._after = Stopwatch(), Stopwatch()
        self._device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        """That something is about to be sent."""
        if not torch.compiler.is_compiling():
            self._device = device
            self._before.start(device)

    def note(self, step: str) -> None:
        """That a step is launched: what was sent has "arrived", attention is over ("attended"), or heads have "returned"."""
        if torch.compiler.is_compiling():
            return
        if step == "arrived":
            self._before.stop()
        elif step == "attended":
            self._after.start(self._device)
        else:
            self._after.stop()

    def seconds(self) -> float | None:
        """Of both; None where nothing was exchanged, or inside a graph. Waits for the device."""
        before, after = self._before.seconds(), self._after.seconds()
        return None if before is None or after is None else before + after
