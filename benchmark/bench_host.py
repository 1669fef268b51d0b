"""What does a call cost the host? Microseconds of the CPU until it returns while the GPU works on, and the peak of its memory.

    python benchmark/bench_host.py [--layer TEXT ...] [--calls 20] [--rounds 25] [--against DIR] [--csv NAME]

At the size of layers of shapes.py: block_sparse_attention over a random fifth of the blocks, also recording for a backward, and that
backward; and the whole layer by ssta_3d_attention, also with compensation "linear". Before every call the device has finished all
others, so that no call waits for room in its queue.
host_us is the median over rounds of the medians of --calls calls, q1_us and q3_us its quartiles; without a GPU it holds the computation
too. Before any time is taken, sampled blocks and tiles are checked against float64.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import measure
import torch
from against import add_against, compare
from arguments import add_names, add_rounds, named, new_parser, number
from bench_layer import sampled_error
from measure import RESULTS, measure_each, peak_extra_mib, print_machine, quartiles
from shapes import LAYERS, LAYERS_CPU, LayerShape, Problem, kept
from truth import Wrong, truth

from ssta import TokenLayout, ssta_3d_attention, ssta_attention
from ssta.kernels import BlockLists, block_sparse_attention

KEYS = ("layer", "what")


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    layers = LAYERS if gpu else LAYERS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "layer", layers)
    parser.add_argument("--calls", type=number, default=20 if gpu else 3, help="of each in a round (default %(default)s)")
    add_rounds(parser, 25 if gpu else 3)
    add_against(parser)
    options = parser.parse_args(argv)
    chosen = named(parser, "layer", options.layer, layers)
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    if options.against:
        rows = compare(__file__, argv, (), options.against, KEYS, ("host_us", "extra_mib"))
        if path:
            measure.write_rows(path, rows)
        return
    print_machine()
    measure_each(chosen, lambda shape: measure_host(shape, options.calls, options.rounds, "cuda" if gpu else "cpu"), path)


def measure_host(shape: LayerShape, number_of_calls: int, rounds: int, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkvo_mib = 4 * shape.tokens * shape.heads * shape.head_dim * dtype.itemsize / 2**20
    try:
        calls = {**kernel_calls(shape, device, dtype), **layer_calls(shape, device, dtype)}
    except Wrong as error:
        raise SystemExit(f"{error}; no time is printed") from None
    memory = {}
    for name, call in calls.items():
        call()
        memory[name] = peak_extra_mib(call)
    times = host_times(calls, number_of_calls, rounds)
    return [dict(layer=shape.name, tokens=shape.tokens, heads=shape.heads, head_dim=shape.head_dim, what=name, calls=number_of_calls,
                 host_us=times[name]["median_ms"] * 1e3, q1_us=times[name]["q1_ms"] * 1e3, q3_us=times[name]["q3_ms"] * 1e3,
                 extra_mib=memory[name], extra_over_qkvo=memory[name] and memory[name] / qkvo_mib) for name in calls]


def kernel_calls(shape: LayerShape, device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """block_sparse_attention on about as many tokens, in whole blocks, checked."""
    block = 384 if device == "cuda" else 96
    problem = Problem(shape.tokens // block * block, shape.heads, shape.head_dim, block)
    q, k, v = (torch.randn(1, shape.heads, problem.tokens, shape.head_dim, device=device, dtype=dtype) for _ in range(3))
    blocks = BlockLists.from_mask(kept(problem, 0.2).mask(problem, device), block, block)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    calls = {"block_sparse_attention": partial(block_sparse_attention, q, k, v, blocks),
             "block_sparse_attention, recording": partial(block_sparse_attention, *leaves, blocks)}
    dout = torch.randn_like(q)
    exact = truth(q, k, v, blocks, dout)
    for name, call in calls.items():
        exact.forward_error(name, call().detach())
    backward = partial(torch.autograd.grad, block_sparse_attention(*leaves, blocks), leaves, dout, retain_graph=True)
    exact.backward_error("backward", backward())
    return calls | {"its backward": backward}


def layer_calls(shape: LayerShape, device: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The layer without padding, on projections as they come, checked."""
    plain = replace(shape.config, pad_type="none").for_canvas(shape.thw)
    linear = replace(plain, compensation="linear", sampling_type="error", threshold=0.0, adaptive_pool=None)
    q, k, v = (torch.randn(1, shape.tokens, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    text_mask = torch.arange(shape.text, device=device)[None] < shape.valid if shape.text else None
    layout, calls = TokenLayout.video_text(shape.thw, shape.text), {}
    for name, config in (("ssta_3d_attention", plain), ("ssta_3d_attention, linear", linear)):
        calls[name] = call = partial(
            ssta_3d_attention, q, k, v, shape.thw, config.topk, config.tile_thw, config.kernel_thw, shape.text, config.sparse_type,
            config.threshold, lambda_=config.lambda_, sampling_type=config.sampling_type, pad_type=config.pad_type, text_mask=text_mask,
            mask_share_within_head=config.mask_share_within_head, adaptive_pool=config.adaptive_pool, compensation=config.compensation)
        _, blocks = ssta_attention(q, k, v, layout, config, text_mask=text_mask, return_blocks=True)
        sampled_error(shape, q, k, v, call(), blocks, layout, config)
    return calls


def host_times(calls: dict[str, Callable[[], object]], number_of_calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median and quartiles over the rounds, in milliseconds; a first round is not counted."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    medians: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(1 + rounds):
            measure.before_round()
            for name in order.sample(list(calls), len(calls)):
                times = []
                for _ in range(number_of_calls):
                    finish()
                    start = time.perf_counter()
                    result = calls[name]()
                    times.append(1e3 * (time.perf_counter() - start))
                    del result
                medians[name].append(statistics.median(times))
    finally:
        gc.enable()
    return {name: quartiles(of[1:]) for name, of in medians.items()}


if __name__ == "__main__":
    main()
