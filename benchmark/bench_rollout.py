"""What does a sparse cache do to video that is generated chunk after chunk? The gate's small model, trained chunk-causally.

    python benchmark/bench_rollout.py [--chunks 8] [--csv rollout_h200]

The model is trained on so that each chunk of 3 latent frames attends to itself and to those before it, with a noise level of its own
(chunk_model.py), and, for 4 steps, on its own pairs of noise and video. It then generates chunk after chunk through ssta.TileCache, twice
as many as a training video has, with a window of as many frames as it saw before a chunk: densely, and sparsely in every step and in the
pass whose keys and values stay. Each row is one chunk of one configuration: how near it is to the same chunk of the dense video from the
same noise, so that errors which add up show. Without a GPU everything is tiny.

    psnr, ssim      of the chunk's frames, mean over the videos; *_spread is the standard deviation
    latent_error    ||chunk - dense chunk|| / ||dense chunk||
    density         share of the tile pairs of window and chunk that is computed exactly
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from arguments import Unusable, named, new_parser, number
from bench_quality import load_clips
from chunk_model import CHUNKS, Rollout, chunked, reflow_chunks, train_chunks
from few_steps import FIRST_SEED, RATE, Pairs, levels_of
from gate import add_model, chosen_device, ready
from measure import RESULTS, print_machine, write_rows
from quality_grid import WAYS, Entry, kept
from sample_quality import Reference, mean_and_spread
from train_video import Plan
from video_model import Checkpoint, VideoModel, label_order

from ssta import SSTAConfig

MANY, FEW = 30, 4
# Of chunks.
FULL_TILE, TOY_TILE = (3, 4, 8), (1, 4, 4)


def ways(tile: tuple[int, int, int]) -> list[Entry]:
    """The dense one first, which all others are held against."""
    return [Entry("dense", "dense", SSTAConfig(tile_thw=tile, density=1.0))] + [
        Entry(way, f"{way} {density:g}", kept(tile, density, **how))
        for density in (0.25, 0.15) for way, how in WAYS.items()]


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    add_model(parser)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="beside dense, only configurations whose name contains one of these")
    parser.add_argument("--train-steps", type=number, default=400 if gpu else 10, help="of the chunk-causal training (default %(default)s)")
    parser.add_argument("--few-steps", type=number, default=250 if gpu else 10, help="of that for few steps (default %(default)s)")
    parser.add_argument("--pairs", type=number, default=32 if gpu else 2, help="of noise and video (default %(default)s)")
    parser.add_argument("--videos", type=number, default=8 if gpu else 2, help="that are sampled (default %(default)s)")
    parser.add_argument("--chunks", type=number, default=8 if gpu else 5, help="of a video (default %(default)s)")
    options = parser.parse_args(argv)
    device = chosen_device(options)
    gpu = device.type == "cuda"
    every = ways(FULL_TILE if gpu else TOY_TILE)
    chosen = named(parser, "only", options.only, every[1:])
    print_machine()
    try:
        base = ready(options.checkpoint, device)
    except Unusable as error:
        parser.error(str(error))
    autoencoder = base.patches(device)
    rows: list[dict] = []
    for steps, checkpoint in trained(base, options, device).items():
        labels = label_order(len(base.clips))
        rollout = Rollout(loaded(checkpoint, device), [labels[i % len(labels)] for i in range(options.videos)], 0, options.chunks)
        chunks = rollout.sample(every[0].config, steps).split(rollout.frames, 2)
        references = [Reference(x, autoencoder) for x in chunks]
        for way in chosen:
            found = rollout.sample(way.config, steps).split(rollout.frames, 2)
            rows += [dict(steps=steps, name=way.name, density=way.config.density or 1.0, chunk=i + 1, videos=options.videos,
                          trained_chunks=CHUNKS, **compared(reference, x))
                     for i, (reference, x) in enumerate(zip(references, found))]
            print(f"{steps} steps, {way.name}:", *(f"{row['psnr']:.1f}" for row in rows[-len(found):]), "dB; SSIM",
                  *(f"{row['ssim']:.3f}" for row in rows[-len(found):]), flush=True)
            if options.csv:
                write_rows(RESULTS / f"{options.csv}.csv", rows, quiet=True)


def compared(reference: Reference, latents: torch.Tensor) -> dict:
    videos, found = reference.compare(latents), {}
    for name in ("psnr", "ssim", "latent_error"):
        found[name], found[f"{name}_spread"] = mean_and_spread(video[name] for video in videos)
    return found


def loaded(checkpoint: Checkpoint, device: torch.device) -> VideoModel:
    return checkpoint.model(device).as_loaded(torch.bfloat16 if device.type == "cuda" else torch.float32)


def trained(base: Checkpoint, options: argparse.Namespace, device: torch.device) -> dict[int, Checkpoint]:
    """By the number of steps, the model that is chunk-causal, and that for few steps on top of it; read from beside the gate's where they
    were trained before."""
    folder: Path = options.checkpoint.parent
    many, few = (folder / f"chunks_{steps}.pt" for steps in (MANY, FEW))
    if not many.exists():
        clips = load_clips(None, base.size, base.train_seed, device)
        model = chunked(base.model(device))
        done = train_chunks(model, base.patches(device), clips.train, Plan(math.inf, options.train_steps, rate=RATE, small=0.0), "chunks")
        keep(base, model, done, many)
    if not few.exists():
        start = Checkpoint.load(many)
        size = min(16, options.pairs)
        pairs = Pairs(*(torch.cat(of) for of in zip(*[pair(loaded(start, device), i, size) for i in range(-(-options.pairs // size))])))
        model = chunked(start.model(device))
        plan = Plan(math.inf, options.few_steps, rate=RATE, small=0.0)
        keep(base, model, reflow_chunks(model, pairs, levels_of(model, FEW), plan, f"chunks, {FEW} steps"), few)
    return {MANY: Checkpoint.load(many), FEW: Checkpoint.load(few)}


def pair(model: VideoModel, number: int, size: int) -> tuple[torch.Tensor, ...]:
    """A batch of noise, samples and labels, as long as a training video."""
    rollout = Rollout(model, [(number * size + i) % model.no_clip for i in range(size)], FIRST_SEED + number, CHUNKS)
    return rollout.noise, rollout.sample(SSTAConfig(tile_thw=(1, 4, 4), density=1.0), MANY), rollout.labels


def keep(base: Checkpoint, model: VideoModel, steps: int, path: Path) -> None:
    kept = Checkpoint(**vars(base))
    kept.keep(model, base.seconds, base.steps + steps, True)
    kept.save(path)


if __name__ == "__main__":
    main()
