"""Split: how a family's model is divided over several ranks, in the terms of diffusers' context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ssta.checks import require_kind

from ..patch.call import CallState

if TYPE_CHECKING:
    from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook

# Why a model whose audio attends to its video does not train on several ranks.
CROSS_LENGTHS = ("its audio attends to the video through diffusers' own exchange, which has no right gradient for queries and keys of "
                 "different lengths")
# As diffusers' `enable_parallelism(cp_plan=...)` takes it: by a module's name, which arguments or outputs are split and which gathered.
SplitPlan = dict[str, Any]
# A forward's arguments by name; what gives the state of the forward in progress; handles of what was registered on a model.
Arguments = Mapping[str, Any]
Call = Callable[[], CallState]
Hooks = Iterable[RemovableHandle]


def _no_hooks(model: nn.Module, call: Call) -> Hooks:
    return ()


@dataclass(frozen=True)
class Split:
    """How a family's model runs on several ranks. Tokens of the video, or of the whole sequence, are split, everything else is whole.

    Attributes:
        plan: as diffusers' ``enable_parallelism`` takes it, or ``plan(model)`` that is; a list of blocks' name and ".-1" is the name of its
            last one, which must not be its first.
        whole: names of attention modules that attend on every rank without communication, ``*`` for any block's number: those of text
            alone, and cross-attention from a rank's own queries to whole keys. Any other module that is no site keeps what diffusers does.
        tokens: ``tokens(arguments, grids)`` is the length of the whole sequence where the plan splits it as one run, ``grids`` being the
            tokens of the canvas and of what ``Family.before`` finds; None = it splits the video.
        stock: whether the model's own processors are right under the plan. If not, ``remove`` takes the plan out of the model too.
        trains: True, or why gradients would be wrong.
        hooks: ``hooks(model, call)`` registers on the model what the plan cannot say, and yields the handles. ``call()`` is the CallState
            of the forward in progress, whose ``ranks`` are None on one rank; held by a ``partial``, it is a copied model's own.

    Raises:
        TypeError: a field of the wrong kind.
    """

    plan: SplitPlan | Callable[[nn.Module], SplitPlan] = field(hash=False)
    whole: tuple[str, ...] = ()
    tokens: Callable[[Arguments, int], int] | None = None
    stock: bool = False
    trains: bool | str = True
    hooks: Callable[[nn.Module, Call], Hooks] = _no_hooks

    def __post_init__(self) -> None:
        require_kind("Split.plan", self.plan, "a dict or a function", isinstance(self.plan, dict) or callable(self.plan))
        require_kind("Split.hooks", self.hooks, "a function", callable(self.hooks))
        require_kind("Split.whole", self.whole, "a tuple of names",
                     isinstance(self.whole, tuple) and all([isinstance(name, str) for name in self.whole]))
        require_kind("Split.tokens", self.tokens, "a function or None", self.tokens is None or callable(self.tokens))
        require_kind("Split.trains", self.trains, "True, or a sentence that says why not",
                     self.trains is True or isinstance(self.trains, str) and len(self.trains) > 0)

    def of(self, model: nn.Module) -> SplitPlan:
        """The plan of ``model``; ValueError where a list of which it wants the last block has just one."""
        plan = self.plan if isinstance(self.plan, dict) else self.plan(model)
        return {_counted(name, model): part for name, part in plan.items()}


def _counted(name: str, model: nn.Module) -> str:
    stack, _, number = name.rpartition(".")
    if number != "-1":
        return name
    blocks: Any = model.get_submodule(stack)
    if len(blocks) < 2:
        raise ValueError(f"model must have at least 2 {stack} to be split over ranks, got {len(blocks)}")
    return f"{stack}.{len(blocks) - 1}"


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
    # Not above: diffusers.hooks takes transformers in where peft is installed, which takes a second and more.
    from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook

    registry: Any = getattr(module, "_diffusers_hook", None)
    for name, hook in ({} if registry is None else registry.hooks).items():
        if isinstance(hook, (ContextParallelSplitHook, ContextParallelGatherHook)):
            yield name.partition("---")[2], hook


def splits(module: nn.Module) -> bool:
    """Whether a plan splits what the module takes or gives."""
    from diffusers.hooks.context_parallel import ContextParallelSplitHook

    return any([isinstance(hook, ContextParallelSplitHook) for _, hook in hooks_of(module)])


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
