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
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(calls: dict[str, Callable[[], object]], rounds: int = 7, warm: int = 2) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, in rounds of one call each, so that a card that throttles slows all alike.

    The order changes from round to round (seeded): the call after the hottest one finds lower clocks than the others.
    Returns name -> {"median_ms", "min_ms", "max_ms"}. The inputs are far larger than any L2 cache here, so it is not flushed in between.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for turn in range(warm + rounds):
        for name in order.sample(list(calls), len(calls)):
            elapsed = _milliseconds(calls[name])
            if turn >= warm:
                times[name].append(elapsed)
    return {name: dict(median_ms=statistics.median(t), min_ms=min(t), max_ms=max(t)) for name, t in times.items()}


def _milliseconds(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Device memory that ``call`` needs at its peak on top of what is held when it starts; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        torch=torch.__version__, triton=triton_version,
        # SSTA_COMMIT names it for a copy that has left its git folder behind.
        commit=os.environ.get("SSTA_COMMIT") or _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"),
        date=datetime.date.today().isoformat())


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def write_rows(path: Path, rows: list[dict]) -> None:
    """A CSV of ``rows``, each with the machine's columns behind its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *where])
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)
    print(f"wrote {path}")


def print_rows(rows: list[dict]) -> None:
    """An aligned table of ``rows`` with the machine on the first line."""
    print(" | ".join(f"{key} {value}" for key, value in machine().items()))
    cells = [list(rows[0])] + [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))
