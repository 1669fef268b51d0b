"""Checkpoints that others trained sparse: a trained module for each attention, taken from the checkpoint, and processors that use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssta import SSTAConfig
from ssta.kernels.checks import require_strided
from ssta.kernels.routing import require_impl

from ...patch.apply import SSTAHandle, install_all, require_counter, transformers_of
from ...patch.context import ModelContext
from ...patch.installation import processors_for, require_bare, sites_of
from ...patch.register import family_of
from ...schedule.progress import Progress
from ...schedule.schedule import Schedule
from ...terms import Family, Site
from .branched import BranchedProcessor
from .checkpoint import FoundTensors, Weights, find_tensors

_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Branch:
    """What a method trains beside the model's own weights: a linear layer in each attention.

    Attributes:
        method: what messages call it.
        module: the layer's name in the attention module.
        keys: what checkpoints call it, below a block's name.
        size: the attention module -> its (outputs, inputs).
        attend: what attends with it, as ``BranchedProcessor.method``.
        without: models of whose checkpoints none has the layer: where no weights are given, they run without it.
    """

    method: str
    module: str
    keys: tuple[str, ...]
    size: Callable[[Any], tuple[int, int]]
    attend: Callable[..., Tensor]
    without: tuple[str, ...] = ()

    @property
    def pattern(self) -> re.Pattern:
        """Matches a tensor's name; its groups are the block's name, and "weight" or "bias"."""
        return re.compile(rf"(?:^|\.)(\w*blocks\.\d+)\.(?:{'|'.join(map(re.escape, self.keys))})\.(?:set_)?(weight|bias)$")


def apply_branch(
    model: Any, weights: Weights | Mapping[str, Weights] | None, branch: Branch, config: SSTAConfig, schedule: Schedule | None, impl: str,
) -> SSTAHandle:
    """What ``apply_vsa`` and ``apply_sla`` do, which say what the arguments are and what is raised. ``config``: what reports are about."""
    require_impl(impl)
    schedule = Schedule() if schedule is None else schedule
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule or None, got {type(schedule).__name__}")
    if schedule.layer_configs:
        raise ValueError(f"schedule must have no layer_configs, for {branch.method} has one sparsity, got {schedule.layer_configs}")
    pipeline = model if not isinstance(model, nn.Module) and hasattr(model, "scheduler") else None
    progress, found = Progress(pipeline, None), transformers_of(model)
    require_counter(schedule, progress)
    if isinstance(weights, Mapping) and weights and set(weights) <= {name for name, _ in found}:
        found = [(name, module) for name, module in found if name in weights]
    names = [name for name, _ in found]
    plans = []
    for name, module in found:
        family = family_of(module)
        require_bare(module)
        sites = _sites(family, module, branch)
        layers = {} if weights is None and family.model in branch.without else _layers(
            sites, _found(weights, module, name, names, branch), branch)
        context = ModelContext(module, family, config, schedule.for_transformer(name, names), progress, impl)
        context.method = branch.method
        replacements: Any = processors_for(context, sites)
        for _, processor in replacements:
            processor.method = branch.attend
        plans.append((name, module, context, replacements, layers))
    return install_all(plans)


def _sites(family: Family, model: nn.Module, branch: Branch) -> list[Site]:
    sites = sites_of(family, model)
    for site in sites:
        if not (isinstance(site.replacement, type) and issubclass(site.replacement, BranchedProcessor)):
            raise ValueError(f"model must be a transformer of Wan's or MiniMax-H3, which {branch.method} checkpoints are for, got "
                             f"{type(model).__name__}")
        if hasattr(site.module, branch.module):
            raise ValueError(f"{site.name} must have no {branch.module} of its own, got one")
        module: Any = site.module
        if module.to_q.weight.device.type == "meta":
            raise ValueError(f"model must have its weights before those of {branch.method} come to them, got {site.name}.to_q on the meta "
                             "device; apply it before offloading")
    return sites


def _found(
    weights: Weights | Mapping[str, Weights] | None, model: nn.Module, name: str, names: Sequence[str], branch: Branch,
) -> FoundTensors:
    """The branch's tensors for one of the pipeline's transformers."""
    own: Any = weights
    if weights is None:
        own = getattr(getattr(model, "config", None), "_name_or_path", None)
        if not own:
            raise ValueError("weights must be given for a model that from_pretrained did not load, got None for a "
                             f"{type(model).__name__} that says of no place where it came from")
    elif isinstance(weights, Mapping) and set(weights) == set(names):
        own = weights[name]
    elif len(names) > 1:
        if isinstance(weights, Mapping):
            raise ValueError(f"weights must have an entry for each of {', '.join(names)}, got {', '.join(map(repr, list(weights)[:3]))}")
        return find_tensors(own, name, branch.pattern, own=False)
    return find_tensors(own, name, branch.pattern)


def _layers(sites: Sequence[Site], found: FoundTensors, branch: Branch) -> dict[str, nn.Linear]:
    """The trained layer of each site, by the name of the module that it will be."""
    blocks = {site.name.rpartition(".")[0]: site for site in sites}
    tensors: dict[tuple[str, str], Tensor] = {}
    origin: dict[tuple[str, str], str] = {}
    for name, x in found.tensors.items():
        match = branch.pattern.search(name)
        assert match is not None
        # MiniMax-H3's own files have "blocks" where diffusers has "transformer_blocks".
        block = f"transformer_{match.group(1)}" if f"transformer_{match.group(1)}" in blocks else match.group(1)
        key = block, match.group(2)
        if key in tensors:
            raise ValueError(f"weights must have one {branch.module} for each attention, got {origin[key]!r} and {name!r}")
        tensors[key], origin[key] = x, name
    example = f"{sites[0].name}.{branch.module}.weight"
    if not tensors:
        raise ValueError(f"weights must be a checkpoint that was trained with {branch.method}, with tensors such as {example!r}, "
                         f"got {found}")
    missing = [block for block in blocks if (block, "weight") not in tensors]
    beyond = sorted({block for block, _ in tensors} - set(blocks))
    if missing or beyond:
        parts = [f"none for {', '.join(missing[:5])}" if missing else "", f"some for {', '.join(beyond[:5])}" if beyond else ""]
        raise ValueError(f"weights must have a {branch.module} for each of the model's {len(blocks)} attentions, and no more, got "
                         f"{' and '.join(filter(None, parts))}, in {found.source}")
    return {f"{site.name}.{branch.module}": _layer(site.module, [(origin.get((block, what), ""), tensors.get((block, what)))
                                                                 for what in ("weight", "bias")], branch)
            for block, site in blocks.items()}


def _layer(module: Any, parameters: list[tuple[str, Tensor | None]], branch: Branch) -> nn.Linear:
    like, (outputs, inputs) = module.to_q.weight, branch.size(module)
    layer = nn.Linear(inputs, outputs, bias=parameters[1][1] is not None, device="meta")
    for (name, x), attribute, shape in zip(parameters, ("weight", "bias"), ((outputs, inputs), (outputs,))):
        if x is None:
            continue
        if tuple(x.shape) != shape or not x.is_floating_point():
            raise ValueError(f"weights' {name} must be a floating-point tensor of shape {shape} for this model, got {x.dtype} of shape "
                             f"{tuple(x.shape)}")
        require_strided(f"weights' {name}", x)
        if x.is_meta:
            raise ValueError(f"weights' {name} must have values, got a tensor on the meta device, as init_empty_weights makes them")
        # Quantised weights say nothing of what is computed in; norms are not quantised.
        dtype = like.dtype if like.dtype in _COMPUTED else module.norm_q.weight.dtype
        own = x.detach().to(like.device, dtype, copy=True).contiguous()
        setattr(layer, attribute, nn.Parameter(own, requires_grad=like.requires_grad))
    return layer.train(module.training)
