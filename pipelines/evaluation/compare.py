"""Speed against what it changes in a pipeline's videos, over prompts and seeds: python -m ssta.pipelines.evaluation.compare."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from ..schedule.presets import OWN_PRESETS, PRESETS
from .comparison import compare
from .configurations import Configuration, dense, parse_configuration, read
from .quality import require_video_writer
from .record import Clip, Measurement, write_json
from .scatter import plot_evaluation
from .table import Evaluation

__all__ = ["Clip", "Configuration", "Evaluation", "Measurement", "compare", "dense", "main", "parse_configuration", "plot_evaluation",
           "read_prompts"]

_PROMPT = "A cat walks on the grass, realistic"


def read_prompts(path: str | Path) -> list[tuple[str, str | None]]:
    """(prompt, image) of every line of a file in UTF-8 that is not empty. A line is a prompt, or a prompt, a tab, and the image that its
    video begins with: an address, or a file, from the folder of the prompts where it is relative.

    Raises:
        ValueError: a file that cannot be read, one without prompts, or a line with more than one tab or without a prompt.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts must be a text file in UTF-8 that can be read, got {path}: {error}") from None
    prompts: list[tuple[str, str | None]] = []
    for number, line in enumerate(lines, 1):
        match [piece.strip() for piece in line.split("\t")]:
            case [""]:
                pass
            case [prompt] if prompt:
                prompts.append((prompt, None))
            case [prompt, image] if prompt and image:
                prompts.append((prompt, image if _is_address(image) else str(path.parent / image)))
            case _:
                raise ValueError(f"prompts must hold a prompt, or a prompt, a tab and an image, in each line, got {line!r} in line "
                                 f"{number} of {path}")
    if not prompts:
        raise ValueError(f"prompts must hold at least one prompt, got none in {path}")
    return prompts


def _is_address(image: str) -> bool:
    return image.startswith(("http://", "https://"))


def _clips(options: argparse.Namespace) -> list[Clip]:
    """Every prompt with every seed."""
    texts, images = options.prompt, options.image
    if len(images) > 1 and len(images) != len(texts):
        raise ValueError(f"--image must come once, for all prompts, or once for each --prompt, got {len(images)} for {len(texts)}")
    shared = images[0] if len(images) == 1 else None
    prompts = list(zip(texts, images if len(images) > 1 else [shared] * len(texts)))
    if options.prompts is not None:
        prompts += [(text, image or shared) for text, image in read_prompts(options.prompts)]
    prompts = prompts or [(_PROMPT, shared)]
    for _, image in prompts:
        if image is not None and not _is_address(image) and not Path(image).is_file():
            raise ValueError(f"an image must be an address or a file that exists, got {image}")
    return [Clip(text, seed, image) for text, image in prompts for seed in options.seeds]


def main(arguments: list[str] | None = None) -> Evaluation:
    """Runs the command line; returns what was measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        evaluation = _run(options)
        if options.output is not None:
            _write(Path(options.output), evaluation)
    except KeyboardInterrupt:
        if options.output is not None:
            say(f"interrupted; the same command with --resume goes on in {options.output}")
        raise SystemExit(130) from None
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(evaluation, flush=True)
    return evaluation


def _run(options: argparse.Namespace) -> Evaluation:
    """The comparison that the options ask for."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"a comparison must run in one process, got one of {os.environ['WORLD_SIZE']} by torchrun: give each GPU a "
                         "command with prompts of its own, the same --output and --resume")
    if options.resume and options.output is None:
        raise ValueError("--resume must come with --output, the folder to go on in, got none")
    if options.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {options.steps}")
    videos = options.output is not None and not options.latents and not options.no_videos
    if videos:
        require_video_writer()
    clips, texts = _clips(options), options.config or ["default"]
    if options.floor != "none":
        texts = [options.floor if options.floor == "stock" or "@" in options.floor else f"dense@{options.floor}", *texts]
    for text in texts:
        read(text)
    say("loading the pipeline")
    pipe = DiffusionPipeline.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    configurations = [parse_configuration(text, pipe) for text in ("dense", *texts)]
    if options.backend is not None:
        configurations = [replace(made, backend=made.backend or options.backend) if made.config is not None else made
                          for made in configurations]
    call = {"num_inference_steps": options.steps, "output_type": "latent" if options.latents else "pt"}
    named = ("negative_prompt", "height", "width", "num_frames")
    call |= {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    if options.offload:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    return compare(pipe, configurations, call, clips, model=options.model, output=options.output, resume=options.resume, videos=videos,
                   fps=options.fps, say=say)


def _write(folder: Path, evaluation: Evaluation) -> None:
    """Table, record and, where matplotlib is installed, the scatter."""
    (folder / "table.txt").write_text(f"{evaluation}\n", encoding="utf-8")
    write_json(folder / "record.json", evaluation.record())
    try:
        plot_evaluation(evaluation, folder / "scatter.png")
    except (ImportError, ValueError) as error:
        say(f"no scatter.png: {error}")
    say(f"{folder}: table.txt, record.json and what they were made from")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ssta.pipelines.evaluation.compare", description=__doc__)
    parser.add_argument("model", help="a diffusers pipeline with a supported transformer: a repository's name or a folder")
    parser.add_argument("--config", action="append", default=[], metavar="FIELDS",
                        help=f"'default', 'stock' (without SSTA), a preset ({', '.join(map(repr, (*PRESETS, *OWN_PRESETS)))}), or what "
                             "differs from the default or a preset, such as density=0.2,tile_thw=4x8x8,dense_steps=0.1 or "
                             "fast,dense_steps=0; give it several times; default: default")
    parser.add_argument("--floor", default="stock", metavar="BACKEND",
                        help="dense again by other kernels, the noise floor: 'stock' (diffusers' own), one of diffusers' attention "
                             "backends such as _native_cudnn, stock@BACKEND, one of the library's implementations such as triton, or "
                             "'none'; default: stock")
    parser.add_argument("--backend", metavar="BACKEND",
                        help="diffusers' attention backend for the dense reference and all dense steps; default: whichever is fastest")
    parser.add_argument("--prompt", action="append", default=[], help="give it several times")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line; for image-to-video with an image after a tab")
    parser.add_argument("--negative-prompt", default=None, help="for all prompts")
    parser.add_argument("--image", action="append", default=[],
                        help="first frame, for image-to-video pipelines, a file or an address: once for all prompts, or once for each "
                             "--prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="of the noise, for every prompt; default 0")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps; default 50")
    for name, meaning in (("height", "pixels"), ("width", "pixels"), ("num-frames", "frames")):
        parser.add_argument(f"--{name}", type=int, default=None, help=f"in {meaning}; default the pipeline's")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--offload", action="store_true", help="enable_model_cpu_offload, for less GPU memory")
    parser.add_argument("--latents", action="store_true", help="compare latents and decode nothing")
    parser.add_argument("--output", default=None, metavar="FOLDER",
                        help="for MP4s side by side, table, scatter and record, and to resume from; needs imageio and imageio-ffmpeg")
    parser.add_argument("--no-videos", action="store_true", help="write no MP4s")
    parser.add_argument("--fps", type=int, default=16, help="of the MP4s; default 16")
    parser.add_argument("--resume", action="store_true", help="go on in --output: what is finished there is not generated again")
    return parser


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
