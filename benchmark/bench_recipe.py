"""What does each part of docs/recipes.md give? Seconds of a denoising step, of its parts and of a generation, memory, errors, by switch.

    python benchmark/bench_recipe.py [--model TEXT ...] [--only NAME ...] [--quantize float8|int8] [--rounds 3] [--csv recipe_h200]
    torchrun --nproc-per-node=2 benchmark/bench_recipe.py ...

A step is one forward of the transformer for one prompt, with random weights at the published width; classifier-free guidance takes two. A
forward of a few blocks and one of a single block are measured: what a block takes follows from these two, and step_s is the rest and all
blocks of the model. SSTA is what apply_ssta(pipe) does in a layer that is not dense, in all layers.

    stock                unmodified diffusers, where it makes no mask of all pairs of tokens
    dense                exact attention in every layer, through whichever kernel is fastest
    default, fast        SSTA by default, and with preset="fast"
    ..., 8 bits          linear layers of the blocks by torchao, rows of activations and weights with scales of their own
    ..., compiled        blocks compiled by compile_repeated_blocks (Inductor); first_s is the first forward, which compiles
    ..., tuned           the same, with Inductor trying launches of its kernels
    ..., skipped         a step that TaylorSeer predicts instead of computing it; it computes computed_steps of a generation
    text encoder         all prompts of a generation (step_s is their seconds)
    VAE, VAE in tiles    decodes the video, in one piece or as diffusers cuts it (step_s is its seconds)

attention_s, linear_s, pointwise_s and exchange_s are parts of a step, by a profile of the few blocks: attention has all kernels of a sparse
layer, and cross-attention. Column error: how far one step is from that of the same recipe with dense attention, not compiled, over its
length. Column error_dense: from that of dense attention in 16 bits. Compiled dense attention that is further from it than rounding ends the
program. Under torchrun every forward is shared out over the ranks; times are the slowest rank's.

What matters most is measured first, and what surrounds the steps last, the largest models at the end. The CSV is written row by row; rows
that it has already and that are not measured now stay.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from arguments import add_names, add_rounds, named, new_parser
from around import AROUND
from bench_pipeline import ALLOWED
from kinds import KINDS, kernels_of, largest, summed
from measure import NO_TIMES, RESULTS, failure, interleaved, peak_extra_mib, print_machine, print_rows, write_rows
from models import MODELS_CPU, ModelShape
from recipe_tables import STEPS, generation_table, recipe_ranks_table, recipe_table
from rows import read_rows
from torch import Tensor, nn
from world import Elsewhere, OnRanks, World

from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.published import PUBLISHED, blocks_of

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from generate import share_out
from recipe import QUANTIZED, RECOMPILE_LIMIT, best_quantization, cached, compile_blocks, quantize

AROUND_STEPS = ("text encoder", "VAE in tiles", "VAE")
WHAT = (*STEPS, *AROUND_STEPS)
# How the blocks are prepared, (8 bits, compiled or tuned), in the order in which that is measured.
PREPARED = ((True, "compiled"), (True, "tuned"), (False, ""), (False, "compiled"), (True, ""))
# diffusers makes a mask of all pairs of tokens for HunyuanVideo 1.5: its step takes 41 s.
SHAPES = tuple(ModelShape.of(PUBLISHED[name], blocks=blocks, stock_blocks=stock)
               for name, blocks, stock in (("wan-14b", 4, 4), ("hunyuan-video-1.5", 4, 0), ("wan-1.3b", 6, 6), ("ltx", 8, 8)))
SCHEDULES = {"dense": lambda layers: Schedule(dense_layers=tuple(range(layers)))}
# How many forwards TaylorSeer computes before it predicts one.
COMPUTED_FIRST = 4


@dataclass(frozen=True)
class Bench:
    """How everything is measured.

    Attributes:
        device, dtype: of the models.
        rounds: of each call.
        quantized: what 8 bits are.
        backend: what compiles.
        kernels: of each forward the time of so many is printed.
        world: the ranks that share out each forward; None = there is one.
    """

    device: torch.device
    dtype: torch.dtype
    rounds: int
    quantized: str
    backend: str
    kernels: int = 0
    world: World | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.world is None else self.world.size

    def times(self, calls: dict[Any, Callable[[], object]]) -> dict[Any, dict]:
        if self.world is None:
            return interleaved(calls, self.rounds)
        return interleaved({name: OnRanks(self.ranks, call) for name, call in calls.items()}, self.rounds, timed=self.world.milliseconds)

    def attempt(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; where it fails on one rank it does so on all."""
        return work() if self.world is None else self.world.attempt(work)

    @contextmanager
    def attending(self, model: nn.Module, how: str, shared: bool = True) -> Iterator[None]:
        """The model with the attention that ``how`` names, in all layers, and its tokens ``shared`` out over the ranks."""
        if how == "stock":
            yield
            return
        layers = len(blocks_of(model)[1])
        schedule = SCHEDULES.get(how, lambda layers: Schedule())(layers)
        with apply_ssta(model, schedule=schedule, preset="fast" if how == "fast" else None):
            if shared and self.world is not None:
                with self.world.counted():
                    share_out(SimpleNamespace(transformer=model))
            yield


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    world = World.start() if "RANK" in os.environ else None
    device = torch.device("cuda" if gpu else "cpu")
    shapes = SHAPES if gpu else MODELS_CPU[1:2]
    parser = new_parser(__doc__)
    add_names(parser, "model", shapes)
    parser.add_argument("--only", nargs="+", default=WHAT, choices=WHAT, help="what to measure")
    parser.add_argument("--quantize", choices=QUANTIZED, default=best_quantization(device), help="what 8 bits are")
    parser.add_argument("--backend", default="inductor" if gpu else "aot_eager", help="what compiles (default %(default)s)")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also print the N kernels that take most of each forward")
    add_rounds(parser, 3)
    options = parser.parse_args(argv)
    chosen = named(parser, "model", options.model, shapes)
    diffusers.logging.set_verbosity_error()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    bench = Bench(device, torch.bfloat16 if gpu else torch.float32, options.rounds, options.quantize, options.backend,
                  options.kernels, world)
    first = world is None or world.rank == 0
    if first:
        print_machine()
    path, rows, start = RESULTS / f"{options.csv}.csv" if options.csv else None, [], time.perf_counter()
    whats = [what for what in WHAT if what in options.only]
    for row in chain(*(measure_model(bench, shape, whats) for shape in chosen),
                     *(measure_around(bench, shape, whats) for shape in reversed(chosen))):
        rows.append({name: str(value) for name, value in row.items()})
        if first:
            print(f"{time.perf_counter() - start:.0f} s")
            print_rows([row])
            if path:
                write_rows(path, beside(row, read_rows(path) if path.exists() else []), quiet=True)
    for head, *lines in (table(rows) for table in (recipe_table, generation_table, recipe_ranks_table) if first):
        if lines:
            print_rows([dict(zip(head, line)) for line in lines])
    if world is not None:
        world.end()


def prepared_as(what: str) -> tuple[bool, str]:
    return "8 bits" in what, next((how for how in ("compiled", "tuned") if how in what), "")


def runs_here(bench: Bench, shape: ModelShape, what: str) -> bool:
    if what == "stock":
        return bool(shape.stock_blocks) and bench.ranks == 1
    return "tuned" not in what or bench.backend == "inductor"


def beside(row: dict, known: list[dict]) -> list[dict]:
    """The rows of a CSV, sorted, ``row`` in the place of one of the same kind."""
    models = [shape.name for shape in (*SHAPES, *MODELS_CPU)]

    def kind(of: dict) -> tuple:
        return models.index(of["model"]), int(of["ranks"]), WHAT.index(of["what"])

    found = {kind(of): of for of in (*known, row)}
    return [found[key] for key in sorted(found)]


@torch.no_grad()
def measure_model(bench: Bench, shape: ModelShape, whats: list[str]) -> Iterator[dict]:
    """A row of each of ``whats`` that is a step, those that matter most first."""
    # The same on all ranks.
    torch.manual_seed(1)
    inputs, plain = shape.call(bench.device.type, bench.dtype), None
    for bits, compiled in PREPARED:
        group = [what for what in whats if what in STEPS and prepared_as(what) == (bits, compiled) and runs_here(bench, shape, what)]
        if not group:
            continue
        torch._dynamo.reset()
        model = shape.build(bench.device.type, bench.dtype)
        if plain is None:
            plain = output(bench, model, inputs, "dense")
        try:
            if bits:
                bench.attempt(partial(quantize, model, bench.quantized))
            dense = bench.attempt(partial(output, bench, model, inputs, "dense")) if bits else plain
            if compiled:
                compile_blocks(model, bench.backend, compiled == "tuned")
        except (AssertionError, NotImplementedError, RuntimeError, Elsewhere) as error:
            # What torchao cannot do here is said in the table, beside what the others give.
            yield from (blank(bench, shape, model, what) | dict(note=failure(error)) for what in group)
            continue
        for what in sorted(group, key=lambda what: what.startswith(("stock", "dense"))):
            row = row_of(bench, shape, model, inputs, what, dense, plain)
            if what == "dense, compiled" and row["error_dense"] != "" and not row["error_dense"] <= ALLOWED[bench.dtype]:
                raise SystemExit(f"{shape.name}, {what}, is wrong: a step is off by {row['error_dense']:.2g} of its length, "
                                 f"{ALLOWED[bench.dtype]} is allowed; no time is printed")
            yield row
        del model, dense
        empty_cache(bench)


def measure_around(bench: Bench, shape: ModelShape, whats: list[str]) -> Iterator[dict]:
    """A row of each of ``whats`` that comes before or after the steps."""
    for what in whats:
        if what in AROUND_STEPS and bench.ranks == 1:
            yield around_row(bench, shape, what)
            empty_cache(bench)


def row_of(bench: Bench, shape: ModelShape, model: nn.Module, inputs: dict, what: str, dense: Tensor, plain: Tensor) -> dict:
    """What one recipe gives on a model that is quantised and compiled as it wants; errors are the distances to ``dense`` and ``plain``."""
    row = blank(bench, shape, model, what)
    try:
        with bench.attending(model, what.partition(",")[0]):
            if what.endswith("skipped"):
                return row | skipped(bench, model, inputs, row["steps"])
            start = time.perf_counter()
            out = bench.attempt(lambda: model(**inputs)[0].float())
            if bench.device.type == "cuda":
                torch.cuda.synchronize()
            row["first_s"] = time.perf_counter() - start
            calls = {count: shortened(model, count, inputs) for count in (shape.blocks, 1)}
            bench.attempt(calls[1])
            row["extra_mib"] = bench.attempt(partial(peak_extra_mib, calls[shape.blocks]))
            times = bench.times(calls)
            whole, one = times[shape.blocks], times[1]
            if whole["note"] or one["note"]:
                return row | dict(note=whole["note"] or one["note"])
            kernels = bench.attempt(partial(kernels_of, calls[shape.blocks]))
    except (torch.OutOfMemoryError, Elsewhere) as error:
        empty_cache(bench)
        return row | dict(note=failure(error))
    for name, ms in largest(kernels, bench.kernels):
        print(f"{ms / shape.blocks:8.3f} ms a block: {name[:110]}")
    block_ms = (whole["median_ms"] - one["median_ms"]) / (shape.blocks - 1)
    step_s = (one["median_ms"] + (shape.depth - 1) * block_ms) / 1e3
    return row | {name: whole[name] for name in NO_TIMES} | dict(
        step_s=step_s, one_block_ms=one["median_ms"], error=distance(out, dense), error_dense=distance(out, plain),
        **{f"{kind}_s": ms / whole["median_ms"] * step_s for kind, ms in summed(kernels).items()})


def blank(bench: Bench, shape: ModelShape, model: nn.Module | None, what: str) -> dict:
    """A row before anything is measured; the weights are those of all blocks of the model."""
    around = AROUND[shape.name]
    row = dict(model=shape.name, canvas=" x ".join(map(str, shape.thw)), what=what, ranks=bench.ranks,
               quantized=bench.quantized if "8 bits" in what else "", step_s="", steps=around.steps, forwards=around.forwards,
               computed_steps="", blocks=shape.depth, blocks_measured="" if model is None else shape.blocks, **NO_TIMES, one_block_ms="",
               first_s="", **{f"{kind}_s": "" for kind in ("attention", *KINDS)}, extra_mib="", blocks_mib="", error="", error_dense="",
               note="")
    if model is not None:
        row["blocks_mib"] = shape.depth / shape.blocks * sum(size_of(x) for x in blocks_of(model)[1].parameters()) / 2**20
    return row


def around_row(bench: Bench, shape: ModelShape, what: str) -> dict:
    """Seconds of what comes before or after the steps."""
    row, around = blank(bench, shape, None, what), AROUND[shape.name]
    try:
        with torch.no_grad():
            call = around.encode(bench.device.type, bench.dtype) if what == "text encoder" else around.decode(
                shape.thw, bench.device.type, bench.dtype, what.endswith("tiles"))
            # The first call, which looks for the fastest convolutions.
            row["extra_mib"] = peak_extra_mib(call)
            times = interleaved({what: call}, 1, warm=0)[what]
    except torch.OutOfMemoryError as error:
        return row | dict(note=failure(error))
    return row | times | dict(step_s=times["median_ms"] / 1e3 if times["median_ms"] else "")


def shortened(model: nn.Module, count: int, inputs: dict) -> Callable[[], object]:
    """A forward through the first ``count`` blocks, the very same ones, compiled or not."""
    name, blocks = blocks_of(model)

    def call() -> object:
        setattr(model, name, blocks[:count])
        try:
            # Arrived: what ranks gather last is on its way until something reads it.
            return model(**inputs)[0].clone()
        finally:
            setattr(model, name, blocks)

    return call


def skipped(bench: Bench, model: nn.Module, inputs: dict, steps: int) -> dict:
    """Times of a forward that TaylorSeer predicts, whatever the number of blocks: they are not called."""
    options = {"cache_interval": COMPUTED_FIRST + bench.rounds + 2, "disable_cache_before_step": COMPUTED_FIRST}
    with cached(SimpleNamespace(transformer=model), "taylor", options, 50), model.cache_context("cond"):
        # The one after the next is computed too.
        for _ in range(COMPUTED_FIRST + 2):
            model(**inputs)
        times = bench.times({"skipped": lambda: model(**inputs)})["skipped"]
    return {name: times[name] for name in NO_TIMES} | dict(step_s=times["median_ms"] / 1e3, computed_steps=computed_steps(steps))


def computed_steps(steps: int) -> int:
    """How many steps of a generation TaylorSeer computes as diffusers configures it: the first ones, then one of every few."""
    config = diffusers.TaylorSeerCacheConfig()
    first = config.disable_cache_before_step
    return sum(step < first or (step - first - 1) % config.cache_interval == 0 for step in range(steps))


def output(bench: Bench, model: nn.Module, inputs: dict, how: str) -> Tensor:
    """The whole output, computed on each rank alone."""
    with bench.attending(model, how, shared=False):
        return model(**inputs)[0].float()


def distance(x: Tensor, right: Tensor) -> float:
    return float((x - right).norm() / right.norm())


def size_of(x: Tensor) -> float:
    """Bytes of a parameter, also of one that torchao made of several tensors."""
    if not hasattr(x, "__tensor_flatten__"):
        return x.numel() * x.element_size()
    return sum(size_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])


def empty_cache(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
