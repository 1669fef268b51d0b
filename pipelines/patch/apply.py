"""apply_ssta and remove_ssta: put SSTA into the video self-attention of a diffusers model, and take it out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ssta import SSTAConfig
from ssta.kernels.checks import require_bool
from ssta.kernels.routing import require_impl

from ..schedule.changes import changed, require_changes, warn_of_dense_layers, warn_of_what_is_dropped
from ..schedule.progress import Progress
from ..schedule.schedule import Schedule
from ..terms import Family, Site
from .context import ModelContext
from .installation import Installation, install, installation_of, processors_for, require_bare, sites_of, uninstall
from .processor import SSTAProcessor
from .register import family_of, preset_settings
from .report import RunReport

# Wan 2.2 has a second one for low noise, MiniMax-H3 another one for generations with references.
_TRANSFORMERS = ("transformer", "transformer_2", "transformer_ref")


def apply_ssta(
    model: Any, config: SSTAConfig | None = None, *, density: float | None = None, schedule: Schedule | None = None,
    preset: str | None = None, scheduler: Any = None, impl: str = "auto", check_ranks: bool = False, **changes: Any,
) -> SSTAHandle:
    """Makes the video self-attention of a diffusers model sparse, until ``handle.remove()`` or ``remove_ssta(model)``.

    Weights, state dict and cross-attention are left alone. The canvas (t, h, w), the text length and its mask are taken from each
    forward, so resolutions may change between calls. A tile larger than the canvas is one tile, and attention then dense.

    One thing outside of attention changes, to the same values: tokens ``[B, S, C]`` that enter the first block of a stack are copied to
    contiguous memory, where a patch embedding left them with a token's channels far apart, and the blocks after it keep that order.

    Apply it to the pipeline that will be called, and fuse projections before rather than after where fusing exchanges the attention
    processors (CogVideoX). ``compile_repeated_blocks(fullgraph=True)`` works before and after; under a torch.compile of the whole model a
    schedule that follows the steps leaves the graph once a forward.

    Args:
        model: a transformer (see ``supported_models()``), or a pipeline: then those of ``transformer``, ``transformer_2`` and
            ``transformer_ref`` that it has.
        config: what is attended, as a whole, in place of the family's default. It takes nothing over from that default: fields that you
            leave out have ``SSTAConfig``'s values, such as ``compensation="none"``, which drops what is not computed. To change the
            default and keep the rest of it, give ``density`` or other fields by keyword instead.
        density: the share in (0, 1] of the video's tile pairs that is computed exactly, in place of that of the family's default or of the
            preset.
        changes: any other fields of ``SSTAConfig``, such as ``compensation_parts=1`` or ``tile_thw=(4, 8, 8)``: they change those of the
            family's default or of the preset, on every canvas. What they leave no room for goes: ``topk`` takes the place of the density.
        schedule: which steps and layers stay dense; default the preset's or the family's, which is the first layer. It takes nothing over
            from that default: without ``dense_layers`` no layer stays dense.
        preset: the name of a configuration and a schedule: ``"near"`` the dense video, ``"balanced"``, ``"fast"``, ``"8 steps"`` or
            ``"4 steps"``, for every family's densely trained weights (``pipelines/schedule/presets.py`` has their settings and reasons);
            or one for weights that were trained with SSTA: ``"hunyuan_video_15_sparse"`` for the sparse checkpoint of HunyuanVideo 1.5,
            which has nothing dense.
        scheduler: the diffusers scheduler that counts the steps; default the pipeline's, also if it is exchanged later.
        impl: which kernel runs: "auto", or a name that ``block_sparse_attention`` takes. Whether it can run is checked when attention does,
            for a model may still move to another device, as offloading moves it; so a model on the meta device is taken too.
        check_ranks: on several ranks, compare canvas, step, settings and inputs of all of them at the beginning of each generation, and
            raise where they differ: other prompts, noise or settings give a wrong video without an error. It waits for the device.

    Returns:
        A handle, also a context manager: ``with apply_ssta(pipe): ...`` removes at the end.

    Raises:
        TypeError: not a model or a pipeline, not an ``SSTAConfig``, a number, a ``Schedule`` or a scheduler, which has a tensor of
            timesteps, a keyword that is no field, or a family whose functions return something else than they should.
        ValueError: fields beside a config, or values that they do not take, an unsupported model, SSTA applied already, an attention
            processor that is not the model's original one, a model that runs on several ranks by another plan than ``cp_plan`` or by
            tensors, a schedule that names layers that the model does not have, or that keeps a share of the steps dense without a
            scheduler, an unknown impl or preset, or a family whose sites are not the model's.
        ImportError: the model's family does not fit the installed diffusers.

    The model is as it was after any of them.
    """
    if density is not None:
        changes["density"] = density
    require_changes(config, changes)
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule or None, got {type(schedule).__name__}")
    if scheduler is not None:
        _require_scheduler(scheduler)
    if preset is not None:
        if not isinstance(preset, str):
            raise TypeError(f"preset must be a name or None, got {type(preset).__name__}")
        if config is not None:
            raise ValueError(f"preset must stand alone, for it is a config, got {preset!r} and a config")
    require_impl(impl)
    require_bool("check_ranks", check_ranks)
    # Everything is checked before anything is installed.
    pipeline = model if not isinstance(model, nn.Module) and hasattr(model, "scheduler") else None
    progress = Progress(pipeline, scheduler)
    found = transformers_of(model)
    plans: list[tuple] = []
    for name, module in found:
        own = None if schedule is None else schedule.for_transformer(name, [other for other, _ in found])
        plans.append((name, module, *_plan(module, config, changes, own, preset, progress, impl, check_ranks), {}))
    return install_all(plans)


def install_all(
    plans: Sequence[tuple[str, nn.Module, ModelContext, list[tuple[Site, SSTAProcessor]], Mapping[str, nn.Module]]],
) -> SSTAHandle:
    """``install`` for each (name, model, context, processors by site, modules to add by name), or, after an exception, for none."""
    installed: list[tuple[str, nn.Module, Installation]] = []
    try:
        for name, module, context, replacements, added in plans:
            installed.append((name, module, install(module, context, replacements, added)))
    except BaseException:
        for _, module, _ in installed:
            uninstall(module, stays_split=True)
        raise
    return SSTAHandle(installed)


def remove_ssta(model: Any) -> None:
    """Undoes ``apply_ssta`` on a transformer, or on the transformers of a pipeline; outputs are then bit-identical to before.

    A processor that was put in SSTA's place in the meantime stays.

    Raises:
        TypeError: not a model or a pipeline.
        ValueError: SSTA is not applied.
    """
    applied = [module for _, module in transformers_of(model) if installation_of(module) is not None]
    if not applied:
        raise ValueError(f"model must have SSTA applied before it is removed, got {type(model).__name__} without it")
    for module in applied:
        uninstall(module)


class SSTAHandle:
    """What ``apply_ssta`` returns: the way to look at what ran, and the way back."""

    def __init__(self, installed: list[tuple[str, nn.Module, Installation]]) -> None:
        self._installed = installed

    def __repr__(self) -> str:
        still = self._still_applied()
        return f"SSTAHandle({'; '.join([_described(*entry) for entry in still]) if still else 'removed'})"

    @property
    def config(self) -> SSTAConfig:
        """The configuration in use; of the first transformer where a pipeline has two."""
        return self._installed[0][2].context.config

    @property
    def schedule(self) -> Schedule:
        """The schedule in use; of the first transformer where a pipeline has two."""
        return self._installed[0][2].context.schedule

    @property
    def configs(self) -> dict[str, SSTAConfig]:
        """Each transformer's configuration, by the transformer's name in the pipeline; by "" for a transformer without one."""
        return {name: installation.context.config for name, _, installation in self._installed}

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Each transformer's schedule, as ``configs``, with the layers of that transformer alone."""
        return {name: installation.context.schedule for name, _, installation in self._installed}

    @property
    def active(self) -> bool:
        """Whether SSTA is still applied to any of the transformers."""
        return bool(self._still_applied())

    def report(self) -> RunReport:
        """What each layer ran last, in order, as a list that prints as a table; after SSTA was removed too. Synchronises the device.

        A layer that has not run since ``apply_ssta`` is left out, and so is one whose processor was replaced since, which attends densely.
        """
        runs = []
        for name, module, installation in self._installed:
            applied = installation_of(module) is installation
            for site, processor in installation.processors(module) if applied else installation.left:
                runs.append(processor.last_run(f"{name}.{site}" if name else site))
        return RunReport([run for run in runs if run is not None])

    def layers(self) -> list[tuple[str, nn.Module, ModelContext, list[tuple[str, SSTAProcessor]]]]:
        """(name, model, context, its processors by site) of each transformer that still has SSTA. For use inside the package."""
        return [(name, module, own.context, own.processors(module)) for name, module, own in self._still_applied()]

    def remove(self) -> None:
        """Undoes the ``apply_ssta`` call that returned this handle; does nothing where that was undone before."""
        for _, module, _ in self._still_applied():
            uninstall(module)

    def __enter__(self) -> SSTAHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _still_applied(self) -> list[tuple[str, nn.Module, Installation]]:
        return [entry for entry in self._installed if installation_of(entry[1]) is entry[2]]


def _described(name: str, module: nn.Module, installation: Installation) -> str:
    """One transformer in a handle's repr."""
    config, processors = installation.context.config, installation.processors(module)
    dense = sum([processor.config is None for _, processor in processors])
    budget = next((f"{field} {value}" for field in ("density", "topk", "threshold", "budget")
                   if (value := getattr(config, field)) not in (None, 0)), "the window alone")
    return f"{f'{name}, ' if name else ''}{type(module).__name__}: {len(processors)} layers, {dense} of them dense, {budget}"


def transformers_of(model: Any) -> list[tuple[str, nn.Module]]:
    """(attribute name, transformer) for a pipeline, ("", model) for a transformer."""
    if isinstance(model, nn.Module):
        return [("", model)]
    named = [(name, getattr(model, name, None)) for name in _TRANSFORMERS]
    found = [(name, module) for i, (name, module) in enumerate(named)
             if isinstance(module, nn.Module) and all(module is not other for _, other in named[:i])]
    if not found:
        hint = "; its own remove() takes SSTA off" if isinstance(model, SSTAHandle) else ""
        raise TypeError(f"model must be a transformer or a pipeline with one as {' or '.join(_TRANSFORMERS)}, got {type(model).__name__}"
                        + hint)
    return found


def _require_scheduler(scheduler: Any) -> None:
    """Some of diffusers' schedulers have no timesteps before ``set_timesteps``."""
    timesteps = getattr(scheduler, "timesteps", "")
    if not isinstance(timesteps, Tensor) and not (timesteps is None and callable(getattr(scheduler, "set_timesteps", None))):
        found = f" whose timesteps are {type(timesteps).__name__}" if hasattr(scheduler, "timesteps") else ""
        raise TypeError(f"scheduler must be a diffusers scheduler, which has a tensor of timesteps, got {type(scheduler).__name__}{found}")


def _plan(
    model: nn.Module, config: SSTAConfig | None, changes: Mapping[str, Any], schedule: Schedule | None, preset: str | None,
    progress: Progress, impl: str, check_ranks: bool,
) -> tuple[ModelContext, list[tuple[Site, SSTAProcessor]]]:
    """The context and, for each site, the processor to install; changes nothing yet."""
    family = family_of(model)
    require_bare(model)
    sites = sites_of(family, model)
    of_layers = {} if schedule is None else {f"layer_configs[{layer!r}]": own for layer, own in dict(schedule.layer_configs).items()}
    for argument, own in {"config": config, **of_layers}.items():
        if own is not None:
            warn_of_what_is_dropped(family.model, own, family.default_config(), [make()[0] for make in family.presets.values()], argument)
    config, schedule = _settings(family, config, schedule, preset, progress, len(sites))
    if changes:
        config = changed(config, **changes)
    # Itself and not just equal: layers that have none of their own are known by it.
    config = replace(config)
    context = ModelContext(model, family, config, schedule, progress, impl)
    context.check_ranks = check_ranks
    replacements = processors_for(context, sites)
    context.configs = tuple([processor.config for _, processor in replacements])
    return context, replacements


def _settings(
    family: Family, config: SSTAConfig | None, schedule: Schedule | None, preset: str | None, progress: Progress, layers: int,
) -> tuple[SSTAConfig, Schedule]:
    """The user's configuration and schedule, or the preset's, or the family's, for a model of so many layers."""
    if preset is not None:
        config, own = preset_settings(family, preset)
    else:
        config, own = family.default_config() if config is None else config, family.default_schedule()
    given, schedule = schedule, own if schedule is None else schedule
    for name, value, wanted in (("configuration", config, SSTAConfig), ("schedule", schedule, Schedule)):
        if not isinstance(value, wanted):
            source = "default" if preset is None else f"preset {preset!r}"
            raise TypeError(f"{family.model}'s {source} {name} must be of class {wanted.__name__}, got {type(value).__name__}")
    require_counter(schedule, progress)
    warn_of_dense_layers(family.model, given, own, layers)
    return config, schedule


def require_counter(schedule: Schedule, progress: Progress) -> None:
    """Refuses a schedule that counts steps where nothing counts them."""
    if progress.scheduler is None and schedule.counts_steps:
        raise ValueError(f"schedule must not count steps without a scheduler, got dense_steps = {schedule.dense_steps}, densities = "
                         f"{schedule.densities}; apply SSTA to the pipeline, or give its scheduler")
