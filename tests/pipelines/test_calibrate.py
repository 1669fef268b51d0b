"""calibrate: what is measured, what is chosen, the file, and what applies it."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_models import TINY, run
from tiny_pipelines import PIPELINES, latents, wan_with_frames
from torch import Tensor

import ssta
from ssta import SSTAConfig
from ssta.pipelines import Calibration, Schedule, apply_ssta
from ssta.pipelines.allocation import DENSE, Setting, allocate, worthwhile
from ssta.pipelines.calibrate import calibrate, main
from ssta.pipelines.calibration import COMPENSATION_COST, candidate

TILES = SSTAConfig(tile_thw=(1, 2, 2), kernel_thw=(1, 1, 1), compensation="linear")
CALL = TINY["wan"].call()
COSTS = (2.7, 2.75, 2.8, 2.85, 2.9, 2.95, 3.0)


def wan(layers: int = 3, **options):
    return TINY["wan"].build(layers=layers, **options)


def of_one_forward(model, schedule=None, **options) -> Calibration:
    options = {"density": 0.3, "config": TILES} | options
    return calibrate(model, schedule=schedule or Schedule(), run=lambda: run(model, CALL), **options)


@pytest.fixture(scope="module")
def measured() -> Calibration:
    """Of three layers, all of them sparse, in one forward."""
    return of_one_forward(wan(), extra=3)


@pytest.fixture(scope="module")
def of_a_pipeline() -> tuple:
    """(pipeline, its call, what it generated before, its calibration, what was said)."""
    tiny, said = PIPELINES["wan"], []
    pipe = tiny.build(layers=3)
    before = latents(pipe, **tiny.call)
    return pipe, tiny.call, before, calibrate(pipe, [tiny.call], target=0.03, config=TILES, steps=4, say=said.append), said


def attended(model, layer: str) -> Tensor:
    """What the attention ``layer`` gives in a forward, before its last projection; and the forward's own output."""
    outputs = []
    hook = model.get_submodule(layer).to_out[0].register_forward_pre_hook(lambda _, args: outputs.append(args[0].double()))
    result = run(model, CALL)
    hook.remove()
    return outputs[0], result.double()


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


# The choice


def curves(seed: int, kinds=("linear",)) -> list[list[Setting]]:
    rng = random.Random(seed)
    return [[Setting(cost := rng.uniform(0.05, 0.9), rng.random() * rng.random(), cost, rng.choice(kinds)) for _ in range(5)]
            for _ in range(3)]


def total(settings, name: str) -> float:
    return sum(getattr(setting, name) for setting in settings)


def test_settings_worth_their_cost_are_convex_and_under_none_of_the_others():
    for seed in range(50):
        hull = worthwhile(curves(seed)[0])
        gains = [(a.error - b.error) / (b.cost - a.cost) for a, b in itertools.pairwise(hull)]
        assert hull[-1] == DENSE and all(a > b > 0 for a, b in itertools.pairwise([*gains, 1e-9]))
        for setting in curves(seed)[0]:
            for a, b in itertools.pairwise(hull):
                if a.cost <= setting.cost <= b.cost:
                    assert setting.error >= a.error + (b.error - a.error) * (setting.cost - a.cost) / (b.cost - a.cost) - 1e-12


@pytest.mark.parametrize("kinds", [("linear",), ("linear", "none")])
def test_no_choice_of_one_setting_a_layer_is_cheaper(kinds):
    for seed in range(30):
        layers = curves(seed, kinds)
        for error in (1e-6, 0.05, 0.2, 0.6):
            chosen = allocate(layers, error=error)
            assert total(chosen, "error") <= error + 1e-12 or chosen == [hull[0] for hull in map(worthwhile, layers)]
            # Halves are to be had where only densities differ; nobody without them does better.
            if len(kinds) == 1 and not any(setting is DENSE for setting in chosen):
                best = min(total(some, "cost") for some in itertools.product(*[[*layer, DENSE] for layer in layers])
                           if total(some, "error") <= error)
                assert total(chosen, "cost") <= best + 1e-9


@pytest.mark.parametrize("kinds", [("linear",), ("linear", "none")])
def test_a_looser_target_never_costs_more_and_more_cost_never_leaves_more_error(kinds):
    for seed in range(30):
        layers = curves(seed, kinds)
        costs = [total(allocate(layers, error=error), "cost") for error in (1e-9, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 5)]
        assert costs == sorted(costs, reverse=True) and costs[0] <= 3
        bought = [allocate(layers, cost=cost) for cost in COSTS]
        errors = [total(one, "error") for one in bought]
        assert errors == sorted(errors, reverse=True) and errors[-1] == 0
        assert all(total(one, "cost") <= cost + 1e-9 for one, cost in zip(bought, COSTS))


def test_a_calibration_chooses_again_by_the_same_laws(measured):
    aims = [measured.chosen(target=target) for target in (1e-9, 1e-3, 0.01, 0.02, 0.05, 0.3)]
    costs = [aim.models[0].cost for aim in aims]
    assert costs == sorted(costs, reverse=True) and costs[0] == 1 and costs[-1] < 0.2
    assert all(aim.models[0].error <= aim.target for aim in aims)
    assert all(layer.density == 1 and layer.error == 0 for layer in aims[0].models[0].layers)
    for density in (0.08, 0.1, 0.2, 0.35, 0.6):
        [model] = measured.chosen(density=density).models
        # Any density that was measured and is as cheap.
        alike = math.sqrt(sum((layer.weight * min(tried.error for tried in layer.measured if tried.density <= density)) ** 2
                              for layer in model.layers))
        assert model.cost <= density + COMPENSATION_COST + 1e-9 and model.error <= alike
    with pytest.raises(ValueError, match="density must be at least 0.05[0-9], the least that was measured .*got 0.01"):
        measured.chosen(density=0.01)


# What is measured


def test_the_error_of_the_first_layer_is_what_it_has_when_the_choice_is_applied(measured):
    model = wan()
    [part] = measured.models
    dense = [attended(model, layer.layer) for layer in part.layers]
    with apply_ssta(model, measured):
        sparse = [attended(model, layer.layer) for layer in part.layers]
    # Its density need not be one of those that were measured.
    assert any(0 < layer.error < 1 for layer in part.layers)
    errors = [relative(a, b) for (a, _), (b, _) in zip(sparse, dense)]
    # The later layers are given what the earlier ones left.
    assert errors == pytest.approx([layer.error for layer in part.layers], rel=0.3)
    assert part.error == pytest.approx(relative(sparse[0][1], dense[0][1]), rel=0.5)
    for tried in part.layers[0].measured[3::5]:
        with apply_ssta(model, candidate(TILES, tried.density, tried.compensation), schedule=Schedule()):
            assert relative(attended(model, part.layers[0].layer)[0], dense[0][0]) == pytest.approx(tried.error, rel=1e-3)


def test_what_a_layer_counts_is_what_its_error_does_to_the_models_output():
    model = wan()
    # One sparse layer: nothing is left to estimate.
    found = of_one_forward(model, Schedule(dense_layers=(0, 2)), extra=1)
    [layer] = found.models[0].layers
    assert layer.layer == "blocks.1.attn1" and found.models[0].sites == 3
    exact = run(model, CALL)
    tried = next(tried for tried in layer.measured if tried.density >= 0.16)
    with apply_ssta(model, candidate(TILES, 0.16, "linear"), schedule=Schedule(dense_layers=(0, 2))):
        assert layer.weight * tried.error == pytest.approx(relative(run(model, CALL), exact), rel=1e-3)
    assert of_one_forward(model, extra=0).models[0].layers[0].weight == pytest.approx(math.sqrt(1 / 3))


def test_errors_fall_with_the_density_and_are_smaller_with_compensation(measured):
    for layer in measured.models[0].layers:
        linear, none = ([tried for tried in layer.measured if tried.compensation == kind] for kind in ("linear", "none"))
        assert len(linear) == len(none) == 8
        for errors in ([tried.error for tried in linear], [tried.error for tried in none]):
            assert errors == sorted(errors, reverse=True)
        assert sum(tried.error for tried in linear) < sum(tried.error for tried in none)


def test_a_window_counts_with_what_it_takes():
    found = of_one_forward(wan(), config=replace(TILES, kernel_thw=(3, 3, 3)), density=0.9)
    densities = [tried.density for tried in found.models[0].layers[0].measured]
    # 27 of the 36 tiles, and the three frames have no more.
    assert densities[:7] == [0.75] * 7
    with pytest.raises(ValueError, match="density must be at least 0.750, the least that was measured"):
        found.chosen(density=0.3)


def test_masked_text_and_both_transformers():
    tiny = PIPELINES["hunyuan_video"]
    found = calibrate(tiny.build(), [tiny.call], target=0.05, config=TILES, steps=2)
    assert 0 < found.models[0].error <= 0.05
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    found = calibrate(pipe, [tiny.call], target=0.05, config=TILES, steps=4)
    # Of four steps the first transformer takes two, of which one is dense; each step has two forwards.
    assert [(model.name, model.forwards) for model in found.models] == [("transformer", 2), ("transformer_2", 4)]
    with apply_ssta(pipe, found) as handle:
        latents(pipe, **tiny.call)
        assert [run.density for run in handle.report()][1] < 1
    with pytest.raises(ValueError, match="got a pipeline with transformer and transformer_2"):
        apply_ssta(pipe, of_one_forward(wan()))
    with pytest.raises(ValueError, match="measured with, a pipeline with transformer and transformer_2, got one transformer"):
        apply_ssta(pipe.transformer, found)


def test_heads_that_share_are_not_compensated():
    shared = replace(TILES, compensation="none", mask_share_within_head=True)
    found = of_one_forward(wan(), config=shared)
    assert {tried.compensation for tried in found.models[0].layers[0].measured} == {"none"}


def test_candidates_keep_all_but_the_budget():
    config = SSTAConfig(threshold=0.9, topk=5, variants=((1, {"tile_thw": (1, 8, 8), "topk": 3}), (9, {"threshold": 0.5})))
    made = candidate(config, 0.2, "linear")
    assert (made.density, made.topk, made.threshold, made.scored_by) == (0.2, None, 0, "error")
    assert made.for_canvas((1, 8, 8)).tile_thw == (1, 8, 8) and made.for_canvas((1, 8, 8)).density == 0.2
    assert candidate(made, 0.3, "none") == replace(made, density=0.3, compensation="none")
    importance = candidate(SSTAConfig.hunyuan_video_15(), 0.1, "linear")
    assert importance.sampling_type == "importance" and importance.pad_type == "zero"
    halves = SSTAConfig(compensation="linear", compensation_parts=2, sampling_type="error")
    assert candidate(halves, 0.1, "none").scored_by == "similarity" and candidate(halves, 0.1, "linear").compensation_parts == 2


# A pipeline, end to end


def test_a_pipeline_is_calibrated_and_left_as_it_was(of_a_pipeline):
    pipe, call, before, found, said = of_a_pipeline
    assert torch.equal(latents(pipe, **call), before)
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks
    [model] = found.models
    assert (model.name, model.model, model.sites, model.heads, model.head_dim) == ("transformer", "WanTransformer3DModel", 3, 2, 16)
    # The warm-up keeps the first of four steps dense, and the first layer.
    assert model.forwards == 6 and [layer.layer for layer in model.layers] == ["blocks.1.attn1", "blocks.2.attn1"]
    assert 0.02 < model.error <= 0.03 and model.density < 0.9
    assert said[0] == "prompt 1 of 1: generating densely" and said[6] == "prompt 1 of 1: 6 forwards measured" and len(said) == 8
    text = str(found)
    assert text.startswith("calibration for target 0.03\nlayer") and "blocks.2.attn1" in text and f"{model.error:.4f}" in text


def test_a_file_does_what_its_calibration_does(of_a_pipeline, tmp_path):
    pipe, call, before, found, _ = of_a_pipeline
    found.save(tmp_path / "wan.json")
    assert Calibration.load(tmp_path / "wan.json") == found
    outputs = []
    for config in (found, tmp_path / "wan.json", str(tmp_path / "wan.json")):
        with apply_ssta(pipe, config) as handle:
            outputs.append(latents(pipe, **call))
            runs = handle.report()
        # Warm-up as by default, and every layer its own density.
        assert [run.dense_steps for run in runs] == [4, 1, 1] and runs[0].density == 1
        assert [run.density for run in runs[1:]] == pytest.approx([layer.density for layer in found.models[0].layers], abs=0.02)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert 0 < relative(outputs[0], before) < 0.1
    # Another canvas, another number of steps, and the transformer alone.
    with apply_ssta(pipe, found):
        assert latents(pipe, steps=3, **call | {"height": 64, "width": 160}).isfinite().all()
    with apply_ssta(pipe.transformer, found, scheduler=pipe.scheduler) as handle:
        assert handle.schedule.dense_layers == ("blocks.0.attn1",)


def test_a_small_target_is_dense(of_a_pipeline):
    pipe, call, before, found, _ = of_a_pipeline
    with apply_ssta(pipe, found.chosen(target=1e-8)):
        torch.testing.assert_close(latents(pipe, **call), before)


def test_a_schedule_of_ones_own(of_a_pipeline):
    pipe, call, _, found, _ = of_a_pipeline
    with apply_ssta(pipe, found, schedule=Schedule(dense_layers=(0, -1))) as handle:
        latents(pipe, **call)
        assert [run.dense_steps for run in handle.report()] == [4, 0, 4]
    made = calibrate(pipe, [call], density=0.3, config=TILES, schedule=Schedule(dense_steps=0.5, dense_layers=(1,), refresh=2), steps=4,
                     extra=0)
    assert made.models[0].forwards == 4
    with apply_ssta(pipe, made) as handle:
        assert handle.schedule.dense_steps == 0.5 and handle.schedule.dense_layers == ("blocks.1.attn1",) and handle.schedule.refresh == 2
    for schedule, message in [
            (Schedule(), "schedule must keep dense what was dense when the calibration was measured, got blocks.0.attn1 sparse"),
            (Schedule(layer_configs={1: TILES}), "schedule must leave .* to the calibration, got layer_configs"),
            (Schedule(density=0.2), "schedule must leave .* to the calibration, got density = 0.2"),
            (Schedule.by_noise(0.2), "schedule must leave densities to the calibration")]:
        with pytest.raises(ValueError, match=message):
            apply_ssta(pipe, found, schedule=schedule)
    assert torch.equal(latents(pipe, **call), latents(pipe, **call))


def test_compiled_blocks_are_measured_as_they_are():
    model = wan(layers=2)
    plain = of_one_forward(model)
    model.compile_repeated_blocks(backend="eager")
    assert of_one_forward(model) == plain


# Mistakes


@pytest.mark.parametrize("change, kind, message", [
    ({"target": 0.0}, ValueError, r"target must lie in \(0, 1\), .*got 0.0"), ({"target": 1}, ValueError, r"target must lie in \(0, 1\)"),
    ({"target": "low"}, TypeError, "target must be a"), ({"target": None}, ValueError, "target must be given or density, and not both"),
    ({"density": 0.2}, ValueError, "target must be given or density, and not both, got target = 0.05 and density = 0.2"),
    ({"target": None, "density": 1.5}, ValueError, r"density must lie in \(0, 1\]"),
    ({"prompts": None}, ValueError, "prompts must be given, or run, and not both, got neither"),
    ({"run": lambda: None}, ValueError, "prompts must be given, or run, and not both, got both"),
    ({"prompts": []}, ValueError, "prompts must hold at least one, got none"),
    ({"prompts": "a cat"}, TypeError, "prompts must be a list of prompts, got str"),
    ({"prompts": [3]}, TypeError, r"prompts\[0\] must be a str or a dict"),
    ({"call": 3}, TypeError, "call must be a dict"), ({"steps": 0}, ValueError, "steps must be at least 1"),
    ({"extra": -1}, ValueError, "extra must be at least 0"), ({"seed": 0.5}, TypeError, "seed must be an int"),
    ({"config": SSTAConfig(sparse_type="sta")}, ValueError, "config must have sparse_type 'ssta' or 'block_attn'.*got 'sta'"),
    ({"config": SSTAConfig(sampling_type=lambda q_descriptors, k_descriptors: q_descriptors @ k_descriptors.mT)}, ValueError,
     "config must be of names and numbers, which a file can hold, got sampling_type"),
    ({"config": 3}, TypeError, "config must be an SSTAConfig"),
    ({"schedule": Schedule(layer_configs={1: TILES})}, ValueError, "schedule must have no layer_configs"),
    ({"schedule": Schedule(density=0.3)}, ValueError, "schedule must have no density, .*got 0.3"),
    ({"schedule": Schedule(dense_steps=1)}, ValueError, "model must run at least one step .*got none of transformer"),
    ({"schedule": Schedule(dense_layers=(0, 1))}, ValueError, "model must run at least one step")])
def test_bad_arguments(change, kind, message):
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    with pytest.raises(kind, match=message):
        calibrate(pipe, **{"prompts": [tiny.call], "target": 0.05, "config": TILES, "steps": 2} | change)
    assert not pipe.transformer._forward_hooks and "_ssta_installation" not in vars(pipe.transformer)


def test_bad_models():
    model = wan()
    with pytest.raises(ValueError, match="run must be given for a transformer, which takes no prompts, got prompts with WanTransformer3D"):
        calibrate(model, ["a cat"], target=0.05)
    with pytest.raises(TypeError, match="run must be a function"):
        calibrate(model, run=3, target=0.05)
    with pytest.raises(ValueError, match="call must be empty with run, which calls by itself, got height"):
        calibrate(model, run=lambda: None, target=0.05, call={"height": 3})
    with pytest.raises(ValueError, match="got none of WanTransformer3DModel within 1 runs"):
        calibrate(model, run=lambda: None, target=0.05)
    with apply_ssta(model), pytest.raises(ValueError, match="SSTA applied already"):
        of_one_forward(model)
    model.blocks[1].attn1.to_v.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="model must give finite outputs to be calibrated, got others from blocks.1"):
        of_one_forward(model)


@pytest.mark.parametrize("model, message", [
    (lambda: wan(layers=2), "WanTransformer3DModel of 3 layers with 2 heads of 16, got WanTransformer3DModel of 2 layers"),
    (lambda: wan(attention_head_dim=8, num_attention_heads=4), "of 3 layers with 2 heads of 16, got .* of 3 layers with 4 heads of 8"),
    (lambda: TINY["ltx"].build(layers=3), "WanTransformer3DModel of 3 layers .*, got LTXVideoTransformer3DModel of 3 layers")])
def test_a_calibration_of_another_model_is_refused(measured, model, message):
    model = model()
    with pytest.raises(ValueError, match="model must be what the calibration was measured with, .*" + message):
        apply_ssta(model, measured)
    assert "_ssta_installation" not in vars(model)


def test_a_layer_by_another_name_is_refused(measured):
    [part] = measured.models
    renamed = replace(measured, models=(replace(part, layers=(replace(part.layers[0], layer="blocks.9.attn1"), *part.layers[1:])),))
    with pytest.raises(ValueError, match="must have the layers that the calibration was measured with, got .* without blocks.9.attn1"):
        apply_ssta(wan(), renamed)


def test_files_that_are_no_calibration_of_this_version(measured, tmp_path):
    path = tmp_path / "c.json"
    measured.save(path)
    good = json.loads(path.read_text())
    for change, message in [
            (None, "c.json must be a calibration as Calibration.save writes it, got no JSON"), ([], "got JSON without \"format\""),
            ({}, "got JSON without \"format\""), (good | {"schema": 2}, "must be a calibration of schema 1, .* got schema 2 of ssta"),
            (good | {"ssta": "0.0.1"}, f"must be measured with the ssta that applies it, {ssta.__version__}, got one of ssta 0.0.1"),
            (good | {"target": 2.0}, "got one that was changed: ValueError"), (good | {"models": 3}, "got one that was changed: TypeError"),
            (good | {"config": {"topk": 0}}, "got one that was changed: ValueError: topk must be"),
            ({name: value for name, value in good.items() if name != "schedule"}, "got one that was changed: KeyError: 'schedule'"),
            (good | {"models": [good["models"][0] | {"layers": []}]}, "layers must hold at least one")]:
        path.write_text("no" if change is None else json.dumps(change))
        with pytest.raises(ValueError, match=message):
            apply_ssta(wan(), path)
    with pytest.raises(ValueError, match="config must be .* the name of its file, got 'balanced', which is no file"):
        apply_ssta(wan(), "balanced")
    with pytest.raises(ValueError, match="preset must stand alone"):
        apply_ssta(wan(), measured, preset="balanced")


# The command


def test_the_command(monkeypatch, capsys, tmp_path):
    pipe = wan_with_frames()
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda name, **options: pipe)
    path = str(tmp_path / "wan.json")
    found = main(["some/model", "--prompt", "a cat", "--prompt", "a dog", "--target", "0.05", "--output", path, "--height", "96", "--width",
                  "128", "--num-frames", "9", "--steps", "2", "--dtype", "float32"])
    assert Calibration.load(path) == found and found.models[0].forwards == 4
    out = capsys.readouterr()
    assert "calibration for target 0.05" in out.out and "prompt 2 of 2: 4 forwards measured" in out.err
    with apply_ssta(pipe, path):
        pass


@pytest.mark.parametrize("arguments, message", [
    (["--target", "2"], "target must lie in"), ([], "one of the arguments --target --density is required"),
    (["--target", ".1", "--height", "97"], "height"), (["--target", ".1", "--steps", "0"], "steps must be at least 1")])
def test_mistakes_on_the_command_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: wan_with_frames())
    with pytest.raises(SystemExit):
        main(["some/model", "--prompt", "a cat", "--output", str(tmp_path / "c.json"), "--dtype", "float32", *arguments])
    assert message in capsys.readouterr().err
