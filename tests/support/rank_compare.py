"""The paired evaluation on several ranks: the figures of one process, resuming, whole and shared, and failures. Cases of rank_cases."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_harness import SPARSE, parallel, refused
from tiny_pipelines import PIPELINES, latents, wan_with_frames

from ssta.pipelines import Schedule, cp_plan
from ssta.pipelines.evaluation import comparison
from ssta.pipelines.evaluation.compare import Clip, Configuration, Measurement, OtherRankError, compare, dense, parse_configuration

SPARSELY = Configuration("sparse", SPARSE, Schedule())
STOCK = Configuration("stock", None)
FAILED = "on rank 1: RuntimeError: no memory left here"


def agree(measured: Measurement, other: Measurement) -> bool:
    """Whether all but the times and the number of ranks are the same, figures to three digits, for latents differ in their last bits."""
    left, right = (asdict(replace(x, seconds=0.0, wall_seconds=0.0, ranks=1)) for x in (measured, other))
    return all(value == right[name] or value == pytest.approx(right[name], rel=1e-3, abs=1e-6) for name, value in left.items())


def share(pipe, ranks: int) -> None:
    config = parallel(ranks)
    pipe.transformer.enable_parallelism(config=config, cp_plan=cp_plan(pipe.transformer))


def compared(rank: int, ranks: int) -> None:
    """Interrupted and resumed, every figure of heads and tokens that ranks share evenly is one process', and only the first rank writes."""
    pipe = wan_with_frames()
    # Not as many in every head, of which a rank has one.
    estimated = parse_configuration("topk=3,threshold=0.5,tile_thw=1x2x2,kernel_thw=1x1x1,compensation=linear,sampling_type=similarity,"
                                    "dense_steps=0.5", pipe)
    configurations = [dense(pipe), STOCK, SPARSELY, estimated]
    call, clips = dict(height=96, width=128, num_frames=9, num_inference_steps=2), [Clip("a cat"), Clip("a dog", 1)]
    alone = compare(pipe, configurations, call, clips)
    share(pipe, ranks)
    generate, calls, said = comparison._generate, [], []

    def interrupted(pipe, call, seed):
        # After the reference of the second clip, when four warm-ups and one more of the first clip were generated.
        if len(calls) == 9 and rank == 0:
            raise KeyboardInterrupt
        calls.append(call["output_type"])
        return generate(pipe, call, seed)

    with tempfile.TemporaryDirectory() as folder:
        run = partial(compare, pipe, configurations, call, clips, output=Path(folder, "out"), resume=True, say=said.append)
        comparison._generate = interrupted
        try:
            run()
        except KeyboardInterrupt:
            assert rank == 0
        except OtherRankError as error:
            assert rank == 1 and str(error) == "on rank 0: KeyboardInterrupt: "
        else:
            raise AssertionError("was not interrupted")
        finally:
            comparison._generate = generate
        # The first one decodes for all.
        assert calls.count("latent") == (4 if rank == 0 else 10)
        finished = sorted(path.name for path in Path(folder, "out", "clips").glob("*/*")) if rank == 0 else []
        assert finished.count("dense.json") == 2 * (rank == 0) and finished.count("sparse.json") == (rank == 0)
        found = run()
        assert Path(folder, "out").exists() == bool(said) == (rank == 0)
        if rank == 0:
            assert sum("generating" in text for text in said) == 9 and "[8/8]" in said[-1]
    assert pipe.transformer._parallel_config is not None and not pipe.transformer._forward_pre_hooks
    for name in ("dense", "sparse", estimated.name):
        for clip in clips:
            one, measured = alone.measurements[name][clip], found.measurements[name][clip]
            assert agree(measured, one) and measured.ranks == ranks, (measured, one)
    assert found.measurements[estimated.name][clips[0]].exact_mass is not None
    assert all(found.measurements["stock"][clip].latent_difference < 1e-4 for clip in clips)
    assert found.settings["ranks"] == ranks and "measured on 2 ranks" in str(found) and "ranks" not in str(alone)
    # All have the same.
    everyone = [None] * ranks
    dist.all_gather_object(everyone, found)
    assert everyone[0] == everyone[1]


def whole_where_stock_cannot_share(rank: int, ranks: int) -> None:
    """Without SSTA each rank has the whole model then, whose seconds are compared with no other; it is as it was afterwards."""
    made = PIPELINES["hunyuan_video_15"]
    pipe = made.build()
    configurations = [dense(pipe), STOCK, SPARSELY]
    call = made.call | {"num_inference_steps": 2, "output_type": "latent"}
    alone = compare(pipe, configurations, call).measurements
    share(pipe, ranks)
    config = pipe.transformer._parallel_config
    found = compare(pipe, configurations, call)
    assert pipe.transformer._parallel_config is config
    for name, of in {"dense": ranks, "stock": 1, "sparse": ranks}.items():
        measured = found.measurements[name][Clip()]
        assert agree(measured, alone[name][Clip()]) and measured.ranks == of, name
    assert found.spread("stock", "speed_up") is None and found.spread("sparse", "speed_up").mean > 0
    assert found.pair("stock", "sparse", "seconds") is None and found.pair("stock", "sparse", "latent_difference").better == 1
    assert "whose seconds are not compared: dense on 2; stock on 1; sparse on 2" in str(found)


def one_rank_fails(rank: int, ranks: int) -> None:
    """The others hear of it where they wait for it: before a generation, after one, and while the first one measures."""
    pipe = PIPELINES["wan"].build()
    call = PIPELINES["wan"].call | {"num_inference_steps": 2, "output_type": "latent"}
    share(pipe, ranks)
    generate, measured = comparison._generate, comparison._Comparison._measured
    run = partial(compare, pipe, [dense(pipe), SPARSELY], call)

    def fail(*_):
        raise RuntimeError("no memory left here")

    def before(*arguments):
        return fail() if rank == 1 else generate(*arguments)

    def after(*arguments):
        found = generate(*arguments)
        return fail() if rank == 1 else found

    for broken in (before, after):
        comparison._generate = broken
        try:
            refused(RuntimeError if rank == 1 else OtherRankError, "^no memory left here" if rank == 1 else FAILED, run)
        finally:
            comparison._generate = generate
    comparison._Comparison._measured = fail
    try:
        refused(RuntimeError if rank == 0 else OtherRankError, "^no memory" if rank == 0 else FAILED.replace("rank 1", "rank 0"), run)
    finally:
        comparison._Comparison._measured = measured
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.json").write_text("{}")
        refused(ValueError if rank == 0 else OtherRankError, "output must be a folder without a comparison", partial(run, output=folder))
    assert set(run().measurements) == {"dense", "sparse"}


def unequal_comparisons(rank: int, ranks: int) -> None:
    pipe = PIPELINES["wan_2.2"].build()
    call = PIPELINES["wan_2.2"].call | {"num_inference_steps": 2, "output_type": "latent"}
    configuration = dense(pipe)
    share(pipe, ranks)
    refused(ValueError, r"pipe must have all transformers on the same ranks, got WanTransformer3DModel on \[0, 1\] and .* on one",
            lambda: compare(pipe, [configuration], call))
    pipe.transformer_2.enable_parallelism(config=parallel(ranks))
    refused(ValueError, r"clips must be the same on all ranks, got \(Clip\(prompt=None, seed=0.* on rank 0 and .*seed=1",
            lambda: compare(pipe, [configuration], call, [Clip(seed=rank)]))
    refused(ValueError, "call must be the same on all ranks",
            lambda: compare(pipe, [configuration], call | {"guidance_scale": 3.0 + rank}))
    before = latents(pipe, **PIPELINES["wan_2.2"].call)
    assert compare(pipe, [configuration], call).measurements["dense"][Clip()].ranks == ranks
    assert torch.equal(latents(pipe, **PIPELINES["wan_2.2"].call), before)
