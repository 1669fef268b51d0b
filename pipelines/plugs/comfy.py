"""SSTA in ComfyUI: a model patch whose wrappers find the step and the canvas of a call, and whose attention override computes it.

Imports neither ComfyUI nor diffusers. The folder ``comfyui/`` of the repository has the nodes that call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssta import DenseRun, SSTAConfig, TokenLayout
from ssta.attention import attend
from ssta.kernels import Route
from ssta.kernels.notices import logger, warn_once
from ssta.report import heads_without_estimate, mass_summary
from ssta.result import ExactMass, LayerResult

from ..patch.report import LayerRun, RunReport
from ..schedule.changes import changed, require_changes, warn_of_the_window, warn_of_what_is_dropped
from ..schedule.presets import first_layer_dense, small_tiles
from ..schedule.schedule import Schedule
from .comfy_models import ComfyModel, Sequence, comfy_model

# Under which a ModelPatcher and a call's transformer_options hold what is ours.
KEY = "ssta"
OVERRIDE = "optimized_attention_override"
# ComfyUI's names for them, in comfy.patcher_extension and in the attention functions.
_APPLY_MODEL, _DIFFUSION_MODEL, _ON_PRE_RUN = "apply_model", "diffusion_model", "on_pre_run"
_AFTER_HEADS = ("mask", "attn_precision", "skip_reshape", "skip_output_reshape")
# A bias on a score below which a token counts as masked: in float16 too, exp of it is 0.
_MASKED = -1e4


def patch_model(model: Any, config: SSTAConfig | None = None, schedule: Schedule | None = None, **changes: Any) -> Any:
    """A clone of one of ComfyUI's models that attends sparsely to its video; the model itself is left alone.

    Cross-attention, single frames, and steps and blocks that the schedule keeps dense are computed by whatever would compute them without
    SSTA: ComfyUI's attention, or the override of another node, whichever of the two was applied first. So is, with a warning that says why,
    any call whose canvas cannot be known or whose mask is none over the text at the end of which tokens are invalid.

    Args:
        model: ComfyUI's ModelPatcher of a Wan, HunyuanVideo, HunyuanVideo 1.5 or LTX model. One that has SSTA gets it anew.
        config: what is attended to, as a whole; None = the default: tiles of 128 tokens, 15 % of their pairs exactly, the rest estimated
            in two parts each.
        schedule: ``dense_steps``, ``dense_layers`` and ``layer_configs``, whose layers are the model's blocks in the order in which they
            run; None = the first block dense. The steps are those that a sampler runs: of a generation that is split among two samplers
            each has its own.
        changes: fields of ``SSTAConfig`` that change the default, such as ``density=0.2``, as in ``apply_ssta``.

    Raises:
        TypeError: no ModelPatcher, a keyword that is no field, or values of the wrong kind.
        ValueError: a model that SSTA does not know, a block that it does not have, fields beside a config or values that they do not take.
    """
    diffusion = _diffusion_model(model)
    known = comfy_model(diffusion)
    require_changes(config, changes)
    schedule = first_layer_dense() if schedule is None else schedule
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule or None, got {type(schedule).__name__}")
    if schedule.densities:
        raise ValueError(f"schedule must have the same density at all steps in ComfyUI, got densities = {schedule.densities}")
    if config is None:
        config = changed(small_tiles(), **changes)
    else:
        warn_of_what_is_dropped(known.name, config, small_tiles(), (SSTAConfig.hunyuan_video_15(),))
    patch = ComfyPatch(diffusion, known, config, schedule)
    # Not as a decorator: it loads all of torch's compiler.
    torch.compiler.assume_constant_result(_say)
    patched = unpatch_model(model)
    patched.add_wrapper_with_key(_APPLY_MODEL, KEY, patch.note_step)
    patched.add_wrapper_with_key(_DIFFUSION_MODEL, KEY, patch.note_canvas)
    patched.add_callback_with_key(_ON_PRE_RUN, KEY, patch.begin)
    patched.set_attachments(KEY, patch)
    return patched


def unpatch_model(model: Any) -> Any:
    """A clone of the model without SSTA, whatever was applied after it; the model itself is left alone.

    Raises:
        TypeError: no ModelPatcher.
    """
    _diffusion_model(model)
    model = model.clone()
    model.remove_wrappers_with_key(_APPLY_MODEL, KEY)
    model.remove_wrappers_with_key(_DIFFUSION_MODEL, KEY)
    model.remove_callbacks_with_key(_ON_PRE_RUN, KEY)
    model.remove_attachments(KEY)
    return model


def report_model(model: Any) -> RunReport:
    """What the blocks of a patched model, or of a clone of it, ran in the generation in progress or last finished. Waits for the device.

    Inside a torch.compile nothing is noted: blocks that ran only there are not in it.

    Raises:
        TypeError: no ModelPatcher.
        ValueError: the model has no SSTA.
    """
    _diffusion_model(model)
    patch = model.get_attachment(KEY)
    if patch is None:
        raise ValueError("model must have SSTA to report on, got one without: apply SSTA first, and take the model from there on")
    return patch.report()


def _diffusion_model(model: Any) -> Any:
    if not all(hasattr(model, name) for name in ("clone", "get_model_object", "add_wrapper_with_key", "set_attachments")):
        raise TypeError(f"model must be a ModelPatcher of ComfyUI's, got {type(model).__name__}")
    return model.get_model_object("diffusion_model")


@dataclass(frozen=True)
class _Denseness:
    """What ``note_step`` tells ``note_canvas`` in a call's transformer_options: whether all of it is dense, or why it has to be."""

    dense: bool
    wrong: str | None = None
    masked: bool = False


@dataclass(frozen=True)
class _Ran:
    """What a block ran last; the tensors are small ones of the device."""

    layout: TokenLayout
    tiles: int
    counts: Tensor
    mass: ExactMass | None
    route: Route | None


class ComfyPatch:
    """SSTA on one model, shared by its clones. Holds no state that decides anything but what each call brings along."""

    def __init__(self, diffusion: Any, known: ComfyModel, config: SSTAConfig, schedule: Schedule) -> None:
        self.known, self.schedule = known, schedule
        self.width = int(getattr(diffusion, known.width))
        self.names = known.block_names(diffusion)
        self.configs = schedule.for_layers(self.names, config)
        self.doubles = len(getattr(diffusion, known.stacks[0]))
        # A call's positional arguments by name; forward hands them on in the order of _forward.
        inner = getattr(type(diffusion), "_forward", type(diffusion).forward)
        self.arguments: tuple[str, ...] = tuple(inspect.signature(inner).parameters)[1:]
        if "transformer_options" not in self.arguments or "context" not in self.arguments:
            raise ValueError(f"model must take context and transformer_options as ComfyUI's {known.name} does, got one that takes "
                             f"{', '.join(self.arguments)}: SSTA does not know this version of ComfyUI")
        self._sigmas: tuple[Tensor, list[float]] | None = None
        self.begin(None)

    def begin(self, model: Any) -> None:
        """A generation begins: ON_PRE_RUN."""
        self.ran: dict[int, _Ran] = {}
        self.steps: set[int] = set()
        self.dense_steps: set[int] = set()

    # Once a forward

    def note_step(self, executor: Callable[..., Any], x: Any, t: Tensor, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
                  transformer_options: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Wrapper of APPLY_MODEL, which is never inside a compiled graph: reads which step it is, once for all blocks."""
        options = dict(transformer_options or {})
        step = self._step(t, options)
        if not step.dense and self.known.joint and kwargs.get("attention_mask") is not None:
            wrong = _not_a_prefix(kwargs["attention_mask"])
            step = _Denseness(False, wrong, masked=True)
        if step.wrong is not None:
            _say(f"{self.known.name} keeps its own attention: {step.wrong}")
        options[KEY] = step
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _step(self, t: Tensor, options: Mapping[str, Any]) -> _Denseness:
        """The forward's step. Where the schedule asks for it, reads the noise level, once a forward, which waits for the device."""
        schedule, sigmas = self.schedule, options.get("sample_sigmas")
        if not schedule.counts_steps:
            return _Denseness(False)
        if sigmas is None:
            _say(f"which step of {self.known.name} it is cannot be found without sample_sigmas: the first steps are not dense")
            return _Denseness(False)
        if self._sigmas is None or self._sigmas[0] is not sigmas:
            self._sigmas = (sigmas, sigmas.tolist())
        # The last one is where the sampler ends; the model is not asked there.
        levels = self._sigmas[1][:-1] or self._sigmas[1]
        sigma = float(t.flatten()[0])
        index = min(range(len(levels)), key=lambda i: abs(levels[i] - sigma))
        dense = schedule.is_dense_step(index, len(levels))
        self.steps.add(index)
        if dense:
            self.dense_steps.add(index)
        return _Denseness(dense)

    def note_canvas(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of DIFFUSION_MODEL: puts the override into this one call, before whatever is there."""
        call = {**dict(zip(self.arguments, args)), **kwargs}
        options = call.get("transformer_options") or {}
        step = options.get(KEY) or _Denseness(False)
        if step.dense or step.wrong is not None:
            return executor(*args, **kwargs)
        sequence = self.known.sequence(executor.class_obj, call)
        if isinstance(sequence, str):
            _say(f"{self.known.name} keeps its own attention: {sequence}")
            return executor(*args, **kwargs)
        for config in () if torch.compiler.is_compiling() else set(self.configs):
            warn_of_the_window(self.known.name, config, _canvas(sequence.layout))
        override = _Override(self, sequence, step.masked, options.get(OVERRIDE))
        options = {**options, OVERRIDE: override}
        place = self.arguments.index("transformer_options")
        if place < len(args):
            args = (*args[:place], options, *args[place + 1:])
        else:
            kwargs["transformer_options"] = options
        out = executor(*args, **kwargs)
        if not torch.compiler.is_compiling() and not override.met:
            _say(f"{self.known.name} keeps its own attention: none of its calls is self-attention over {sequence.layout} with {self.width} "
                 "channels")
        return out

    # Once a block

    def block_of(self, options: Mapping[str, Any], seen: int) -> int:
        """Which block is running; ``seen`` have run, for versions of ComfyUI whose models do not say which."""
        block = options.get("block_index")
        if block is None:
            return seen
        return block + self.doubles if options.get("block_type") == "single" else block

    def note(self, block: int, layout: TokenLayout, result: LayerResult) -> None:
        """What a block ran, for the report. Reads nothing from the device."""
        if not self.ran:
            logger.info(f"SSTA: {self.known.name}, {layout}, with {result.route}")
        counts = result.selection.blocks.counts
        self.ran[block] = _Ran(layout, counts.shape[-1], counts, result.mass, result.route)

    def report(self) -> RunReport:
        """One line for each block, in their order, once one has attended sparsely."""
        steps, dense, runs = len(self.steps) or None, len(self.dense_steps) if self.steps else None, []
        layouts = [ran.layout for ran in self.ran.values()]
        for block, name in enumerate(self.names):
            if block in self.ran:
                ran = self.ran[block]
                masses = None if ran.mass is None else ran.mass.tensor()
                runs.append(LayerRun(
                    name, str(ran.route), _canvas(ran.layout), ran.layout.length, ran.tiles, float(ran.counts.double().mean()) / ran.tiles,
                    steps, dense, explanation=() if ran.route is None else ran.route.explain(),
                    exact_mass=None if masses is None else mass_summary(masses),
                    without_estimate=None if masses is None else heads_without_estimate(masses)))
            elif self.configs[block] is None and layouts:
                runs.append(LayerRun(name, "dense, ComfyUI's", _canvas(layouts[0]), layouts[0].length, None, 1.0, steps, steps))
        return RunReport(runs)


class _Override:
    """``optimized_attention_override`` of one forward: video self-attention is SSTA's, everything else goes on as it came."""

    def __init__(self, patch: ComfyPatch, sequence: Sequence, masked: bool, before: Callable[..., Tensor] | None) -> None:
        self.patch, self.sequence, self.masked, self.before = patch, sequence, masked, before
        # Whether there was a video self-attention; how many, where they have no index. A compiled block asks for neither.
        self.met, self.seen = False, 0

    def __call__(self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        out = self._attend(q, k, v, heads, {**dict(zip(_AFTER_HEADS, args)), **kwargs})
        if isinstance(out, Tensor):
            return out
        if out is not None:
            _say(f"{self.patch.known.name} keeps its own attention: {out}")
        if self.before is not None:
            return self.before(func, q, k, v, heads, *args, **kwargs)
        return func(q, k, v, heads, *args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, named: Mapping[str, Any]) -> Tensor | str | None:
        """What SSTA gives; None where it is not meant, a sentence where it is and cannot."""
        split, patch = bool(named.get("skip_reshape")), self.patch
        layout = self.sequence.of_length(q.shape[-2])
        width = q.shape[-1] * (heads if split else 1)
        if layout is None or width != patch.width or k.shape != q.shape or v.shape != q.shape:
            return None
        options = named.get("transformer_options") or {}
        self.met = True
        block = patch.block_of(options, self.seen)
        if "block_index" not in options:
            self.seen += 1
        if block >= len(patch.configs):
            return f"block {block} runs, of {len(patch.configs)} that were known"
        config, grid, mask = patch.configs[block], options.get("grid_sizes"), named.get("mask")
        if config is None:
            return None
        if grid is not None and tuple(grid) != _canvas(layout):
            return f"its canvas is {tuple(grid)}, where {_canvas(layout)} was expected"
        if not q.dtype == k.dtype == v.dtype:
            return f"its queries are {q.dtype}, its keys {k.dtype} and its values {v.dtype}"
        text_mask = None
        if mask is not None:
            if not self.masked or not _over_keys(mask, q.shape[0], layout.length):
                found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                return f"its mask, {found}, does not follow from a mask over its text"
            text_mask = _text_mask(mask, q.shape[0], layout)
        if not split:
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        result = attend(q, k, v, layout, config, text_mask=text_mask, scale=named.get("scale"))
        if not torch.compiler.is_compiling():
            patch.note(block, layout, result)
        return result.out if named.get("skip_output_reshape") else result.out.transpose(1, 2).flatten(2)


def _canvas(layout: TokenLayout) -> tuple[int, int, int]:
    assert layout.longest_video is not None
    return layout.longest_video


def _not_a_prefix(mask: Tensor) -> str | None:
    """Why a model's ``attention_mask``, ``[B, text]``, is none that has the valid tokens first; None if it is. Waits for the device.

    Integers are 1 = valid, 0 = not; floating-point numbers are added to scores.
    """
    if mask.ndim < 2 or mask.numel() != mask.shape[0] * mask.shape[-1]:
        return f"its text mask is {tuple(mask.shape)}, not [batch, text tokens]"
    for row in mask.reshape(mask.shape[0], -1).tolist():
        if mask.is_floating_point():
            if any(_MASKED < bias < 0 or bias > 0 for bias in row):
                return "its text mask weighs tokens, where they should be valid or not"
            row = [bias == 0 for bias in row]
        elif any(value not in (0, 1) for value in row):
            return f"its text mask has values from {min(row)} to {max(row)}, where 0 and 1 are expected"
        valid = sum(row)
        if not all(row[:valid]):
            return f"its text mask does not have the valid tokens first: of {len(row)} {valid} are valid, and token {row.index(0)} is not"
    return None


def _over_keys(mask: Any, batch: int, tokens: int) -> bool:
    """Whether an attention mask is the same for all heads and queries: [1, tokens], or [batch or 1, (1,) 1, tokens]."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 3, 4) or mask.shape[-1] != tokens:
        return False
    return mask.numel() == tokens or mask.ndim > 2 and mask.shape[0] == batch and mask.numel() == batch * tokens


def _text_mask(mask: Tensor, batch: int, layout: TokenLayout) -> Tensor:
    """bool ``[batch, dense tokens]`` from an attention mask over all tokens, bool or added to scores. Stays on the device."""
    valid = (mask if mask.dtype == torch.bool else mask > _MASKED).reshape(-1, layout.length)
    runs, start = [], 0
    for segment in layout.segments:
        if isinstance(segment, DenseRun):
            runs.append(valid[:, start: start + segment.length])
        start += segment.length
    return torch.cat(runs, 1).expand(batch, -1)


def _say(message: str) -> None:
    """A warning, once in a process; where a graph is being compiled, when it is."""
    warn_once(message, message)
