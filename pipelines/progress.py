"""Progress: which denoising step a forward belongs to, found without waiting for the device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


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
        # The timesteps read last, and the tensor they were read from.
        self._read: tuple[Tensor, list[float]] | None = None

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

    def step(self) -> tuple[int, int] | None:
        """(index, count) of the step in progress; None where nothing counts."""
        scheduler, timesteps = self.scheduler, self.timesteps
        if timesteps is None:
            return None
        pipeline = self._pipeline and self._pipeline()
        current = getattr(pipeline, "_current_timestep", None)
        if isinstance(current, Tensor):
            place = _place(current, timesteps)
            if place is not None:
                return place
        if not hasattr(scheduler, "step_index"):
            return None
        # Schedulers look for their index when they first step.
        index = scheduler.step_index
        if index is None:
            index = getattr(scheduler, "begin_index", None) or 0
        return index, len(timesteps)

    def timestep(self, index: int) -> float:
        """The scheduler's timestep of step ``index``. All of them are read from the device once in a generation."""
        timesteps = self.timesteps
        if self._read is None or self._read[0] is not timesteps:
            _refuse_capture(timesteps)
            self._read = timesteps, timesteps.tolist()
        values = self._read[1]
        return values[min(index, len(values) - 1)]


def _place(current: Tensor, timesteps: Tensor) -> tuple[int, int] | None:
    """Pipelines walk through a tensor of timesteps, so the current one is a view, and where it lies says which one it is."""
    if current.dim() == 0:
        if current.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
            return None
        return (current.storage_offset() - timesteps.storage_offset()) // timesteps.stride(0), len(timesteps)
    # Diffusion forcing walks through a matrix whose rows hold a timestep for every frame.
    rows, rest = divmod(current.untyped_storage().nbytes() // current.element_size(), current.numel())
    if current.dim() != 1 or rest or rows < 2 or current.storage_offset() % current.numel():
        return None
    return current.storage_offset() // current.numel(), rows


def read(value: Tensor | float) -> float:
    """The greatest entry of what may be a tensor. Waits for the device where it lies on one.

    Raises:
        ValueError: inside the capture of a CUDA graph, where nothing can be read.
    """
    if not isinstance(value, Tensor):
        return float(value)
    _refuse_capture(value)
    return float(value.max())


def _refuse_capture(values: Tensor) -> None:
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("schedule must not read timesteps while a CUDA graph is captured, got one with dense_above")
