"""How near does sparse attention stay to dense video, in one line: a small model of a fixed recipe, sampled at three densities.

    python benchmark/gate.py                                      # or make gate
    python benchmark/gate.py --estimate estimates:flex_top_tiles  # beside it another way to attend
    python benchmark/gate.py --csv gate_h200                      # at a release: its decibels, for later code to be held against

The first call trains the model, video_model.LIGHT on procedural clips for so many steps (ten minutes on a slow GPU, one on an H200), and
leaves it in --checkpoint; later ones only sample: 8 videos from the same noise as the dense ones, 30 steps, in tiles of 4 x 4 x 8, the
others estimated in two parts each, all steps and layers sparse. A line holds the PSNR to the dense videos in dB. Beside that of this code
stand those of the last release, from benchmark/results/gate_*.csv. Trainings on different GPUs round differently and are some tenths of
a decibel apart; the line says where the release's weights were others. To compare two versions exactly, give both one --checkpoint.

--estimate names a function ``f(q, k, v, thw, density)`` of a module that can be imported, which stands in for every self-attention: q, k, v
and what it returns are ``[B, H, S, D]``, thw the canvas, density the share of the pairs that it may compute. Without a GPU everything is
tiny.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from arguments import Unusable, new_parser
from bench_quality import load_clips, untrained
from measure import RESULTS, machine, print_machine, write_rows
from measure_quality import Bench
from quality_grid import DENSITIES, FULL_TILES, LINEAR_2, TOY_TILES, Entry, Tiles, kept
from rows import Row, read_rows
from torch import Tensor
from train_video import Plan, train
from video_model import LIGHT, TOY, Checkpoint, ModelSize

import ssta

OURS = "ssta"
HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--estimate", nargs="+", default=[], type=function, metavar="MODULE:FUNCTION", help="others to hold beside SSTA's")
    add_model(parser)
    options = parser.parse_args(argv)
    device = chosen_device(options)
    gpu = device.type == "cuda"
    print_machine()
    try:
        checkpoint = ready(options.checkpoint, device)
    except Unusable as error:
        parser.error(str(error))
    bench = Bench(checkpoint, device, *((8, 1, 30) if gpu else (2, 1, 3)), [])
    tiles = FULL_TILES if gpu else TOY_TILES
    rows = measured(bench, tiles, {OURS: None, **dict(options.estimate)})
    for name in (OURS, *dict(options.estimate)):
        print(line(name, rows, released(RESULTS)))
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def add_model(parser: argparse.ArgumentParser) -> None:
    """What ``chosen_device`` and ``ready`` are given."""
    parser.add_argument("--checkpoint", metavar="FILE", type=Path, default=Path("build/gate/model.pt"),
                        help="of the gate's model, which is trained if it is not there (default %(default)s)")
    parser.add_argument("--device", help="cuda:0 or the like; cpu is tiny (default: the first GPU)")


def chosen_device(options: argparse.Namespace) -> torch.device:
    """The device of the command line, made the current one."""
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # SSIM takes differences of nearly equal products.
        torch.backends.cudnn.allow_tf32 = False
    return device


def function(text: str) -> tuple[str, Callable[..., Tensor]]:
    """The name and the function that MODULE:FUNCTION stands for; modules of this folder and of the current one are found too."""
    module, _, name = text.partition(":")
    sys.path[:0] = [of for of in (str(Path.cwd()), str(HERE)) if of not in sys.path]
    try:
        return text, getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"MODULE:FUNCTION must name a function that can be imported, got {text!r}: {error}") from error


def ready(path: Path, device: torch.device) -> Checkpoint:
    """The model at ``path``, trained and written there first if there is none.

    Raises:
        Unusable: it cannot be read.
    """
    return Checkpoint.load(path) if path.exists() else recipe(*((LIGHT, 1000) if device.type == "cuda" else (TOY, 250)), path, device)


def recipe(size: ModelSize, steps: int, path: Path, device: torch.device) -> Checkpoint:
    """The model that everybody trains: the same clips, draws and number of steps."""
    start = time.perf_counter()
    clips = load_clips(None, size, 0, device)
    checkpoint = untrained(size, clips, 0)
    model = checkpoint.model(device)
    # A toy has few steps; of a model that has learnt nothing nothing depends on attention.
    plan = Plan(math.inf, steps, rate=1e-3 if size != TOY else 3e-3, small=0.0)
    checkpoint.keep(model, time.perf_counter() - start, train(model, checkpoint.patches(device), clips.train, plan, "training"), True)
    checkpoint.save(path)
    print(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")
    return checkpoint


def measured(bench: Bench, tiles: Tiles, estimates: dict[str, Callable[..., Tensor] | None]) -> list[dict]:
    """A row for each of ``estimates`` and density; None is SSTA itself."""
    bench.dense()
    rows = []
    for name, density, entry in entries(bench.checkpoint.size, tiles, estimates):
        bench.measure(entry)
        found = bench.rows[-1]
        rows.append(dict(release=ssta.__version__, estimate=name, density=density, weights=digest(bench.checkpoint),
                         **{column: found[column] for column in ("psnr", "psnr_spread", "ssim", "velocity_error", "note")}))
    return rows


def entries(size: ModelSize, tiles: Tiles, estimates: dict[str, Callable[..., Tensor] | None]) -> Iterator[tuple[str, float, Entry]]:
    """(estimate, density, what is measured)."""
    for name, attend in estimates.items():
        for density in sorted(DENSITIES):
            how: dict = (dict(config=kept(tiles.others[0], density, **LINEAR_2)) if attend is None else
                         dict(attend=partial(attend, thw=size.canvas, density=density)))
            yield name, density, Entry("gate", f"{name} {density:g}", **how)


def digest(checkpoint: Checkpoint) -> str:
    """The same for the same weights."""
    of = 0
    for name in sorted(checkpoint.state):
        of = zlib.crc32(checkpoint.state[name].contiguous().view(torch.uint8).numpy().tobytes(), of)
    return f"{of:08x}"


def released(results: Path) -> list[Row]:
    """The rows of the last release: those of this kind of device, if there are any."""
    own = machine()["device"]
    files = [read_rows(path) for path in sorted(results.glob("gate_*.csv"))]
    return min(files, key=lambda rows: rows[0]["device"] != own, default=[])


def line(name: str, rows: list[dict], before: list[Row]) -> str:
    """What one estimate gives; SSTA's last release beside SSTA."""
    own = [row for row in rows if row["estimate"] == name]
    found = ", ".join(f"{float(row['density']):.3g} {decibels(row)}" for row in own)
    if name != OURS:
        return f"{name}: {found}"
    text, old = f"{name} {own[0]['release']}: {found}", [row for row in before if row["estimate"] == OURS]
    if not old:
        return f"{text}; no release to hold it against"
    same = "the same weights" if old[0]["weights"] == own[0]["weights"] else f"other weights of the same recipe, {old[0]['device']}"
    return f"{text}; release {old[0]['release']} on {same}: " + ", ".join(decibels(row) for row in old)


def decibels(row: dict) -> str:
    return f"{float(row['psnr']):.2f} dB" if row["psnr"] != "" else row["note"]


if __name__ == "__main__":
    main()
