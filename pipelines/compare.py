"""Latency against difference from dense, for any supported pipeline and a list of configurations: python -m ssta.pipelines.compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import load_image
from torch import Tensor

from ssta import SSTAConfig

from .apply import apply_ssta, transformers_of
from .family import family_of
from .quality import describe, require_video_writer, write_video
from .report import RunReport, Stopwatch
from .schedule import Schedule
from .text_table import aligned

_OWN = ("tile_thw", "kernel_thw", "adaptive_pool")
_CONFIG_FIELDS = {field.name for field in fields(SSTAConfig)} - {"variants", "budget"}
_SCHEDULE_FIELDS = {"dense_steps", "dense_above", "dense_layers"}


@dataclass(frozen=True)
class Configuration:
    """One way to run a pipeline: ``config`` None = without SSTA, as diffusers has it."""

    name: str
    config: SSTAConfig | None
    schedule: Schedule | None = None


@dataclass(frozen=True)
class Comparison:
    """What one configuration gave.

    Attributes:
        name: the configuration's.
        seconds: per denoising step, the mean of the run: the transformers' forwards and what happens between them.
        density: attended tile pairs over all, the mean over layers and steps; None without SSTA.
        quality: ``ssta.pipelines.quality.describe`` against the first configuration; None for that one.
        video: frames ``[F, 3, H, W]`` in [0, 1], or what the pipeline gave as latents.
        report: what the layers ran; None without SSTA.
    """

    name: str
    seconds: float
    density: float | None
    quality: dict[str, float | None] | None
    video: Tensor
    report: RunReport | None


def dense(pipe: Any) -> Configuration:
    """Exact attention at every step, on the kernels that SSTA's dense steps use and without masks of S x S tokens."""
    return Configuration("dense", family_of(transformers_of(pipe)[0][1]).default_config(), Schedule(dense_steps=1))


def parse_configuration(text: str, pipe: Any) -> Configuration:
    """``"default"``, ``"stock"`` (without SSTA), the name of one of the family's presets, or fields of ``SSTAConfig`` and ``Schedule`` that
    differ from the default, such as ``"topk=16,tile_thw=4x8x8,dense_steps=0.1,dense_layers=0;-1"``. A configuration given by
    fields has no variants.

    Raises:
        ValueError: an unknown field, or a value that the field does not take.
    """
    family = family_of(transformers_of(pipe)[0][1])
    if text == "stock":
        return Configuration(text, None)
    if text == "default":
        return Configuration(text, family.default_config(), family.default_schedule())
    if text in family.presets:
        return Configuration(text, *family.presets[text]())
    config, schedule = {}, {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _CONFIG_FIELDS | _SCHEDULE_FIELDS or not value:
            names = ", ".join(map(repr, ("default", "stock", *family.presets)))
            raise ValueError(f"a configuration must be {names} or fields such as topk=16 of "
                             f"{', '.join(sorted(_CONFIG_FIELDS | _SCHEDULE_FIELDS))}, got {part!r}")
        (config if name in _CONFIG_FIELDS else schedule)[name] = _value(name, value)
    try:
        made = replace(family.default_config(), variants=(), **config) if config else family.default_config()
        return Configuration(text, made, replace(family.default_schedule(), **schedule))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None


def _value(name: str, text: str) -> object:
    if name in _OWN:
        return tuple(int(part) if part.isdecimal() else part for part in text.split("x"))
    if name == "dense_layers":
        return tuple(int(part) if part.lstrip("-").isdecimal() else part for part in text.split(";"))
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def compare(pipe: Any, configurations: Sequence[Configuration], call: dict, *, seed: int = 0, warm_up: bool = True,
            say: Callable[[str], None] = lambda text: None) -> list[Comparison]:
    """Generates the same video with every configuration, all from one seed; the first one is what the others are compared with.

    Args:
        pipe: a pipeline of a supported family, without SSTA.
        configurations: at least one.
        call: the pipeline's arguments, among them ``num_inference_steps``; ``output_type`` "pt" or "latent", default "pt".
        seed: of the noise.
        warm_up: a generation of two steps before each that is timed, in which kernels are compiled.
        say: told what is being done.

    Raises:
        ValueError: no configuration, or what ``apply_ssta`` refuses.
    """
    if not configurations:
        raise ValueError("configurations must hold at least one Configuration, got none")
    call = {"output_type": "pt", **call}
    results: list[Comparison] = []
    for configuration in configurations:
        with ExitStack() as stack:
            handle = None
            if configuration.config is not None:
                handle = stack.enter_context(apply_ssta(pipe, configuration.config, schedule=configuration.schedule))
            if warm_up:
                say(f"{configuration.name}: two steps to warm up")
                _generate(pipe, call | {"num_inference_steps": 2, "output_type": "latent"}, seed)
            say(f"{configuration.name}: generating")
            video, seconds = _generate(pipe, call, seed)
            report = None if handle is None else handle.report()
        reference = results[0].video if results else None
        results.append(Comparison(configuration.name, seconds, None if report is None else report.mean_density(),
                                  None if reference is None else describe(video, reference), video, report))
    return results


def _generate(pipe: Any, call: dict, seed: int) -> tuple[Tensor, float]:
    """(the first video of the call, seconds per step)."""
    with _denoising_time(pipe) as watch:
        out = pipe(**call, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]
    return out[0].cpu(), watch.seconds() / len(pipe.scheduler.timesteps)


@contextmanager
def _denoising_time(pipe: Any):
    """A stopwatch from the beginning of the first forward of any of the pipeline's transformers to the end of the last one."""
    watch, hooks, started = Stopwatch(), [], []

    def start(model, args, kwargs):
        if not started:
            watch.start(next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
            started.append(True)

    for _, model in transformers_of(pipe):
        hooks += [model.register_forward_pre_hook(start, with_kwargs=True), model.register_forward_hook(lambda *_: watch.stop())]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def table(results: Sequence[Comparison]) -> str:
    """The comparisons as an aligned table."""
    rows = [("configuration", "s per step", "speed-up", "density", "difference", "PSNR, dB", "SSIM", "LPIPS")]
    for result in results:
        quality = result.quality or {}
        rows.append((
            result.name, f"{result.seconds:.3f}", f"{results[0].seconds / result.seconds:.2f}", _number(result.density, ".1%"),
            *(_number(quality.get(name), style) for name, style in (("relative_difference", ".2e"), ("psnr", ".2f"), ("ssim", ".4f"),
                                                                     ("lpips", ".4f")))))
    return aligned(rows)


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def main(arguments: list[str] | None = None) -> list[Comparison]:
    """Runs the command line; returns what was compared."""
    parser = argparse.ArgumentParser(prog="python -m ssta.pipelines.compare", description=__doc__)
    parser.add_argument("model", help="a diffusers pipeline with a supported transformer: a repository's name or a folder")
    parser.add_argument("--config", action="append", default=[], metavar="FIELDS",
                        help="'default', 'stock' (without SSTA), a preset's name, or what differs from the default, such as "
                             "topk=16,tile_thw=4x8x8,dense_steps=0.1; give it several times; default: default")
    parser.add_argument("--prompt", default="A cat walks on the grass, realistic")
    parser.add_argument("--negative-prompt", default=None)
    parser.add_argument("--image", default=None, help="first frame, for image-to-video pipelines: a file or an address")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    for name, meaning in (("height", "pixels"), ("width", "pixels"), ("num-frames", "frames")):
        parser.add_argument(f"--{name}", type=int, default=None, help=f"in {meaning}; default the pipeline's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--offload", action="store_true", help="enable_model_cpu_offload, for less GPU memory")
    parser.add_argument("--latents", action="store_true", help="compare latents and decode nothing")
    parser.add_argument("--output", default=None, help="folder for the videos; needs imageio and imageio-ffmpeg")
    options = parser.parse_args(arguments)

    try:
        if options.output is not None:
            require_video_writer()
        say("loading the pipeline")
        pipe = DiffusionPipeline.from_pretrained(options.model, torch_dtype=getattr(torch, options.dtype))
        configurations = [dense(pipe)] + [parse_configuration(text, pipe) for text in options.config or ["default"]]
        call = {"num_inference_steps": options.steps, "output_type": "latent" if options.latents else "pt"}
        named = ("prompt", "negative_prompt", "height", "width", "num_frames")
        call |= {name: getattr(options, name) for name in named if getattr(options, name) is not None}
        if options.image is not None:
            call["image"] = load_image(options.image)
        if options.offload:
            pipe.enable_model_cpu_offload()
        else:
            pipe.to("cuda" if torch.cuda.is_available() else "cpu")
        results = compare(pipe, configurations, call, seed=options.seed, say=say)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    if options.output is not None and not options.latents:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        for index, result in enumerate(results):
            write_video(result.video, str(folder / f"{index}.mp4"), fps=16)
            say(f"{folder / f'{index}.mp4'}: {result.name}")
    print(table(results), flush=True)
    return results


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
