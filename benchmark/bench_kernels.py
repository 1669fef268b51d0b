"""How fast is the kernel? Lists, forward and backward of block_sparse_attention beside other libraries, on one and the same pattern.

    python benchmark/bench_kernels.py [--full] [--impl hopper triton] [--peers NAME ...] [--shape 46080,48 ...] [--inputs randn ...]
                                       [--rounds 7] [--against DIR] [--csv NAME]

Patterns: "full" (all blocks), "window" (the 3 x 3 x 3 neighbours of a video's tile) and "random" (so many blocks of every row). Inputs:
"randn" (normal numbers), "long" (q and k times 3) and "outlier" (one key in 200 ten times as long). All calls of one problem and kind of
inputs are interleaved. Before any time is taken, out, dq, dk and dv are checked at sampled blocks against float64; column error is the
largest error found there, over the largest value. Rows "lists" are the time to make a library's lists from a bool mask of blocks.

A library that is absent, fails or is wrong gets a row that says so, and no time; after one that leaves the GPU unusable the program starts
again without it. Where ours is wrong, the program ends. With --against ours alone is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from arguments import SHAPE, add_rounds, kernel_shape, new_parser
from measure import (
    NO_TIMES,
    RESULTS,
    backward_flops,
    failure,
    forward_flops,
    interleaved,
    peak_extra_mib,
    print_machine,
    print_rows,
    write_rows,
)
from peers import PEERS, Calls, Inputs, Peer, Tensors, Unsupported, by_autograd
from shapes import INPUTS, KERNELS, KERNELS_CPU, KERNELS_FULL, Pattern, Problem, draw, full, pairs
from sides import add_against, compare
from truth import Truth, Wrong, truth

from ssta.kernels import BlockLists, block_sparse_attention

OURS = "ssta"
DIRECTIONS = ("lists", "forward", "backward")
# Where an implementation offers more than its usual call, what else is measured: name, options, which directions they change.
_ANY_ORDER = ("non-deterministic dQ", dict(deterministic=False), ("backward",))
CHOICES = {"hopper": (_ANY_ORDER,), "cudnn": (_ANY_ORDER,)}
# What tells one row from another.
KEYS = ("what", "provider", "pattern", "tokens", "heads", "head_dim", "block", "inputs", "kept")
COLUMNS = ("what", "provider", "version", "pattern", "tokens", "heads", "head_dim", "block", "inputs", "kept", "blocks", *NO_TIMES,
           "tflops", "extra_mib", "error", "note")


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    parser = new_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="the whole sweep: 11,520 to 138,240 tokens, 16 heads and 1, five patterns")
    parser.add_argument("--impl", nargs="+", metavar="NAME",
                        help="implementations of ours, as block_sparse_attention names them, side by side (default: all kernels that run "
                             "here)")
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS], metavar="NAME",
                        help=f"other libraries (default: all that are installed); of {', '.join(peer.name for peer in PEERS)}")
    parser.add_argument("--shape", metavar=SHAPE, type=kernel_shape, action="append",
                        help="measure this shape instead of the usual ones; KEPT is a number of blocks of BLOCK tokens for every query "
                             "block, a share such as 0.4, full or window (default 384 tokens, 16 heads, head_dim 128); may be given "
                             "several times")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS if gpu else INPUTS[:1],
                        help=f"what q and k hold (default {' '.join(INPUTS if gpu else INPUTS[:1])})")
    add_rounds(parser, 7 if gpu else 3)
    add_against(parser)
    parser.add_argument("--lost", nargs=2, action="append", default=[], help=argparse.SUPPRESS)  # NAME REASON, see start_again
    options = parser.parse_args(argv)
    if options.against:
        rows = compare(__file__, argv, ("--peers",), options.against, KEYS, ("median_ms", "host_ms", "extra_mib"))
        if options.csv:
            write_rows(RESULTS / f"{options.csv}.csv", rows)
        return
    sweep: dict[Problem, list[Pattern]] = {}
    for problem, pattern in options.shape or usual_shapes(gpu, options.full):
        for kind in options.inputs:
            sweep.setdefault(replace(problem, inputs=kind), []).append(pattern)
    peers = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
    print_machine()
    reasons = {peer.name: peer.absent() for peer in peers} | dict(options.lost)
    rows = [row_of_absent(name, reason) for name, reason in reasons.items() if reason]
    for row in rows:
        print(f"{row['provider']} is left out: {row['note']}", flush=True)
    peers = [peer for peer in peers if not reasons[peer.name]]
    for problem, patterns in sweep.items():
        impls = options.impl or runnable(device, dtype, problem)
        for impl in impls:
            reason = refused(impl, device, dtype, problem)
            if reason:
                parser.error(reason)
        try:
            found = measure_problem(problem, list(dict.fromkeys(patterns)), impls, peers, options.rounds, device, dtype)
        except Lost as lost:
            start_again(lost, sys.argv[1:] if argv is None else argv)
        print_rows(found)
        rows += found
        if options.csv:
            write_rows(RESULTS / f"{options.csv}.csv", rows)


def usual_shapes(gpu: bool, everything: bool) -> list[tuple[Problem, Pattern]]:
    sweep = KERNELS_CPU if not gpu else KERNELS_FULL if everything else KERNELS
    return [(problem, pattern(problem)) for problem, patterns in sweep.items() for pattern in patterns]


def refused(impl: str, device: torch.device, dtype: torch.dtype, problem: Problem) -> str:
    """Empty, or why ``impl`` cannot run on such tensors: one block is tried."""
    x = torch.zeros(1, 1, problem.block, problem.head_dim, device=device, dtype=dtype)
    one = BlockLists.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), problem.block, problem.block)
    try:
        block_sparse_attention(x, x, x, one, impl=impl)
    except ValueError as error:
        return str(error)
    return ""


def runnable(device: torch.device, dtype: torch.dtype, problem: Problem) -> list[str]:
    """Our kernels that take such tensors here; plain torch where none does."""
    return [impl for impl in ("hopper", "triton") if not refused(impl, device, dtype, problem)] or ["torch"]


def measure_problem(problem: Problem, patterns: list[Pattern], impls: list[str], peers: list[Peer], rounds: int, device: torch.device,
                    dtype: torch.dtype) -> list[dict]:
    """Rows of every direction, pattern and provider; all calls of one direction are interleaved."""
    torch.manual_seed(0)
    tensors = Tensors(*draw(problem, device, dtype))
    dense = full(problem)
    providers: list[tuple[str, str, Pattern]] = []
    calls: dict[str, dict] = {direction: {} for direction in DIRECTIONS}
    facts: dict[tuple, dict] = {}

    def add(name: str, release: str, pattern: Pattern, prepare, exact: Truth, roundings: float, fatal: bool,
            directions: tuple[str, ...] = DIRECTIONS) -> None:
        providers.append((name, release, pattern))
        with warnings.catch_warnings():
            if not fatal:  # what libraries say as they compile
                warnings.simplefilter("ignore")
            checked = checked_calls(name, prepare, exact, roundings, fatal)
        for direction in checked.keys() & set(directions):
            call, fact = checked[direction]
            facts[direction, name, pattern] = fact
            if call:
                calls[direction][name, pattern] = call

    for pattern in patterns:
        mask = pattern.mask(problem, device)
        blocks = BlockLists.from_mask(mask, problem.block, problem.block)
        exact = truth(tensors.q, tensors.k, tensors.v, blocks, tensors.dout)
        inputs = Inputs(tensors, mask, pattern.kept, problem.block)
        for impl in impls:
            add(f"{OURS} {impl}", "", pattern, partial(ours, inputs, impl, impl == impls[0]), exact, 4, fatal=True)
            for choice, options, directions in CHOICES.get(impl, ()):
                add(f"{OURS} {impl}, {choice}", "", pattern, partial(ours, inputs, impl, False, **options), exact, 4, True, directions)
        for peer in peers:
            if not peer.dense:
                add(peer.name, peer.version, pattern, partial(peer.prepare, inputs), exact, peer.roundings, fatal=False)
    if any(peer.dense for peer in peers):
        inputs = Inputs(tensors, dense.mask(problem, device), dense.kept, problem.block)
        exact = truth(tensors.q, tensors.k, tensors.v, BlockLists.from_mask(inputs.mask, problem.block, problem.block), tensors.dout)
        for peer in (peer for peer in peers if peer.dense):
            add(peer.name, peer.version, dense, partial(peer.prepare, inputs), exact, peer.roundings, fatal=False)

    rows = []
    for direction, flops in zip(DIRECTIONS, (None, forward_flops, backward_flops)):
        times = interleaved(calls[direction], rounds, failed=failed_in_time)
        for name, release, pattern in providers:
            fact = facts.get((direction, name, pattern))
            if fact is None:
                continue
            measured = times.get((name, pattern), {**NO_TIMES, "note": fact["note"]})
            rows.append(dict(
                what=direction, provider=name, version=release, pattern=pattern.name, tokens=problem.tokens, heads=problem.heads,
                head_dim=problem.head_dim, block=problem.block, inputs=problem.inputs, kept=pattern.kept, blocks=problem.blocks,
                **{column: measured[column] for column in NO_TIMES}, tflops=rate(flops, problem, pattern, measured["median_ms"]),
                extra_mib=fact["extra_mib"], error=fact["error"], note=measured["note"]))
    calls.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def row_of_absent(name: str, reason: str) -> dict:
    return dict(dict.fromkeys(COLUMNS, ""), what="absent", provider=name, note=reason)


def rate(flops, problem: Problem, pattern: Pattern, ms: float | str) -> float | str:
    """TFLOP/s of the blocks that are kept."""
    return "" if flops is None or ms == "" else 1e-9 * flops(pairs(problem, pattern.kept), problem.head_dim) / ms


def ours(inputs: Inputs, impl: str, times_lists: bool, **options) -> Calls:
    """The lists are the same for all implementations, so only one of them times them."""
    x = inputs.tensors

    def build():
        return BlockLists.from_mask(inputs.mask, inputs.block, inputs.block)

    attend = partial(block_sparse_attention, blocks=build(), impl=impl, **options)
    return Calls(build if times_lists else None, lambda: attend(x.q, x.k, x.v), by_autograd(attend, x.leaves, x.dout))


def checked_calls(name: str, prepare, exact: Truth, roundings: float, fatal: bool) -> dict[str, tuple]:
    """direction -> (what to time, or None; its error, memory and note). Ends the program where ``fatal`` and something is wrong.

    A provider whose forward gives nothing has one row only, which says why.
    """
    found = {}

    def record(direction, call=None, error="", extra="", note=""):
        found[direction] = (call, dict(error=error, extra_mib=extra, note=note))

    direction = "forward"
    try:
        calls = prepare()
        error = exact.forward_error(name, calls.forward(), roundings)
        record(direction, calls.forward, error, peak_extra_mib(calls.forward))
        if calls.build:
            record("lists", calls.build)
        direction = "backward"
        if calls.start_backward:
            backward = calls.start_backward()
            error = exact.backward_error(name, backward(), roundings)
            record(direction, backward, error, peak_extra_mib(backward))
        else:
            record(direction, note=calls.no_backward)
    except Unsupported as error:
        record(direction, note=str(error))
    except Wrong as error:
        if fatal:
            raise SystemExit(f"{error}; no time is printed") from None
        record(direction, note=str(error))
    except Exception as error:  # a library may raise anything
        if fatal:
            raise
        record(direction, note=failure(error))
        still_alive(name)
    return found


class Lost(Exception):
    """A library has left the GPU unusable for this process: (its name, what was seen)."""


def still_alive(name: str) -> None:
    """Raises Lost where a failure has taken the GPU's context with it: nothing could be measured any more."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise Lost(name, f"left the GPU unusable: {failure(error)}") from None


def failed_in_time(key: tuple[str, Pattern], note: str) -> None:
    """Ends the program for a kernel of ours; goes on without a library, if the GPU has survived."""
    if key[0].startswith(OURS):
        raise SystemExit(f"{key[0]}, {key[1].name}, while it was timed: {note}")
    still_alive(key[0])


def start_again(lost: Lost, argv: list[str]) -> NoReturn:
    """Runs the same in a new process without the library that was lost; only a new process gets a working GPU."""
    name, reason = lost.args
    print(f"{name} {reason}; starting again without it", flush=True)
    os.execv(sys.executable, [sys.executable, __file__, *argv, "--lost", name, reason])


if __name__ == "__main__":
    main()
