"""A density and a compensation for each layer, from a few dense steps of the user's own model: python -m ssta.pipelines.calibrate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ssta import SSTAConfig
from ssta.kernels import require_int

from .apply import apply_ssta, transformers_of
from .calibration import Calibration, ModelCalibration, checked_aim, writable
from .context import ModelContext
from .family import family_of
from .parallel import require_one_rank
from .probe import Probe
from .schedule import Schedule

# Levels of noise that a calibration sees: about what a compensation's errors differ over. The first of six is dense under a warm-up.
STEPS = 6
# Forwards with one sparse layer after each that was measured: all layers of a large model have their turn within one prompt.
EXTRA = 4


def calibrate(
    model: Any, prompts: Sequence[str | Mapping[str, Any]] | None = None, *, target: float | None = None, density: float | None = None,
    config: SSTAConfig | None = None, schedule: Schedule | None = None, scheduler: Any = None, steps: int = STEPS, extra: int = EXTRA,
    seed: int = 0, call: Mapping[str, Any] | None = None, run: Callable[[], object] | None = None, impl: str = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measures what every layer of a model gets wrong at every density, and chooses one for each.

        calibration = calibrate(pipe, ["a prompt", "another"], target=0.05)
        calibration.save("wan.json")
        apply_ssta(pipe, "wan.json")

    The model generates densely. At every step that the schedule does not keep dense, each layer's q, k and v also go through attention at
    eight densities, with compensation and without; and the model runs again with one layer sparse at a time, which says how much an error
    of that layer counts in the model's output, and with all of them, which says how errors of several layers add up. Then the densities
    are the cheapest under the target, all layers together: a layer whose error falls fast or counts much gets more. It takes about ten
    times as long as the forwards themselves. Nothing of the model changes.

    Args:
        model: a pipeline or a transformer, as ``apply_ssta`` takes it, without SSTA.
        prompts: for a pipeline: each is a prompt, or a dict of arguments of the pipeline's (for embeddings, or images).
        target: the relative error in (0, 1) of the transformer's output, root mean square over steps, that must not be exceeded. 0.05 is
            near the dense video.
        density: instead of a target: the least error that costs no more than this density in (0, 1] for all layers would, with the
            configuration's own compensation. Compensation is taken to cost 0.016 of dense attention.
        config: tile, window, selection and kind of compensation ("linear" if it has none); default the family's. Its budget is replaced.
        schedule: which steps and layers stay dense, which are left out here; default the family's.
        scheduler: as in ``apply_ssta``.
        steps: denoising steps of each generation; a few, from which a video cannot be seen but its statistics can. Scheduler and guidance
            are the pipeline's.
        extra: with how many layers, one at a time, the model runs again after each measured forward. 0 = never: layers count alike, and
            target and error are the root mean square of the layers' own relative errors.
        seed: of the first prompt's noise; the next ones count up.
        call: further arguments of the pipeline, such as height, width and num_frames. Densities hold for other canvases too.
        run: in place of prompts, and for a transformer without a pipeline: a function that runs the model's forwards. Each whose step
            is not dense is measured.
        impl: as in ``apply_ssta``.
        say: told what is being done.

    Returns:
        A Calibration, which prints as a table. ``calibration.chosen(target=...)`` chooses again without running.

    Raises:
        TypeError: prompts, call or run of another kind, or what ``apply_ssta`` refuses.
        ValueError: both or neither of target and density, or of prompts and run; a number out of range; a configuration of windows alone; a
            configuration or schedule that no file can hold, or a schedule with densities or configurations of layers; a model with a
            cache, or on several ranks; nothing to measure; outputs that are not finite; what ``apply_ssta`` refuses.
    """
    target, density = checked_aim(target, density)
    steps, extra = require_int("steps", steps, 1), require_int("extra", extra, 0)
    runs = _runs(model, prompts, run, {} if call is None else call, steps, require_int("seed", seed, 0))
    models = transformers_of(model)
    require_one_rank("calibrate", models)
    for _, module in models:
        if getattr(module, "is_cache_enabled", False):
            raise ValueError(f"model must run without a cache while it is calibrated, got {type(module).__name__} with one; call "
                             "disable_cache() first")
    config = family_of(models[0][1]).default_config() if config is None else config
    with ExitStack() as stack:
        handle = stack.enter_context(apply_ssta(model, config, schedule=schedule, scheduler=scheduler, impl=impl))
        _require_plain(config, handle.schedule)
        writable(config, schedule)
        place = ""

        def tell(context: ModelContext) -> None:
            say(f"{place}{sum(probe.forwards for probe in probes)} forwards measured")

        sites = {name: len(processors) for name, _, _, processors in handle.layers()}
        probes = [Probe(module, context, processors, config, extra, tell) for _, module, context, processors in handle.layers()]
        for probe in probes:
            stack.callback(probe.remove)
        # What is measured is not part of compiled blocks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        for index, one in enumerate(runs):
            place = f"prompt {index + 1} of {len(runs)}: " if run is None else ""
            say(f"{place}generating densely")
            one()
    found = [ModelCalibration(name, type(module).__name__, sites[name], *probe.shape, probe.forwards, probe.result())
             for (name, module), probe in zip(models, probes) if probe.forwards]
    if len(found) < len(models):
        idle = [f"{name} ({type(module).__name__})" if name else type(module).__name__
                for (name, module), probe in zip(models, probes) if not probe.forwards]
        raise ValueError(f"model must run at least one step that schedule does not keep dense in every layer, got none of "
                         f"{' and '.join(idle)} within {len(runs)} runs")
    made = Calibration(target, density, config, schedule, tuple(found)).chosen(target=target, density=density)
    for part, probe in zip(made.models, probes):
        if part.error:
            say(f"{part.name or part.model}: attention at {part.cost:.3f} of its dense cost; with a setting for every head "
                f"{probe.cost_by_heads(part.layers, part.error):.3f}")
    return made


def _runs(model: Any, prompts: Any, run: Any, call: Mapping[str, Any], steps: int, seed: int) -> list[Callable[[], object]]:
    """What to call, one after the other."""
    if (prompts is None) == (run is None):
        raise ValueError("prompts must be given, or run, and not both, got " + ("neither" if run is None else "both"))
    if run is not None:
        if not callable(run):
            raise TypeError(f"run must be a function that runs the model's forwards, got {type(run).__name__}")
        if call:
            raise ValueError(f"call must be empty with run, which calls by itself, got {', '.join(call)}")
        return [run]
    if isinstance(model, nn.Module):
        raise ValueError(f"run must be given for a transformer, which takes no prompts, got prompts with {type(model).__name__}")
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
    if not prompts:
        raise ValueError("prompts must hold at least one, got none")
    if not isinstance(call, Mapping):
        raise TypeError(f"call must be a dict of the pipeline's arguments, got {type(call).__name__}")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Mapping)):
            raise TypeError(f"prompts[{index}] must be a str or a dict of the pipeline's arguments, got {type(prompt).__name__}")

    def generate(index: int, prompt: str | Mapping[str, Any]) -> None:
        own = {"prompt": prompt} if isinstance(prompt, str) else prompt
        model(**{"output_type": "latent", **call, **own, "num_inference_steps": steps,
                 "generator": torch.Generator().manual_seed(seed + index)})

    return [partial(generate, index, prompt) for index, prompt in enumerate(prompts)]


def _require_plain(config: SSTAConfig, schedule: Schedule) -> None:
    """That densities are left to be chosen."""
    if config.sparse_type == "sta":
        raise ValueError("config must have sparse_type 'ssta' or 'block_attn' to be calibrated, for the window alone has no density, "
                         "got 'sta'")
    if schedule.layer_configs:
        raise ValueError(f"schedule must have no layer_configs, which are what is to be found, got {schedule.layer_configs}")
    if schedule.density is not None:
        raise ValueError(f"schedule must have no density, which is what is to be found, got {schedule.density}")


def main(arguments: list[str] | None = None) -> Calibration:
    """Runs the command line; returns what was found."""
    parser = argparse.ArgumentParser(prog="python -m ssta.pipelines.calibrate", description=__doc__)
    parser.add_argument("model", help="a diffusers pipeline with a supported transformer: a repository's name or a folder")
    parser.add_argument("--prompt", action="append", required=True, help="give it several times for a better estimate")
    parser.add_argument("--negative-prompt", default=None)
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--target", type=float, help="relative error of the model's output in (0, 1), such as 0.05")
    aim.add_argument("--density", type=float, help="instead: the best that costs as much as this density for all layers")
    parser.add_argument("--output", required=True, help="the file to write, such as wan.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps of each generation")
    parser.add_argument("--extra", type=int, default=EXTRA, help="layers whose weight is found out after each forward; 0 = all count alike")
    for name, meaning in (("height", "pixels"), ("width", "pixels"), ("num-frames", "frames")):
        parser.add_argument(f"--{name}", type=int, default=None, help=f"in {meaning}; default the pipeline's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--offload", action="store_true", help="enable_model_cpu_offload, for less GPU memory")
    options = parser.parse_args(arguments)

    try:
        # Before minutes are spent.
        checked_aim(options.target, options.density)
        say("loading the pipeline")
        pipe = DiffusionPipeline.from_pretrained(options.model, torch_dtype=getattr(torch, options.dtype))
        named = ("negative_prompt", "height", "width", "num_frames")
        call = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
        if options.offload:
            pipe.enable_model_cpu_offload()
        else:
            pipe.to("cuda" if torch.cuda.is_available() else "cpu")
        found = calibrate(pipe, options.prompt, target=options.target, density=options.density, steps=options.steps, extra=options.extra,
                          seed=options.seed, call=call, say=say)
        found.save(options.output)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(found, flush=True)
    say(f"{options.output}: apply_ssta(pipe, {options.output!r})")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
