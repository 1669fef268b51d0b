"""The side of one checkout in against.py: rows of layers, kernels, models, host times, memory and decibels.

Sections come one after the other. Both sides prepare a section at the same time, write each row's result to a file, and wait. The command
compares the results and names the rows that differ in a file. The other rows are then timed in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from measure import LONGEST_WAIT, failure, peak_extra_mib
from torch import Tensor

SECTIONS = ("layer", "kernel", "model", "host", "memory", "gate")
RESULTS = Path("build/against")
# The value of a row in one round is the median of as many calls as fit into so many ms, at least and at most so many.
ROUND_MS, CALLS = dict(ms=40.0, us=100.0), dict(ms=(1, 15), us=(3, 25))
# Blocks of the models that are not measured whole.
FEW_BLOCKS = {"hunyuan-video-1.5": 4}
# Values of a result that are compared.
COMPARED = 1 << 21
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


@dataclass
class Row:
    """One row of the table.

    Attributes:
        call: what is measured; None where ``value`` was measured already.
        unit: "ms" of the device, "us" of the host, "MiB" or "dB".
        value: of rows without rounds.
        keep: whether gradients are recorded in the call.
    """

    call: Callable[[], Any] | None
    unit: str = "ms"
    value: float | None = None
    keep: bool = False


Rows = dict[str, Row | str]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--csv")
    options = parser.parse_args(argv)
    if GPU:
        torch.backends.cudnn.allow_tf32 = False
    rows: dict[str, dict] = {}
    for name, build in sections(options):
        measure.before_round(measure.TOGETHER)
        rows |= measured(name, build, options.rounds)
        (RESULTS / "rows.json").write_text(json.dumps(rows))


def sections(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Rows]]]:
    for kind in [kind for kind in SECTIONS if kind in options.only]:
        if kind == "model":
            yield from [(f"model {name}", partial(model_rows, name)) for name in model_names()]
        elif kind == "gate":
            yield kind, partial(gate_rows, options.gate)
        else:
            yield kind, dict(layer=layer_rows, kernel=kernel_rows, host=host_rows, memory=memory_rows)[kind]


def measured(section: str, build: Callable[[], Rows], rounds: int) -> dict[str, dict]:
    """By name of each row its unit and its values, one a round; or a note why there are none."""
    rows: Rows = {}
    try:
        rows = build()
    except Exception as error:
        rows[section] = failure(error)
    results: dict[str, dict] = {}
    for name, row in list(rows.items()):
        if isinstance(row, Row) and row.call:
            try:
                with torch.set_grad_enabled(row.keep):
                    torch.save(sampled(row.call()), RESULTS / f"{file_name(name)}.pt")
            except Exception as error:
                rows[name] = row = failure(error)
        if isinstance(row, str):
            results[name] = dict(note=row, unit="", values=[])
        else:
            results[name] = dict(note="", unit=row.unit, values=[] if row.value is None else [row.value])
    timed = {name: row for name, row in rows.items() if isinstance(row, Row) and row.call and row.value is None}
    # Every side asks for as many turns.
    pace: dict[str, Pace] = {}
    for turn in range(rounds + 1 if section.split()[0] not in ("memory", "gate") else 1):
        measure.before_round()
        wrong = set(json.loads((RESULTS / "wrong.json").read_text())) if (RESULTS / "wrong.json").is_file() else set()
        for name, row in timed.items():
            if file_name(name) in wrong or results[name]["note"]:
                continue
            try:
                with torch.set_grad_enabled(row.keep):
                    value, pace[name] = one_round(row, pace.get(name, Pace()))
            except Exception as error:
                results[name]["note"] = failure(error)
                continue
            if turn:
                results[name]["values"].append(value)
    rows.clear()
    timed.clear()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    return results


def file_name(row: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in row)


@dataclass(frozen=True)
class Pace:
    """How a row is measured in a round: the number of its calls, and the ms that the GPU waits for the host before each."""

    calls: int = 3
    wait: float = LONGEST_WAIT


def one_round(row: Row, pace: Pace) -> tuple[float, Pace]:
    """(the median of its calls, how the next round measures it)."""
    assert row.call is not None
    if row.unit == "us":
        times = [(host_us(row.call), 0.0) for _ in range(pace.calls)]
    else:
        times = [measure.milliseconds(row.call, pace.wait) for _ in range(pace.calls)]
    value, host = (statistics.median(column) for column in zip(*times))
    least, most = CALLS[row.unit]
    fitting = round(ROUND_MS[row.unit] / max(value / (1000 if row.unit == "us" else 1), 1e-3))
    return value, Pace(max(least, min(most, fitting)), min(LONGEST_WAIT, 0.2 + 1.2 * host))


def host_us(call: Callable[[], object]) -> float:
    """Until the call returns, which finds the device's queue empty."""
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    us = 1e6 * (time.perf_counter() - start)
    del result
    return us


def sampled(result: Any) -> list[Tensor]:
    """Evenly spaced values of the tensors of a result."""
    tensors = [result] if isinstance(result, Tensor) else [x for x in result if isinstance(x, Tensor)]
    return [x.detach().reshape(-1)[::max(1, x.numel() // COMPARED)].float().cpu() for x in tensors]


def layer_calls(recording: bool) -> dict[str, tuple[Any, Callable[[], Tensor], tuple[Tensor, ...]]]:
    """By names of the layer and its configuration: (shape, call, leaves)."""
    from shapes import LAYERS, LAYERS_CPU

    from ssta import TokenLayout, ssta_attention

    calls = {}
    for shape in ((LAYERS[0], LAYERS[3]) if GPU else LAYERS_CPU[:1]):
        torch.manual_seed(0)
        size = 1, shape.tokens, shape.heads, shape.head_dim
        # [B, S, H, D] as projections give it, seen as [B, H, S, D].
        qkv = tuple(torch.randn(size, device=DEVICE, dtype=DTYPE).transpose(1, 2).requires_grad_(recording) for _ in range(3))
        mask = torch.arange(shape.text, device=DEVICE)[None] < shape.valid if shape.text else None
        layout = TokenLayout.video_text(shape.thw, shape.text)
        for what in ("default", "one part", "none"):
            call = partial(ssta_attention, *qkv, layout, shape.attention_config(what), text_mask=mask)
            calls[f"{shape.name}, {what}"] = shape, call, qkv
    return calls


def layer_rows() -> Rows:
    """Forwards of all layers, and backwards of the smallest."""
    rows: Rows = {f"layer {name}": Row(call) for name, (_, call, _) in layer_calls(False).items()}
    recorded_calls = layer_calls(True)
    smallest = min(shape.tokens for shape, _, _ in recorded_calls.values())
    for name, (shape, call, leaves) in recorded_calls.items():
        if shape.tokens == smallest:
            rows[f"layer {name}, backward"] = backward_row(call, leaves)
    return rows


def backward_row(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Row:
    with torch.enable_grad():
        out = call()
    torch.manual_seed(1)
    dout = torch.randn_like(out)
    return Row(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), keep=True)


def kernel_rows() -> Rows:
    from shapes import KERNELS, KERNELS_CPU, Problem, draw, kept

    from ssta.kernels import BlockLists, block_sparse_attention

    rows: Rows = {}
    chosen = [(problem, pattern(problem)) for problem, patterns in (KERNELS if GPU else KERNELS_CPU).items() for pattern in patterns[-1:]]
    if GPU:
        wanted = (Problem(46_080), Problem(46_080, head_dim=64), Problem(138_240), Problem(5_760, heads=12), Problem(11_520, heads=2),
                  Problem(113_664, block=128), Problem(30_720, block=64))
        chosen = [(problem, kept(problem, 0.4) if problem == wanted[0] else pattern) for problem, pattern in chosen if problem in wanted]
    else:
        chosen = chosen[:1]
    for problem, pattern in chosen:
        torch.manual_seed(0)
        q, k, v, dout = draw(problem, torch.device(DEVICE), DTYPE)
        blocks = BlockLists.from_mask(pattern.mask(problem, DEVICE), problem.block, problem.block)
        name = (f"kernel {problem.tokens:,} x {problem.heads} x {problem.head_dim}, {pattern.kept} of {problem.blocks} blocks of "
                f"{problem.block}")
        rows[f"{name}, forward"] = Row(partial(block_sparse_attention, q, k, v, blocks))
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            out = block_sparse_attention(*leaves, blocks)
        rows[f"{name}, backward"] = Row(partial(torch.autograd.grad, out, leaves, dout, retain_graph=True), keep=True)
    return rows


def model_names() -> tuple[str, ...]:
    return ("ltx", "wan-1.3b", "hunyuan-video-1.5") if GPU else ("ltx",)


def model_call(name: str) -> tuple[str, torch.nn.Module, dict]:
    """(its name, the model with SSTA, a forward's arguments)."""
    from models import MODELS_CPU

    from ssta.pipelines import Schedule, apply_ssta

    if GPU:
        from ssta.pipelines.evaluation.published import PUBLISHED

        shape = PUBLISHED[name]
        blocks = FEW_BLOCKS.get(name, shape.depth)
        model, call = shape.build(DEVICE, DTYPE, blocks), shape.call(DEVICE, DTYPE)
    else:
        shape = next(tiny for tiny in MODELS_CPU if tiny.name.startswith("LTX"))
        blocks, model, call = shape.blocks, shape.build(DEVICE, DTYPE), shape.call(DEVICE, DTYPE)
    # Of few blocks the dense one would be most of the time.
    apply_ssta(model, schedule=Schedule() if name in FEW_BLOCKS else None)
    return f"{shape.name}, {blocks} blocks", model, call


@torch.no_grad()
def model_rows(name: str) -> Rows:
    """A forward of the model, and of one on the same weights whose blocks are compiled."""
    rows: Rows = {}
    for compiled in (False, True):
        what, model, call = model_call(name)
        if compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            model.compile_repeated_blocks(fullgraph=True, backend="inductor" if GPU else "aot_eager")
        rows[f"model {what}{', compiled' if compiled else ''}"] = Row(partial(model, **call))
    return rows


@torch.no_grad()
def host_rows() -> Rows:
    """Microseconds until calls return that find the device's queue empty."""
    rows: Rows = {f"host {name}": Row(call, "us") for name, (_, call, _) in layer_calls(False).items()}
    try:
        what, model, call = model_call("ltx")
        rows[f"host {what}"] = Row(partial(model, **call), "us")
    except Exception as error:  # of pipelines, on which the other rows do not depend
        rows["host of a model"] = failure(error)
    return rows


def memory_rows() -> Rows:
    """The peak of memory beyond the inputs, of layers as they are and recording."""
    rows: Rows = {}
    for recording in (False, True):
        for name, (_, call, _) in layer_calls(recording).items():
            with torch.set_grad_enabled(recording):
                call()
                call()
                extra = peak_extra_mib(call)
            what = f"memory {name}{', recording' if recording else ''}"
            rows[what] = "memory is counted on a GPU only" if extra == "" else Row(None, "MiB", value=float(extra))
    return rows


def gate_rows(path: Path) -> Rows:
    """Decibels of samples to dense ones, of the model at ``path``."""
    from gate import FULL_TILES, OURS, TOY_TILES, Bench, Checkpoint
    from gate import measured as sampled_rows

    bench = Bench(Checkpoint.load(path), torch.device(DEVICE), *((8, 1, 30) if GPU else (2, 1, 3)), [])
    sampled_videos = sampled_rows(bench, FULL_TILES if GPU else TOY_TILES, {OURS: None})
    return {f"gate at {row['density']:g}": Row(None, "dB", value=float(row["psnr"])) if row["psnr"] != "" else row["note"]
            for row in sampled_videos}


