"""Hooks for training through SSTA: the dense teacher beside the sparse student, a falling density, selections that checkpointing keeps."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssta.checks import require_share
from ssta.kernels.checks import require_int
from ssta.kernels.notices import warn_once

from ..patch.apply import SSTAHandle
from ..patch.context import ModelContext, having
from ..patch.processor import SSTAProcessor
from ..schedule.changes import changed
from ..terms import CallState
from .kept_selection import KeptSelection

# From this density on a forward is dense: choosing what to leave out gains nothing.
DENSE_FROM = 63 / 64
# A density that falls to its target falls by at most so many equal factors.
FACTORS = 3


class Velocities(NamedTuple):
    """What ``teacher_student`` gives: each the model's first output, of one shape.

    Attributes:
        teacher: the dense model's; no gradient.
        student: the sparse model's, whose gradient reaches what is trained.
    """

    teacher: Tensor
    student: Tensor


class TeacherStudent:
    """What ``teacher_student`` gives: a function of the arguments that both models are called with."""

    def __init__(self, model: nn.Module, teacher: nn.Module | None) -> None:
        self._model, self._teacher = model, teacher

    def __call__(self, *args: Any, **kwargs: Any) -> Velocities:
        """The teacher's and the student's."""
        return Velocities(self.teacher(*args, **kwargs), _first(self._model(*args, **kwargs)))

    def teacher(self, *args: Any, **kwargs: Any) -> Tensor:
        """The frozen dense model's alone."""
        target = self._model if self._teacher is None else self._teacher
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            # In some versions of torch weights that autocast cast without gradients would serve the student too, and get no gradients; and
            # the cast weights would stay in memory.
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            for context in _contexts(target):
                stack.enter_context(context.dense_forwards())
            # PEFT's own enable_adapters also takes the adapters' gradients away and gives them to all that are active, whoever had frozen
            # some: the flag is what its layers look at.
            for layer in _adapter_layers(self._model) if self._teacher is None else ():
                stack.enter_context(having(layer, "_disable_adapters", True))
            return _first(target(*args, **kwargs))


def teacher_student(model: nn.Module, teacher: nn.Module | None = None) -> TeacherStudent:
    """A function that calls the frozen dense model and the sparse one on the same arguments.

        velocities = teacher_student(transformer)
        loss = F.mse_loss(*velocities(hidden_states=..., timestep=..., encoder_hidden_states=..., return_dict=False))

    That loss is what training-free sparse models recover by within hundreds of steps (SpargeAttention2, arXiv 2602.13515, which finds it
    better than the diffusion loss). The teacher runs first, so that under any kind of gradient checkpointing the backward finds the
    student's forward as the last one.

    Args:
        model: has SSTA applied, itself or a module in it: a transformer, a model that holds one, or what DistributedDataParallel, FSDP,
            torch.compile or accelerate made of either, which is then what is called.
        teacher: the frozen dense model, called in ``model``'s place, such as ``copy.deepcopy(model).requires_grad_(False)``; it may have
            SSTA too, which is then dense, but no branches of ``apply_vsa`` or ``apply_sla``. None = ``model`` itself, dense and with its
            PEFT adapters off, whose training leaves its weights alone.

    Returns:
        ``f(*args, **kwargs) -> Velocities``; ``f.teacher(*args, **kwargs)`` is the dense model's alone.

    Raises:
        TypeError: no modules.
        ValueError: a model without SSTA, or one whose own weights are trained without a ``teacher``: it would move with them; a teacher
            with a trained branch, which is not the dense model.
    """
    for name, given in (("model", model), ("teacher", teacher)):
        if not isinstance(given, nn.Module) and not (name == "teacher" and given is None):
            raise TypeError(f"{name} must be a module, got {type(given).__name__}")
    if not _contexts(model):
        raise ValueError(f"model must have SSTA applied, got {type(model).__name__} without it; call apply_ssta(model) first")
    branches = sorted({context.method for context in _contexts(model if teacher is None else teacher) if context.method is not None})
    if branches:
        raise ValueError(f"teacher must be the dense model, got {'None, and a model' if teacher is None else type(teacher).__name__} with "
                         f"{branches[0]}'s branches in it; a frozen copy from before they were applied is one")
    if teacher is None:
        layers = _adapter_layers(model)
        adapted = {id(parameter) for layer in layers for parameter in layer.parameters()}
        adapted -= {id(parameter) for layer in layers for parameter in layer.get_base_layer().parameters()}
        own = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in adapted]
        if own:
            raise ValueError(f"teacher must be given where model's own weights are trained, got None, and {own[0]} and {len(own) - 1} more "
                             "that require gradients; copy.deepcopy(model).requires_grad_(False) is one")

    return TeacherStudent(model, teacher)


def set_density(handle: SSTAHandle, density: float) -> None:
    """Changes the share of the video's tile pairs that is computed exactly, in place of the budget that SSTA was applied with.

    For use between forwards. Nothing is installed anew; a compiled block is compiled once for each density, and finds it again later. Dense
    layers, and layers with a configuration of their own, stay as they are, and so do steps for which the schedule has a density: a warning
    says once that in generations nothing changes. From 63/64 on whole forwards are dense, these layers and steps too; those of
    ``apply_vsa`` and ``apply_sla`` keep their trained branches.

    Args:
        handle: what ``apply_ssta`` returned, still applied.
        density: in (0, 1].

    Raises:
        TypeError: no handle, or no number.
        ValueError: out of range; SSTA was removed; no layer without a configuration of its own; or a configuration in which the window
            alone selects.

    Nothing has changed after any of them.
    """
    if not isinstance(handle, SSTAHandle):
        raise TypeError(f"handle must be what apply_ssta returned, got {type(handle).__name__}")
    density = _density("density", density)
    applied = handle.layers()
    if not applied:
        raise ValueError("handle must be one whose SSTA is still applied, got one that was removed")
    plans = []
    for name, module, context, processors in applied:
        own = [processor for _, processor in processors if processor.config is context.config]
        if not own:
            raise ValueError("handle must have layers whose density can be set, without a configuration of their own, got none in "
                             f"{name or type(module).__name__}")
        plans.append((context, own, changed(context.config, density=density)))
        if context.schedule.densities and density < DENSE_FROM:
            warn_once(f"density of {context.family.model}", "set_density changes nothing in generations whose schedule has a density for "
                      f"each step, got {density} beside densities = {context.schedule.densities}")
    for context, own, config in plans:
        context.config, context.always_dense = config, density >= DENSE_FROM and context.method is None
        for processor in own:
            processor.config = config


class Ramp:
    """A density that falls over the first steps of a training, from 1 to ``target`` in a few equal factors.

        ramp = Ramp(handle, 0.15, steps=100)
        for step in range(500):
            ramp.set(step)
            ...

    or, in a loop of somebody else's, ``Ramp(handle, 0.15, steps=100).follow(optimizer)``. The density follows from the step's number alone,
    so that a training that is resumed has nothing else to remember. It takes few values, because a compiled block is compiled once for each
    of them: twice under ``frozen_checkpoint``, and torch compiles it eight times at most unless ``torch._dynamo.config.recompile_limit``
    says otherwise.

    Args:
        handle: what ``apply_ssta`` returned.
        target: the density in (0, 1] from step ``steps`` on.
        steps: how many steps the others share; 0 = ``target`` at once.

    Attributes:
        densities: the values that steps have, descending: four, or as many as there are steps for.

    Raises:
        TypeError, ValueError: values of the wrong kind or out of range, and what ``set_density`` raises, when it is called.
    """

    def __init__(self, handle: SSTAHandle, target: float, steps: int) -> None:
        if not isinstance(handle, SSTAHandle):
            raise TypeError(f"handle must be what apply_ssta returned, got {type(handle).__name__}")
        target, steps = _density("target", target), require_int("steps", steps, 0)
        # With fewer steps than factors only those that a step has.
        last = min(FACTORS, steps)
        falling = [target ** (i * FACTORS // last / FACTORS) for i in range(last)]
        self.densities = tuple(dict.fromkeys([*falling, target]))
        self._handle, self._steps, self._step = handle, steps, 0
        self._set: float | None = None

    def at(self, step: int) -> float:
        """The density of step ``step``, which counts from 0."""
        step, last = require_int("step", step, 0), len(self.densities) - 1
        return self.densities[last if step >= self._steps else step * last // self._steps]

    def set(self, step: int) -> float:
        """Gives the handle the density of step ``step``, unless that is what this ramp gave it last; returns it."""
        density = self.at(step)
        if density != self._set:
            set_density(self._handle, density)
            self._set = density
        self._step = step
        return density

    def follow(self, optimizer: torch.optim.Optimizer) -> Ramp:
        """Counts the steps itself from now on: one for each of ``optimizer``'s, which are none where gradients are accumulated or a scaler
        skips one. For use before the first forward; ends where SSTA is removed. Returns itself.

        ``accelerator.register_for_checkpointing(ramp)`` saves the step with the rest and goes on from there.

        Args:
            optimizer: torch's, or accelerate's around it.

        Raises:
            TypeError: another one.
            ValueError: what ``set_density`` raises.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch's, or accelerate's around it, got {type(optimizer).__name__}")
        self.set(self._step)

        def after_step(*_: Any) -> None:
            if self._handle.layers():
                self.set(self._step + 1)
            else:
                counting.remove()

        counting = optimizer.register_step_post_hook(after_step)
        return self

    def state_dict(self) -> dict[str, int]:
        """The step that was set last."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets the step that ``state_dict`` gave."""
        self.set(state["step"])


def frozen_checkpoint(function: Any, *args: Any) -> Any:
    """Gradient checkpointing whose recomputation attends to the tiles that the forward selected, and knows its canvas and step.

        model.enable_gradient_checkpointing(frozen_checkpoint)

    diffusers' default, ``torch.utils.checkpoint`` alone, selects anew in the backward. That gives the same where the same numbers come out
    of the same operations. This one keeps each layer's selection, a bit for each pair of tiles and head, and saves the recomputation its
    scoring. A model whose whole forward torch.compile compiles recomputes as it sees fit, and selects anew; blocks that are compiled by
    themselves keep.

    Args:
        function: a block, or a method of one, such as ``block.__call__``.
        args: what it is called with.

    Returns:
        What it returns.

    Raises:
        TypeError: a function that is no module's, in which no layers would be found.
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False)
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"function must be a module or a method of one, got {type(function).__name__}")
    layers = [of for of in (getattr(part, "processor", None) for part in module.modules()) if isinstance(of, SSTAProcessor)]

    def both() -> tuple[AbstractContextManager, AbstractContextManager]:
        kept = [(layer, KeptSelection()) for layer in layers]
        return _with_selections(kept, []), _with_selections(kept, [(context, context.call) for context in _contexts(module)])

    # Lists that were kept are as long as they can be, which are other shapes than the forward's; that they are as many is still checked.
    return checkpoint(function, *args, use_reentrant=False, context_fn=both, determinism_check="none")


@contextmanager
def _with_selections(kept: list[tuple[SSTAProcessor, KeptSelection]], states: list[tuple[ModelContext, CallState]]) -> Iterator[None]:
    """Within it this thread's forward has ``states`` again, and its layers keep what they select, or attend to what was kept."""
    with ExitStack() as stack:
        for context, state in states:
            stack.enter_context(context.resumed(state))
        for layer, selection in kept:
            stack.enter_context(having(layer.holder, "frozen", selection))
        yield


def _contexts(model: nn.Module) -> list[ModelContext]:
    """The contexts of the SSTA in ``model``, each once."""
    processors = (getattr(module, "processor", None) for module in model.modules())
    return list({id(of.context): of.context for of in processors if isinstance(of, SSTAProcessor)}.values())


def _adapter_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers in ``model``, which hold its adapters beside the layer that they were put on."""
    # Without PEFT loaded there are no adapters.
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return [] if tuners is None else [module for module in model.modules() if isinstance(module, tuners.BaseTunerLayer)]


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _density(name: str, value: Any) -> float:
    return float(require_share(name, value, "(0, 1]", "a share of the tile pairs"))
