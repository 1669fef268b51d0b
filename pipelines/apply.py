"""apply_ssta and remove_ssta: put SSTA into the video self-attention of a diffusers model, and take it out again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ssta import SSTAConfig
from ssta.kernels import IMPLEMENTATIONS

from .family import LayerRun, ModelContext, Site, SSTAProcessor, family_of

# Where the model keeps its installation. It holds no reference back to the model, so the model is freed as soon as its user drops it.
_ATTRIBUTE = "_ssta_installation"
_TRANSFORMERS = ("transformer", "transformer_2")


def apply_ssta(model: Any, config: SSTAConfig | None = None, *, impl: str = "auto") -> SSTAHandle:
    """Makes the video self-attention of a diffusers model sparse, until ``handle.remove()`` or ``remove_ssta(model)``.

    Weights, state dict and cross-attention are left alone. The canvas (t, h, w), the text length and its mask are taken from each
    forward, so resolutions may change between calls.

    Args:
        model: a transformer (see ``supported_models()``), or a pipeline: then its ``transformer``, and ``transformer_2`` if it has one.
        config: what is attended; default the preset of the model's family.
        impl: which kernel runs: "auto", or a name that ``block_sparse_attention`` takes.

    Returns:
        A handle, also a context manager: ``with apply_ssta(pipe): ...`` removes at the end.

    Raises:
        TypeError: not a model or a pipeline, or not an ``SSTAConfig``.
        ValueError: an unsupported model, SSTA applied already, an attention processor that is not the model's stock one, context
            parallelism, or an unknown impl. The model is then as it was.
    """
    if config is not None and not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig or None, got {type(config).__name__}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    # Everything is checked before anything is installed.
    plans = [(name, module, *_plan(module, config, impl)) for name, module in _transformers(model)]
    return SSTAHandle([(name, module, _install(module, context, sites)) for name, module, context, sites in plans])


def remove_ssta(model: Any) -> None:
    """Undoes ``apply_ssta`` on a transformer, or on the transformers of a pipeline; outputs are then bit-identical to before.

    A processor that was put in SSTA's place in the meantime stays.

    Raises:
        TypeError: not a model or a pipeline.
        ValueError: SSTA is not applied.
    """
    applied = [module for _, module in _transformers(model) if _installation(module) is not None]
    if not applied:
        raise ValueError(f"model must have SSTA applied before it is removed, got {type(model).__name__} without it")
    for module in applied:
        _uninstall(module)


class SSTAHandle:
    """What ``apply_ssta`` returns: the way to look at what ran, and the way back."""

    def __init__(self, installed: list[tuple[str, nn.Module, _Installation]]) -> None:
        self._installed = installed

    @property
    def config(self) -> SSTAConfig:
        """The configuration in use; of the first transformer where a pipeline has two."""
        return self._installed[0][2].context.config

    @property
    def active(self) -> bool:
        """Whether SSTA is still applied to any of the transformers."""
        return bool(self._still_applied())

    def report(self) -> list[LayerRun]:
        """What each layer ran last, in order; a layer that has not run since ``apply_ssta`` is left out. Synchronises the device."""
        runs = [processor.last_run(f"{name}.{site}" if name else site)
                for name, module, installation in self._still_applied() for site, processor in installation.processors(module)]
        return [run for run in runs if run is not None]

    def remove(self) -> None:
        """Undoes the ``apply_ssta`` call that returned this handle.

        Raises:
            ValueError: it was undone before.
        """
        still = self._still_applied()
        if not still:
            raise ValueError("SSTA must still be applied before the handle can remove it, got a handle that was removed before")
        for _, module, _ in still:
            _uninstall(module)

    def __enter__(self) -> SSTAHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.active:
            self.remove()

    def _still_applied(self) -> list[tuple[str, nn.Module, _Installation]]:
        return [entry for entry in self._installed if _installation(entry[1]) is entry[2]]


@dataclass
class _Installation:
    """What a model must remember to be brought back: lives on the model, and is copied with it."""

    context: ModelContext
    stock: dict[str, Any]
    hook: RemovableHandle

    def processors(self, model: nn.Module) -> list[tuple[str, SSTAProcessor]]:
        """(name, processor) of the sites where this installation's processor is still in place."""
        found = []
        for name in self.stock:
            processor = model.get_submodule(name).processor
            if isinstance(processor, SSTAProcessor) and processor.context is self.context:
                found.append((name, processor))
        return found


def _transformers(model: Any) -> list[tuple[str, nn.Module]]:
    """(attribute name, transformer) for a pipeline, ("", model) for a transformer."""
    if isinstance(model, nn.Module):
        return [("", model)]
    found = [(name, getattr(model, name, None)) for name in _TRANSFORMERS]
    found = [(name, module) for i, (name, module) in enumerate(found)
             if isinstance(module, nn.Module) and all(module is not other for _, other in found[:i])]
    if not found:
        raise TypeError(f"model must be a transformer or a pipeline with a .transformer, got {type(model).__name__}")
    return found


def _installation(model: nn.Module) -> _Installation | None:
    return vars(model).get(_ATTRIBUTE)


def _plan(model: nn.Module, config: SSTAConfig | None, impl: str) -> tuple[ModelContext, list[Site]]:
    family = family_of(model)
    if _installation(model) is not None:
        raise ValueError(f"model must not have SSTA applied already, got {type(model).__name__} with it; call remove_ssta(model) first")
    sites = list(family.sites(model))
    for site in sites:
        processor = site.module.processor
        if type(processor) is not site.stock:
            raise ValueError(f"{site.name} must have its stock processor {site.stock.__name__}, got {type(processor).__name__}; "
                             "put the stock processor back first")
        if getattr(processor, "_parallel_config", None) is not None:
            raise ValueError(f"{site.name} must run without context parallelism, got _parallel_config = {processor._parallel_config}")
    return ModelContext(family, family.default_config() if config is None else config, impl), sites


def _install(model: nn.Module, context: ModelContext, sites: list[Site]) -> _Installation:
    stock = {}
    for site in sites:
        stock[site.name] = site.module.processor
        replacement = site.replacement(context)
        _copy_settings(site.module.processor, replacement)
        site.module.processor = replacement
    installation = _Installation(context, stock, model.register_forward_pre_hook(context.capture, with_kwargs=True))
    setattr(model, _ATTRIBUTE, installation)
    return installation


def _uninstall(model: nn.Module) -> None:
    installation = _installation(model)
    for name, processor in installation.processors(model):
        _copy_settings(processor, installation.stock[name])
        model.get_submodule(name).processor = installation.stock[name]
    installation.hook.remove()
    delattr(model, _ATTRIBUTE)


def _copy_settings(source: Any, target: Any) -> None:
    """Carries over what diffusers' set_attention_backend and enable_parallelism leave on a processor."""
    for name in ("_attention_backend", "_parallel_config"):
        if hasattr(source, name) and hasattr(target, name):
            setattr(target, name, getattr(source, name))
