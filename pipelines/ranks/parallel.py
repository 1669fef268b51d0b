"""Several ranks: what diffusers' context parallelism leaves on a model, made to fit SSTA's processors, checked, and taken back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import ContextParallelSplitHook, remove_context_parallel
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.sea_cache import SeaCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from ssta import SSTAConfig
from ssta.ranks import check_ranks

from ..terms import Family, Ranks, SplitPlan
from .split import LeftOut, OwnMemory, hooks_of

# They compare activations, of which a rank has its own tokens.
_LOOKING = FirstBlockCacheConfig, SeaCacheConfig
_HOW = "pass cp_plan=ssta.pipelines.cp_plan(transformer) to enable_parallelism, or call it after apply_ssta"


def _stock_shares(model: nn.Module, family: Family) -> bool:
    """Whether a model's own processors are right on the ranks that it is split over: under its family's plan, with the backend of
    diffusers' and the heads that it has, without diffusers' rings."""
    config: Any = model._parallel_config
    context = config.context_parallel_config
    sites = list(family.sites(model))
    names = {AttentionBackendName(getattr(site.module.processor, "_attention_backend", None)
                                  or _AttentionBackendRegistry.get_active_backend()[0]) for site in sites}
    return (family.shared.stock and context.ring_degree == 1 and all(_deals(site.module, context) for site in sites)
            and all(map(_AttentionBackendRegistry._is_context_parallel_available, names)))


def _deals(module: Any, context: Any) -> bool:
    """Whether diffusers' own exchange can deal out the module's heads."""
    size = context.ulysses_degree
    heads = getattr(module, "heads", 0)
    missing = -heads % size
    return not missing or context.ulysses_anything and missing < (heads + missing) // size


class Parallelism:
    """One model's part in context parallelism.

    Args:
        family: the model's.
        configs: those of its layers.
    """

    def __init__(self, family: Family, configs: Sequence[SSTAConfig | None]) -> None:
        self._family, self._configs = family, configs
        self._config: Any = None
        # None on one rank.
        self._ranks: Ranks | None = None
        # Processors beside the sites' whose setting was changed, and what it was; split hooks whose shares get memory of their own, and
        # how they find arguments.
        self._changed: list[tuple[Any, Any]] = []
        self._splitting: list[tuple[Any, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model settles anew.
        return {**vars(self), "_config": None, "_ranks": None, "_changed": [], "_splitting": []}

    def ranks(self, model: nn.Module, arguments: Mapping[str, Any], thw: tuple[int, int, int], before: int = 0) -> Ranks | None:
        """Who shares the forward with these arguments, which has ``before`` tokens before the canvas that its family found; None on one
        rank.

        Raises:
            ValueError: they cannot; the same on all ranks, which have not communicated yet.
        """
        self.settle(model)
        ranks = self._ranks
        if ranks is None:
            return None
        cache = getattr(model, "_cache_config", None)
        if isinstance(cache, _LOOKING):
            raise ValueError(f"model must run without {type(cache).__name__} on {ranks.size} ranks, because each would skip what it finds "
                             "unchanged in its own tokens, and the others wait for it; take a cache that goes by the step, enabled before "
                             "enable_parallelism")
        split = self._family.shared
        tokens = None if split.tokens is None else split.tokens(arguments, before + math.prod(thw))
        self._check_length(model, ranks.size, math.prod(thw) if tokens is None else tokens, thw)
        if split.trains is not True and torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"gradients of {self._family.model} must not be recorded on {ranks.size} ranks, because {split.trains}, got a "
                             "call with gradients enabled; call it under torch.no_grad(), or train it on 1 rank")
        return ranks._replace(tokens=tokens)

    def agree(self, arguments: Mapping[str, Any], **facts: object) -> None:
        """That all ranks do the same with the same: ``facts``, and the sums of the forward's tensors, which is how another prompt or other
        noise shows. A collective that waits for all of them and for the device."""
        assert self._ranks is not None
        sums = {name: f"a tensor {tuple(value.shape)} whose sum is {float(value.double().sum())!r}" for name, value in arguments.items()
                if isinstance(value, Tensor)}
        check_ranks(self._ranks.group, **facts, **sums)

    def _check_length(self, model: nn.Module, size: int, tokens: int, thw: tuple[int, int, int]) -> None:
        context = self._config.context_parallel_config
        if context.ulysses_anything:
            if tokens < size:
                raise ValueError(f"hidden_states must have at least a token for each of {size} ranks, got {tokens}")
        elif tokens % size:
            raise ValueError(f"hidden_states must have tokens that {size} ranks divide, got {tokens} with a canvas of "
                             f"{' x '.join(map(str, thw))}; any number will do with ContextParallelConfig("
                             f"ulysses_degree={size}, ulysses_anything=True)")

    def settle(self, model: nn.Module) -> None:
        """Takes in whether the model is parallel now, and how.

        Raises:
            ValueError: in a way in which its processors cannot attend.
        """
        config = getattr(model, "_parallel_config", None)
        if config is not self._config:
            self._settle(model, config)

    @torch.compiler.disable
    def _settle(self, model: nn.Module, config: Any) -> None:
        _checked(model, self._family)
        self._restore()
        self._config, self._ranks = config, None
        if config is None:
            return
        for own in self._configs:
            if own is not None and own.mask_share_within_head:
                raise ValueError("config must have mask_share_within_head = False on several ranks, each of which has some of the heads, "
                                 f"got {own}")
        context = config.context_parallel_config
        group = context._flattened_mesh.get_group()
        size = dist.get_world_size(group)
        self._ranks = Ranks(group, dist.get_rank(group), size, None)
        for module in model.modules():
            for _, hook in hooks_of(module):
                if isinstance(hook, ContextParallelSplitHook) and "_prepare_cp_input" not in vars(hook):
                    self._splitting.append((hook, hook.module_forward_metadata))
                    vars(hook)["_prepare_cp_input"] = OwnMemory(hook)
                    hook.module_forward_metadata = LeftOut(hook.module_forward_metadata)
        for name, processor in _configured(model):
            self._changed.append((processor, processor._parallel_config))
            if any(fnmatchcase(name, pattern) for pattern in self._family.shared.whole):
                processor._parallel_config = None
                continue
            attention: Any = model.get_submodule(name)
            if not _deals(attention, context):
                raise ValueError(f"{name} must have heads that {size} ranks divide, because diffusers deals them out there, got "
                                 f"{attention.heads} heads")
            processor._parallel_config = config

    def _restore(self) -> None:
        for processor, config in self._changed:
            processor._parallel_config = config
        for hook, metadata in self._splitting:
            vars(hook).pop("_prepare_cp_input", None)
            hook.module_forward_metadata = metadata
        self._changed, self._splitting = [], []

    def undo(self, model: Any, originals: list[Any], stays_split: bool) -> None:
        """Leaves the model, with its ``originals`` back in place, as diffusers would have it; or, unless it ``stays_split``, whole where
        these cannot attend to a share."""
        self._restore()
        config = getattr(model, "_parallel_config", None)
        shared = config is not None and config.context_parallel_config is not None
        if shared and not stays_split and self._family.split is not None and not _stock_shares(model, self._family):
            remove_context_parallel(model, _hooked(model))
            for _, processor in _configured(model):
                processor._parallel_config = None
            config = model._parallel_config = None
        for processor in originals:
            # One that nothing was set on stays so: compiled blocks look at that.
            if getattr(processor, "_parallel_config", config) is not config:
                processor._parallel_config = config


def _configured(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(module's name, processor) of those that diffusers has told of several ranks."""
    for name, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        if getattr(processor, "_parallel_config", None) is not None:
            yield name, processor


def _checked(model: nn.Module, family: Family) -> None:
    config = getattr(model, "_parallel_config", None)
    if config is None:
        return
    if config.context_parallel_config is None:
        degree = getattr(config.tensor_parallel_config, "tp_degree", None)
        raise ValueError(f"model must run without tensor parallelism under SSTA, got {family.model} with tp_degree = {degree}; "
                         "take a ContextParallelConfig")
    context = config.context_parallel_config
    if context.ring_degree > 1:
        ranks = context.ring_degree * context.ulysses_degree
        raise ValueError(f"ring_degree must be 1 under SSTA, got {context.ring_degree} with ulysses_degree = {context.ulysses_degree}; "
                         f"take ContextParallelConfig(ulysses_degree={ranks}), which needs at least {ranks} heads, or fewer ranks")
    split = family.shared
    found, wanted = _hooked(model), split.of(model)
    if found != {name: _listed(part) for name, part in wanted.items()}:
        raise ValueError(f"model must be split over ranks by SSTA's plan, got {family.model} with another, of {', '.join(map(repr, found))}"
                         f"; {_HOW}")


def _hooked(model: nn.Module) -> SplitPlan:
    """The plan that diffusers' hooks in the model carry out."""
    return {name: hook.metadata for module in model.modules() for name, hook in hooks_of(module)}


def _listed(part: Any) -> Any:
    """As diffusers keeps it: outputs in a list."""
    return part if isinstance(part, (dict, list, tuple)) else [part]
