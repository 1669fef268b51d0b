"""What the scripts of the model families share: load the weights, make attention sparse, generate, save, and say what it gave.

Under torchrun, as in ``torchrun --nproc-per-node=2 examples/wan.py``, all GPUs generate one video together.
"""

from __future__ import annotations

import argparse
import atexit
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.utils import load_image

from ssta import SSTAConfig
from ssta.pipelines import Family, Schedule, apply_ssta
from ssta.pipelines.evaluation.quality import describe, require_video_writer, write_video
from ssta.pipelines.patch.register import family_of_class, preset_settings
from ssta.pipelines.schedule.changes import changed

# What imageio writes with ffmpeg's H.264.
VIDEO_FILES = (".mp4", ".mov", ".mkv", ".avi")


@dataclass(frozen=True)
class Example:
    """One family's script.

    Attributes:
        pipeline: class name of its text-to-video pipeline.
        model: where the weights are, unless the user says otherwise.
        call: what the pipeline is called with besides prompt and seed, at the resolution and the length that the model is made for.
        fps: frames in a second of video.
        image_pipeline, image_model: the same for a video that begins with an image; None = the family has none here.
        prepare: called with the loaded pipeline.
    """

    pipeline: str
    model: str
    call: dict[str, Any]
    fps: int
    image_pipeline: str | None = None
    image_model: str | None = None
    prepare: Callable[[Any], None] = field(default=lambda pipe: None)


class Way:
    """How a command line runs its pipeline; examples/fastest.py has another one."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Adds what this way has."""
        parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")

    def check(self, options: argparse.Namespace, family: Family, kind: type) -> None:
        """That the options go together for a transformer of class ``kind``, before anything is loaded.

        Raises:
            ValueError: they do not.
        """

    @contextmanager
    def running(self, pipe: Any, options: argparse.Namespace, steps: int, config: SSTAConfig, schedule: Schedule) -> Iterator[Any]:
        """The pipeline as the options want it; gives SSTA's handle, None without SSTA."""
        with apply_ssta(pipe, config, schedule=schedule) as handle:
            share_out(pipe)
            if options.compile:
                for transformer in transformers(pipe):
                    transformer.compile_repeated_blocks(fullgraph=True)
            yield handle


def main(example: Example, about: str, arguments: list[str] | None = None, way: Way | None = None) -> Path:
    """Runs the command line; returns the file of the video."""
    way = way or Way()
    options = parse(example, about, arguments, way)
    if not torch.cuda.is_available() and not options.cpu:
        fail("a CUDA GPU is needed for a model of this size; --cpu runs on the CPU all the same, which takes hours")
    join_ranks(options)
    try:
        require_video_writer()
        require_output(options.output)
        known, kind = family(example, options)
        config, schedule = settings(options, known)
        way.check(options, known, kind)
        pipe = load(example, options)
        call = call_of(example, options, pipe)
        with way.running(pipe, options, call["num_inference_steps"], config, schedule) as handle:
            video = generate("dense" if handle is None else "sparse", pipe, call, options.seed)
            if is_first() and handle is not None:
                print(handle.report(), flush=True)
        dense = None
        if options.side_by_side:
            with apply_ssta(pipe, config, schedule=Schedule(dense_steps=1.0)):
                share_out(pipe)
                dense = generate("dense", pipe, call, options.seed)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if not is_first():
        return options.output
    shown = video if dense is None else torch.cat([dense, video], dim=-1)
    write_video(shown, str(options.output), fps=example.fps)
    if dense is not None:
        found = {name: value for name, value in describe(video, dense).items() if value is not None}
        print("against dense: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    say(f"{options.output}: {'dense on the left, sparse on the right' if dense is not None else 'done'}")
    return options.output


def parse(example: Example, about: str, arguments: list[str] | None, way: Way) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--prompt", default="A cat walks on the grass, realistic", help="what to show; '%(default)s' if left out")
    parser.add_argument("--negative-prompt", help="what not to show")
    if example.image_pipeline is not None:
        parser.add_argument("--image", help="the first frame, a file or an address; takes the image-to-video weights")
    parser.add_argument("--model", help=f"repository or folder of the weights; {example.model} if left out")
    for name, what in (("height", "pixels"), ("width", "pixels"), ("num-frames", "frames"), ("num-inference-steps", "denoising steps")):
        default = example.call.get(name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, help=f"{what}{f'; {default} if left out' if default else ''}")
    parser.add_argument("--seed", type=int, default=0, help="of the noise; %(default)s if left out")
    parser.add_argument("--preset", help="near, balanced, fast, '8 steps' or '4 steps', or one for weights that were trained with SSTA, "
                                         "such as hunyuan_video_15_sparse; balanced if left out")
    parser.add_argument("--topk", type=int, help="tiles that each tile computes exactly, besides its window if the family has one, in "
                                                 "place of a density")
    parser.add_argument("--density", type=float, help="share of the video's tile pairs to compute exactly, in place of --topk")
    parser.add_argument("--pad-type", choices=("none", "zero", "repeat"), help="what happens to partial tiles; the family's if left out")
    parser.add_argument("--dense-steps", type=float, help="the first fraction of the steps, which stays dense; the family's if left out")
    parser.add_argument("--side-by-side", action="store_true", help="also generate with dense attention, and measure the difference")
    parser.add_argument("--offload", action="store_true", help="keep only the model that is running on the GPU")
    way.options(parser)
    parser.add_argument("--cpu", action="store_true", help="run without a GPU")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"),
                        help=f"file to write, one of {', '.join(VIDEO_FILES)}; %(default)s if left out")
    options = parser.parse_args(arguments)
    if options.cpu and options.offload:
        parser.error("--offload must be left out with --cpu: there is no GPU whose memory it would save")
    if example.image_pipeline is None:
        options.image = None
    return options


def require_output(path: Path) -> None:
    """Raises ValueError where no video could be written: better before a long generation than after it."""
    if path.suffix.lower() not in VIDEO_FILES:
        raise ValueError(f"--output must end with one of {', '.join(VIDEO_FILES)}, got {path}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output must be a file in a folder that exists, got {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--output must be a file that may be written, got {path}")


def ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first() -> bool:
    """Whether this process is the one that decodes, prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


def join_ranks(options: argparse.Namespace) -> None:
    """Brings torchrun's processes together, each with a GPU of its own."""
    if ranks() == 1:
        return
    if torch.accelerator.device_count() == 0:
        fail("several processes need an accelerator each, got none; without torchrun, --cpu runs on the CPU")
    if not options.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("gloo" if options.cpu else "nccl")
        atexit.register(dist.destroy_process_group)


def share_out(pipe: Any) -> None:
    """Shares the tokens of every forward out over the ranks, any number of them. What was removed with SSTA is put back."""
    for transformer in transformers(pipe):
        if ranks() > 1 and transformer._parallel_config is None:
            transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks(), ulysses_anything=True))


def transformers(pipe: Any) -> list[Any]:
    """The pipeline's transformers: Wan 2.2 has two, one for each range of noise levels."""
    found = [getattr(pipe, name, None) for name in ("transformer", "transformer_2")]
    return [transformer for transformer in found if transformer is not None]


def family(example: Example, options: argparse.Namespace) -> tuple[Family, type]:
    """The family of the pipeline's transformer and the class that the pipeline asks for: nothing is loaded for it."""
    kind = getattr(diffusers, example.pipeline if options.image is None else example.image_pipeline)
    wanted = inspect.signature(kind.__init__).parameters["transformer"].annotation
    # Some may also be called without a transformer: WanTransformer3DModel | None.
    return next((known, one) for one in get_args(wanted) or (wanted,) if (known := family_of_class(one)) is not None)


def load(example: Example, options: argparse.Namespace) -> Any:
    """The pipeline, on its device."""
    name, model = (example.pipeline, example.model) if options.image is None else (example.image_pipeline, example.image_model)
    model = options.model or model
    say(f"loading {model}")
    pipe = getattr(diffusers, name).from_pretrained(model, dtype=torch.bfloat16)
    example.prepare(pipe)
    # Decoding at full resolution in one piece can take more memory than denoising.
    if hasattr(pipe.vae, "enable_tiling"):
        pipe.vae.enable_tiling()
    if options.offload:
        pipe.enable_model_cpu_offload(gpu_id=torch.cuda.current_device() if torch.cuda.is_available() else None)
    else:
        pipe.to("cpu" if options.cpu else "cuda")
    return pipe


def call_of(example: Example, options: argparse.Namespace, pipe: Any) -> dict[str, Any]:
    """What the pipeline is called with. Some image pipelines take the size from the image, and none from the caller."""
    asked = {name: value for name in ("height", "width", "num_frames", "num_inference_steps", "negative_prompt")
             if (value := getattr(options, name)) is not None}
    taken = inspect.signature(type(pipe).__call__).parameters
    for name in asked:
        if name not in taken:
            raise ValueError(f"--{name.replace('_', '-')} must be left out: {type(pipe).__name__} takes none")
    call = {name: value for name, value in example.call.items() if name in taken} | asked
    if options.image is not None:
        call["image"] = load_image(options.image)
    return call | {"prompt": options.prompt, "output_type": "pt"}


def settings(options: argparse.Namespace, family: Family) -> tuple[SSTAConfig, Schedule]:
    """The family's, with what the command line changes."""
    if options.preset is None:
        config, schedule = family.default_config(), family.default_schedule()
    else:
        config, schedule = preset_settings(family, options.preset)
    changes = {name: getattr(options, name) for name in ("topk", "density", "pad_type") if getattr(options, name) is not None}
    config = changed(config, **changes)
    if options.dense_steps is not None:
        schedule = replace(schedule, dense_steps=options.dense_steps)
    return config, schedule


def generate(name: str, pipe: Any, call: dict, seed: int) -> torch.Tensor:
    """Frames ``[F, 3, H, W]`` in [0, 1]; latents on ranks that need not decode them."""
    say(f"{name}: generating")
    start = time.perf_counter()
    if not is_first():
        call = call | {"output_type": "latent"}
    # A generator on the CPU draws the same noise on every rank.
    video = pipe(**call, generator=torch.Generator().manual_seed(seed), return_dict=False)[0][0].cpu()
    say(f"{name}: {time.perf_counter() - start:.1f} s with text encoding and decoding")
    return video


def say(text: str) -> None:
    if is_first():
        print(text, file=sys.stderr, flush=True)


def fail(message: str) -> None:
    raise SystemExit(f"error: {message}")


if __name__ == "__main__":
    print("This is a module of the scripts beside it, such as examples/wan.py, which says what it can do: --help.")
