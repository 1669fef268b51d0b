"""Which settings for 4 and 8 steps? The gate's small model, made ready for so few, under the configurations of quality_grid.for_few_steps.

    python benchmark/bench_few_steps.py [--only TEXT ...] [--csv few_steps_h200]

The model samples pairs of noise and video in 30 steps, densely, and is trained on them at the noise levels of 4 and of 8 steps, until its
way from noise to video is nearly straight (few_steps.py). Every configuration is then held against the dense samples of as many steps from
the same noise. Columns are those of bench_quality.py; steps is 4 or 8. Rows "few steps" say how near dense samples of few steps are to the
first model's of 30, before that training and after it. Without a GPU everything is tiny.

With --fine-tune nothing of that happens: the gate's model as it is, in 4 steps, is trained on through SSTA towards its own dense velocities
where its own generations come by. gap_closed is as bench_quality.py has it, for "distilled".
"""

from __future__ import annotations

import math
from argparse import Namespace
from copy import copy
from pathlib import Path

import torch
from arguments import Unusable, named, new_parser, number
from few_steps import RATE, Pairs, levels_of, lines_of, reflow
from fine_tune import fine_tune_few
from gate import add_model, chosen_device, ready
from measure import RESULTS, print_machine, write_rows
from measure_quality import Bench
from quality_grid import FULL_TILES, TOY_TILES, Entry, few_tuned, for_few_steps
from sample_quality import mean_and_spread
from train_video import Plan
from video_model import Checkpoint

MANY, FEW = 30, (4, 8)


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    add_model(parser)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only configurations whose name contains one of these")
    parser.add_argument("--pairs", type=number, default=48 if gpu else 4, help="of noise and video (default %(default)s)")
    parser.add_argument("--train-steps", type=number, default=400 if gpu else 10, help="of training (default %(default)s)")
    parser.add_argument("--fine-tune", action="store_true", help="instead of all that, train for 4 steps through SSTA")
    parser.add_argument("--generations", type=number, default=256 if gpu else 8, help="to learn at with --fine-tune (default %(default)s)")
    options = parser.parse_args(argv)
    device = chosen_device(options)
    gpu = device.type == "cuda"
    tiles = FULL_TILES if gpu else TOY_TILES
    entries = named(parser, "only", options.only, few_tuned(tiles.others[0]) if options.fine_tune else for_few_steps(tiles))
    print_machine()
    try:
        many = ready(options.checkpoint, device)
        if options.fine_tune:
            fine_tuned(many, options, entries, device)
            return
        few = straightened(many, options.pairs, options.train_steps, options.checkpoint.with_name("few_steps.pt"), device)
    except Unusable as error:
        parser.error(str(error))
    benches = [Bench(few, device, 8 if gpu else 2, 1, steps, []) for steps in FEW]
    for bench in benches:
        bench.dense()
        bench.add(dict(what="few steps", name="before", **off_by(bench, many, many)))
        bench.add(dict(what="few steps", name="after", **off_by(bench, few, many)))
    for entry in entries:
        for bench in benches:
            bench.measure(entry)
        if options.csv:
            write_rows(RESULTS / f"{options.csv}.csv", [row for bench in benches for row in bench.rows], quiet=True)


def fine_tuned(checkpoint: Checkpoint, options: Namespace, entries: list[Entry], device: torch.device) -> None:
    bench = Bench(checkpoint, device, 8 if device.type == "cuda" else 2, 1, FEW[0],
                  [RESULTS / f"{options.csv}.csv"] if options.csv else [])
    bench.dense()
    lines = lines_of(bench.model, -(-options.generations // 8), 8, FEW[0])
    for row in fine_tune_few(bench, lines, entries, options.train_steps):
        bench.add(row)


def straightened(checkpoint: Checkpoint, pairs: int, steps: int, path: Path, device: torch.device) -> Checkpoint:
    """The model at ``path``, made of ``checkpoint`` and written there first if there is none."""
    if path.exists():
        return Checkpoint.load(path)
    found = pairs_of(checkpoint, pairs, MANY, device)
    model = checkpoint.model(device)
    few = copy(checkpoint)
    done = reflow(model, found, levels_of(model, *FEW), Plan(math.inf, steps, rate=RATE, small=0.0), "few steps")
    few.keep(model, checkpoint.seconds, checkpoint.steps + done, True)
    few.save(path)
    return few


def pairs_of(checkpoint: Checkpoint, number: int, steps: int, device: torch.device) -> Pairs:
    size, dtype = min(8, number), torch.bfloat16 if device.type == "cuda" else torch.float32
    found = Pairs.of(checkpoint.model(device).as_loaded(dtype), -(-number // size), size, steps)
    print(f"{len(found.labels)} pairs of {steps} steps", flush=True)
    return found


def off_by(bench: Bench, of: Checkpoint, many: Checkpoint) -> dict:
    """How near dense samples of ``of`` in the bench's steps are to those of ``many`` in many."""
    one, other = (bench.dense_samples(checkpoint, number) for checkpoint, number in ((of, bench.steps), (many, MANY)))
    videos = other.compare(one.latents)
    columns = {}
    for name in ("psnr", "ssim"):
        columns[name], columns[f"{name}_spread"] = mean_and_spread(video[name] for video in videos)
    return columns


if __name__ == "__main__":
    main()
