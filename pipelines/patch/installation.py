"""What is changed in one model: processors at its sites, hooks, and modules that trained branches bring; and how all that is undone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssta.kernels.notices import warn_once

from ..terms import Family, Site
from .context import ModelContext
from .processor import SSTAProcessor
from .recomputation import forget_recomputations, resume_recomputations
from .token_order import channels_side_by_side, first_blocks

# Where the model keeps its installation. It holds no reference back to the model, so the model is freed as soon as its user drops it.
_ATTRIBUTE = "_ssta_installation"


@dataclass
class Installation:
    """What one model's installation changed: the processors that were replaced, by site; hooks; modules that were added, by name; and
    the plan that an instance had for several ranks. Once it is undone, ``left`` has its processors by site, for reports."""

    context: ModelContext
    originals: dict[str, Any]
    hooks: list[RemovableHandle]
    added: list[str] = field(default_factory=list)
    plan: list[Any] = field(default_factory=list)
    left: list[tuple[str, SSTAProcessor]] = field(default_factory=list)

    def processors(self, model: nn.Module) -> list[tuple[str, SSTAProcessor]]:
        """(name, processor) of the sites where this installation's processor is still in place. A site whose block has another number by
        now, because one before it was deleted, has the name that goes with it."""
        named = [(name, getattr(module, "processor", None)) for name, module in model.named_modules()]
        found = [(name, processor) for name, processor in named
                 if isinstance(processor, SSTAProcessor) and processor.context is self.context]
        order = list(self.originals)
        return sorted(found, key=lambda entry: order.index(entry[1].site))


def installation_of(model: nn.Module) -> Installation | None:
    """That of ``model``, None if it has none."""
    return vars(model).get(_ATTRIBUTE)


def require_bare(model: nn.Module) -> None:
    """Refuses a model that has an installation."""
    if installation_of(model) is not None:
        raise ValueError(f"model must not have SSTA applied already, got {type(model).__name__} with it; call remove_ssta(model) first")


def sites_of(family: Family, model: nn.Module) -> list[Site]:
    """The family's sites in this model, each of them known to be what it says."""
    found: Any = family.sites(model)
    sites = list(found) if isinstance(found, Iterable) else [found]
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
    return sites


def processors_for(context: ModelContext, sites: list[Site]) -> list[tuple[Site, SSTAProcessor]]:
    """A processor for each site, with the configuration that the context's schedule has for it. Changes nothing yet."""
    replacements: list[tuple[Site, SSTAProcessor]] = []
    for site, own in zip(sites, context.schedule.for_layers([site.name for site in sites], context.config)):
        _require_one_argument(site)
        processor = site.replacement(context)
        if not isinstance(processor, SSTAProcessor) or getattr(processor, "context", None) is not context:
            raise TypeError(f"{site.name}'s Site.replacement must return an SSTAProcessor with the context it was called with, "
                            f"got {type(processor).__name__}")
        if any(processor is other for _, other in replacements):
            raise ValueError(f"{site.name}'s Site.replacement must return a processor of its own for each site, got the same one again")
        processor.config, processor.site = own, site.name
        replacements.append((site, processor))
    return replacements


def _require_one_argument(site: Site) -> None:
    """Refuses a replacement that cannot be called with a context, as a class without an ``__init__`` that takes one."""
    try:
        signature = inspect.signature(site.replacement)
    except ValueError:
        # Some callables have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(site.replacement, "__name__", type(site.replacement).__name__)
        raise TypeError(f"{site.name}'s Site.replacement must take one argument, the model's ModelContext, as a subclass of SSTAProcessor "
                        f"does, got {name}{signature}") from error


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
        begins = partial(_begins, context, [site.module for site, _ in replacements])
        hooks.append(model.register_forward_pre_hook(begins, with_kwargs=True))
        hooks.append(model.register_forward_pre_hook(partial(resume_recomputations, context)))
        if context.family.split is not None:
            hooks.extend(context.family.split.hooks(model, context.state))
        parallel = context.parallelism(model)
        if parallel is None:
            _leave_plan(model, context.family, installation)
        else:
            parallel.settle(model)
        for block in first_blocks(model, list(installation.originals)):
            hooks.append(block.register_forward_pre_hook(channels_side_by_side, with_kwargs=True))
        setattr(model, _ATTRIBUTE, installation)
    except BaseException:
        _undo(model, installation, stays_split=True)
        raise
    return installation


def _leave_plan(model: nn.Module, family: Family, installation: Installation) -> None:
    """Leaves the family's plan where diffusers' ``enable_parallelism`` looks for one."""
    if family.split is None or not hasattr(model, "_cp_plan"):
        return
    try:
        plan = family.split.of(model)
    except ValueError:
        # Too small to be split, which is said when it is to be.
        return
    if plan != model._cp_plan:
        installation.plan = [vars(model).get("_cp_plan")]
        vars(model)["_cp_plan"] = plan


def _begins(context: ModelContext, modules: list[Any], model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook of the transformer."""
    if not torch.compiler.is_compiling():
        _warn_of_replaced(context, modules)
    context.capture(model, args, kwargs)


def _warn_of_replaced(context: ModelContext, modules: list[Any]) -> None:
    """Says once for each kind of model that processors were put in SSTA's place since."""
    replaced = [module.processor for module in modules if getattr(module.processor, "context", None) is not context]
    if replaced:
        warn_once(f"processors of {context.family.model}, {len(replaced)}",
                  f"{len(replaced)} of {len(modules)} self-attentions of {context.family.model} run without SSTA: since apply_ssta they "
                  f"have {type(replaced[0]).__name__} in the place of its processor. fuse_qkv_projections and set_attn_processor exchange "
                  "processors, so call them before apply_ssta; handle.remove() leaves theirs in place")


def uninstall(model: nn.Module, stays_split: bool = False) -> None:
    """Takes back what ``install`` did. On several ranks a model whose stock processors cannot attend to a share becomes whole, unless it
    ``stays_split``: for one to which SSTA was never quite applied."""
    installation = installation_of(model)
    assert installation is not None
    _undo(model, installation, stays_split)
    delattr(model, _ATTRIBUTE)


def _undo(model: nn.Module, installation: Installation, stays_split: bool) -> None:
    """What was installed so far, taken back."""
    installation.left = installation.processors(model)
    for name, processor in installation.left:
        original = installation.originals[processor.site]
        _copy_settings(processor, original)
        attention: Any = model.get_submodule(name)
        attention.processor = original
    for hook in installation.hooks:
        hook.remove()
    forget_recomputations(model)
    # Without blocks that were deleted since.
    modules = dict(model.named_modules()) if installation.added else {}
    for name in installation.added:
        parent, _, attribute = name.rpartition(".")
        if parent in modules:
            delattr(modules[parent], attribute)
    for own in installation.plan:
        vars(model).pop("_cp_plan", None)
        if own is not None:
            vars(model)["_cp_plan"] = own
    parallel = installation.context.parallelism(model)
    if parallel is not None:
        parallel.undo(model, list(installation.originals.values()), stays_split)


def _copy_settings(source: Any, target: Any) -> None:
    """Carries over what diffusers' set_attention_backend leaves on a processor. One that it left nothing on stays so: compiled blocks
    look at that."""
    if not hasattr(source, "_attention_backend"):
        return
    if getattr(target, "_attention_backend", source._attention_backend) != source._attention_backend:
        target._attention_backend = source._attention_backend
