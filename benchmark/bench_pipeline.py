"""What does a denoising step of a video model cost? Seconds and peak memory of SSTA, of dense attention by two kernels, and of diffusers.

    python benchmark/bench_pipeline.py [--model TEXT ...] [--only NAME ...] [--rounds 5] [--csv NAME]

A step here is one forward of the transformer for one prompt (column step_s); classifier-free guidance takes two. The models of models.py
have their published width, random weights and a few blocks. Their forward is measured (median_ms), and in it the time of the blocks
(blocks_ms). step_s is reckoned: the rest of the forward, and all blocks of the model at the mean of the measured ones. Where the first
block is of another kind, it has a time of its own (first_ms), and counts once. Nothing is compiled:

    default    apply_ssta(model): the first layer is dense, the others are sparse
    sparse     the same settings in all layers
    one part   as sparse, with compensation_parts=1
    stock      diffusers' own processors and their default backend
    unmasked   all layers dense: SSTA's processors around torch's SDPA over every token, the invalid ones included
    dense      all layers dense: SSTA's exact kernel over the valid tokens (torch's SDPA on GPUs where that is faster)
    zero       all layers sparse, with published padding, tiles, window and top-k as in models.py
    none       the same with partial tiles
    removed    SSTA's processors without the attention itself, which nothing can be faster than

Before any time is taken, the first block's attention is compared with stock's: by default, dense, and with every tile selected (column
error: the distance over stock's length). All models together take about three minutes on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from arguments import add_names, add_rounds, named, new_parser
from bench_layer import dense
from measure import (
    NO_TIMES,
    RESULTS,
    elapsed_ms,
    failure,
    interleaved,
    measure_each,
    now,
    peak_extra_mib,
    print_machine,
    quartiles,
)
from models import MODELS, MODELS_CPU, ModelShape, blocks_of, twin
from table import steps_table
from torch import Tensor, nn

from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.patch.register import family_of

WHAT = ("default", "sparse", "one part", "stock", "unmasked", "dense", "zero", "none", "removed")
# As apply_ssta has them: the first layer dense, the others sparse.
FIRST_DENSE = ("default",)
# Relative to the length of stock's result. bfloat16 rounds by 2**-9 at every step from the projections on.
ALLOWED = {torch.bfloat16: 0.02, torch.float32: 1e-4}


def main(argv: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    shapes = MODELS if gpu else MODELS_CPU
    parser = new_parser(__doc__)
    add_names(parser, "model", shapes)
    parser.add_argument("--only", nargs="+", default=WHAT, choices=WHAT, help="what to measure")
    add_rounds(parser, 5 if gpu else 3)
    options = parser.parse_args(argv)
    chosen = named(parser, "model", options.model, shapes)
    print_machine()
    whats = [what for what in WHAT if what in options.only]
    path = RESULTS / f"{options.csv}.csv" if options.csv else None
    measure_each(chosen, lambda shape: measure_model(shape, whats, options.rounds, "cuda" if gpu else "cpu"), path, steps_table)


@torch.no_grad()
def measure_model(shape: ModelShape, whats: list[str], rounds: int, device: str) -> list[dict]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, call = shape.build(device, dtype), shape.call(device, dtype)
    errors, notes = checked(shape, model, call, whats)
    models = {what: prepared(shape, model, what) for what in whats if what not in notes}
    watches = {what: BlockWatch(of) for what, of in models.items()}

    def forward(what: str) -> Callable[[], object]:
        return lambda: models[what](**call)

    memory = {}
    for what in list(models):
        try:
            forward(what)()
            memory[what] = peak_extra_mib(forward(what))
        except torch.OutOfMemoryError as error:
            notes[what] = failure(error)
            del models[what]
            torch.cuda.empty_cache()
    times = interleaved({what: forward(what) for what in models}, rounds)
    weights_mib = sum(x.numel() * x.element_size() for x in model.parameters()) / 2**20
    block_mib = sum(x.numel() * x.element_size() for x in blocks_of(model)[1].parameters()) / shape.blocks / 2**20
    rows = []
    for what in whats:
        measured = times.get(what, {**NO_TIMES, "note": notes.get(what, "")})
        blocks = len(blocks_of(models[what])[1]) if what in models else shape.stock_blocks if what == "stock" else shape.blocks
        blocks_ms, first_ms, step_s = "", "", ""
        if measured["median_ms"]:
            blocks_ms = watches[what].median(rounds)
            first_ms = watches[what].first_median(rounds) if what in FIRST_DENSE else ""
            step_s = step_seconds(shape, blocks, measured["median_ms"], blocks_ms, first_ms or None)
        rows.append(dict(
            model=shape.name, canvas=" x ".join(map(str, shape.thw)), what=what, step_s=step_s, blocks=shape.depth, blocks_measured=blocks,
            **{column: measured[column] for column in NO_TIMES}, blocks_ms=blocks_ms, first_ms=first_ms, extra_mib=memory.get(what, ""),
            weights_mib=weights_mib + (shape.depth - shape.blocks) * block_mib, error=errors.get(what, ""), note=measured["note"]))
    return rows


def step_seconds(shape: ModelShape, blocks: int, forward_ms: float, blocks_ms: float, first_ms: float | None = None) -> float:
    """Of the whole model, from a forward with ``blocks`` blocks, which took blocks_ms of it. A first block with a time of its own counts
    once."""
    once = first_ms or 0.0
    alike = 0 if first_ms is None else 1
    return (forward_ms - blocks_ms + once + (shape.depth - alike) * (blocks_ms - once) / (blocks - alike)) / 1e3


def prepared(shape: ModelShape, model: nn.Module, what: str) -> nn.Module:
    """A model that computes ``what``, on the weights of ``model``."""
    if what == "stock":
        return twin(model, shape.stock_blocks)
    of = twin(model, shape.blocks)
    if what in FIRST_DENSE:
        apply_ssta(of)
        return of
    sites = list(family_of(of).sites(of))
    sparse = what in ("zero", "none", "sparse", "one part")
    config = replace(shape.config, pad_type=what) if what in ("zero", "none") else family_of(of).default_config()
    if what == "one part":
        config = replace(config, compensation_parts=1)
    apply_ssta(of, config, schedule=Schedule() if sparse else Schedule(dense_layers=tuple(range(len(sites)))))
    instead = {"unmasked": unmasked, "removed": removed}.get(what)
    if instead is not None:
        for site in sites:
            site.module.processor.attend = instead
    return of


def unmasked(query: Tensor, key: Tensor, value: Tensor, layout: object, text_mask: Tensor | None = None) -> Tensor:
    """In place of ``SSTAProcessor.attend``: every token attends to every token."""
    return dense(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def removed(query: Tensor, key: Tensor, value: Tensor, layout: object, text_mask: Tensor | None = None) -> Tensor:
    """In place of ``SSTAProcessor.attend``: the query goes back unseen."""
    return query


def checked(shape: ModelShape, model: nn.Module, call: dict, whats: list[str]) -> tuple[dict[str, float], dict[str, str]]:
    """(errors, notes): how far the first layer is from stock's, by default, dense, and with every tile selected. Where stock does not fit
    into memory, its note says so, and the next one takes its place. Ends the program where a distance is no rounding."""
    every = twin(model, shape.blocks)
    apply_ssta(every, replace(shape.config, pad_type="none", topk=10**6, sparse_type="block_attn", variants=()), schedule=Schedule())
    candidates = {what: every if what == "none" else prepared(shape, model, what)
                  for what in ("stock", "dense", "default", "none") if what in whats}
    exact, errors, notes = None, {}, {}
    for what, of in candidates.items():
        try:
            with first_attention(of) as seen:
                of(**call)
        except torch.OutOfMemoryError as error:
            notes[what] = failure(error)
            torch.cuda.empty_cache()
            continue
        found = seen[0].float()
        if exact is None:
            exact = found
            continue
        errors[what] = float((found - exact).norm() / exact.norm())
        if not errors[what] <= ALLOWED[seen[0].dtype]:
            raise SystemExit(f"{shape.name}, {what}, is wrong: the first block's attention is off by {errors[what]:.2g} of its length, "
                             f"{ALLOWED[seen[0].dtype]} is allowed; no time is printed")
    return errors, notes


@contextmanager
def first_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, the video's part of what the first block's attention returns is appended to the list."""
    seen: list[Tensor] = []
    site = next(family_of(model).sites(model))
    hook = site.module.register_forward_hook(lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output))
    try:
        yield seen
    finally:
        hook.remove()


class BlockWatch:
    """Times the blocks in every forward of ``model``, from the first one's beginning to its end and to the last one's end."""

    def __init__(self, model: nn.Module) -> None:
        blocks = blocks_of(model)[1]
        self._starts: list = []
        self._firsts: list = []
        self._ends: list = []
        blocks[0].register_forward_pre_hook(lambda module, args: self._starts.append(now()))
        blocks[0].register_forward_hook(lambda module, args, output: self._firsts.append(now()))
        blocks[-1].register_forward_hook(lambda module, args, output: self._ends.append(now()))

    def median(self, rounds: int) -> float:
        """Milliseconds of all blocks, over the last ``rounds`` forwards."""
        return self._between(self._ends, rounds)

    def first_median(self, rounds: int) -> float:
        """Milliseconds of the first block."""
        return self._between(self._firsts, rounds)

    def _between(self, ends: list, rounds: int) -> float:
        times = [elapsed_ms(first, last) for first, last in zip(self._starts[-rounds:], ends[-rounds:])]
        return quartiles(times)["median_ms"]


if __name__ == "__main__":
    main()
