"""ModelContext: what the processors of one model share; CallState: what belongs to one forward of it."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssta import SSTAConfig, TokenLayout
from ssta.kernels import warn_once

from .family import Family
from .progress import Generation, Progress, read
from .report import Stopwatch
from .schedule import Schedule


class CallState(NamedTuple):
    """One forward's own: its canvas in tokens, and whether its step is dense."""

    thw: tuple[int, int, int]
    dense_step: bool


@dataclass
class _Steps:
    """How many steps were seen, and were dense, in the generation in progress or last finished; where nothing counts, forwards."""

    seen: int = 0
    dense: int = 0
    generation: Generation | None = None
    index: int = -1

    def add(self, dense: bool, generation: Generation | None, index: int) -> None:
        if generation is not None:
            if generation is not self.generation:
                self.seen = self.dense = 0
                self.generation, self.index = generation, -1
            # Guidance may take several forwards in a step.
            if index == self.index:
                return
            self.index = index
        self.seen += 1
        self.dense += dense


class ModelContext:
    """What the processors of one model share: configuration, schedule, and the canvas and step of the forward in progress.

    Canvas and step belong to a forward, and a forward runs in one thread, so each thread has its own: one model may be called from several
    threads at once. (Not a context variable, because torch.compile reads a ``threading.local`` and guards it, and breaks its graph at the
    other.) They stay until the thread's next forward begins, because gradient checkpointing recomputes attention after the forward has
    returned. On a GPU autograd does that in a thread of its own, which takes those of the last forward that began anywhere. So with
    checkpointing, a forward's backward must come before another forward of another canvas or step: on a GPU in any thread, on a CPU
    in the same one.
    """

    def __init__(self, family: Family, config: SSTAConfig, schedule: Schedule, progress: Progress, impl: str) -> None:
        self.family = family
        self.config = config
        self.schedule = schedule
        self.impl = impl
        self.stopwatch = Stopwatch()
        # What `SSTAProcessor.around` gave: a forward asks for the same in every layer.
        self.layouts: dict[tuple, TokenLayout] = {}
        self._progress = progress
        self._steps = _Steps()
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._calls = threading.local()
        self._latest: CallState | None = None
        self._counting = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_calls", "_latest", "_counting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_calls()

    @property
    def call(self) -> CallState:
        """The state of this thread's forward.

        Raises:
            ValueError: there was no forward of the whole model.
        """
        state = getattr(self._calls, "state", None)
        if state is None:
            state = self._latest
            if state is None:
                raise ValueError("SSTA learns the canvas from a forward of the whole model, got a call of the attention without one before")
        return state

    @property
    def thw(self) -> tuple[int, int, int]:
        """The canvas (t, h, w), in tokens, of this thread's forward; raises as ``call`` does."""
        return self.call.thw

    @property
    def dense_step(self) -> bool:
        """Whether the step of this thread's forward is dense; False before there was one."""
        state = getattr(self._calls, "state", None) or self._latest
        return state is not None and state.dense_step

    @property
    def steps(self) -> int | None:
        """How many steps were seen, see ``LayerRun``; None where there was none, or nothing that leaves a trace."""
        return self._steps.seen or None

    @property
    def dense_steps(self) -> int:
        """How many of ``steps`` were dense."""
        return self._steps.dense

    def capture(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of the transformer: takes the canvas from the call, and finds the step."""
        arguments = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        thw, dense, schedule = self.family.canvas(model, arguments), False, self.schedule
        if schedule.follows_steps and torch.compiler.is_exporting():
            raise ValueError("schedule must not follow the steps under torch.export, which keeps the steps of one call, got "
                             f"dense_steps = {schedule.dense_steps}, dense_above = {schedule.dense_above}; apply SSTA with Schedule()")
        if schedule.follows_steps or not torch.compiler.is_compiling():
            dense = self._follow(arguments)
        self._calls.state = self._latest = CallState(thw, dense)

    def finish(self, model: nn.Module, args: tuple, output: object) -> None:
        """Forward hook of the transformer."""
        if not torch.compiler.is_compiling():
            self.stopwatch.stop()

    # Steps are counted outside of compiled graphs, which would be compiled anew for each of them.
    @torch.compiler.disable
    def _follow(self, arguments: dict) -> bool:
        """Counts the forward's step, and starts the stopwatch; whether the step is dense."""
        schedule, dense = self.schedule, False
        noise: Any = None
        timestep = arguments.get("timestep")
        step = self._progress.step(timestep)
        if step is None:
            if schedule.dense_steps:
                self._warn()
            if schedule.dense_above is not None:
                if timestep is None:
                    raise ValueError(f"{self.family.model} must be called with a timestep for schedule's dense_above, got none")
                noise = read(self._noise(timestep))
        else:
            dense = schedule.is_dense_step(step.position, step.total)
            if schedule.dense_above is not None:
                noise = self.family.noise(self._progress.timestep(step))
        dense = dense or noise is not None and noise > schedule.dense_above
        with self._counting:
            self._steps.add(dense, *((None, -1) if step is None else (step.generation, step.position)))
        self.stopwatch.start(next((value.device for value in arguments.values() if isinstance(value, Tensor)), torch.device("cpu")))
        return dense

    def _noise(self, timestep: Tensor | float) -> Tensor | float:
        if isinstance(timestep, bool) or not isinstance(timestep, (Tensor, int, float)):
            raise TypeError(f"timestep must be a tensor or a number for schedule's dense_above, got {type(timestep).__name__}")
        return self.family.noise(timestep)

    def _warn(self) -> None:
        counter = self._progress.scheduler
        warn_once(f"steps of {self.family.model}", f"schedule has dense_steps = {self.schedule.dense_steps}, but nothing says which step "
                  f"this forward of {self.family.model} is: neither its timestep, nor a pipeline, nor {type(counter).__name__}; no step is "
                  "dense for it. Call it from the pipeline that SSTA was applied to, or use a schedule with dense_above")
