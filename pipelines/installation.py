"""What is changed in one model: processors at its sites, hooks, and modules that trained branches bring; and how all that is undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ssta import SSTAConfig

from .context import ModelContext
from .family import Family, Site
from .processor import SSTAProcessor

# Where the model keeps its installation. It holds no reference back to the model, so the model is freed as soon as its user drops it.
_ATTRIBUTE = "_ssta_installation"


@dataclass
class Installation:
    """What one model's installation changed: the processors that were replaced, by site; hooks; modules that were added, by name."""

    context: ModelContext
    originals: dict[str, Any]
    hooks: list[RemovableHandle]
    added: list[str] = field(default_factory=list)

    def processors(self, model: nn.Module) -> list[tuple[str, SSTAProcessor]]:
        """(name, processor) of the sites where this installation's processor is still in place."""
        found = []
        for name in self.originals:
            processor: Any = model.get_submodule(name).processor
            if isinstance(processor, SSTAProcessor) and processor.context is self.context:
                found.append((name, processor))
        return found


def installation_of(model: nn.Module) -> Installation | None:
    """That of ``model``, None if it has none."""
    return vars(model).get(_ATTRIBUTE)


def require_bare(model: nn.Module) -> None:
    """Refuses a model that has an installation."""
    if installation_of(model) is not None:
        raise ValueError(f"model must not have SSTA applied already, got {type(model).__name__} with it; call remove_ssta(model) first")


def sites_of(family: Family, model: nn.Module) -> list[Site]:
    """The family's sites in this model, each of them known to be what it says."""
    found = family.sites(model)
    if not isinstance(found, Iterable):
        raise TypeError(f"{family.model}'s Family.sites must yield Sites, got {type(found).__name__}")
    sites = list(found)
    if not sites:
        raise ValueError(f"{family.model}'s Family.sites must yield at least one Site, got none")
    seen: dict[int, str] = {}
    for site in sites:
        if not isinstance(site, Site):
            raise TypeError(f"{family.model}'s Family.sites must yield Sites, got {type(site).__name__}")
        try:
            module = model.get_submodule(site.name)
        except AttributeError:
            module = None
        if module is not site.module:
            raise ValueError(f"Site.name must be the dotted name of Site.module in {type(model).__name__}, got {site.name!r}, which is "
                             f"{'no module' if module is None else 'another module'}")
        if id(module) in seen:
            raise ValueError(f"Family.sites must yield every module once, got {site.name!r} and {seen[id(module)]!r} for the same one")
        seen[id(module)] = site.name
        processor = getattr(module, "processor", None)
        if type(processor) not in site.classes:
            raise ValueError(f"{site.name} must have its original processor {' or '.join(kind.__name__ for kind in site.classes)}, "
                             f"got {'none' if processor is None else type(processor).__name__}; put the original processor back first")
        parallel = getattr(processor, "_parallel_config", None)
        if parallel is not None:
            raise ValueError(f"{site.name} must run without context parallelism, got _parallel_config = {parallel}")
    return sites


def processors_for(
    context: ModelContext, sites: list[Site], by_level: tuple[SSTAConfig, ...] = (),
) -> list[tuple[Site, SSTAProcessor]]:
    """A processor for each site, with the configuration that the context's schedule has for it and ``by_level``. Changes nothing yet.

    Raises:
        TypeError, ValueError: what a ``Site.replacement`` returned does not fit, or the schedule does not fit the sites.
    """
    context.sites = tuple([site.name for site in sites])
    replacements: list[tuple[Site, SSTAProcessor]] = []
    for site, own in zip(sites, context.schedule.for_layers([site.name for site in sites], context.config)):
        processor = site.replacement(context)
        if not isinstance(processor, SSTAProcessor) or getattr(processor, "context", None) is not context:
            raise TypeError(f"{site.name}'s Site.replacement must return an SSTAProcessor with the context it was called with, "
                            f"got {type(processor).__name__}")
        if any(processor is other for _, other in replacements):
            raise ValueError(f"{site.name}'s Site.replacement must return a processor of its own for each site, got the same one again")
        processor.config = own
        # A layer's own configuration keeps its own budget.
        processor.by_level = by_level if own is context.config else ()
        replacements.append((site, processor))
    return replacements


def install(
    model: nn.Module, context: ModelContext, replacements: list[tuple[Site, SSTAProcessor]],
    added: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Installation:
    """Puts the processors and the modules ``added``, by dotted name, into the model; it is as it was after an exception."""
    installation = Installation(context, {}, [])
    try:
        for name, branch in added.items():
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent).add_module(attribute, branch)
            installation.added.append(name)
        for site, replacement in replacements:
            module: Any = site.module
            installation.originals[site.name] = original = module.processor
            _copy_settings(original, replacement)
            module.processor = replacement
        hooks = installation.hooks
        hooks.append(model.register_forward_pre_hook(context.capture, with_kwargs=True))
        hooks.append(model.register_forward_hook(context.finish))
        for block in _first_blocks(model, list(installation.originals)):
            hooks.append(block.register_forward_pre_hook(_channels_side_by_side, with_kwargs=True))
        setattr(model, _ATTRIBUTE, installation)
    except BaseException:
        _undo(model, installation)
        raise
    return installation


def _first_blocks(model: nn.Module, sites: list[str]) -> list[nn.Module]:
    """The first block of each stack that has sites, by names such as blocks.0.attn1. A site without a dot has no block."""
    names = [name.rpartition(".")[0] for name in sites if "." in name]
    first = {name.rpartition(".")[0]: name for name in reversed(names)}
    return [model.get_submodule(name) for name in first.values()]


def _channels_side_by_side(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of a stack's first block: tokens ``[B, S, C]`` with a token's channels next to one another in memory.

    A patch embedding by convolution leaves those of a channel so, and each block hands the order on: every norm would copy its input first,
    and every residual sum go through two tensors in different orders. On an H200 the copies alone are a twentieth of a step of
    HunyuanVideo 1.5 under SSTA. A compiler chooses orders itself.
    """
    if torch.compiler.is_compiling():
        return args, kwargs
    return tuple(map(_contiguous_tokens, args)), {name: _contiguous_tokens(value) for name, value in kwargs.items()}


def _contiguous_tokens(x: Any) -> Any:
    return x.contiguous() if isinstance(x, Tensor) and x.dim() == 3 and x.stride(-1) != 1 else x


def uninstall(model: nn.Module) -> None:
    """Takes back what ``install`` did."""
    installation = installation_of(model)
    assert installation is not None
    _undo(model, installation)
    delattr(model, _ATTRIBUTE)


def _undo(model: nn.Module, installation: Installation) -> None:
    """What was installed so far, taken back."""
    for name, processor in installation.processors(model):
        original = installation.originals[name]
        _copy_settings(processor, original)
        model.get_submodule(name).processor = original
    for hook in installation.hooks:
        hook.remove()
    for name in installation.added:
        parent, _, attribute = name.rpartition(".")
        delattr(model.get_submodule(parent), attribute)
    installation.context.forget_selections()


def _copy_settings(source: Any, target: Any) -> None:
    """Carries over what diffusers' set_attention_backend and enable_parallelism leave on a processor."""
    for name in ("_attention_backend", "_parallel_config"):
        if hasattr(source, name) and hasattr(target, name):
            setattr(target, name, getattr(source, name))
