"""What does a whole SSTA layer cost? Its stages tile, select, attend and untile, its sum, and its peak memory, beside dense SDPA.

    python benchmark/bench_layer.py [--pad none zero] [--rounds 7] [--csv NAME]

Preset HunyuanVideo 1.5 (top-k 32 on these canvases, importance, window 3 x 3 x 3, text mask), random inputs, bfloat16 on a GPU.
Before any time is printed, one query tile is checked against float64 over the same selection (column error), and the layer
must give the bits of its stages run one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from arguments import add_rounds, new_parser
from bench_kernels import dense
from measure import RESULTS, interleaved, peak_extra_bytes, print_rows, write_rows
from shapes import LAYERS, LAYERS_CPU, LayerShape
from truth import check, exact_first_block, first_block

from ssta import SSTAConfig, TokenLayout, ssta_attention, tile_layout
from ssta.kernels import block_sparse_attention
from ssta.selection import select_tiles


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    parser.add_argument("--pad", nargs="+", default=["none", "zero"], choices=["none", "zero", "repeat"], help="paddings to measure")
    add_rounds(parser, 7 if gpu else 3)
    options = parser.parse_args(argv)
    rows = []
    for shape in LAYERS if gpu else LAYERS_CPU:
        rows += measure_layer(shape, options.pad, options.rounds, "cuda" if gpu else "cpu")
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measure_layer(shape: LayerShape, paddings: list[str], rounds: int, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # [B, S, H, D] as projections give it, seen as [B, H, S, D].
    q, k, v = (torch.randn(1, shape.tokens, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    text_mask = torch.arange(shape.text, device=device)[None] < shape.valid
    layout = TokenLayout.video_text(shape.thw, shape.text)
    tensor_bytes = 4 * q.numel() * q.element_size()

    calls = {("dense", "total"): lambda: dense(q, k, v)}
    memory = {("dense", "total"): peak_extra_bytes(lambda: dense(q, k, v))}
    errors = {}
    for padding in paddings:
        config = replace(SSTAConfig.hunyuan_video_15(), pad_type=padding).for_canvas(shape.thw)
        of_padding, errors[padding, "attend"] = stages(q, k, v, layout, config, text_mask)
        calls |= {(padding, stage): call for stage, call in of_padding.items()}
        memory[padding, "total"] = peak_extra_bytes(of_padding["total"])
    rows = []
    for call, times in interleaved(calls, rounds).items():
        extra = memory.get(call, "")
        rows.append(dict(layer=shape.name, tokens=shape.tokens, heads=shape.heads, padding=call[0], stage=call[1], **times,
                         extra_mib=extra and extra / 2**20, extra_over_qkvo=extra and extra / tensor_bytes, error=errors.get(call, "")))
    return rows


def stages(q, k, v, layout, config, text_mask):
    """(callables for each stage and for the whole layer, attend's error); a stage starts from what the one before it made."""
    tiles = tile_layout(layout, config.tile_thw, config.pad_type, q.device)
    tiled = [tiles.tile(x) for x in (q, k, v)]
    blocks = select_tiles(*tiled[:2], tiles, config, text_mask)
    out = block_sparse_attention(*tiled, blocks)
    exact, _ = exact_first_block(*tiled, blocks)
    error = check(f"SSTA with padding {config.pad_type!r}", first_block(out, exact.shape[2]), exact)
    calls = dict(
        tile=lambda: [tiles.tile(x) for x in (q, k, v)],
        select=lambda: select_tiles(*tiled[:2], tiles, config, text_mask),
        attend=lambda: block_sparse_attention(*tiled, blocks),
        untile=lambda: tiles.untile(out),
        total=lambda: ssta_attention(q, k, v, layout, config, text_mask=text_mask))
    if not torch.equal(calls["total"](), tiles.untile(out)):
        raise SystemExit(f"the layer with padding {config.pad_type!r} differs from its stages run one after the other; no time is printed")
    return calls, error


if __name__ == "__main__":
    main()
