"""ModelContext: what the processors of one model share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ssta import SSTAConfig, TokenLayout
from ssta.kernels.notices import warn_once

from ..schedule.changes import at_density
from ..schedule.progress import Progress, Step
from ..schedule.schedule import Schedule
from ..terms import CallState, Family, Ranks, Ruling
from .arguments import ArgumentNames

if TYPE_CHECKING:
    from ..ranks.parallel import Parallelism


@dataclass
class StepCount:
    """How many steps were seen and were dense in the generation in progress or last finished; where nothing counts, forwards."""

    seen: int = 0
    dense: int = 0
    last: Step | None = None

    def begins(self, step: Step) -> bool:
        """Whether a forward of ``step`` belongs to the first step of its generation, which may take several."""
        return self.last is None or step.generation is not self.last.generation or self.seen == 1 and step.position == self.last.position

    def add(self, dense: bool, step: Step | None) -> None:
        if step is not None:
            if self.last is None or step.generation is not self.last.generation:
                self.seen = self.dense = 0
            elif step.position == self.last.position:
                # Guidance may take several forwards in a step.
                return
            self.last = step
        self.seen += 1
        self.dense += dense


@contextmanager
def having(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it the attribute ``name`` of ``owner`` is ``value``; afterwards what it was, or None."""
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class ModelContext:
    """What the processors of one model share: configuration, schedule, and the canvas and step of the forward in progress.

    Canvas and step belong to a forward, and a forward runs in one thread, so each thread has its own: one model may be called from several
    threads at once. (Not a context variable, because torch.compile reads a ``threading.local`` and guards it, and breaks its graph at the
    other.) They stay until the thread's next forward begins, because gradient checkpointing recomputes attention after the forward has
    returned, on a GPU in a thread of autograd's. diffusers' default checkpointing is told each recomputation's own state
    (``recomputation``), and ``training.frozen_checkpoint`` keeps it. With any other function for checkpointing, a thread without a forward
    takes the state of the last one that began anywhere, so that a forward's backward must come before another forward of another canvas or
    step.
    """

    def __init__(self, model: nn.Module, family: Family, config: SSTAConfig, schedule: Schedule, progress: Progress, impl: str) -> None:
        self._names = ArgumentNames(model, family.model, family.canvas)
        self.family = family
        self.config = config
        self.schedule = schedule
        self.impl = impl
        # By layer: its own configuration, or `config`; None = the schedule keeps the layer dense.
        self.configs: tuple[SSTAConfig | None, ...] = ()
        # Whether every forward is dense: `training.set_density` was given nearly 1.
        self.always_dense = False
        # VSA or SLA, where layers have its trained branch, which stays beside attention to all tiles.
        self.method: str | None = None
        # Whether all ranks are asked, in each generation's first step, if they do the same.
        self.check_ranks = False
        # Layouts of sequences, each made once: the layers of a forward ask for the same ones.
        self.layouts: dict[tuple, TokenLayout] = {}
        self._parallel: Parallelism | None = None
        self._progress = progress
        self.count = StepCount()
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._calls = threading.local()
        self._latest: CallState | None = None
        self._counting = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_calls", "_latest", "_counting", "layouts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The layouts are known by process groups, which cannot be copied, and are made again.
        vars(self).update(state, layouts={})
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

    def state(self) -> CallState:
        """``call``, as a function."""
        return self.call

    @property
    def thw(self) -> tuple[int, int, int]:
        """The canvas (t, h, w), in tokens, of this thread's forward; raises as ``call`` does."""
        return self.call.thw

    def ruling(self, config: SSTAConfig | None) -> Ruling:
        """How a layer with ``config``, or with None, which is dense, attends in this thread's forward; raises as ``call`` does."""
        call = self.call
        if config is None:
            return call.dense_layers
        return call.ruling if call.ruling.dense or config is self.config else Ruling(False, config)

    def parallelism(self, model: nn.Module) -> Parallelism | None:
        """The model's part in diffusers' context parallelism; None while it has run on one rank only."""
        if self._parallel is None and getattr(model, "_parallel_config", None) is not None:
            self._parallel = self._made_parallel()
        return self._parallel

    @torch.compiler.disable
    def _made_parallel(self) -> Parallelism:
        # Not above: a model on one rank does not need the parts of diffusers that this file imports.
        from ..ranks.parallel import Parallelism

        return Parallelism(self.family, self.configs)

    def capture(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of the transformer: takes the canvas from the call, and finds the step."""
        arguments = self._names.by_name(args, kwargs)
        schedule, thw = self.schedule, self.family.canvas(model, arguments)
        if not isinstance(thw, (tuple, list)) or len(thw) != 3:
            raise TypeError(f"{self.family.model}'s Family.canvas must return (t, h, w), got {thw!r}")
        before = () if self.family.before is None else self.family.before(model, arguments, thw)
        parallel = self.parallelism(model)
        ranks = None if parallel is None else parallel.ranks(model, arguments, thw, sum([segment.length for segment in before]))
        if schedule.counts_steps and torch.compiler.is_exporting():
            raise ValueError("schedule must not follow the steps under torch.export, which keeps the steps of one call, got "
                             f"dense_steps = {schedule.dense_steps}, densities = {schedule.densities}; apply SSTA with Schedule()")
        # Forwards under `dense_forwards` are no steps of a generation.
        counted = not getattr(self._calls, "dense", False)
        dense, density = self.always_dense or not counted, None
        if counted and (schedule.counts_steps or not torch.compiler.is_compiling()):
            dense, density = self._follow(arguments, thw, ranks)
        self._calls.state = self._latest = CallState(thw, *self._rulings(dense, density), ranks, before)

    def dense_forwards(self) -> AbstractContextManager[None]:
        """Within it this thread's forwards are dense at every step, and reports do not count them."""
        return having(self._calls, "dense", True)

    def resumed(self, state: CallState) -> AbstractContextManager[None]:
        """Within it ``state`` is that of this thread's forward, which gradient checkpointing takes up again in whatever thread it likes."""
        return having(self._calls, "state", state)

    def _rulings(self, dense: bool, density: float | None) -> tuple[Ruling, Ruling]:
        """``ruling`` and ``dense_layers`` of a forward's ``CallState``. The schedule may have a ``density`` for its step."""
        config = self.config
        if self.method is not None:
            # Attention to all tiles, with the trained branch beside it, is no dense attention.
            every = at_density(config, 1.0)
            return Ruling(False, every if dense else config if density is None else at_density(config, density)), Ruling(False, every)
        return Ruling(dense, config if dense or density is None else at_density(config, density)), Ruling(True, config)

    # Steps are counted outside of compiled graphs, which would be compiled anew for each of them.
    @torch.compiler.disable
    def _follow(self, arguments: dict, thw: tuple[int, int, int], ranks: Ranks | None) -> tuple[bool, float | None]:
        """Counts the forward's step; whether it is dense, and the density that the schedule has for it."""
        schedule, dense, density = self.schedule, self.always_dense, None
        step = self._progress.step(arguments.get("timestep"))
        if self.check_ranks and ranks is not None and (step is None or self.count.begins(step)):
            assert self._parallel is not None
            at = "unknown" if step is None else f"{step.position} of {step.total}"
            self._parallel.agree(arguments, canvas=thw, step=at, config=self.config, schedule=schedule)
        if step is not None:
            density = schedule.density_of_step(step.position, step.total)
            dense = dense or schedule.is_dense_step(step.position, step.total) or density == 1 and self.method is None
        elif schedule.counts_steps:
            warn_once(f"steps of {self.family.model}", f"schedule has densities = {schedule.densities}, dense_steps = "
                      f"{schedule.dense_steps}, but nothing says which step this forward of {self.family.model} is: neither its timestep, "
                      f"nor a pipeline, nor {type(self._progress.scheduler).__name__}; they do nothing for it. Call it from the pipeline "
                      "that SSTA was applied to")
        with self._counting:
            self.count.add(dense, step)
        return dense, density
