"""examples/recipe.py on several ranks: each switch beside them gives what it gives in one process."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from rank_harness import parallel, refused, run_all
from tiny_pipelines import PIPELINES, latents

from ssta.pipelines import Schedule

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from recipe import Recipe, cooked

STEPS = 3
# Compiled blocks by themselves are in rank_settings.py.
BESIDE = {"int8": dict(quantize="int8"),
          "mag": dict(cache="mag", cache_options={"mag_ratios": [1.0] * STEPS}),
          "taylor": dict(cache="taylor", cache_options={"disable_cache_before_step": 2}),
          "all": dict(compile=True, backend="eager", quantize="int8", cache="taylor", cache_options={"disable_cache_before_step": 2})}


def generated(ranks: int, switches: dict, **options) -> torch.Tensor:
    pipe = PIPELINES["wan"].build()
    recipe = Recipe(ranks=ranks, **switches)
    recipe.check(type(pipe.transformer), torch.device("cpu"))

    def share_out(of) -> None:
        of.transformer.enable_parallelism(config=parallel(ranks))

    with cooked(pipe, recipe, STEPS, share_out, tile_thw=(2, 3, 4), density=0.3, **options) as handle:
        out = latents(pipe, steps=STEPS, **PIPELINES["wan"].call)
        assert {run.ranks for run in handle.report()} == {ranks}
    return out


def as_alone(switches: dict, rank: int, ranks: int) -> None:
    torch._dynamo.reset()
    # Blocks that are dense at some steps would be compiled once more.
    options = {"schedule": Schedule()} if "compile" in switches else {}
    alone = generated(1, switches | {"compile": False}, **options)
    torch.testing.assert_close(generated(ranks, switches, **options), alone, rtol=1e-3, atol=1e-3)


def caches_that_decide_by_tokens(rank: int, ranks: int) -> None:
    for cache in ("first-block", "cache-dit"):
        refused(ValueError, f"cache '{cache}' must be off on several GPUs", partial(generated, ranks, dict(cache=cache)))


CASES = {**{name: partial(as_alone, switches) for name, switches in BESIDE.items()}, "refused": caches_that_decide_by_tokens}


def run(rank: int, ranks: int) -> dict[str, str | None]:
    return run_all(rank, ranks, CASES)
