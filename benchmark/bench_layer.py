"""What does a whole SSTA layer cost? Its stages, its sum, and its peak memory, beside exact dense attention by two kernels.

    python benchmark/bench_layer.py [--layer TEXT ...] [--only default parts published] [--pad none zero] [--compensation none linear]
                                    [--parts 1] [--tile 6x8x8] [--density D] [--same-selection] [--whole] [--rounds 7] [--against DIR]
                                    [--csv NAME]

The layers of shapes.py, random inputs as projections give them, bfloat16 on a GPU. The stages are timed inside calls of the layer, which
therefore add up to it but for the gaps between them; the whole layer is timed in calls of its own, and alone with --whole and --against.
Column padding says what runs: "dense", torch's SDPA; "exact", SSTA's kernel over the same pairs; "default", a sparse layer of
apply_ssta(pipe), with two estimates for each tile of 4 x 4 x 8; "one part", the same with one; or a padding of the layer's published
configuration, which --pad and all options behind it change. --only leaves the others out.
Before any time is taken, sampled tiles of the layer's output are checked against float64 over the same selection (column error). With a
compensation, tiles are selected by its error unless --same-selection leaves that to the layer's configuration (other tiles
may be other numbers of token pairs).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from arguments import add_names, add_rounds, named, new_parser
from measure import NO_TIMES, RESULTS, forward_flops, interleaved, measure_each, peak_extra_mib, print_machine, write_rows
from rows import PADDINGS
from shapes import DEFAULTS, LAYERS, LAYERS_CPU, LayerShape
from sides import add_against, compare
from table import totals_table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from truth import Wrong, check, estimated_query_block, exact_query_block

from ssta import SSTAConfig, TokenLayout, dense_attention, ssta_attention, tile_layout
from ssta.kernels import BlockLists

KEYS = ("layer", "padding", "compensation", "stage")
ONLY = (*DEFAULTS, "published")
# Of column padding: exact attention over all pairs.
DENSE = ("dense", "exact")
# Consecutive queries of a head that are checked in dense attention.
CHECKED_ROWS = 64


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    layers = LAYERS if gpu else LAYERS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "layer", layers)
    parser.add_argument("--only", nargs="+", default=ONLY, choices=ONLY, help="what to measure beside dense attention")
    parser.add_argument("--pad", nargs="+", default=["none", "zero"], choices=["none", "zero", "repeat"], help="paddings to measure")
    parser.add_argument("--compensation", nargs="+", default=["none", "linear"], choices=["none", "linear"])
    parser.add_argument("--parts", type=int, default=1, choices=[1, 2], help="estimates for each tile, with a compensation")
    parser.add_argument("--tile", default=None, metavar="TxHxW", help="tiles other than the layer's, with --density")
    parser.add_argument("--density", type=float, default=None, help="share of the tile pairs to compute, in place of the layer's top-k")
    parser.add_argument("--same-selection", action="store_true", help="with a compensation too, select as the layer's configuration says")
    parser.add_argument("--whole", action="store_true", help="leave the stages out")
    add_rounds(parser, 7 if gpu else 3)
    add_against(parser)
    options = parser.parse_args(argv)
    chosen = named(parser, "layer", options.layer, layers)
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    if options.against:
        rows = compare(__file__, argv, ("--whole",), options.against, KEYS, ("median_ms", "host_ms", "extra_mib"))
        if path:
            write_rows(path, rows)
        return
    print_machine()
    device = "cuda" if gpu else "cpu"
    if options.tile and options.density is None:
        parser.error(f"--tile must come with --density, for the layers' top-k are for their own tiles, got {options.tile} alone")
    measure_each(chosen, lambda shape: measure_layer(shape, configurations(shape, options), options.rounds, device, options.whole), path,
                 totals_table)


def configurations(shape: LayerShape, options: argparse.Namespace) -> dict[tuple[str, str], SSTAConfig]:
    """The layer's configuration by (padding, compensation)."""
    found = {(name, "linear"): shape.attention_config(name) for name in DEFAULTS if name in options.only}
    kinds = [(padding, kind) for padding in options.pad for kind in options.compensation] if "published" in options.only else []
    changes: dict = {}
    if options.density is not None:
        changes = dict(topk=None, density=options.density, variants=())
    if options.tile:
        changes |= dict(tile_thw=tuple(int(size) for size in options.tile.split("x")))
    for padding, kind in kinds:
        config = replace(shape.config, pad_type=padding, **changes).for_canvas(shape.thw)
        if kind != "none":
            selection = config.scored_by if options.same_selection else None
            # An estimate has no window unless the rule has one.
            window = config.kernel_thw if config.sparse_type == "ssta" else None
            config = replace(config, compensation=kind, compensation_parts=options.parts, sampling_type=selection, kernel_thw=window)
        found[padding, kind] = config
    return found


def measure_layer(shape: LayerShape, configs: dict[tuple[str, str], SSTAConfig], rounds: int, device: str, whole: bool) -> list[dict]:
    q, k, v, layout, text_mask = layer_inputs(shape, device)
    tensors_mib = 4 * q.numel() * q.element_size() / 2**20

    calls = {("dense", "", "total"): lambda: dense(q, k, v),
             ("exact", "", "total"): lambda: dense_attention(q, k, v, layout).out}
    facts = {key: dict(density=1.0, error=dense_error(key[0], q, k, v, call())) for key, call in calls.items()}
    watches = {}
    for key, config in configs.items():
        def layer(config=config, **options):
            return ssta_attention(q, k, v, layout, config, text_mask=text_mask, **options)

        _, blocks = layer(return_blocks=True)
        facts[(*key, "total")] = dict(error=sampled_error(shape, q, k, v, layer(), blocks, layout, config),
                                    density=computed_share(blocks, layout, config, device, shape.tokens))
        calls[(*key, "total")] = layer
        if not whole:
            from stages import Stopwatch  # which must know the inside of the layer: beside another checkout there may be another inside

            calls[(*key, "stages")] = watches[key] = Stopwatch(layer)
    memory = {}
    for key, call in calls.items():
        if key[-1] == "total":
            call()
            memory[key] = peak_extra_mib(call)
    rows = []
    pairs = shape.heads * shape.tokens**2
    for (padding, kind, what), times in interleaved(calls, rounds).items():
        if what == "stages":
            parts = watches[padding, kind].summary(rounds)
        else:
            parts = {"total": times}
        for stage, measured in parts.items():
            key = padding, kind, stage
            extra, fact = memory.get(key, ""), facts.get(key, dict(density="", error=""))
            # The rate of the kernel alone: of stage attend, and of dense attention.
            flops = forward_flops(facts[padding, kind, "total"]["density"] * pairs, shape.head_dim)
            tflops = 1e-9 * flops / measured["median_ms"] if padding in DENSE or stage == "attend" else ""
            rows.append(dict(
                layer=shape.name, tokens=shape.tokens, heads=shape.heads, head_dim=shape.head_dim, padding=padding, compensation=kind,
                stage=stage, **{column: measured[column] for column in NO_TIMES}, tflops=tflops, density=fact["density"], extra_mib=extra,
                extra_over_qkvo=extra and extra / tensors_mib, error=fact["error"], note=measured["note"]))
    order = [*((name, "") for name in DENSE), *configs]
    return sorted(rows, key=lambda row: (order.index((row["padding"], row["compensation"])), row["stage"] == "total"))


def layer_inputs(shape: LayerShape, device: str) -> tuple[Tensor, Tensor, Tensor, TokenLayout, Tensor | None]:
    """q, k, v ``[1, H, S, D]``, the layout and the text's mask, if there is text."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # [B, S, H, D] as projections give it, seen as [B, H, S, D].
    q, k, v = (torch.randn(1, shape.tokens, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    text_mask = torch.arange(shape.text, device=device)[None] < shape.valid if shape.text else None
    return q, k, v, TokenLayout.video_text(shape.thw, shape.text), text_mask


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention over everything: the fastest of SDPA that takes such inputs."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return scaled_dot_product_attention(q, k, v)


def sampled_error(shape: LayerShape, q: Tensor, k: Tensor, v: Tensor, out: Tensor, blocks: BlockLists, layout: TokenLayout,
                  config: SSTAConfig) -> float:
    """The largest error at the real tokens of the first, a middle and the last video tile. Ends the program where it is no rounding."""
    tiles = tile_layout(layout, config.tile_thw, config.pad_type, q.device)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    tiled = [tiles.tile(x) for x in (q, k, v)]
    last = tiles.num_video_tiles - 1
    errors = []
    for head, row in ((0, 0), (shape.heads // 2, last // 2), (shape.heads - 1, last)):
        spot = exact_query_block(*tiled, blocks, 0, head, row)
        estimated = config.compensation == "linear"
        wanted = estimated_query_block(*tiled, blocks, head, row, last + 1, config.compensation_parts) if estimated else spot.values[0]
        tokens = tiles.source[spot.rows]
        real = tokens >= 0
        try:
            # The estimate's means and matrices are rounded too.
            errors.append(check(f"SSTA with padding {config.pad_type!r} and compensation {config.compensation!r}",
                                out[0, head, tokens[real]], wanted[real], 8 if estimated else 4))
        except Wrong as error:
            raise SystemExit(f"{error}; no time is printed") from None
    return max(errors)


def dense_error(name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """The largest error at the first, some middle and the last tokens. Ends the program where it is no rounding."""
    heads, tokens, errors = q.shape[1], q.shape[2], []
    for head, first in ((0, 0), (heads // 2, tokens // 2), (heads - 1, max(0, tokens - CHECKED_ROWS))):
        rows, group = slice(first, first + CHECKED_ROWS), head * k.shape[1] // heads
        scores = q[0, head, rows].double() @ k[0, group].double().mT * q.shape[-1] ** -0.5
        try:
            errors.append(check(f"dense attention, {PADDINGS[name]},", out[0, head, rows], scores.softmax(-1) @ v[0, group].double()))
        except Wrong as error:
            raise SystemExit(f"{error}; no time is printed") from None
    return max(errors)


def computed_share(blocks: BlockLists, layout: TokenLayout, config: SSTAConfig, device: str, tokens: int) -> float:
    """(query, key) pairs that are computed over tokens * tokens, padding included in the first."""
    tiles = tile_layout(layout, config.tile_thw, config.pad_type, torch.device(device))
    q_sizes, kv_sizes = blocks.q_bounds(tiles.num_slots)[1].double(), blocks.kv_bounds(tiles.num_slots)[1].double()
    computed = blocks.to_mask().double() * q_sizes[..., :, None] * kv_sizes[..., None, :]
    return float(computed.sum((-1, -2)).mean()) / tokens**2


if __name__ == "__main__":
    main()
