"""What does each part of docs/recipes.md give? Seconds of a denoising step, memory, and the error of a step, by switch.

    python benchmark/bench_recipe.py [--model TEXT ...] [--only NAME ...] [--quantize float8|int8] [--rounds 3] [--csv recipe_h200]

A step is one forward of the transformer for one prompt, with random weights at the published width; classifier-free guidance takes two. A
forward of a few blocks and one of a single block are measured: what a block takes follows from these two, and step_s is the rest and all
blocks of the model. SSTA is what apply_ssta(pipe) does at a step that is not dense, in all layers.

    dense                exact attention in every layer, through whichever kernel is fastest
    default              SSTA by default
    ..., compiled        blocks compiled by compile_repeated_blocks (Inductor)
    ..., 8 bits          linear layers of the blocks by torchao, rows of activations and weights with scales of their own
    ..., skipped         a step that TaylorSeer predicts instead of computing it

Column error: how far one step is from that of the same recipe with dense attention, over its length. Column error_dense: from that of plain
dense attention, uncompiled and in 16 bits. Compiled dense attention that is further from it than rounding ends the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from arguments import add_names, add_rounds, named, new_parser
from bench_pipeline import ALLOWED
from measure import NO_TIMES, RESULTS, failure, interleaved, measure_each, peak_extra_mib, print_machine
from models import MODELS_CPU, ModelShape
from table import recipe_table
from torch import Tensor, nn

from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.evaluation.published import PUBLISHED, blocks_of

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from recipe import QUANTIZED, best_quantization, cached, quantize

WHAT = ("dense", "default", "dense, compiled", "default, compiled", "default, 8 bits", "default, 8 bits, compiled", "default, skipped")
SHAPES = tuple(ModelShape.of(PUBLISHED[name], blocks=blocks, stock_blocks=1)
               for name, blocks in (("wan-14b", 4), ("hunyuan-video-1.5", 4), ("wan-1.3b", 6), ("ltx", 8)))
# How many forwards TaylorSeer computes before it predicts one.
COMPUTED_FIRST = 4


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shapes = SHAPES if gpu else MODELS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "model", shapes)
    parser.add_argument("--only", nargs="+", default=WHAT, choices=WHAT, help="what to measure")
    parser.add_argument("--quantize", choices=QUANTIZED, default=best_quantization(device), help="what 8 bits are")
    parser.add_argument("--backend", default="inductor" if gpu else "aot_eager", help="what compiles (default %(default)s)")
    add_rounds(parser, 3)
    options = parser.parse_args(argv)
    chosen = named(parser, "model", options.model, shapes)
    print_machine()
    whats = [what for what in WHAT if what in options.only]
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    measure_each(chosen, lambda shape: measure_model(shape, whats, options.rounds, device, options.quantize, options.backend), path,
                 recipe_table)


@torch.no_grad()
def measure_model(shape: ModelShape, whats: list[str], rounds: int, device: torch.device, quantized: str, backend: str) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs, plain, rows = shape.call(device.type, dtype), None, []
    for bits in (None, quantized):
        group = [what for what in whats if ("8 bits" in what) == (bits is not None)]
        if not group:
            continue
        model = shape.build(device.type, dtype)
        if plain is None:
            plain = output(model, inputs, "dense")
        for compiled in (False, True):
            wanted = [what for what in group if ("compiled" in what) == compiled]
            if not wanted:
                continue
            try:
                if bits is not None and not is_quantized(model):
                    quantize(model, bits)
                if compiled:
                    model.compile_repeated_blocks(fullgraph=True, backend=backend)
                dense = output(model, inputs, "dense")
            except (AssertionError, NotImplementedError, RuntimeError) as error:
                # What torchao or the compiler cannot do here is said in the table, beside what the others give.
                rows += [blank(shape, model, what, bits) | dict(note=failure(error)) for what in wanted]
                continue
            if bits is None and distance(dense, plain) > ALLOWED[dtype]:
                raise SystemExit(f"{shape.name}, dense, compiled, is wrong: a step is off by {distance(dense, plain):.2g} of its length, "
                                 f"{ALLOWED[dtype]} is allowed; no time is printed")
            rows += [row_of(shape, model, inputs, what, rounds, bits, dense, plain) for what in wanted]
        del model
    return sorted(rows, key=lambda row: WHAT.index(row["what"]))


def row_of(
    shape: ModelShape, model: nn.Module, inputs: dict, what: str, rounds: int, bits: str | None, dense: Tensor, plain: Tensor,
) -> dict:
    """What one recipe gives on a model that is quantised and compiled as it wants; errors are the distances to ``dense`` and ``plain``."""
    row = blank(shape, model, what, bits)
    try:
        with attending(model, what.partition(",")[0]):
            if what.endswith("skipped"):
                return row | skipped(model, inputs, rounds)
            out = model(**inputs)[0].float()
            calls = {count: shortened(model, count, inputs) for count in (shape.blocks, 1)}
            row["extra_mib"] = peak_extra_mib(calls[shape.blocks])
            times = interleaved(calls, rounds)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return row | dict(note=failure(error))
    whole, one = times[shape.blocks], times[1]
    block_ms = (whole["median_ms"] - one["median_ms"]) / (shape.blocks - 1)
    return row | {name: whole[name] for name in NO_TIMES} | dict(
        step_s=(one["median_ms"] + (shape.depth - 1) * block_ms) / 1e3, one_block_ms=one["median_ms"], error=distance(out, dense),
        error_dense=distance(out, plain))


def blank(shape: ModelShape, model: nn.Module, what: str, bits: str | None) -> dict:
    """A row before anything is measured; the weights are those of all blocks of the model."""
    weights_mib = shape.depth / shape.blocks * sum(size_of(x) for x in blocks_of(model)[1].parameters()) / 2**20
    return dict(model=shape.name, canvas=" x ".join(map(str, shape.thw)), what=what, quantized=bits or "", step_s="", blocks=shape.depth,
                blocks_measured=shape.blocks, **NO_TIMES, one_block_ms="", extra_mib="", blocks_mib=weights_mib, error="", error_dense="",
                note="")


def is_quantized(model: nn.Module) -> bool:
    return any(hasattr(x, "__tensor_flatten__") for x in blocks_of(model)[1].parameters())


def shortened(model: nn.Module, count: int, inputs: dict) -> Callable[[], object]:
    """A forward through the first ``count`` blocks, the very same ones, compiled or not."""
    name, blocks = blocks_of(model)

    def call() -> object:
        setattr(model, name, blocks[:count])
        try:
            return model(**inputs)
        finally:
            setattr(model, name, blocks)

    return call


def skipped(model: nn.Module, inputs: dict, rounds: int) -> dict:
    """Times of a forward that TaylorSeer predicts, whatever the number of blocks: they are not called."""
    class Pipe:
        transformer = model

    with cached(Pipe, "taylor", {"cache_interval": COMPUTED_FIRST + rounds + 2, "disable_cache_before_step": COMPUTED_FIRST}, 50):
        with model.cache_context("cond"):
            for _ in range(COMPUTED_FIRST):
                model(**inputs)
            times = interleaved({"skipped": lambda: model(**inputs)}, rounds)["skipped"]
    return {name: times[name] for name in NO_TIMES} | dict(step_s=times["median_ms"] / 1e3)


@contextmanager
def attending(model: nn.Module, how: str) -> Iterator[None]:
    """The model with dense attention, or with SSTA by default, in all layers."""
    layers = len(blocks_of(model)[1])
    with apply_ssta(model, schedule=Schedule(dense_layers=tuple(range(layers))) if how == "dense" else Schedule()):
        yield


def output(model: nn.Module, inputs: dict, how: str) -> Tensor:
    with attending(model, how):
        return model(**inputs)[0].float()


def distance(x: Tensor, right: Tensor) -> float:
    return float((x - right).norm() / right.norm())


def size_of(x: Tensor) -> float:
    """Bytes of a parameter, also of one that torchao made of several tensors."""
    if not hasattr(x, "__tensor_flatten__"):
        return x.numel() * x.element_size()
    return sum(size_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])


if __name__ == "__main__":
    main()
