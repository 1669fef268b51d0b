"""What does a call cost the host? Microseconds of the CPU until it returns while the GPU works on, and the peak of its memory.

    python benchmark/bench_host.py [--layer TEXT ...] [--only TEXT ...] [--calls 25] [--rounds 8] [--against DIR] [--csv NAME]

At the size of layers of shapes.py: block_sparse_attention over a random fifth of the blocks, also recording for a backward, and that
backward; and the whole layer by ssta_attention, as apply_ssta(pipe) configures it (compensation "linear"), also in two parts, without
compensation, recording for a backward, and in the layer's published configuration. --only takes the calls whose name contains a text.
Before every call the device has finished all others, so that no call waits for room in its queue; nothing waits for the device inside.
host_us is the median of all --calls of all --rounds, q1_us and q3_us their quartiles, min_us the least; a first round is left out, and
without a GPU they hold the computation too. Before any time is taken, sampled blocks and tiles are checked against float64.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import measure
import torch
from arguments import add_names, add_rounds, named, new_parser, number
from bench_layer import sampled_error
from measure import RESULTS, measure_each, peak_extra_mib, print_machine, quartiles
from shapes import HOST, HOST_CPU, LayerShape, Problem, kept
from sides import add_against, compare
from table import host_table
from truth import Wrong, truth

from ssta import TokenLayout, ssta_attention
from ssta.kernels import BlockLists, block_sparse_attention

KEYS = ("layer", "what")
KERNEL, RECORDING, BACKWARD = "block_sparse_attention", "block_sparse_attention, recording", "its backward"
# What a layer is called with: the name of LayerShape.attention_config, what differs from it, whether q, k and v want gradients.
LAYER_CALLS: dict[str, tuple[str, dict, bool]] = {
    "layer, default": ("default", {}, False),
    "layer, default, one part": ("one part", {}, False),
    "layer, default without compensation": ("one part", dict(compensation="none", compensation_parts=1), False),
    "layer, default, recording": ("default", {}, True),
    "layer, published": ("none", {}, False)}
CALLS = (KERNEL, RECORDING, BACKWARD, *LAYER_CALLS)


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    layers = HOST if gpu else HOST_CPU
    parser = new_parser(__doc__)
    add_names(parser, "layer", layers)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help=f"only the calls whose name contains one of these: {'; '.join(CALLS)}")
    parser.add_argument("--calls", type=number, default=25 if gpu else 3, help="of each in a round (default %(default)s)")
    add_rounds(parser, 8 if gpu else 3)
    add_against(parser)
    options = parser.parse_args(argv)
    chosen = named(parser, "layer", options.layer, layers)
    only = [name for name in CALLS if not options.only or any(text in name for text in options.only)]
    if not only:
        parser.error(f"--only must be part of one of {', '.join(map(repr, CALLS))}, got {options.only}")
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    if options.against:
        rows = compare(__file__, argv, (), options.against, KEYS, ("host_us", "min_us", "extra_mib"))
        if path:
            measure.write_rows(path, rows)
        return
    print_machine()
    measure_each(chosen, lambda shape: measure_host(shape, only, options.calls, options.rounds, "cuda" if gpu else "cpu"), path, host_table)


def measure_host(shape: LayerShape, only: Sequence[str], number_of_calls: int, rounds: int, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkvo_mib = 4 * shape.tokens * shape.heads * shape.head_dim * dtype.itemsize / 2**20
    try:
        calls = {**kernel_calls(shape, only, device, dtype), **layer_calls(shape, only, device, dtype)}
    except Wrong as error:
        raise SystemExit(f"{error}; no time is printed") from None
    memory = {}
    for name, call in calls.items():
        call()
        memory[name] = peak_extra_mib(call)
    times = host_times(calls, number_of_calls, rounds)
    return [dict(layer=shape.name, tokens=shape.tokens, heads=shape.heads, head_dim=shape.head_dim, what=name,
                 calls=number_of_calls * rounds, **times[name], extra_mib=memory[name],
                 extra_over_qkvo=memory[name] and memory[name] / qkvo_mib) for name in calls]


def kernel_calls(shape: LayerShape, only: Sequence[str], device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """block_sparse_attention on about as many tokens, in whole blocks, checked."""
    if not {KERNEL, RECORDING, BACKWARD} & set(only):
        return {}
    block = 384 if device == "cuda" else 96
    problem = Problem(shape.tokens // block * block, shape.heads, shape.head_dim, block)
    q, k, v = (torch.randn(1, shape.heads, problem.tokens, shape.head_dim, device=device, dtype=dtype) for _ in range(3))
    blocks = BlockLists.from_mask(kept(problem, 0.2).mask(problem, device), block, block)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    calls: dict[str, Callable[[], object]] = {KERNEL: partial(block_sparse_attention, q, k, v, blocks),
                                              RECORDING: partial(block_sparse_attention, *leaves, blocks)}
    dout = torch.randn_like(q)
    exact = truth(q, k, v, blocks, dout)
    for name, call in calls.items():
        exact.forward_error(name, call().detach())
    if BACKWARD in only:
        calls[BACKWARD] = partial(torch.autograd.grad, block_sparse_attention(*leaves, blocks), leaves, dout, retain_graph=True)
        exact.backward_error("backward", calls[BACKWARD]())
    return {name: call for name, call in calls.items() if name in only}


def layer_calls(shape: LayerShape, only: Sequence[str], device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The layer without padding, on projections as they come, checked."""
    q, k, v = (torch.randn(1, shape.tokens, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    text_mask = torch.arange(shape.text, device=device)[None] < shape.valid if shape.text else None
    layout, calls = TokenLayout.video_text(shape.thw, shape.text), {}
    for name, (attention, changes, recording) in LAYER_CALLS.items():
        if name not in only:
            continue
        config = replace(shape.attention_config(attention), **changes)
        calls[name] = call = partial(ssta_attention, *(leaves if recording else (q, k, v)), layout, config, text_mask=text_mask)
        out, blocks = call(return_blocks=True)
        sampled_error(shape, q, k, v, out.detach(), blocks, layout, config)
    return calls


def host_times(calls: dict[str, Callable[[], object]], number_of_calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """host_us, q1_us, q3_us and min_us over the calls of all rounds but a first one."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for turn in range(1 + rounds):
            measure.before_round()
            for name in order.sample(list(calls), len(calls)):
                for _ in range(number_of_calls):
                    finish()
                    start = time.perf_counter()
                    result = calls[name]()
                    us = 1e6 * (time.perf_counter() - start)
                    del result
                    if turn:
                        times[name].append(us)
    finally:
        gc.enable()
    found = {}
    for name, of in times.items():
        middle = quartiles(of)
        found[name] = dict(host_us=middle["median_ms"], q1_us=middle["q1_ms"], q3_us=middle["q3_ms"], min_us=min(of))
    return found


if __name__ == "__main__":
    main()
