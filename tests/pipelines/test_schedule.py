"""The schedule: dense steps are the stock model's, found by counting in real pipelines; dense layers, layers of their own; mistakes."""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from tiny_hunyuan import CANVAS, SPARSE, WINDOW
from tiny_models import TINY, all_dense, run
from tiny_pipelines import PIPELINES, flow, latents

from ssta.kernels import choose_route
from ssta.pipelines import Schedule, apply_ssta, remove_ssta
from ssta.pipelines.patch import processor
from ssta.pipelines.schedule.changes import changed


def noting(function, seen: list, entry):
    def noted(*args):
        seen.append(entry)
        return function(*args)

    return noted


def watched(pipe) -> list[tuple[str, bool]]:
    """What every sparse-by-nature layer does from now on: (transformer, whether it was dense)."""
    seen = []
    for name in ("transformer", "transformer_2"):
        for module in (getattr(pipe, name, None) or torch.nn.Module()).modules():
            processor = getattr(module, "processor", None)
            if getattr(processor, "config", None) is not None and hasattr(processor, "context"):
                for kind, dense in (("_attend_densely", True), ("_attend_sparsely", False)):
                    setattr(processor, kind, noting(getattr(processor, kind), seen, (name, dense)))
    return seen


# All pipelines are in test_progress.py.
@pytest.mark.parametrize("name, steps", [(name, steps) for name in ("wan", "ltx", "cogvideox") for steps in (1, 4, 10)])
def test_a_warm_up_is_dense_in_the_first_steps(name, steps):
    pipe, call = PIPELINES[name].build(), PIPELINES[name].call
    with apply_ssta(pipe, SPARSE, schedule=Schedule.warm_up()) as handle:
        assert handle.schedule == Schedule(dense_steps=0.15, dense_layers=(0,))
        seen = watched(pipe)
        for _ in range(2):
            latents(pipe, steps=steps, **call)
            kinds = [dense for _, dense in seen]
            forwards, rest = divmod(len(kinds), steps)
            expected = 0 if steps == 1 else math.ceil(0.15 * steps)
            assert not rest and kinds == [True] * (expected * forwards) + [False] * ((steps - expected) * forwards)
            first, second = handle.report()
            assert (first.steps, first.dense_steps, second.steps, second.dense_steps) == (steps, steps, steps, expected)
            assert first.density == 1 and first.tiles is None and second.density < 0.6
            seen.clear()


def test_dense_steps_are_the_stock_model_s_and_the_others_are_not():
    def trail(pipe) -> list[torch.Tensor]:
        seen = []
        latents(pipe, **PIPELINES["ltx"].call, callback_on_step_end=lambda pipe, i, t, kept: seen.append(kept["latents"]) or {})
        return seen

    pipe = PIPELINES["ltx"].build()
    stock = trail(pipe)
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.5)):
        ours = trail(pipe)
    for i in range(4):
        assert torch.allclose(ours[i], stock[i], rtol=1e-4, atol=1e-4) == (i < 2)
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=1.0)):
        torch.testing.assert_close(trail(pipe)[-1], stock[-1], rtol=1e-4, atol=1e-4)


def test_wan_2_2_counts_over_both_transformers():
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    with apply_ssta(pipe, SPARSE, schedule=Schedule.warm_up()) as handle:
        seen = watched(pipe)
        # Another generation begins where the second transformer has not been yet.
        latents(pipe, steps=4, **tiny.call)
        seen.clear()
        for _ in range(2):
            latents(pipe, steps=10, **tiny.call)
            # Shift 3 leaves the first four steps above the boundary; two passes of guidance.
            expected = [("transformer", True)] * 4 + [("transformer", False)] * 4 + [("transformer_2", False)] * 12
            assert seen == expected
            assert [(layer.steps, layer.dense_steps) for layer in handle.report()] == [(4, 4), (4, 2), (6, 6), (6, 0)]
            seen.clear()


def test_the_scheduler_may_be_exchanged_and_the_pipeline_copied_or_dropped():
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    handle = apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.5))
    pipe.scheduler = flow()
    latents(pipe, steps=6, **tiny.call)
    assert [(layer.steps, layer.dense_steps) for layer in handle.report()] == [(6, 3)] * 2
    twin = copy.deepcopy(pipe)
    expected = latents(twin, steps=4, **tiny.call)
    assert torch.equal(latents(pipe, steps=4, **tiny.call), expected)
    # The copy counts by its own scheduler, also when the first one is gone.
    del pipe, handle
    gc.collect()
    assert torch.equal(latents(twin, steps=4, **tiny.call), expected)
    remove_ssta(twin)
    assert not torch.equal(latents(twin, steps=4, **tiny.call), expected)


def test_another_pipeline_of_the_same_components_counts_too():
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    handle = apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.5))
    expected = latents(pipe, steps=6, **tiny.call)
    other = type(pipe)(**pipe.components)
    other.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert torch.equal(latents(other, steps=6, **tiny.call), expected)
        assert [(layer.steps, layer.dense_steps) for layer in handle.report()] == [(6, 3)] * 2
        pipe = None
        gc.collect()


def test_dense_steps_take_the_faster_kernel_unless_a_backend_was_chosen(monkeypatch):
    # As on a Hopper GPU, where "auto" stands for its kernel with such heads.
    monkeypatch.setattr(processor, "choose_route", lambda impl, device, dtype, dim, *_: replace(
        choose_route("torch", device, dtype, dim), name="hopper" if impl == "auto" and dim in (64, 128) else "torch"))
    tiny = TINY["wan"]
    model, call = tiny.build(num_attention_heads=1, attention_head_dim=64), tiny.call(prompts=(3, 6))
    stock = run(model, call)

    def implementation(**options) -> str:
        with apply_ssta(model, SPARSE, schedule=all_dense(model), **options) as handle:
            torch.testing.assert_close(run(model, call), stock, rtol=1e-4, atol=1e-4)
            return handle.report()[0].implementation

    # What ran is reported, which on a CPU is plain torch over lists of blocks.
    assert implementation() == "dense, torch"
    assert implementation(impl="torch") == "dense, default backend"
    with attention_backend("_native_math"):
        assert implementation() == "dense, default backend"
    model.set_attention_backend("native")
    assert implementation() == "dense, native"
    model.reset_attention_backend()
    # A backward pass would take more memory, and heads of another size another kernel.
    with apply_ssta(model, SPARSE, schedule=all_dense(model)) as handle:
        model(**call)
        assert handle.report()[0].implementation == "dense, default backend"
    model, call = tiny.build(), tiny.call(prompts=(3, 6))
    stock = run(model, call)
    assert implementation() == "dense, default backend"


def test_layers_by_position_and_by_name_and_with_their_own_configuration():
    tiny = TINY["wan"]
    model, call = tiny.build(layers=4), tiny.call()
    schedule = Schedule(dense_layers=(0, -1), layer_configs={"blocks.2.attn1": WINDOW})
    with apply_ssta(model, SPARSE, schedule=schedule) as handle:
        run(model, call)
        runs = handle.report()
        assert [layer.implementation.startswith("dense") for layer in runs] == [True, False, False, True]
        assert runs[1].tiles == 8 and runs[2].tiles == 2 * 3 * 2
        assert [layer.dense_steps for layer in runs] == [1, 0, 0, 1]
    with apply_ssta(model, SPARSE, schedule=Schedule(layer_configs={2: WINDOW})):
        by_position = run(model, call)
    with apply_ssta(model, SPARSE, schedule=Schedule(layer_configs=(("blocks.2.attn1", WINDOW),))):
        assert torch.equal(run(model, call), by_position)
    with apply_ssta(model, SPARSE):
        assert not torch.equal(run(model, call), by_position)


def test_variants_of_every_configuration_follow_the_canvas():
    tiny = TINY["wan"]
    model = tiny.build(layers=2)
    varied = replace(WINDOW, variants=((1, {"tile_thw": (1, 4, 4)}),))
    with apply_ssta(model, SPARSE, schedule=Schedule(layer_configs={1: varied})) as handle:
        run(model, tiny.call(CANVAS))
        assert [layer.tiles for layer in handle.report()] == [8, 12]
        run(model, tiny.call((1, 8, 8)))
        assert [layer.tiles for layer in handle.report()] == [4, 4]


def test_vace_keeps_the_first_layer_of_both_stacks_dense():
    with apply_ssta(TINY["wan_vace"].build()) as handle:
        assert handle.schedule.dense_layers == ("blocks.0.attn1", "vace_blocks.0.attn1")


def test_a_dense_step_is_dense_in_layers_with_a_configuration_of_their_own_too():
    pipe, call = PIPELINES["ltx"].build(), PIPELINES["ltx"].call
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.5, layer_configs={0: replace(SPARSE, topk=1)})):
        seen = watched(pipe)
        latents(pipe, steps=2, **call)
    half = len(seen) // 2
    assert [dense for _, dense in seen] == [True] * half + [False] * half and half > 1


def test_densities_by_step_are_those_that_set_density_sets():
    """One for each step; 1 is the stock model's attention; layers with a configuration of their own keep it."""
    pipe, wanted = PIPELINES["ltx"].build(), (1, 0.5, 0.5, 0.2)
    schedule, seen = Schedule(densities=wanted, layer_configs={0: SPARSE}), []
    with apply_ssta(pipe, density=0.3, schedule=schedule) as handle:
        first, second = (module.processor for module in pipe.transformer.modules() if hasattr(getattr(module, "processor", None), "site"))
        kind = type(second)._attend_sparsely
        second._attend_sparsely = lambda *args: seen.append((first.ruling.config, second.ruling.config)) or kind(second, *args)
        latents(pipe, steps=4, **PIPELINES["ltx"].call)
        assert (handle.report()[1].steps, handle.report()[1].dense_steps) == (4, 1)
        own, per_step = handle.config, len(seen) // 3
    expected = [changed(own, density=density) for density in wanted[1:] for _ in range(per_step)]
    assert [config for _, config in seen] == expected and all(config == SPARSE for config, _ in seen)
    # The same object each time, by which a compiled block and a layer are found again.
    assert seen[0][1] is seen[2 * per_step - 1][1]


@pytest.mark.parametrize("densities, count, wanted", [
    ((), 3, [None] * 3), ((0.5,), 3, [0.5] * 3), ((1, 0.2), 5, [1, 1, 1, 0.2, 0.2]), ((1, 0.5, 0.2), 2, [1, 0.5])])
def test_which_density_a_step_has(densities, count, wanted):
    assert [Schedule(densities=densities).density_of_step(index, count) for index in range(count)] == wanted


@pytest.mark.parametrize("fraction, count, dense", [
    (0.0, 50, 0), (0.15, 50, 8), (0.15, 4, 1), (0.15, 2, 1), (0.15, 1, 0), (0.07, 100, 7), (0.99, 4, 3), (1.0, 4, 4), (1.0, 1, 1)])
def test_how_many_steps_a_fraction_is(fraction, count, dense):
    assert sum(Schedule(dense_steps=fraction).is_dense_step(index, count) for index in range(count)) == dense


@pytest.mark.parametrize("arguments, error, message", [
    (("a", 4), TypeError, "index must be an int, got 'a'"), ((0, None), TypeError, "count must be an int"),
    ((-1, 4), ValueError, "index must be at least 0, got -1"), ((0, 0), ValueError, "count must be at least 1, got 0"),
    ((4, 4), ValueError, r"index must lie in \[0, 4\).* got 4")])
def test_steps_that_there_are_not(arguments, error, message):
    with pytest.raises(error, match=message):
        Schedule.warm_up().is_dense_step(*arguments)


def test_a_schedule_is_a_value():
    assert Schedule(dense_layers=[0, "a"], layer_configs={1: SPARSE}) == Schedule(dense_layers=(0, "a"), layer_configs=((1, SPARSE),))
    assert len({Schedule(), Schedule(), Schedule.warm_up()}) == 2
    # Positions of numpy's and a range's are positions.
    same = Schedule(dense_layers=np.arange(2).tolist(), layer_configs={np.int64(3): SPARSE})
    assert same == Schedule(dense_layers=range(2), layer_configs={3: SPARSE}) and type(same.layer_configs[0][0]) is int


@pytest.mark.parametrize("options, error, message", [
    (dict(dense_steps=1.5), ValueError, r"dense_steps must lie in \[0, 1\].*1.5"),
    (dict(dense_steps=1), ValueError, "dense_steps must be a fraction of the steps, got 1, which may be meant for one step: 1.0 keeps all"),
    (dict(dense_steps=-0.1), ValueError, "dense_steps"),
    (dict(dense_steps="first"), TypeError, "dense_steps must be a number"),
    (dict(dense_steps=float("nan")), ValueError, "dense_steps"),
    (dict(densities=0.5), TypeError, "densities must be a tuple of numbers, one for each step, got 0.5"),
    (dict(densities=(0.5, 0)), ValueError, r"densities must lie in \(0, 1\], shares of the tile pairs, got 0"),
    (dict(densities=("a",)), TypeError, "densities must be a number"),
    (dict(dense_layers="blocks.0"), TypeError, "dense_layers must be a tuple"),
    (dict(dense_layers=3), TypeError, "dense_layers must be a tuple"),
    (dict(dense_layers=(0.5,)), TypeError, "dense_layers must name layers by position or by name, got 0.5"),
    (dict(dense_layers=b"ab"), TypeError, "dense_layers must be a tuple of positions and names, got b'ab'"),
    (dict(dense_layers=(0, 1, 0)), ValueError, "dense_layers must name a layer once, got 0 twice"),
    (dict(dense_layers=(True,)), TypeError, "dense_layers must name layers by position or by name, got True"),
    (dict(layer_configs=[SPARSE]), TypeError, "layer_configs must map layers"),
    (dict(layer_configs=b"ab"), TypeError, "layer_configs must map layers"),
    (dict(layer_configs=["ab"]), TypeError, "layer_configs must map layers"),
    (dict(layer_configs=[("a", SPARSE), ("a", WINDOW)]), ValueError, "layer_configs must name a layer once, got 'a' twice"),
    (dict(dense_layers=(0,), layer_configs={0: SPARSE}), ValueError, "dense_layers must not name a layer of layer_configs, got 0"),
    (dict(layer_configs={0: {"topk": 3}}), TypeError, r"layer_configs\[0\] must be an SSTAConfig, got dict"),
])
def test_bad_schedules(options, error, message):
    with pytest.raises(error, match=message):
        Schedule(**options)


@pytest.mark.parametrize("schedule, message", [
    (Schedule(dense_layers=(2,)), r"dense_layers must lie in \[-2, 2\) for this model's 2 layers, got 2"),
    (Schedule(dense_layers=("blocks.9.attn1",)), "dense_layers must name video .* such as 'blocks.0.attn1', got 'blocks.9.attn1'"),
    (Schedule(layer_configs={-3: SPARSE}), "layer_configs must lie in"),
    (Schedule(dense_layers=(0,), layer_configs={"blocks.0.attn1": SPARSE}), "dense_layers must not name a layer of layer_configs"),
    (Schedule(dense_layers=(0, -2)), "dense_layers must name a layer once, got 0 and -2, which are both blocks.0.attn1"),
    (Schedule(layer_configs={1: SPARSE, "blocks.1.attn1": WINDOW}), "layer_configs must name a layer once, got 1 and 'blocks.1.attn1'"),
    (Schedule(densities=(1, 0.2)), "schedule must not count steps without a scheduler, got dense_steps = 0.0, densities = .1.0, 0.2."),
    (Schedule(dense_steps=0.2), "schedule must not count steps without a scheduler, got dense_steps = 0.2"),
])
def test_schedules_that_the_model_cannot_follow_install_nothing(schedule, message):
    model = TINY["wan"].build()
    with pytest.raises(ValueError, match=message):
        apply_ssta(model, SPARSE, schedule=schedule)
    assert not model._forward_pre_hooks and type(model.blocks[0].attn1.processor).__name__ == "WanAttnProcessor"


def test_wrong_kinds_are_refused():
    model = TINY["wan"].build()
    with pytest.raises(TypeError, match="schedule must be a Schedule or None, got float"):
        apply_ssta(model, schedule=0.15)
    with pytest.raises(TypeError, match="scheduler must be a diffusers scheduler, which has a tensor of timesteps, got str"):
        apply_ssta(model, scheduler="ddim")
