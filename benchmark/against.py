"""Is NEW as fast, as small and as good as OLD? Two checkouts of this repository, interleaved on one device, in one table.

    python benchmark/against.py OLD NEW [--only layer kernel model host memory gate] [--without SECTION ...] [--rounds 15]
                                [--bound 1.5] [--host-bound 10] [--gate CHECKPOINT] [--csv FILE] [--json FILE]

OLD and NEW are folders. ``git archive COMMIT ssta kernels pipelines src | tar x -C DIR`` fills one. Rows:

    layer      HunyuanVideo 1.5 at 720p and LTX-Video: the default, one part, the published configuration; LTX's backwards
    kernel     block_sparse_attention, forward and backward, on seven shapes of shapes.py
    model      forwards, eager and with compiled blocks: LTX-Video and Wan 1.3B whole, as apply_ssta(model) has them, with a dense layer;
               four blocks of HunyuanVideo 1.5 without one
    host       us until a call returns that finds the device's queue empty: those layers, and LTX-Video's forward
    memory     the peak of those layers beyond their inputs, without and with gradients
    gate       decibels of gate.py on one checkpoint, trained first where there is none

Each library has a process of its own. Both prepare a section at the same time, and then take turns. Their results are compared before any
time is taken: column apart is the distance over the length of OLD's result. A row with two results is not timed. Column ratio is the median
of NEW / OLD over the rounds; q1 and q3 are its quartiles.

SLOWER marks a median beyond --bound percent, of host times beyond --host-bound, with the lower quartile above 1. LARGER marks 3 % more
memory, WORSE a loss of 0.1 dB, LEFT OUT a row without figures. Any mark gives exit status 1. Without a GPU everything is tiny.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import measure
import torch
from against_rows import SECTIONS, file_name
from arguments import rounds
from sides import Side, checkout, package

# How far results may be apart before nothing is timed: bfloat16 rounds, and through the blocks of a model differences grow.
APART = {"layer": 0.02, "kernel": 0.01, "host": 0.1, "model": 0.1}
# Percent beyond which a row is marked, where that is not --bound; dB for the gate.
MEMORY_BOUND, GATE_BOUND = 3.0, 0.1
COLUMNS = ("row", "unit", "old", "new", "ratio", "q1", "q3", "apart", "mark", "note")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("old", metavar="OLD", type=checkout)
    parser.add_argument("new", metavar="NEW", type=checkout)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--without", nargs="+", choices=SECTIONS, default=[])
    parser.add_argument("--rounds", type=rounds, default=15 if torch.cuda.is_available() else 3, help="default %(default)s")
    parser.add_argument("--bound", type=float, default=1.5, metavar="PERCENT", help="of layers, kernels and models (default %(default)s)")
    parser.add_argument("--host-bound", type=float, default=10.0, metavar="PERCENT", help="of host times (default %(default)s)")
    parser.add_argument("--gate", type=Path, default=Path("build/gate/model.pt"), metavar="CHECKPOINT",
                        help="of gate.py's model (default %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with the values of every round")
    options = parser.parse_args(argv)
    chosen = [section for section in options.only if section not in options.without]
    if not chosen:
        parser.error(f"--only and --without must leave a section, got {options.only} and {options.without}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "gate" in chosen:
            train(options.gate.resolve(), options.new, folder / "trainer")
        argv = ["--only", *chosen, "--rounds", str(options.rounds), "--gate", str(options.gate.resolve())]
        sides = [Side("against_rows", argv, tree, folder / side) for side, tree in (("old", options.old), ("new", options.new))]
        apart: dict[str, float] = {}
        try:
            take_turns(sides, lambda: check(folder, apart))
        finally:
            for side in sides:
                side.close()
        old, new = (json.loads((folder / side / "rows.json").read_text()) for side in ("old", "new"))
    rows = compared(old, new, apart, options.bound, options.host_bound)
    measure.print_machine()
    print(f"OLD {options.old}, commit {sides[0].commit}; NEW {options.new}, commit {sides[1].commit}; {options.rounds} rounds, "
          f"{time.monotonic() - start:.0f} s")
    measure.print_rows(rows)
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(dict(machine=measure.machine(), rows=rows, old=old, new=new)))
    marked = [row for row in rows if row["mark"]]
    print(f"{len(marked)} of {len(rows)} rows are marked" if marked else f"no row of {len(rows)} is marked")
    return int(bool(marked))


def train(checkpoint: Path, tree: Path, path: Path) -> None:
    """Makes the gate's model by the library ``tree``, if there is none at ``checkpoint``."""
    if checkpoint.exists():
        return
    package(tree, path)
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])))
    code = ("import sys; from pathlib import Path; import torch, gate; "
            "gate.ready(Path(sys.argv[1]), torch.device('cuda' if torch.cuda.is_available() else 'cpu'))")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}", str(checkpoint)],
                   env=environment, check=True)


def take_turns(sides: Sequence[Side], check: Callable[[], object]) -> None:
    """Until both have ended. Sides that both ask for it work at the same time, after which ``check`` is called. Else one works after the
    other, and the order changes from turn to turn."""
    running, turn = list(sides), 0
    while running:
        together = all(side.wants == measure.TOGETHER for side in running)
        if together:
            for side in running:
                side.hand_over()
            running = [side for side in running if side.returned()]
            check()
            continue
        turn += 1
        going = [side for side in (running if turn % 2 else reversed(running)) if side.next()]
        running = [side for side in running if side in going]


def check(folder: Path, apart: dict[str, float]) -> None:
    """Compares the results that both sides have written, and tells both which rows differ."""
    for path in sorted((folder / "old").glob("*.pt")):
        other = folder / "new" / path.name
        if other.is_file():
            apart[path.stem] = distance(*(torch.load(file) for file in (path, other)))
            path.unlink()
            other.unlink()
    wrong = [name for name, far in apart.items() if not far <= APART[name.split("_")[0]]]
    for side in ("old", "new"):
        (folder / side / "wrong.json").write_text(json.dumps(wrong))


def distance(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> float:
    """The largest of the tensors' distances over the length of the old ones."""
    if [x.shape for x in old] != [x.shape for x in new]:
        return float("inf")
    far = [float((y.double() - x.double()).norm() / x.double().norm().clamp(min=1e-30)) for x, y in zip(old, new)]
    return max([float("inf") if value != value else value for value in far], default=0.0)


def compared(old: dict[str, dict], new: dict[str, dict], apart: dict[str, float], bound: float,
             host_bound: float) -> list[dict]:
    """The rows of the table, with their marks."""
    rows = []
    for name in dict.fromkeys([*old, *new]):
        pair = [rows_of_side.get(name, dict(note="it has no such row", unit="", values=[])) for rows_of_side in (old, new)]
        notes = [f"{side}: {row['note']}" for side, row in zip(("OLD", "NEW"), pair) if row["note"]]
        row: dict = dict.fromkeys(COLUMNS, "") | dict(row=name, unit=pair[0]["unit"] or pair[1]["unit"], note="; ".join(notes))
        far = apart.get(file_name(name))
        row["apart"] = "" if far is None else far
        values = [measured["values"] for measured in pair]
        if far is not None and not far <= APART[name.split()[0]]:
            row["mark"] = "RESULTS DIFFER"
        elif not all(values):
            row["mark"] = "" if name.startswith("memory") and not torch.cuda.is_available() else "LEFT OUT"
        else:
            row |= dict(zip(("old", "new"), map(median, values)))
            row |= judged(row["unit"], *values, bound=host_bound if row["unit"] == "us" else bound)
        rows.append(row)
    return rows


def judged(unit: str, old: Sequence[float], new: Sequence[float], bound: float) -> dict:
    """ratio, q1, q3 and mark of a row's values, one a round."""
    if unit == "dB":
        lost = old[0] - new[0]
        return dict(ratio=new[0] / old[0], mark="WORSE" if lost > GATE_BOUND else "")
    if unit == "MiB":
        ratio = new[0] / old[0]
        return dict(ratio=ratio, mark="LARGER" if ratio > 1 + MEMORY_BOUND / 100 else "")
    spread = measure.quartiles([here / there for here, there in zip(new, old)])
    ratio, low, high = (spread[name] for name in ("median_ms", "q1_ms", "q3_ms"))
    return dict(ratio=ratio, q1=low, q3=high, mark="SLOWER" if ratio > 1 + bound / 100 and low > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
