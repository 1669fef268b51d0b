"""Steps of video models whose tokens ranks share out: SSTA beside diffusers' own Ulysses around SDPA, and beside unmasked SDPA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import diffusers
import torch
from bench_layer import dense
from bench_pipeline import BlockWatch, prepared, step_seconds
from diffusers import ContextParallelConfig
from measure import failure, interleaved, peak_extra_mib
from models import ModelShape, blocks_of
from shared_layer import row
from torch import Tensor, nn
from world import OnRanks, World

from ssta import TokenLayout
from ssta.dense import EXACT
from ssta.pipelines.patch.register import family_of
from ssta.ranks import Sent
from ssta.ranks.layer import enter

# diffusers' own processors run for hours where they make a mask of every pair of tokens, and are right on several ranks in few families.
RIGHT_AS_STOCK = ("WanTransformer3DModel",)


def attentions(shape: ModelShape, only: Sequence[str]) -> list[str]:
    """Those of ``only`` in bench_pipeline.py's names, "dense" being what diffusers has where it is right."""
    dense = "stock" if shape.model in RIGHT_AS_STOCK else "unmasked"
    return [dense if name == "dense" else name for name in only]


@torch.no_grad()
def measure_step(world: World, shape: ModelShape, only: Sequence[str], over: list[int], rounds: int) -> list[dict]:
    """Rows of the model's step on each number of ranks.

    ``difference`` is that of the forward's output from one rank's, relative to its length.
    """
    diffusers.logging.set_verbosity_error()
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    model = world.attempt(lambda: shape.build(world.device.type, dtype))
    call = world.attempt(lambda: shape.call(world.device.type, dtype))
    models, watches, facts, notes = {}, {}, {}, {}
    for what in attentions(shape, only):
        expected = None
        for ranks in over:
            key = what, ranks
            try:
                of = models[key] = world.attempt(lambda key=key: on_ranks(world, shape, model, *key))
                watches[key] = BlockWatch(of)
                # Alone every rank runs the whole, so that each has it to compare with.
                out = world.attempt(partial(forward, of, call), None if ranks == 1 else ranks)
                expected = out if ranks == 1 else expected
                memory = world.gather(world.attempt(lambda of=of: peak_extra_mib(partial(forward, of, call)), ranks))
                found = world.gather(distance(out, expected) if out is not None and expected is not None else "")
            except Exception as error:
                notes[key] = failure(error)
                models.pop(key, None)
                continue
            facts[key] = dict(extra_mib=max(memory[:ranks]), difference=max(found[:ranks]))
        del expected
    calls = {key: OnRanks(key[1], partial(forward, of, call)) for key, of in models.items()}
    times = interleaved(calls, rounds, timed=world.milliseconds)
    rows = []
    for key in [(what, ranks) for what in attentions(shape, only) for ranks in over if (what, ranks) in {**times, **notes}]:
        what, ranks = key
        about = dict(what="step", shape=shape.name, attention=what, ranks=ranks, stage="total")
        if key in notes or times[key]["note"]:
            rows.append(row(**about, note=notes.get(key) or times[key]["note"]))
            continue
        blocks_ms = max(world.gather(watches[key].median(rounds) if world.rank < ranks else 0.0))
        step_s = step_seconds(shape, len(blocks_of(models[key])[1]), times[key]["median_ms"], blocks_ms)
        one = next((of["step_s"] for of in rows if of["attention"] == what and of["ranks"] == 1), None)
        rows.append(row(**about, **times[key], **facts[key], step_s=step_s,
                        speed_up=1.0 if ranks == 1 else one / step_s if one else ""))
    return rows


def forward(model: nn.Module, call: dict) -> Tensor:
    """The output, arrived: what ranks gather last is on its way until something reads it, and views do not."""
    return model(**call)[0].clone()


def distance(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def on_ranks(world: World, shape: ModelShape, model: nn.Module, what: str, ranks: int) -> nn.Module:
    """A model that attends as ``what`` says, shared out over the first ``ranks``; every rank has to ask for it. By default all layers are
    sparse, so that a step is reckoned from layers that are alike."""
    of = prepared(shape, model, "sparse" if what == "default" else what)
    if ranks == 1:
        return of
    # Every size of group is made on all ranks at once, so the others have their own.
    config = ContextParallelConfig(ulysses_degree=ranks, mesh=world.mesh(ranks))
    with world.counted():
        of.enable_parallelism(config=config)
    if what == "unmasked":
        for site in family_of(of).sites(of):
            site.module.processor.attend = unmasked
    return of


def unmasked(query: Sent, key: Sent, value: Sent, layout: TokenLayout, text_mask: Tensor | None = None) -> Tensor:
    """In place of ``SSTAProcessor.attend``, on several ranks: every token attends to every token."""
    exchange = enter(query, key, value, layout, EXACT, query.shards)
    return exchange.back(dense(*exchange.tensors())).transpose(1, 2)
