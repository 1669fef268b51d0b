"""How everything here is measured: interleaved rounds, medians with their spread, the machine beside every number, CSV rows."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
# The longest that the GPU waits for the host to prepare a call, and its highest clock.
LONGEST_WAIT = 8.0  # ms
CYCLES_PER_MS = 2_000_000
# What a turn is asked for.
ALONE, TOGETHER = b".", b"t"


def before_round(wants: bytes = ALONE) -> None:
    """Called before every round; beside another checkout (sides.py) a process waits here for its turn, in which it works alone, or for what
    both sides may do at the same time."""


def interleaved(calls: dict[Hashable, Callable[[], object]], rounds: int = 7, warm: int = 1,
                failed: Callable[[Hashable, str], None] = lambda name, note: None,
                timed: Callable[[Callable[[], object], float], tuple[float, float]] | None = None) -> dict[Hashable, dict[str, object]]:
    """Times of each call, in rounds of one call each, so that a card that throttles slows all alike.

    The order changes from round to round (seeded): the call after the hottest one finds lower clocks than the others. The inputs are far
    larger than any L2 cache here, so it is not flushed in between. Before every call the GPU waits as long as the slowest host among them
    needs, because kernels queue up in a model too; longer, and it would cool down. Returns for each name

        median_ms, q1_ms, q3_ms     the device's time and its quartiles
        host_ms                     median time until the call returns to the host
        note                        empty, or why there are no times: a call that raises is left out from then on

    ``failed`` is told at once which call raised, and may raise itself. ``timed`` stands in for ``milliseconds``.
    """
    timed = timed or milliseconds
    times: dict[Hashable, list[tuple[float, float]]] = {name: [] for name in calls}
    notes = dict.fromkeys(calls, "")
    order = random.Random(0)
    wait = LONGEST_WAIT
    for turn in range(warm + rounds):
        before_round()
        for name in order.sample(list(calls), len(calls)):
            if notes[name]:
                continue
            try:
                times[name].append(timed(calls[name], wait))
            except Exception as error:
                notes[name] = failure(error)
                failed(name, notes[name])
        if turn == warm - 1:
            wait = min(LONGEST_WAIT, 1.2 * max((of[-1][1] for name, of in times.items() if not notes[name]), default=0))
            times = {name: [] for name in calls}
    return {name: {**(_summary(times[name]) if not notes[name] else NO_TIMES), "note": notes[name]} for name in calls}


NO_TIMES = dict(median_ms="", q1_ms="", q3_ms="", host_ms="")


def failure(error: BaseException) -> str:
    """One line of what went wrong, for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:200].rstrip(": ")


def _summary(times: list[tuple[float, float]]) -> dict[str, float]:
    device, host = zip(*times)
    return dict(quartiles(device), host_ms=statistics.median(host))


def quartiles(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return dict(median_ms=middle, q1_ms=low, q3_ms=high)


def milliseconds(call: Callable[[], object], wait: float, ready: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """(on the device, which first waits so many ms and does what ``ready`` gives it; until the call returns); without a GPU they are the
    same."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda._sleep(int(wait * CYCLES_PER_MS))
    ready()
    first = now()
    start = time.perf_counter()
    call()
    host = 1e3 * (time.perf_counter() - start)
    last = now()
    return elapsed_ms(first, last), host


def now() -> torch.cuda.Event | float:
    """A point in the device's work."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    """Milliseconds between two points of ``now``; waits for the second."""
    if isinstance(first, float):
        return 1e3 * (last - first)
    last.synchronize()
    return first.elapsed_time(last)


def peak_extra_mib(call: Callable[[], object]) -> float | str:
    """MiB of device memory that ``call`` needs at its peak on top of what is held when it starts, its results included.

    Call it once before: the first call may compile. Without a GPU nothing is known: "".
    """
    if not torch.cuda.is_available():
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def forward_flops(pairs: float, head_dim: int) -> float:
    """Floating-point operations of attention over ``pairs`` (query token, key token) pairs, all heads counted: two products."""
    return 4.0 * pairs * head_dim


def backward_flops(pairs: float, head_dim: int) -> float:
    """The five products of the usual backward; an implementation that recomputes more gets no credit for it."""
    return 2.5 * forward_flops(pairs, head_dim)


def machine() -> dict[str, str]:
    """What a number depends on besides the code: device, driver, versions, commit, date."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return dict(
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        driver=_driver(),
        torch=torch.__version__, triton=triton_version,
        # SSTA_COMMIT names it for a copy that has left its git folder behind.
        commit=os.environ.get("SSTA_COMMIT") or commit_of(Path(__file__).parent),
        date=datetime.date.today().isoformat())


@cache
def _driver() -> str:
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit_of(tree: Path) -> str:
    return _first_line("git", "-C", str(tree), "rev-parse", "--short=10", "HEAD")


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def write_rows(path: Path, rows: list[dict], quiet: bool = False) -> None:
    """A CSV of ``rows``, each with the machine's columns behind its own, if it has none yet; says so unless ``quiet``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list({**rows[0], **where}))
        writer.writeheader()
        writer.writerows({**where, **row} for row in rows)
    if not quiet:
        print(f"wrote {path}", flush=True)


def measure_each(shapes: Sequence, measure: Callable[[object], list[dict]], path: Path | None,
                 table: Callable[[list[dict]], list[list[str]]] | None = None) -> None:
    """Prints the rows of one shape after the other, and keeps the CSV at ``path`` up to date, so that an end before the last loses none.
    Last it prints what ``table`` makes of them all: lines of cells, a head first."""
    rows = []
    for shape in shapes:
        found = measure(shape)
        print_rows(found)
        rows += found
        if path:
            write_rows(path, rows)
    if table:
        head, *lines = table([{name: str(value) for name, value in row.items()} for row in rows])
        print_rows([dict(zip(head, line)) for line in lines])


def print_machine() -> None:
    print(" | ".join(f"{key} {value}" for key, value in machine().items()), flush=True)


def print_rows(rows: list[dict]) -> None:
    """An aligned table of ``rows``, without the columns that are empty throughout."""
    shown = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    cells = [shown] + [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row[name] for name in shown)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))
    print(flush=True)
