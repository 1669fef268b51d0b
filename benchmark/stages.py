"""The stages of an SSTA layer, and a stopwatch that times them inside a call of the layer.

The stopwatch stands in for the stages' functions while it runs. Ranges of torch.profiler in the library itself would cost every call of
every user microseconds a stage, even when nobody profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from measure import NO_TIMES, elapsed_ms, now, quartiles
from rows import STAGES

from ssta.layer import Layer
from ssta.ranks import Sent
from ssta.ranks import layer as on_ranks
from ssta.ranks.exchange import Incoming
from ssta.ranks.layer import Exchange

# Of STAGES the functions that each consists of, with the class or module in which the layer looks it up. What runs inside another stage's
# function counts for the inner one alone, so that "select" is the selection without its scores. On a GPU the means that are scored are made
# while tiling. The exchanges are those between ranks.
FUNCTIONS = {
    "tile": ((Layer, Layer.gather), (Exchange, Exchange.tiled)),
    "estimate": ((Layer, Layer.estimate),),
    "score": ((Layer, Layer.score),),
    "select": ((Layer, Layer.select),),
    "attend": ((Layer, Layer.attend),),
    "merge": ((Layer, Layer.merge),),
    "untile": ((Layer, Layer.take),),
    "exchange in": ((on_ranks, on_ranks.enter), (Incoming, Incoming.wait), (Sent, Sent.wait)),
    "exchange out": ((Exchange, Exchange.back),)}


class Stopwatch:
    """Called, it runs ``layer`` once and keeps what each stage took."""

    def __init__(self, layer: Callable[[], object]):
        self._layer = layer
        self._runs: list[list] = []

    def __call__(self) -> None:
        marks: list = []
        with timed_stages(marks):
            self._layer()
        self._runs.append(marks)

    def runs(self, rounds: int) -> list[dict[str, float]]:
        """Of each of the last ``rounds`` calls what its stages took, in milliseconds."""
        return [_alone(marks) for marks in self._runs[-rounds:]]

    def summary(self, rounds: int) -> dict[str, dict[str, object]]:
        """Stage -> the columns of ``measure.interleaved``, over the last ``rounds`` calls; what the host needs is not taken apart."""
        found: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for run in self.runs(rounds):
            for stage, ms in run.items():
                found[stage].append(ms)
        return {stage: {**NO_TIMES, **quartiles(times), "note": ""} for stage, times in found.items() if times}


@contextmanager
def timed_stages(marks: list) -> Iterator[None]:
    """Within it every stage's functions append (stage, depth, start, end) to ``marks``, inner ones first."""
    depth = 0

    def timed(stage: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal depth
            depth += 1
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                marks.append((stage, depth, start, now()))

        return call

    with ExitStack() as stack:
        for stage, functions in FUNCTIONS.items():
            for owner, function in functions:
                stack.enter_context(patch.object(owner, function.__name__, timed(stage, function)))
        yield


def _alone(marks: list) -> dict[str, float]:
    """Milliseconds of each stage without those of the stages inside it."""
    total: dict[str, float] = {}
    inside: dict[int, float] = {}
    for stage, depth, start, end in marks:
        ms = elapsed_ms(start, end)
        total[stage] = total.get(stage, 0.0) + ms - inside.pop(depth + 1, 0.0)
        inside[depth] = inside.get(depth, 0.0) + ms
    return total
