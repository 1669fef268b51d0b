"""What a report says of compensation: the share of the softmax that was computed exactly, by layer and in its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_hunyuan import EVERYTHING, SPARSE
from tiny_models import TINY, run

from ssta import explain
from ssta.pipelines import Schedule, apply_ssta, set_density
from ssta.pipelines.patch import processor
from ssta.pipelines.patch.report import LayerRun, RunReport
from ssta.report import heads_without_estimate, mass_summary


def wan(sharpness: float) -> torch.nn.Module:
    """Where heads look at single tokens nothing is estimated."""
    model = TINY["wan"].build()
    for block in model.blocks:
        block.attn1.norm_q.weight.data.mul_(sharpness)
    return model


def test_the_exact_mass_is_that_of_the_layer(monkeypatch):
    model, call = wan(1 / 6), TINY["wan"].call()
    masses, layer = [], processor.attend

    def noted(*args, **options):
        result = layer(*args, **options)
        masses.append(result.exact_mass)
        return result

    monkeypatch.setattr(processor, "attend", noted)
    with apply_ssta(model, replace(SPARSE, compensation="linear"), schedule=Schedule(dense_layers=(0,))) as handle:
        run(model, call)
        dense, sparse = handle.report()
        (mass,) = masses
        assert dense.exact_mass is None and mass.shape[1] == 2
        mean, low, worst = sparse.exact_mass
        assert mean == pytest.approx(float(mass.mean())) and worst == pytest.approx(float(mass.mean(-1).min()))
        assert float(mass.min()) <= low <= mean < 1 and low <= worst <= mean
        head, *rows = str(handle.report()).splitlines()
        assert "exact mass" in head and f"{100 * mean:.0f} % / {100 * low:.0f} % / {100 * worst:.0f} %" in rows[1]


def test_everything_is_exact_where_everything_is_selected():
    model, call = wan(1 / 6), TINY["wan"].call()
    with apply_ssta(model, replace(EVERYTHING, compensation="linear"), schedule=Schedule()) as handle:
        run(model, call)
        assert handle.report()[0].exact_mass == pytest.approx((1, 1, 1))


def test_a_layer_says_what_its_last_dense_step_ran():
    """Also after sparse steps; a layer without a dense step says nothing."""
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, replace(SPARSE, topk=None, density=0.5), schedule=Schedule(dense_layers=(0,))) as handle:
        run(model, call)
        assert [layer.dense_by for layer in handle.report()] == ["default backend", None]
        set_density(handle, 1.0)
        run(model, call)
        set_density(handle, 0.5)
        run(model, call)
        assert [(layer.implementation, layer.dense_by) for layer in handle.report()] == [
            ("dense, default backend", "default backend"), ("torch", "default backend")]


def test_without_compensation_there_is_no_such_column():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        run(model, call)
        assert handle.report()[0].exact_mass is None and "exact mass" not in str(handle.report())


def test_heads_that_look_at_single_tokens_have_no_estimate():
    model, call = wan(20), TINY["wan"].call()
    with apply_ssta(model, replace(SPARSE, compensation="linear"), schedule=Schedule()) as handle:
        run(model, call)
        assert handle.report()[0].exact_mass is None and handle.report()[0].without_estimate == (2, 2)
        head, row, *_ = str(handle.report()).splitlines()
        assert "no estimate" in head and "2 of 2 heads" in row


def test_reports_and_explanations_say_how_many_heads_have_no_estimate():
    mass = torch.rand(2, 3, 5)
    mass[1, 2] = torch.nan
    assert heads_without_estimate(mass) == (1, 6) and heads_without_estimate(mass[:1]) == (0, 3)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 128, 16)
    k[:, 1:] *= 20
    options = dict(value=v, topk=3, tile_thw=(1, 4, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn", compensation="linear")
    one = explain(q, k, (2, 8, 8), **options)
    assert one.without_estimate == (1, 2) and "1 of 2 heads, whose other tiles are dropped" in str(one)
    assert "1 of 2 heads have no estimate" in one.error_sources[1]
    none = explain(q[:, 1:], k[:, 1:], (2, 8, 8), **options | {"value": v[:, 1:]})
    assert none.without_estimate == (1, 1) and "dropped: no head has an estimate" in none.error_sources[0]
    assert "estimated" not in none.error_sources[0] and none.to_dict()["without_estimate"] == [1, 1]


def test_comparisons_count_heads_without_an_estimate():
    run = LayerRun("a", "torch", (3, 6, 8), 144, 8, 0.2)
    report = RunReport([run, replace(run, without_estimate=(1, 4)), replace(run, without_estimate=(2, 4))])
    assert report.without_estimate() == pytest.approx(3 / 8) and RunReport([run]).without_estimate() is None


def test_mean_percentile_and_worst_head():
    shares = torch.linspace(0, 1, 101)[None, None].repeat(1, 2, 1)
    shares[:, 1] = 0.9
    mean, low, worst = mass_summary(shares)
    # Of 202 shares the eleventh is the first above a twentieth of them.
    assert mean == pytest.approx(0.7) and worst == pytest.approx(0.5) and low == pytest.approx(0.1)


def test_the_mean_density_counts_dense_steps():
    run = LayerRun("a", "torch", (3, 6, 8), 144, 8, 0.2, steps=10, dense_steps=2)
    assert RunReport([run]).mean_density() == pytest.approx((2 + 8 * 0.2) / 10)
    assert RunReport([replace(run, steps=None, dense_steps=None)]).mean_density() == 0.2


def test_a_table_explains_its_columns_and_gives_each_reason_once():
    run = LayerRun("a", "torch", (3, 6, 8), 144, 8, 0.2, steps=4, dense_steps=0, explanation=(
        "not 'hopper', which requires a GPU", "not 'triton', which requires a GPU", "not 'cudnn', which requires sm_90"))
    dense = replace(run, layer="b", implementation="dense, torch", tiles=None, density=1.0, dense_steps=4)
    lines = str(RunReport([dense, run])).splitlines()
    assert " all 4 " in lines[1] and " 0 of 4 " in lines[2]
    assert lines[4:] == ["density: share of the pairs of a layer's tiles that is computed exactly, conditions included",
                         "torch: not 'hopper' and not 'triton', which requires a GPU", "torch: not 'cudnn', which requires sm_90"]
    with_mass = str(RunReport([replace(run, exact_mass=(0.6, 0.4, 0.5))]))
    assert "\nexact mass: share of the softmax that is computed exactly, " in with_mass
    assert "mean / 5th percentile / worst head" in with_mass
