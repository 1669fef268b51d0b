"""Progress: which denoising step a forward belongs to, found without waiting for the device."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from torch import Tensor

from ssta.kernels.notices import warn_once

# Guidance takes at most so many forwards a step: with the prompt, without it, and perturbed in two ways.
_GUIDED = 4


class Generation:
    """One run through a scheduler's timesteps.

    Attributes:
        timesteps: the scheduler's, all of them.
        first: where among them the generation began; later than 0 where it started from a video and a strength.
        place: where it is now.
    """

    def __init__(self, timesteps: Tensor, first: int) -> None:
        self.timesteps = timesteps
        self.first = self.place = first


class Step(NamedTuple):
    """A step of a generation: ``position`` of ``total``, which are the steps that run, and the generation."""

    position: int
    total: int
    generation: Generation


class Progress:
    """Looks up the step in the pipeline and its scheduler, which count in plain Python while the device works.

    Args:
        pipeline: whose ``scheduler`` counts, also one that is exchanged later; held weakly. After it is gone its last scheduler counts,
            which a pipeline made of its components shares. None = ``scheduler`` alone.
        scheduler: counts instead of the pipeline's.
    """

    def __init__(self, pipeline: Any = None, scheduler: Any = None) -> None:
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._given = scheduler
        self._scheduler = scheduler if pipeline is None or scheduler is not None else getattr(pipeline, "scheduler", None)
        self._generation: Generation | None = None
        # Forwards that found the scheduler before its first step since it last moved.
        self._waited = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict) -> Progress:
        # A copied pipeline counts for its own models; a model copied alone stays with the pipeline it came from.
        pipeline = self._pipeline and self._pipeline()
        scheduler = self._given if pipeline is not None else self._scheduler
        return Progress(memo.get(id(pipeline), pipeline), memo.get(id(scheduler), scheduler))

    def __reduce__(self) -> tuple:
        return Progress, (None, self._scheduler)

    @property
    def scheduler(self) -> Any:
        """Whatever counts the steps; None if nothing does."""
        pipeline = self._pipeline and self._pipeline()
        if pipeline is not None and self._given is None:
            self._scheduler = getattr(pipeline, "scheduler", None)
        return self._scheduler

    @property
    def timesteps(self) -> Tensor | None:
        """The scheduler's timesteps, a new tensor for every generation; None where nothing counts, as in training."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        begun = getattr(self.scheduler, "num_inference_steps", 0) is not None
        return timesteps if begun and isinstance(timesteps, Tensor) else None

    def step(self, timestep: Any = None) -> Step | None:
        """The step of a forward that was called with ``timestep``; None where nothing counts, or no longer, as in training.

        A generation begins with new timesteps, or where the place in them goes back. Its first step is the one that the scheduler was told
        to begin with or, where nobody told it, the first that a forward came from, of any transformer that shares this Progress.
        """
        timesteps = self.timesteps
        found = None if timesteps is None else self._find(timestep, timesteps)
        if timesteps is None or found is None or found[0] >= found[1]:
            return None
        place, count = found
        with self._lock:
            generation = self._generation
            if generation is None or generation.timesteps is not timesteps or place < generation.place:
                begin = getattr(self.scheduler, "begin_index", None)
                generation = self._generation = Generation(timesteps, place if begin is None else min(begin, place))
            generation.place = place
        return Step(place - generation.first, count - generation.first, generation)

    def _find(self, timestep: Any, timesteps: Tensor) -> tuple[int, int] | None:
        """(place, count) among the timesteps, those before a generation's first included."""
        # Most pipelines give the model `t.expand(batch)`, ...
        if isinstance(timestep, Tensor) and timestep.dim() <= 1 and (timestep.numel() == 1 or timestep.stride(0) == 0):
            place = _place(timestep, timesteps)
            if place is not None:
                return place, len(timesteps)
        # ... others change its dtype, or have one for each token, but say which it is.
        current = getattr(self._pipeline and self._pipeline(), "_current_timestep", None)
        if isinstance(current, Tensor):
            place = _place(current, timesteps) if current.dim() == 0 else None
            if place is None and current.dim() == 0:
                place = _place_in_a_copy(current, timesteps)
            found = _row(current) if place is None else (place, len(timesteps))
            if found is not None:
                return found
        if not hasattr(self.scheduler, "step_index"):
            return None
        # Schedulers look for their index when they first step.
        index = self.scheduler.step_index
        self._watch(index is not None, len(timesteps))
        if index is None:
            index = getattr(self.scheduler, "begin_index", None) or 0
        return index, len(timesteps)

    def _watch(self, moved: bool, count: int) -> None:
        """Says once that a scheduler does not move: more forwards than guidance takes found it before its first step. Generations of one
        step are not counted, because no forward follows their step."""
        with self._lock:
            self._waited = 0 if moved or count < 2 else self._waited + 1
            waited = self._waited
        if waited > _GUIDED:
            name = type(self.scheduler).__name__
            warn_once(f"steps of {name}", f"schedule follows the steps of {name}, which has not moved in {waited} forwards, so that all of "
                      "them count as the first step: call scheduler.step in your loop, or give the model a view of one of "
                      "scheduler.timesteps, as `for t in scheduler.timesteps: model(timestep=t.expand(batch), ...)` does")


def _place(current: Tensor, timesteps: Tensor) -> int | None:
    """Pipelines iterate over a tensor of timesteps, so the current one is a view, and where it lies says which one it is."""
    if is_fake(current) or current.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    return (current.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0)


def _place_in_a_copy(current: Tensor, timesteps: Tensor) -> int | None:
    """The same where a pipeline iterates over timesteps that the scheduler has made anew since (Allegro's), as many as there were."""
    if is_fake(current) or current.untyped_storage().nbytes() != len(timesteps) * current.element_size():
        return None
    return int(current.storage_offset())


def _row(current: Tensor) -> tuple[int, int] | None:
    """Diffusion forcing iterates over a matrix whose rows hold a timestep for every frame: (row, how many)."""
    if current.dim() != 1 or current.numel() == 0:
        return None
    rows, rest = divmod(current.untyped_storage().nbytes() // current.element_size(), current.numel())
    if rest or rows < 2 or current.storage_offset() % current.numel():
        return None
    return current.storage_offset() // current.numel(), rows


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` is a tensor subclass of tracing (FakeTensor, FunctionalTensor), which holds no values."""
    return type(x) is not Tensor and hasattr(x, "fake_mode")
