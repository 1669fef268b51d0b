"""How fast are checkpoints that others trained sparse? A layer of VSA and one of SLA, beside their exact part alone and dense attention.

    python benchmark/bench_vsa.py [--layer TEXT ...] [--impl auto ...] [--others] [--rounds 7] [--csv NAME]

Layers of Wan 2.1 and MiniMax-H3 with the settings of published checkpoints, random inputs as projections give them, bfloat16 on a GPU,
forward and backward. "exact part" is attention to the kept blocks alone, what FlashInfer and FastVideo publish rates of (FlashInfer: 317
TFLOP/s on sm_90, forward); "layer" is everything from q, k, v and the gate to the output: tiles, selection, both branches. The rates of
both count the exactly computed (query, key) pairs, two products forward and five backward. Before a time is taken, sampled query blocks are
checked against float64. --others also times what others run for the exact part, forward, on the same lists and on blocks that were padded
before: FlexAttention under torch.compile (SGLang, xDiT), and for tiles of 64 fastvideo_kernel.block_sparse_attn_from_indices,
where it is installed (FastVideo; by Triton where the wheel's extension is left out, which has left GPUs unusable, see peers.py). Both must
agree with ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from arguments import add_names, add_rounds, named, new_parser
from bench_layer import dense
from measure import NO_TIMES, RESULTS, backward_flops, forward_flops, interleaved, measure_each, peak_extra_mib, print_machine
from table import trained_table
from torch import Tensor
from truth import Wrong, check, exact_query_block

from ssta import DenseRun, TileLayout, TokenLayout, VideoGrid, tile_layout
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.routing import IMPLEMENTATIONS
from ssta.result import LayerResult
from ssta.trained.sla import sla_layer
from ssta.trained.vsa import TILE, vsa_config, vsa_layer


@dataclass(frozen=True)
class Layer:
    """One attention of a model, and how much of it is left out by ``method``: VSA's sparsity, or 1 less SLA's density."""

    name: str
    method: str
    thw: tuple[int, int, int]
    heads: int
    head_dim: int
    sparsity: float
    before: tuple[int, ...] = ()

    @property
    def layout(self) -> TokenLayout:
        return TokenLayout((*map(DenseRun, self.before), VideoGrid(*self.thw)))

    @property
    def tokens(self) -> int:
        return self.layout.length


# Wan: 81 frames; VSA: FastWan2.1-T2V-1.3B and Wan2.1-VSA-T2V-14B-720P; SLA: TurboWan2.1. MiniMax-H3: 124 and 362 frames of 768 x 1344 after
# text and audio; FastH3 and Turbo-SLA.
LAYERS = (Layer("VSA, Wan 2.1 1.3B, 480p", "vsa", (21, 30, 52), 12, 128, 0.8),
          Layer("VSA, Wan 2.1 14B, 720p", "vsa", (21, 45, 80), 40, 128, 0.9),
          Layer("SLA, Wan 2.1 1.3B, 480p", "sla", (21, 30, 52), 12, 128, 0.9),
          Layer("SLA, Wan 2.1 14B, 720p", "sla", (21, 45, 80), 40, 128, 0.9),
          Layer("VSA, MiniMax-H3, 768p, 5 s", "vsa", (37, 24, 42), 56, 128, 0.9, (300, 414)),
          Layer("VSA, MiniMax-H3, 768p, 15 s", "vsa", (107, 24, 42), 56, 128, 0.9, (300, 1206)),
          Layer("SLA, MiniMax-H3, 768p, 15 s", "sla", (107, 24, 42), 56, 128, 0.85, (300, 1206)))
LAYERS_CPU = (Layer("VSA, small", "vsa", (5, 9, 10), 2, 64, 0.6, (70, 9)), Layer("SLA, small", "sla", (5, 9, 10), 2, 64, 0.6))


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    layers = LAYERS if gpu else LAYERS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "layer", layers)
    parser.add_argument("--impl", nargs="+", default=["auto"], choices=IMPLEMENTATIONS, help="which kernels run the exact part")
    parser.add_argument("--others", action="store_true", help="time other libraries' kernels on the exact part too")
    add_rounds(parser, 7 if gpu else 3)
    options = parser.parse_args(argv)
    chosen = named(parser, "layer", options.layer, layers)
    print_machine()
    measure_each(chosen, partial(measure, options=options, device="cuda" if gpu else "cpu"),
                 RESULTS / f"{options.csv}.csv" if options.csv else None, trained_table)


def measure(layer: Layer, options: argparse.Namespace, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = 1, layer.tokens, layer.heads, layer.head_dim
    q, k, v, gate, dout = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(5))
    weight, bias = torch.randn(layer.head_dim, layer.head_dim, device=device, dtype=dtype) / 16, torch.randn(layer.head_dim, device=device)
    # Turbo-SLA has no projection.
    projection = () if layer.before else (weight, bias.to(dtype))
    leaves = (q, k, v, gate) if layer.method == "vsa" else (q, k, v, *projection)
    attend = {"vsa": partial(vsa, layer), "sla": partial(sla, layer)}[layer.method]
    calls: dict[tuple[str, str, str], Callable] = {("dense", "SDPA", "forward"): lambda: dense(q, k, v)}
    errors, pairs = {}, layer.heads * layer.tokens**2
    result = attend(*leaves)
    blocks = result.selection.blocks
    order = tile_layout(layer.layout, TILE, "none", device) if layer.method == "vsa" else None
    exact = [x if order is None else order.tile(x) for x in (q, k, v, dout)]
    computed = layer.heads * computed_pairs(blocks, layer.tokens)
    for impl in options.impl:
        errors["layer", impl, "forward"] = sampled_error(layer, attend(*leaves, impl=impl), leaves, exact, order)
        both = ("exact part", exact[:3], exact[3], partial(block_sparse_attention, blocks=blocks, impl=impl)), (
            "layer", leaves, dout, lambda *x, impl=impl: attend(*x, impl=impl).out)
        for what, inputs, gradient, function in both:
            calls[what, impl, "forward"] = partial(function, *inputs)
            calls[what, impl, "backward"] = backward_of(function, inputs, gradient)
    if options.others:
        ours = block_sparse_attention(*exact[:3], blocks, impl=options.impl[0])
        for name, call in others(blocks, *exact[:3]).items():
            calls["exact part", name, "forward"] = agreeing(layer, name, call, ours)
    memory = {}
    for key, call in calls.items():
        if key[0] == "layer" and key[1] in options.impl:
            call()
            memory[key] = peak_extra_mib(call)
    rows = []
    for (what, impl, direction), times in interleaved(calls, options.rounds).items():
        flops = (forward_flops if direction == "forward" else backward_flops)(pairs if what == "dense" else computed, layer.head_dim)
        rows.append(dict(
            layer=layer.name, tokens=layer.tokens, heads=layer.heads, head_dim=layer.head_dim, what=what, impl=impl, direction=direction,
            **{column: times[column] for column in NO_TIMES}, tflops=1e-9 * flops / times["median_ms"] if times["median_ms"] else "",
            density=1.0 if what == "dense" else computed / pairs, extra_mib=memory.get((what, impl, direction), ""),
            error=errors.get((what, impl, direction), ""), note=times["note"]))
    return rows


def vsa(layer: Layer, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, impl: str = "auto") -> LayerResult:
    return vsa_layer(q, k, v, gate, layer.layout, vsa_config(layer.sparsity), impl=impl)


def sla(layer: Layer, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, impl: str = "auto"
        ) -> LayerResult:
    return sla_layer(q, k, v, weight, bias, density=1 - layer.sparsity, impl=impl)


def computed_pairs(blocks: BlockLists, tokens: int) -> float:
    """(query, key) pairs of one head."""
    q_sizes, kv_sizes = blocks.q_bounds(tokens)[1].double(), blocks.kv_bounds(tokens)[1].double()
    return float((blocks.to_mask().double() * q_sizes[..., :, None] * kv_sizes[..., None, :]).sum((-1, -2)).mean())


def backward_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...] | list[Tensor], dout: Tensor) -> Callable[[], object]:
    """The backward alone, over a forward that runs when it is first asked for."""
    graph: list = []

    def backward() -> tuple[Tensor, ...]:
        if not graph:
            leaves = [x.detach().requires_grad_() for x in inputs]
            graph.extend((function(*leaves), leaves))
        return torch.autograd.grad(graph[0], graph[1], dout, retain_graph=True)

    return backward


def sampled_error(layer: Layer, result: LayerResult, leaves: tuple[Tensor, ...], exact: list[Tensor], order: TileLayout | None) -> float:
    """The largest error over the largest value at the first, a middle and the last query block; ends the program where that is too much."""
    blocks, errors = result.selection.blocks, []
    last = blocks.num_q_blocks - 1
    for head, row in ((0, 0), (layer.heads // 2, last // 2), (layer.heads - 1, last)):
        spot = exact_query_block(*exact[:3], blocks, 0, head, row)
        tokens = spot.rows if order is None else order.source[spot.rows]
        branch = linear(leaves, head, tokens) if order is None else pooled(leaves, head, tokens, row, order)
        try:
            # Means, gates and features are rounded too.
            errors.append(check(f"{layer.name}, head {head}, block {row},", result.out[0, head, tokens], spot.values[0] + branch, 12))
        except Wrong as error:
            raise SystemExit(f"{error}; no time is printed") from None
    return max(errors)


def pooled(leaves: tuple[Tensor, ...], head: int, tokens: Tensor, row: int, order: TileLayout) -> Tensor:
    """VSA's pooled branch of one query tile."""
    bounds = order.offsets.tolist()
    tiles = [order.source[start:end] for start, end in zip(bounds, bounds[1:])]
    means = [torch.stack([x[0, head, tile].double().mean(0) for tile in tiles]) for x in leaves[:3]]
    shared = (means[0][row] @ means[1].mT * means[0].shape[-1] ** -0.5).softmax(-1) @ means[2]
    return leaves[3][0, head, tokens].double() * shared


def linear(leaves: tuple[Tensor, ...], head: int, tokens: Tensor) -> Tensor:
    """SLA's linear branch of one query block."""
    if len(leaves) == 3:
        return leaves[0].new_zeros(())
    q, k, v = (x[0, head].double() for x in leaves[:3])
    weight, bias = (x.double() for x in leaves[3:])
    q, k = q[tokens].softmax(-1), k.softmax(-1)
    return q @ (k.mT @ v) / (1e-5 + q @ k.sum(0)[:, None]) @ weight.mT + bias


def others(blocks: BlockLists, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """By library a call that gives the exact part, padded, and the slots in it of ours; q, k and v in the order of the blocks. What a
    library wants beside them is made before anything is timed."""
    tokens, (q_starts, q_sizes), (kv_starts, kv_sizes) = q.shape[2], blocks.q_bounds(q.shape[2]), blocks.kv_bounds(k.shape[2])
    q_slots, kv_slots = padded_slots(q_starts, q_sizes), padded_slots(kv_starts, kv_sizes)
    (q_size, rows), (kv_size, columns) = ((slots.shape[1], slots.flatten()) for slots in (q_slots, kv_slots))
    query, key, value = (torch.where((slots >= 0)[:, None], x[:, :, slots.clamp(min=0)], 0)
                         for x, slots in ((q, rows), (k, columns), (v, columns)))
    place = torch.empty(tokens, dtype=torch.int64, device=q.device)
    place[rows[rows >= 0]] = torch.nonzero(rows >= 0)[:, 0]
    chosen = blocks.to_mask()
    ids, counts = chosen.int().argsort(dim=-1, descending=True, stable=True).int(), chosen.sum(-1, dtype=torch.int32)
    del chosen
    real = columns >= 0
    flex = import_module("torch.nn.attention.flex_attention")
    mask = flex.BlockMask.from_kv_blocks(counts, ids, BLOCK_SIZE=(q_size, kv_size), seq_lengths=(len(rows), len(columns)),
                                         mask_mod=lambda b, h, q_index, kv_index: real[kv_index])
    attend = torch.compile(flex.flex_attention, dynamic=False)
    tiles = {"BLOCK_M": q_size, "BLOCK_N": kv_size}
    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "FlexAttention": lambda: (attend(query, key, value, block_mask=mask, kernel_options=tiles), place)}
    if (q_size, kv_size) == (64, 64) and find_spec("fastvideo_kernel"):
        kernel, lengths = import_module("fastvideo_kernel.block_sparse_attn").block_sparse_attn_from_indices, kv_sizes.flatten().int()
        calls["fastvideo-kernel"] = lambda: (kernel(query, key, value, ids, counts, lengths)[0], place)
    return calls


def padded_slots(starts: Tensor, sizes: Tensor) -> Tensor:
    """int64 ``[blocks, size of the longest]``: the token of each slot of blocks that are padded to one size, -1 behind the last."""
    starts, sizes = starts.flatten().long(), sizes.flatten().long()
    within = torch.arange(int(sizes.max()), device=sizes.device)
    return torch.where(within < sizes[:, None], starts[:, None] + within, -1)


def agreeing(layer: Layer, name: str, call: Callable[[], tuple[Tensor, Tensor]], ours: Tensor) -> Callable[[], object]:
    """``call``, whose result was found to be ours to rounding; one that fails or does not agree is a call that says so."""
    try:
        out, place = call()
        check(f"{layer.name}, {name},", out[0].transpose(0, 1)[place], ours[0].transpose(0, 1).double(), 12)
    except Exception as error:
        return partial(raise_again, error)
    return call


def raise_again(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()
