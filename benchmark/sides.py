"""Another checkout beside this one: a benchmark of this checkout runs on both libraries, rounds interleaved, and ratios are printed.

Each library gets a process of its own. A process works only while it holds the turn, which it hands over before every round, so that
neither disturbs the other and a card that throttles slows both alike. Both run the scripts of this checkout: what those call must be there
in both libraries. ``import ssta`` takes the checkout whether it is installed or not.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import measure

ENDED = "ended with an error"
FLOORS = ("kernels", "pipelines", "interfaces")


def add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="DIR", type=checkout, help="measure the checkout of this repository in DIR too, interleaved "
                        "with this one, and print the ratios")


def checkout(text: str) -> Path:
    """The folder ``text`` with the package's folders. ``git archive COMMIT ssta kernels pipelines src | tar x -C DIR`` fills one."""
    tree = Path(text).resolve()
    for part in ("ssta/__init__.py", "kernels/__init__.py"):
        if not any((folder / part).is_file() for folder in (tree, tree / "src", tree / "src" / "ssta")):
            raise argparse.ArgumentTypeError(f"DIR must be a checkout of this repository, with {part}, got {text!r}")
    return tree


def compare(script: str, argv: Sequence[str] | None, extra: Sequence[str], other: Path, keys: Sequence[str], columns: Sequence[str],
            ) -> list[dict]:
    """Runs ``script`` (a module's ``__file__``) with ``argv`` and ``extra`` on both libraries and prints how their rows compare.

    Args:
        argv: as ``main`` got it; None for the program's own.
        other: the other checkout.
        keys: the columns that say which row of one is which of the other.
        columns: those that are compared; of the first the spread is shown too.

    Returns:
        The rows that were printed: for every column its value here, there, and here / there.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--against")
    _, rest = finder.parse_known_args(None if argv is None else list(argv))
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(script, [*rest, *extra], tree, Path(folder) / name) for name, tree in (("here", here), ("there", other))]
        try:
            take_turns(sides)
        finally:
            for side in sides:
                side.close()
        rows = compared(*(side.rows() for side in sides), keys, columns)
    measure.print_machine()
    print(f"here: {here}, commit {sides[0].commit}; there: {other}, commit {sides[1].commit}; ratio: here / there")
    measure.print_rows(rows)
    for column in columns:
        ratios = [row for row in rows if row[f"{column} ratio"] != ""]
        if ratios:
            worst = max(ratios, key=lambda row: row[f"{column} ratio"])
            print(f"largest ratio of {column}: {worst[f'{column} ratio']:.4f} ({', '.join(str(worst[key]) for key in keys)})")
    return rows


def take_turns(sides: list[Side]) -> None:
    """Until all have ended, each works for one round, then the next."""
    running = [side for side in sides if side.next()]
    while running:
        running = [side for side in running if side.next()]


class Side:
    """A process that runs the script on one library. It waits wherever ``measure.before_round`` is called."""

    def __init__(self, script: str, argv: list[str], tree: Path, folder: Path) -> None:
        self._name, self._folder = tree, folder
        self.commit = measure.commit_of(tree)
        package(tree, folder / "path")
        log = (folder / "log").open("w")
        theirs_in, self._go = os.pipe()
        self._done, theirs_out = os.pipe()
        environment = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, [str(folder / "path"), os.environ.get("PYTHONPATH")])),
                                        SSTA_COMMIT=self.commit)
        command = [sys.executable, __file__, Path(script).stem, str(folder), str(theirs_in), str(theirs_out), *argv]
        self._process = subprocess.Popen(command, env=environment, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log)
        for end in (theirs_in, theirs_out):
            os.close(end)
        log.close()
        self.wants = os.read(self._done, 1)  # it has started

    def next(self) -> bool:
        """Hands the turn over and waits for it to come back; False once the script has ended."""
        self.hand_over()
        return self.returned()

    def hand_over(self) -> None:
        try:
            os.write(self._go, b".")
        except BrokenPipeError:
            pass

    def returned(self) -> bool:
        """Waits for the turn; False once the script has ended. ``wants`` then says how the script asks for its next turn."""
        self.wants = os.read(self._done, 1)
        if self.wants:
            return True
        if self._process.wait():
            log = (self._folder / "log").read_text().splitlines()
            raise SystemExit("\n".join([*log[-30:], f"the benchmark on {self._name} {ENDED}, {self._process.returncode}"]))
        return False

    def rows(self) -> list[dict]:
        with (self._folder / "rows.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def close(self) -> None:
        for end in (self._go, self._done):
            os.close(end)  # which ends a process that still waits
        self._process.terminate()
        self._process.wait()


def package(tree: Path, path: Path) -> None:
    """Makes ``path``/ssta of links, so that ``import ssta`` with ``path`` on PYTHONPATH is that of the checkout ``tree``.

    The floors kernels, pipelines and interfaces stand at the top of the repository; which there are, and whether ssta/ has links to them,
    differs between commits.
    """
    home = path / "ssta"
    home.mkdir(parents=True)
    floors = [tree / floor for floor in FLOORS if (tree / floor / "__init__.py").is_file()]
    whole = next(folder for folder in (tree / "ssta", tree / "src" / "ssta") if (folder / "__init__.py").is_file())
    parts = {part.name: part for part in (*whole.iterdir(), *floors)}
    for name, part in parts.items():
        if name != "__pycache__":
            (home / name).symlink_to(part.resolve())


def compared(here: list[dict], there: list[dict], keys: Sequence[str], columns: Sequence[str]) -> list[dict]:
    """One row for each that both have."""
    others = {tuple(row[key] for key in keys): row for row in there}
    rows = []
    for row in here:
        other = others.get(tuple(row[key] for key in keys))
        if other is None:
            continue
        found = {key: row[key] for key in keys}
        for column in columns:
            pair = row[column], other[column]
            both = [float(value) if value else "" for value in pair]
            found |= {f"{column} here": both[0], f"{column} there": both[1], f"{column} ratio": both[0] / both[1] if all(both) else ""}
        found["spread"] = max(map(spread, (row, other)))
        rows.append(found)
    if not rows:
        raise SystemExit("nothing was measured on both sides")
    return rows


def spread(row: dict) -> float:
    """Half the distance between the quartiles over the median, of the time that the row has."""
    low, middle, high = next([row[name] for name in names] for names in TIMES if names[0] in row)
    return (float(high) - float(low)) / 2 / float(middle) if middle else 0.0


TIMES = (("q1_ms", "median_ms", "q3_ms"), ("q1_us", "host_us", "q3_us"))


def run_one_side(script: str, folder: str, read: str, write: str, *argv: str) -> None:
    """What a Side's process does."""
    def wait_for_turn(wants: bytes = measure.ALONE) -> None:
        os.write(int(write), wants)
        if not os.read(int(read), 1):
            raise SystemExit("the other side has ended")

    module = importlib.import_module(script)
    module.RESULTS = Path(folder)
    measure.before_round = wait_for_turn
    wait_for_turn()
    module.main([*argv, "--csv", "rows"])


if __name__ == "__main__":
    run_one_side(*sys.argv[1:])
