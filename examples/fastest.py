"""Generates a video as fast as a model goes: SSTA with compiled blocks, 8-bit linears, a step cache and a LoRA, each by its own switch.

The first argument is the model: wan, hunyuan_video_15, hunyuan_video, ltx, cogvideox or mochi. Several GPUs by torchrun:
torchrun --nproc-per-node=2 examples/fastest.py wan --compile --quantize best
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from generate import Way, fail, main, ranks, share_out
from recipe import CACHES, QUANTIZED, Recipe, best_quantization, cooked

from ssta import SSTAConfig
from ssta.pipelines import Family, Schedule

MODELS = ("wan", "hunyuan_video_15", "hunyuan_video", "ltx", "cogvideox", "mochi")
# Options that say nothing without it.
OF_SSTA = ("preset", "topk", "density", "pad_type", "dense_steps", "side_by_side")


class Fastest(Way):
    """Each part of a recipe by a switch."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.prog += " MODEL"
        parser.add_argument("--dense", action="store_true", help="without SSTA, to see what the rest gives")
        parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
        parser.add_argument("--tune", action="store_true", help="have the compiler try launches of its kernels; takes longer at first")
        parser.add_argument("--quantize", choices=("best", *QUANTIZED), help="8-bit linear layers; best: float8 where the GPU has it")
        parser.add_argument("--cache", choices=CACHES, help="skip steps that change little")
        parser.add_argument("--cache-options", type=json_object, default={}, metavar="JSON",
                            help='of the cache\'s own configuration, such as \'{"threshold": 0.1}\'')
        parser.add_argument("--lora", help="file or repository of a LoRA, which is fused into the weights")

    def check(self, options: argparse.Namespace, family: Family, kind: type) -> None:
        given = [name for name in OF_SSTA if getattr(options, name) not in (None, False)]
        if options.dense and given:
            raise ValueError(f"--{given[0].replace('_', '-')} must be left out with --dense, which switches SSTA off")
        recipe_of(options).check(kind, device_of(options))

    @contextmanager
    def running(self, pipe: Any, options: argparse.Namespace, steps: int, config: SSTAConfig, schedule: Schedule) -> Iterator[Any]:
        recipe = recipe_of(options)
        with cooked(pipe, recipe, steps, share_out, config=config, schedule=schedule) as handle:
            yield handle


def json_object(text: str) -> dict[str, Any]:
    """What a command line's JSON says."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"threshold\": 0.1}}', got {text!r}")
    return found


def recipe_of(options: argparse.Namespace) -> Recipe:
    quantized = best_quantization(device_of(options)) if options.quantize == "best" else options.quantize
    return Recipe(sparse=not options.dense, compile=options.compile, tune=options.tune, quantize=quantized, cache=options.cache,
                  cache_options=options.cache_options, lora=options.lora, ranks=ranks())


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device("cpu" if options.cpu else "cuda")


def run(arguments: list[str]) -> Path:
    """Runs the command line; returns the file of the video."""
    if arguments[:1] in (["-h"], ["--help"]):
        # The switches of all models are the same.
        arguments = ["wan", *arguments]
    if not arguments or arguments[0] not in MODELS:
        fail(f"the first argument must be one of {', '.join(MODELS)}, got {arguments[0] if arguments else 'none'}")
    example = getattr(importlib.import_module(arguments[0]), arguments[0].upper())
    return main(example, __doc__, arguments[1:], Fastest())


if __name__ == "__main__":
    run(sys.argv[1:])
