"""LastRun: the last attention of one layer and its time, for reports."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssta import TokenLayout
from ssta.kernels import PatternFacts, Route, choose_backend, choose_route
from ssta.ranks import Sent
from ssta.report import heads_without_estimate, mass_summary
from ssta.result import ExactMass, LayerResult

from ..schedule.progress import is_fake
from .context import StepCount
from .report import ExchangeTimer, LayerRun, Stopwatch
from .streams import Operand


class _Run(NamedTuple):
    """A layer's last attention, for the report."""

    dense: bool
    backend: str | None  # of diffusers, where that attended
    route: Route | None  # of the library's kernels; None while torch.compile traces
    kind: tuple | None   # what the route follows from, where lists were attended to
    thw: tuple[int, int, int]
    tokens: int
    tiles: int | None
    counts: Tensor | None
    mass: ExactMass | None     # as in a LayerResult
    part: tuple[int, int, int, int] | None  # rank, ranks, own heads, all heads


class LastRun:
    """The last attention of one layer, and its last dense one.

    Attributes:
        exchange: times the exchanges between ranks.
    """

    def __init__(self) -> None:
        self.exchange = ExchangeTimer()
        self._stopwatch = Stopwatch()
        self._run: _Run | None = None
        self._dense: _Run | None = None

    def begins(self, device: torch.device) -> None:
        """Starts the time; where ranks send q, k and v, q's start is the last, and the one that counts."""
        if not torch.compiler.is_compiling():
            self._stopwatch.start(device)

    def ends(self, result: LayerResult | Tensor, backend: str | None, thw: tuple[int, int, int], layout: TokenLayout, dense: bool,
             query: Operand) -> None:
        """Stops the time, and keeps the values of a report. Counts of lists stay on the device until a report is wanted.

        Args:
            result: with ``out`` as ``[B, H, S, D]``; of a backend of diffusers that alone.
            backend: its name.
            thw: the canvas.
            layout: of the sequence.
            dense: whether the forward was, here.
            query: ``[B, H, S, D]``.
        """
        out, selection, route = (result, None, None) if isinstance(result, Tensor) else (result.out, result.selection, result.route)
        if not torch.compiler.is_compiling():
            self.exchange.note("returned")
            self._stopwatch.stop()
        blocks = None if selection is None else selection.blocks
        kind = None if blocks is None else (out.device, out.dtype, out.shape[3], PatternFacts.of(blocks))
        mass = None if dense or isinstance(result, Tensor) else result.mass
        tiles, counts = (None, None) if dense or blocks is None else (blocks.num_kv_blocks or blocks.num_q_blocks, blocks.counts)
        part = (query.shards.rank, query.shards.ranks, query.shape[1], query.heads) if isinstance(query, Sent) else None
        self._run = _Run(dense, backend, route, kind, thw, layout.length, tiles, counts, mass, part)
        if dense:
            self._dense = self._run

    def told(self, layer: str, impl: str, always_dense: bool, count: StepCount) -> LayerRun | None:
        """It under the name ``layer``; None if nothing ran, or only on fake tensors. Synchronises the device.

        Args:
            layer: the layer's name in the report.
            impl: which kernels were asked for.
            always_dense: whether the schedule keeps the layer dense.
            count: the model's steps.
        """
        run = self._run
        if run is None or run.counts is not None and is_fake(run.counts):
            return None
        route, name = _implementation(run, impl)
        density = 1.0 if run.counts is None or run.tiles is None else float(run.counts.double().mean()) / run.tiles
        # Nothing leaves a trace in a model that is compiled whole.
        steps, dense = (count.seen, count.seen if always_dense else count.dense) if count.seen else (None, None)
        masses = None if run.mass is None else run.mass.tensor()
        rank, ranks, own, heads = run.part or (0, 1, None, None)
        by: tuple[tuple[str, str], ...] = ()
        if not run.dense and not always_dense and run.kind is not None:
            device, dtype, dim, _ = run.kind
            by = choose_backend(impl, device, dtype, dim).names
        return LayerRun(
            layer, f"dense, {name}" if run.dense else name, run.thw, run.tokens, run.tiles, density, steps, dense,
            self._stopwatch.seconds(), () if route is None else route.explain(),
            exact_mass=None if masses is None else mass_summary(masses),
            without_estimate=None if masses is None else heads_without_estimate(masses),
            by=by, rank=rank, ranks=ranks, own_heads=own, heads=heads,
            exchange_seconds=None if run.part is None else self.exchange.seconds(),
            dense_by=None if self._dense is None else _implementation(self._dense, impl)[1])


def _implementation(run: _Run, impl: str) -> tuple[Route | None, str]:
    """The library's route, None where a backend of diffusers attended, and the name of either."""
    route = run.route
    if route is None and run.kind is not None:
        # Inside a compiled graph, which asked for the same when it ran.
        route = choose_route(impl, *run.kind)
    return route, (run.backend or "") if route is None else str(route)
