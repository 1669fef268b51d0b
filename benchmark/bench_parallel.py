"""What do several GPUs gain? Exchange, layers by stage, steps of models, memory and errors, on 1, 2, 4, ... ranks of one host.

    torchrun --nproc-per-node=4 benchmark/bench_parallel.py [--ranks 1 2 4] [--what all-to-all layer step] [--layer TEXT ...]
                                                            [--model TEXT ...] [--only default "one part" none dense]
                                                            [--rounds 5] [--limit MINUTES] [--profile NAME] [--csv NAME]

On GPUs through NCCL; without one through gloo, on toy shapes. Rounds go through all numbers of ranks, which the first ranks make up while
the others wait; a time is that of the slowest rank, and all of them begin together. bfloat16. Column attention says what runs: "default",
what apply_ssta(pipe) does (two estimates for each tile); "one part", the same with one; "none", the published configuration in partial
tiles; of steps also dense attention. --only leaves out the others. Rows (column what):

    all-to-all    buffers of some sizes (mib); gb_s are the bytes that a rank sends to others
    layer         a layer of shapes.py: what the rank that attended longest spent in each stage, and the whole. imbalance is its attention
                  over the ranks' mean, difference that of the result from one rank's over the largest value, error that of sampled tiles
                  against float64, extra_mib the largest rank's peak of memory besides the inputs
    step          a model of models.py, its first blocks measured and the rest reckoned as in bench_pipeline.py; sparse are all layers;
                  dense are diffusers' own
                  processors and Ulysses around torch's SDPA (stock) where they are right, elsewhere SSTA's processors around SDPA over
                  every token (unmasked); difference as of a layer, relative to the output's length
    profile       with --profile: how long the devices are idle within three layers, and how often a host waits for them

basis "reckoned" is a layer measured on one GPU with the heads that one of so many ranks has, with the copies that packing takes and the
bytes of the exchange at the rate of the largest all-to-all above (or --bandwidth); and a step whose layers are these, the rest of it
divided by the ranks but for the text's share, v and k on their way under projections. --profile NAME also writes what every rank's host and
device did to results/timeline_NAME.csv, and draws it where matplotlib is installed. After --limit no new section begins; rows are printed
and written as they come.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from arguments import add_names, add_rounds, named, new_parser, number
from measure import RESULTS, failure, interleaved, print_machine, print_rows, write_rows
from rank_tables import scaling_table
from shapes import DEFAULTS, SHARED, SHARED_CPU, LayerShape
from shared_layer import measure_layer, reckon_layer, row
from table import draw
from world import OnRanks, World

ONLY = (*DEFAULTS, "none", "dense")
# Bytes of an all-to-all's buffer, own part included: what layers exchange.
BUFFERS, BUFFERS_CPU = (50e6, 115e6, 230e6), (2.5e5,)
# So many minutes after the limit the program is ended with every thread's whereabouts.
GRACE = 3
# What its rows are of, and what makes them.
Section = tuple[dict, Callable[[], list[dict]]]


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    options = arguments(argv, gpu)
    faulthandler.dump_traceback_later(60 * (options.limit + GRACE), exit=True)
    world = World.start()
    try:
        sizes = numbers_of_ranks(options.ranks, world.size)
        if world.rank == 0:
            print_machine()
            print(f"{world.size} ranks, measured on {', '.join(map(str, sizes))}", flush=True)
        for ranks in sizes[1:]:
            world.mesh(ranks)
        run(world, options, sizes)
        world.end()
    finally:
        faulthandler.cancel_dump_traceback_later()


def arguments(argv: list[str] | None, gpu: bool) -> argparse.Namespace:
    parser = new_parser(__doc__)
    layers, models = SHARED if gpu else SHARED_CPU, models_here(gpu)
    parser.add_argument("--ranks", nargs="+", type=number, help="numbers of ranks; they must divide the number of processes (default: its "
                        "powers of two)")
    add_names(parser, "layer", layers)
    add_names(parser, "model", models)
    parser.add_argument("--what", nargs="+", default=["all-to-all", "layer", "step"], choices=["all-to-all", "layer", "step"])
    parser.add_argument("--only", nargs="+", default=ONLY, choices=ONLY, help="which attention to measure")
    parser.add_argument("--reckon", nargs="*", type=number, default=[2, 4, 8], help="for how many ranks to reckon (default 2 4 8)")
    parser.add_argument("--bandwidth", type=float, help="GB/s that a rank sends, for reckoning, in place of what is measured")
    parser.add_argument("--limit", type=float, default=5.0, metavar="MINUTES", help="begin nothing after so long (default 5)")
    parser.add_argument("--profile", metavar="NAME", help="also record what hosts and devices do in a layer")
    add_rounds(parser, 5 if gpu else 2)
    options = parser.parse_args(argv)
    options.layers = named(parser, "layer", options.layer, layers)
    options.models = named(parser, "model", options.model, models) if models else []
    return options


def models_here(gpu: bool) -> list[Any]:
    """The models whose steps are measured: those that have a layer in ``SHARED``. None without diffusers, which nothing else here needs."""
    try:
        from models import MODELS, MODELS_CPU
    except ImportError:
        return []
    canvases = {layer.thw for layer in (SHARED if gpu else SHARED_CPU)}
    return [shape for shape in (MODELS if gpu else MODELS_CPU) if shape.thw in canvases and not shape.model.startswith("LTX")]


def numbers_of_ranks(asked: list[int] | None, world: int) -> list[int]:
    """In ascending order, 1 among them. Ends the program where one cannot be had."""
    sizes = sorted({1, *(asked or [2**i for i in range(world.bit_length())])})
    for ranks in sizes:
        if world % ranks and asked:
            raise SystemExit(f"--ranks must be numbers that divide the {world} processes, got {ranks}")
    return [ranks for ranks in sizes if world % ranks == 0]


def run(world: World, options: argparse.Namespace, sizes: list[int]) -> None:
    rows: list[dict] = []
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    for about, work in sections(world, options, sizes, rows):
        begun = world.section(world.seconds)
        title = " ".join(filter(None, map(about.get, ("what", "shape", "attention", "basis"))))
        if begun > 60 * options.limit:
            found = [row(**about, note=f"left out: the limit of {options.limit:g} minutes")]
        else:
            if world.rank == 0:
                print(f"{begun:.1f} s: {title}", flush=True)
            try:
                found = world.section(work)
            except Exception as error:
                found = [row(**about, note=failure(error))]
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        rows += found
        if world.rank == 0 and found:
            print_rows(found)
            if path:
                write_rows(path, rows, quiet=True)
    if world.rank == 0:
        head, *lines = scaling_table(rows)
        if lines:
            print_rows([dict(zip(head, line)) for line in lines])
        print(f"{'wrote ' + str(path) + ' after ' if path else ''}{world.own_seconds():.0f} s", flush=True)


def sections(world: World, options: argparse.Namespace, sizes: list[int], rows: list[dict]) -> Iterator[Section]:
    """The most important ones first; ``rows`` are those that were found so far."""
    rounds, shared = options.rounds, [ranks for ranks in sizes if ranks > 1]
    reckoned = sorted({1, *options.reckon})

    def rate(ranks: int) -> float | None:
        return options.bandwidth or best_rate(rows, ranks)

    if "all-to-all" in options.what and shared:
        yield dict(what="all-to-all"), partial(measure_exchange, world, shared, rounds)
    models = list(options.models)
    for layer in options.layers:
        model = next((shape for shape in models if shape.thw == layer.thw), None)
        sparse = [name for name in ONLY if name in options.only and name != "dense"] if "layer" in options.what else []
        for name in sparse:
            yield dict(what="layer", shape=layer.name, attention=name), partial(measure_layer, world, layer, name, sizes, rounds)
        if "step" in options.what and model:
            models.remove(model)
            yield dict(what="step", shape=model.name), partial(measure_model, world, model, options.only, sizes, rounds)
        evenly = not layer.kv_heads and any(layer.heads % ranks == 0 for ranks in options.reckon)
        for name in sparse if evenly else ():
            about = dict(what="layer", shape=layer.name, attention=name, basis="reckoned")
            yield about, partial(reckon, world, layer, name, model, reckoned, rounds, rate, rows)
    for model in models if "step" in options.what else ():
        yield dict(what="step", shape=model.name), partial(measure_model, world, model, options.only, sizes, rounds)
    if options.profile:
        yield dict(what="profile", shape=options.layers[0].name), partial(profile, world, options.layers[0], sizes[-1], options.profile)


def measure_exchange(world: World, sizes: list[int], rounds: int) -> list[dict]:
    """Rows of the all-to-all on each number of ranks, with each buffer."""
    gpu = world.device.type == "cuda"
    calls, sent = {}, {}
    for ranks in sizes:
        for size in BUFFERS if gpu else BUFFERS_CPU:
            elements = int(size) // 2 // ranks * ranks
            x = torch.zeros(elements, dtype=torch.bfloat16, device=world.device)
            call = partial(dist.all_to_all_single, torch.empty_like(x), x, group=world.group(ranks))
            calls[ranks, size], sent[ranks, size] = OnRanks(ranks, call), 2 * elements
    rows = []
    for (ranks, size), times in interleaved(calls, rounds, timed=world.milliseconds).items():
        rate = 1e-6 * sent[ranks, size] * (ranks - 1) / ranks / times["median_ms"] if times["median_ms"] else ""
        rows.append(row(what="all-to-all", ranks=ranks, stage="total", **times, mib=sent[ranks, size] / 2**20,
                        gb_s=rate))
    return rows


def best_rate(rows: list[dict], ranks: int) -> float | None:
    """GB/s of the largest buffer, between so many ranks or, where these were not measured, between most."""
    measured = [of for of in rows if of["what"] == "all-to-all" and of["gb_s"]]
    if not measured:
        return None
    there = {of["ranks"] for of in measured}
    nearest = ranks if ranks in there else max(there)
    return max((of["mib"], of["gb_s"]) for of in measured if of["ranks"] == nearest)[1]


def measure_model(*arguments: Any) -> list[dict]:
    from shared_step import measure_step

    return measure_step(*arguments)


def reckon(world: World, layer: LayerShape, attention: str, model: Any, sizes: list[int], rounds: int, rate: Callable[[int], float | None],
           rows: list[dict]) -> list[dict]:
    """Rows of the layer, and of the step of ``model`` whose layers are such."""
    if rate(max(sizes)) is None:
        raise ValueError("nothing is known of the exchange: --bandwidth must be given where no all-to-all is measured")
    found = reckon_layer(world, layer, attention, sizes, rounds, rate)
    one = next((of for of in rows if model and (of["what"], of["shape"], of["attention"], of["ranks"]) == (
        "step", model.name, attention, 1)), None)
    if one is None or not one["step_s"]:
        return found
    totals = {of["ranks"]: of["median_ms"] for of in found if of["stage"] == "total" and of["median_ms"]}
    arriving = {of["ranks"]: of["median_ms"] for of in found if of["stage"] == "exchange in" and of["median_ms"]}
    rest, text = one["step_s"] - model.depth * totals[1] / 1e3, layer.text / layer.tokens
    for ranks, ms in totals.items():
        # Every rank has all of the text. Of what arrives v and k do so while k and q are projected.
        step_s = rest * (text + (1 - text) / ranks) + model.depth * (ms - arriving.get(ranks, 0.0) * 2 / 3) / 1e3
        found.append(row(what="step", shape=model.name, attention=attention, ranks=ranks, stage="total",
                         basis="reckoned", step_s=step_s, speed_up=one["step_s"] / step_s))
    return found


def profile(world: World, layer: LayerShape, ranks: int, name: str) -> list[dict]:
    from timeline import record, summary

    events = record(world, layer, ranks)
    if world.rank == 0:
        write_rows(RESULTS / f"timeline_{name}.csv", events)
        draw(RESULTS, ["timeline"])
    return [row(what="profile", shape=layer.name, ranks=ranks, stage="device idle", **summary(events))]


if __name__ == "__main__":
    main()
