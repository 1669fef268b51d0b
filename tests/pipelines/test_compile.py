"""SSTA under torch.compile: repeated blocks whole and once, whole models, and no new graph at later steps."""

from __future__ import annotations

import threading
import warnings

import diffusers
import pytest
import torch
from graphs import Graphs
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run, steps_at
from tiny_pipelines import PIPELINES, latents

from ssta import SSTAConfig
from ssta.pipelines import Ramp, Schedule, apply_ssta, frozen_checkpoint, teacher_student

pytestmark = pytest.mark.slow

NEVER_DENSE = Schedule()
TILES = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn")
# HunyuanVideo 1.5 is in test_processors.py; the others left out are variants of what is here.
LEFT_OUT = {"chronoedit", "hunyuan_video_15", "hunyuan_video_i2v", "wan_i2v", "wan_ti2v", "ltx2_gated", "sana_wm_refiner"}


# The steps of a schedule run in code that all families share: three kinds of blocks meet dense ones too.
BOTH_KINDS_OF_STEPS = {"wan", "hunyuan_video", "ltx"}
COMPILED = [name for name in TINY if getattr(diffusers, TINY[name].model)._repeated_blocks and name not in LEFT_OUT]


@pytest.mark.parametrize("name", COMPILED)
def test_repeated_blocks_compile_whole_and_once(name):
    tiny = TINY[name]
    model, call = tiny.build(layers=2), tiny.call()
    dense = 2 if name in BOTH_KINDS_OF_STEPS else 0
    scheduler = steps_at(*((0.1, 0.15, 0.5) if name == "minimax_h3" else (900.0, 850.0, 500.0)))
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5) if dense else NEVER_DENSE, scheduler=scheduler) as handle:
        steps = [call | {"timestep": timestep.expand(call["timestep"].shape)} for timestep in scheduler.timesteps]
        eager = [run(model, step) for step in steps]
        assert [layer.dense_steps for layer in handle.report()[:2]] == [dense, dense]
        graphs = Graphs()
        model.compile_repeated_blocks(fullgraph=True, backend=graphs)
        for step, expected in zip(steps, eager):
            torch.testing.assert_close(run(model, step), expected, rtol=1e-4, atol=1e-4)
        known = graphs.count
        # Dense and sparse steps, again and in another order, are all compiled.
        for step in steps[::-1]:
            run(model, step)
        assert graphs.count == known


def test_a_compiled_pipeline_meets_no_new_graph_at_later_steps():
    tiny = PIPELINES["wan"]
    pipe = tiny.build(layers=3)
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.3, dense_layers=(0,))):
        eager = latents(pipe, steps=5, **tiny.call)
        graphs = Graphs()
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=graphs)
        torch.testing.assert_close(latents(pipe, steps=5, **tiny.call), eager, rtol=1e-3, atol=1e-3)
        # The layer that is always dense, and the others as dense and as sparse.
        assert graphs.count == 3
        latents(pipe, steps=8, **tiny.call)
        assert graphs.count == 3


def test_a_whole_model_compiles_and_follows_the_steps():
    tiny = TINY["wan"]
    model = tiny.build(layers=1)
    scheduler = steps_at(900.0, 850.0, 500.0, 100.0)
    calls = [tiny.call() | {"timestep": timestep.expand(1)} for timestep in scheduler.timesteps]
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5), scheduler=scheduler):
        eager = [run(model, call) for call in calls]
        graphs = Graphs()
        compiled = torch.compile(model, backend=graphs)
        for call, expected in zip(calls, eager):
            torch.testing.assert_close(run(compiled, call), expected, rtol=1e-4, atol=1e-4)
        known = graphs.count
        for call in calls:
            run(compiled, call)
        assert graphs.count == known


@pytest.mark.parametrize("name", ["wan", "hunyuan_video"])
def test_compiled_blocks_are_as_they_were_once_ssta_is_removed(name):
    tiny = TINY[name]
    # A layer that is dense and one that is sparse.
    model, call = tiny.build(layers=2 if name == "wan" else 1), tiny.call()
    graphs = Graphs()
    model.compile_repeated_blocks(fullgraph=True, backend=graphs)
    before, known = run(model, call), graphs.count
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        with apply_ssta(model, tile_thw=(2, 3, 4), schedule=Schedule(dense_layers=(0,))):
            assert not torch.equal(run(model, call), before)
        assert graphs.count > known
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(run(model, call), before)


@pytest.fixture
def no_recompile():
    """Within it, a compiled function that would be compiled anew raises."""
    return torch._dynamo.config.patch(error_on_recompile=True)


@pytest.mark.parametrize("name, schedule, dynamic, repeated", [
    ("wan", NEVER_DENSE, None, False), ("wan", None, True, False), ("wan", None, None, True), ("motif_video", None, None, False)])
def test_the_second_call_of_a_canvas_compiles_nothing(no_recompile, name, schedule, dynamic, repeated):
    tiny = TINY[name]
    model = tiny.build(layers=1)
    with apply_ssta(model, SPARSE, schedule=schedule):
        eager = {thw: run(model, tiny.call(thw)) for thw in [(3, 6, 8), (4, 6, 6)][:2 if name == "wan" else 1]}
        graphs = Graphs()
        # Without rules for steps nothing has to leave the graph.
        whole = {"fullgraph": True} if schedule == NEVER_DENSE else {}
        (model.compile_repeated_blocks if repeated else model.compile)(backend=graphs, dynamic=dynamic, **whole)
        for thw, expected in eager.items():
            torch.testing.assert_close(run(model, tiny.call(thw)), expected, rtol=1e-4, atol=1e-4)
            with no_recompile:
                for _ in range(2):
                    run(model, tiny.call(thw, seed=3))
        # Nor does coming back to a canvas.
        with no_recompile:
            for thw in eager:
                run(model, tiny.call(thw))


def test_a_compiled_call_that_another_thread_s_comes_between():
    model, calls = TINY["wan"].build(), [TINY["wan"].call(thw) for thw in ((3, 6, 8), (4, 6, 6))]
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        eager = [run(model, call) for call in calls]
        model.compile_repeated_blocks(fullgraph=True, backend=Graphs())
        found = []

        def call(index: int) -> None:
            found.append(run(model, calls[index]))

        for _ in range(2):
            thread = threading.Thread(target=call, args=(1,))
            thread.start(), thread.join()
            call(0)
        for ours, expected in zip(found, [eager[1], eager[0]] * 2, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# Training


def test_a_ramp_compiles_a_block_once_for_each_of_its_values():
    model, call = TINY["wan"].build(layers=1), TINY["wan"].call()

    def gradients(step: int) -> list[torch.Tensor]:
        ramp.set(step)
        model.zero_grad()
        both(**call).student.square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model.enable_gradient_checkpointing(frozen_checkpoint)
    with apply_ssta(model, TILES, schedule=NEVER_DENSE) as handle:
        ramp, both = Ramp(handle, 0.25, 2), teacher_student(model, model)
        assert len(ramp.densities) == 3
        expected = [gradients(step) for step in range(4)]
        graphs = Graphs()
        model.compile_repeated_blocks(fullgraph=True, backend=graphs)
        seen = []
        for step, grads in enumerate(expected):
            for ours, eager in zip(gradients(step), grads, strict=True):
                torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-5)
            seen.append(graphs.count)
        # The teacher, the dense start, and each sparse density in forward and recomputation.
        assert seen[2] == seen[3] <= 2 + 2 * (len(ramp.densities) - 1)
        for step in (0, 1, 2):
            gradients(step)
        assert graphs.count == seen[3]
