"""Plans in the terms of diffusers' context parallelism: what families say them with, and diffusers' hooks that carry them out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn

from ..terms import SplitPlan

if TYPE_CHECKING:
    from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook

# Why a model whose audio attends to its video does not train on several ranks.
CROSS_LENGTHS = ("its audio attends to the video through diffusers' own exchange, which has no right gradient for queries and keys of "
                 "different lengths")


def split(dims: int = 3, dim: int = 1) -> ContextParallelInput:
    """An argument with ``dims`` dimensions, split along ``dim``: by default tokens ``[B, S, C]``."""
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=False)


def split_outputs(dims: int, dim: int, count: int = 2) -> dict[int, ContextParallelInput]:
    """The first ``count`` outputs of a module, by default the cosines and sines of RoPE."""
    return {index: ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=True) for index in range(count)}


def gathered() -> ContextParallelOutput:
    """An output ``[B, S, C]``, made whole."""
    return ContextParallelOutput(gather_dim=1, expected_dims=3)


def stock_plan(model: Any) -> SplitPlan:
    """The plan that the model's own class has."""
    return type(model)._cp_plan


def hooks_of(module: nn.Module) -> Iterator[tuple[str, ContextParallelSplitHook | ContextParallelGatherHook]]:
    """diffusers' hooks on a module that carry out a plan, each with the name that the plan has for the module."""
    registry: Any = getattr(module, "_diffusers_hook", None)
    if registry is None:
        return
    # Not above: only where there are hooks does a process need that module.
    from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook

    for name, hook in registry.hooks.items():
        if isinstance(hook, (ContextParallelSplitHook, ContextParallelGatherHook)):
            yield name.partition("---")[2], hook


def splits(module: nn.Module) -> bool:
    """Whether a plan splits what the module takes or gives."""
    return any([hook.__class__.__name__ == "ContextParallelSplitHook" for _, hook in hooks_of(module)])


class OwnMemory:
    """In the place of a split hook's function that takes a rank's share out of a tensor: the share has memory of its own, by token.

    diffusers' share is a view, which keeps the whole tensor for as long as it lives.
    """

    def __init__(self, hook: ContextParallelSplitHook) -> None:
        self._share = hook._prepare_cp_input

    def __call__(self, x: Tensor, cp_input: ContextParallelInput) -> Tensor:
        share = self._share(x, cp_input)
        return share if share is x else share.clone(memory_format=torch.contiguous_format)


class LeftOut:
    """In the place of what tells a split hook its module's arguments: one that the caller left out is None, which is split into nothing."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata
        self._names = list(inspect.signature(metadata._cls.forward).parameters)[1:]
        # diffusers finds these places at the first call, in a way that a compiler cannot trace.
        metadata.cached_parameter_indices = {name: index for index, name in enumerate(self._names)}

    def _get_parameter_from_args_kwargs(self, name: str, args: tuple = (), kwargs: dict | None = None) -> tuple[Any, bool, int | None]:
        if name in self._names and name not in (kwargs or {}) and self._names.index(name) >= len(args):
            return None, False, None
        return self._metadata._get_parameter_from_args_kwargs(name, args, kwargs)
