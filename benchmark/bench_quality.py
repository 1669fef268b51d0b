"""What does SSTA do to a video? Trains a small video model and holds its samples under many configurations against its dense ones.

    python benchmark/bench_quality.py [--clips FOLDER] [--minutes 5.5] [--only TEXT ...] [--fine-tune] [--csv NAME]

The model has 20 million parameters and 11,520 tokens, and is trained on a dozen clips until its samples look like them: on the cut-free
stretches of the videos in FOLDER, or on procedural scenes, so that anybody can rerun it. A checkpoint is written while it trains; given
again, an unfinished one is trained on from, with its clips, and a finished one is measured, without any. Without a GPU everything is tiny.

Every configuration (quality_grid.py) is put in by apply_ssta and samples the same videos from the same noise as the dense model:

    psnr, ssim, lpips      of the sample against the dense one, means over videos and seeds; *_spread is their standard deviation
    latent_error           ||sample - dense|| / ||dense|| of the latents
    velocity_error         the same of the velocity, at each step along the dense trajectory; the mean, and at so many percent of the steps
    loss, loss_above       held-out denoising loss, and by how many percent it is above the dense one
    density                share of tile pairs that is computed, over all steps, dense ones included
    exact_mass             share of the softmax that is computed exactly, where the rest is estimated

Rows "fine-tune" are about training through SSTA: the same steps from the same weights, dense and sparse; loss is that of the clips that
are trained on. gap_closed is the share, in percent, of the distance between sparse and dense loss (of the densely trained weights) that
training through SSTA closed. "distilled" is trained towards the velocities of the weights as they were, dense and frozen; there it is the
share of the velocity's squared error that is gone.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path

import torch
from arguments import Unusable, named, new_parser, number
from clips import Clips, read_clips
from fine_tune import LOSSES, fine_tune
from measure import RESULTS, print_machine
from measure_quality import FOLLOWED, Bench
from procedural import procedural_clips
from quality_grid import FULL_TILES, TOY_TILES, fine_tuned, grid
from train_video import Plan, train
from video_model import FULL, TOY, Checkpoint, ModelSize, PatchAutoencoder, VideoModel, label_order, pixels


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = new_parser(__doc__)
    add_options(parser)
    options = parser.parse_args(argv)
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
        # SSIM takes differences of nearly equal products.
        torch.backends.cudnn.allow_tf32 = False
    print_machine()
    try:
        checkpoint, clips = trained(options, device, again=options.fine_tune)
    except Unusable as error:
        parser.error(str(error))
    tiles = FULL_TILES if gpu else TOY_TILES
    paths = [options.out / "quality.csv", *([RESULTS / f"{options.csv}.csv"] if options.csv else [])]
    bench = Bench(checkpoint, device, options.videos, options.seeds, options.steps, paths)
    left = (lambda: True) if options.limit is None else (lambda: time.perf_counter() - began < 60 * options.limit)
    entries = named(parser, "only", options.only, grid(tiles, gpu))
    bench.dense()
    for entry in entries:
        if not left():
            print(f"--limit: left out {entry.name!r} and what follows", flush=True)
            break
        bench.measure(entry)
    if options.fine_tune and left():
        assert clips is not None
        for row in fine_tune(bench, clips, fine_tuned(tiles.main), options.fine_tune_seconds, options.fine_tune_loss):
            bench.add(row)
    draw(bench, options.out)


def draw(bench: Bench, out: Path) -> None:
    bench.sheet.save(out / "sheet.jpg")
    if importlib.util.find_spec("matplotlib"):
        from plots import plot_quality
        from rows import read_rows

        plot_quality(read_rows(out / "quality.csv")).savefig(out / "quality.png", dpi=110)
        print(f"wrote {out / 'quality.png'}")


def add_options(parser: argparse.ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    add_training(parser)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only configurations whose name contains one of these")
    parser.add_argument("--videos", type=number, default=8 if gpu else 2, help="for each seed (default %(default)s)")
    parser.add_argument("--seeds", type=number, default=1, help="of noise (default %(default)s)")
    parser.add_argument("--steps", type=number, default=30 if gpu else 3, help="of denoising (default %(default)s)")
    parser.add_argument("--fine-tune", action="store_true", help="also train through SSTA")
    parser.add_argument("--fine-tune-seconds", type=_positive, default=60.0 if gpu else 1.0, help="of the dense one (default %(default)s)")
    parser.add_argument("--fine-tune-loss", nargs="+", choices=tuple(LOSSES), default=["diffusion"],
                        help="of the training through SSTA: the clips' velocities or the frozen dense model's (default diffusion)")
    parser.add_argument("--limit", metavar="MINUTES", type=_positive, help="after which no configuration is begun")


def add_training(parser: argparse.ArgumentParser) -> None:
    """What ``trained`` asks for."""
    parser.add_argument("--clips", metavar="FOLDER", type=Path,
                        help="videos to train on, read with cv2 or imageio (default: procedural scenes)")
    parser.add_argument("--minutes", type=_positive, default=5.5 if torch.cuda.is_available() else 0.05,
                        help="of training (default %(default)s)")
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, help="trained on from, or measured if finished (default OUT/model.pt)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("build/quality"),
                        help="where checkpoint, rows and pictures go (default %(default)s)")
    parser.add_argument("--device", help="cuda:0 or the like; cpu is tiny (default: the first GPU)")
    parser.add_argument("--train-seed", type=int, help="chooses the clips, and all that is random in training (default 0)")
    parser.add_argument("--head-dim", type=int, choices=(32, 64, 128), help="of the transformer, whose width stays (default 64)")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def trained(options: argparse.Namespace, device: torch.device, again: bool = False) -> tuple[Checkpoint, Clips | None]:
    """A finished checkpoint, and the clips where they are needed: to finish it, or to train ``again``.

    Raises:
        Unusable: clips or a checkpoint that cannot be used, or that do not fit each other or the other arguments.
    """
    path = options.checkpoint or options.out / "model.pt"
    checkpoint = Checkpoint.load(path) if path.exists() else None
    size = FULL if device.type == "cuda" else TOY
    seed, head_dim = options.train_seed or 0, options.head_dim or size.head_dim
    if checkpoint is not None:
        for option, given, found in (("train-seed", options.train_seed, checkpoint.train_seed),
                                     ("head-dim", options.head_dim, checkpoint.size.head_dim)):
            if given not in (None, found):
                raise Unusable(f"--{option} must be {found}, as in the checkpoint {path}, got {given}")
        size, seed, head_dim = checkpoint.size, checkpoint.train_seed, checkpoint.size.head_dim
        print(f"{path}: {checkpoint.steps} steps, {checkpoint.seconds:.0f} s of training, {'' if checkpoint.complete else 'not '}finished")
        if checkpoint.complete and not again:
            return checkpoint, None
    size = ModelSize(**{**vars(size), "head_dim": head_dim})
    clips = load_clips(options.clips, size, seed, device)
    if checkpoint is None:
        checkpoint = untrained(size, clips, seed)
    elif checkpoint.clips != [clip.name for clip in clips.train]:
        raise Unusable(f"--clips must be those of the checkpoint {path}, {checkpoint.source}: {', '.join(checkpoint.clips)}; "
                         f"got {clips.source}: {', '.join(clip.name for clip in clips.train)}")
    if not checkpoint.complete:
        finish(checkpoint, clips, 60 * options.minutes, path, device)
    return checkpoint, clips


def load_clips(folder: Path | None, size: ModelSize, seed: int, device: torch.device) -> Clips:
    start = time.perf_counter()
    clips = (procedural_clips(size.clips, size.held, *size.pixels, seed) if folder is None
             else read_clips(folder, size.clips, size.held, *size.pixels, seed))
    seconds = time.perf_counter() - start
    print(f"{clips.source}: {len(clips.train)} clips to train on, {len(clips.held)} held out, in {seconds:.1f} s", flush=True)
    return clips.to(device)


def untrained(size: ModelSize, clips: Clips, seed: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    autoencoder = PatchAutoencoder.fit(clips.train, size.channels, generator)
    shown = [clips.train[label] for label in label_order(len(clips.train))[:FOLLOWED]]
    held, real = (torch.cat([autoencoder.encode(pixels(clip.take(*size.pixels)[None])) for clip in of]).to("cpu", torch.bfloat16)
                  for of in (clips.held, shown))
    checkpoint = Checkpoint(size, {}, {name: x.cpu() for name, x in autoencoder.state_dict().items()}, held, real,
                            [clip.name for clip in clips.train], clips.source, seed, seconds=0.0, steps=0, complete=False)
    checkpoint.keep(VideoModel(size, len(clips.train)), 0.0, 0, False)
    return checkpoint


def finish(checkpoint: Checkpoint, clips: Clips, seconds: float, path: Path, device: torch.device) -> None:
    """Trains on, to ``seconds`` in all."""
    model, before, steps = checkpoint.model(device), checkpoint.seconds, checkpoint.steps
    millions = sum(x.numel() for x in model.parameters()) / 1e6
    print(f"model: {millions:.1f} M parameters, {checkpoint.size.tokens:,} tokens", flush=True)
    start = time.perf_counter()

    def save(done: int, complete: bool = False) -> None:
        checkpoint.keep(model, before + time.perf_counter() - start, steps + done, complete)
        checkpoint.save(path)

    left = max(seconds - before, 1.0)
    plan = Plan(left, seed=checkpoint.train_seed + 1000 * steps, begun=min(before / seconds, 0.99))
    save(train(model, checkpoint.patches(device), clips.train, plan, "training", save), complete=True)
    print(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
