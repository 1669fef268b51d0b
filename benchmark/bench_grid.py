"""What does a layer of a large model cost in each configuration whose samples bench_quality.py holds against dense ones?

    python benchmark/bench_grid.py [--only TEXT ...] [--rounds 5] [--csv grid_h200]

Attention over the small model's 11,520 tokens is a small part of a sample, so its seconds say little. Here the configurations of
quality_grid.py that have a density run as a layer of HunyuanVideo 1.5 at 720p (113,585 tokens, 16 heads), all interleaved with exact dense
attention, after the checks of bench_layer.py. Inputs are random; time depends on them by how many tokens the chosen tiles have. Those that
differ in their schedule alone are one call and a row each. table.py joins the rows with those of quality_*.csv by name.

    density     share of the video's tile pairs that the layer computes where it is sparse, as asked for
    relative    median time over that of dense attention in the same run
    overall     the same over 30 steps of the model's 54 layers, of which some are dense as the configuration's schedule says
    error       as in bench_layer.py
"""

from __future__ import annotations

import math

import torch
from arguments import add_rounds, named, new_parser
from bench_layer import dense, layer_inputs, sampled_error
from measure import RESULTS, interleaved, peak_extra_mib, print_machine, print_rows, write_rows
from quality_grid import FULL_TILES, TOY_TILES, Entry, grid, overall
from shapes import LAYERS, LAYERS_CPU, LayerShape

from ssta import SSTAConfig, ssta_attention

STEPS = 30


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only configurations whose name contains one of these")
    add_rounds(parser, 5 if gpu else 1)
    options = parser.parse_args(argv)
    entries = named(parser, "only", options.only, measurable(grid(FULL_TILES if gpu else TOY_TILES, gpu)))
    print_machine()
    rows = measure(entries, (LAYERS if gpu else LAYERS_CPU)[0], options.rounds, "cuda" if gpu else "cpu")
    print_rows(rows)
    if options.csv:
        write_rows(RESULTS / f"{options.csv}.csv", rows)


def measurable(entries: list[Entry]) -> list[Entry]:
    """Those with one density for all sparse steps, and something left to leave out."""
    return [entry for entry in entries if entry.config is not None and entry.config.density not in (None, 1.0)]


def measure(entries: list[Entry], shape: LayerShape, rounds: int, device: str) -> list[dict]:
    q, k, v, layout, text_mask = layer_inputs(shape, device)
    of_steps = {entry.name: [config and config.for_canvas(shape.thw) for config in entry.configs(STEPS)] for entry in entries}
    configs = {name: next(filter(None, of)) for name, of in of_steps.items()}
    calls, facts = {None: lambda: dense(q, k, v)}, {None: dict(extra_mib="", error="")}
    for config in dict.fromkeys(config for of in of_steps.values() for config in of if config is not None):
        def layer(config: SSTAConfig = config, **options):
            return ssta_attention(q, k, v, layout, config, text_mask=text_mask, **options)

        out, blocks = layer(return_blocks=True)
        error = sampled_error(shape, q, k, v, out, blocks, layout, config)
        del out, blocks
        calls[config], facts[config] = layer, dict(extra_mib=peak_extra_mib(layer), error=error)
        print(f"checked {next(name for name, of in of_steps.items() if config in of)}", flush=True)
    times = interleaved(calls, rounds)
    whole = times[None]["median_ms"]
    relative = {config: found["median_ms"] / whole if found["median_ms"] else math.nan for config, found in times.items()}
    rows = []
    for entry in (None, *entries):
        config = entry and configs[entry.name]
        found = times[config]
        how = dict(tile="", density=1.0, compensation="") if config is None else dict(
            tile="x".join(map(str, config.tile_thw)), density=config.density,
            compensation=config.compensation + (" 2 parts" if config.compensation_parts == 2 else ""))
        over = 1.0 if entry is None else overall(entry, [relative[of] for of in of_steps[entry.name]])
        rows.append(dict(layer=shape.name, name=entry.name if entry else "dense", **how, **found, **facts[config],
                         relative=relative[config], overall=over))
    return rows


if __name__ == "__main__":
    main()
