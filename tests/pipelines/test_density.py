"""A density that follows the noise: the published curve, the few values that steps have, what it takes the place of, what was computed."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from tiny_hunyuan import CANVAS, SPARSE, WINDOW
from tiny_models import TINY, run
from tiny_pipelines import PIPELINES, latents

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta, processor
from ssta.pipelines.density import LEVELS, NoiseDensity, levels_of, log_snr, nearest, with_density

# No window, so that a density is met exactly; 2 x 2 x 2 tiles.
TILES = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), sparse_type="block_attn")


def falling(ratio: float) -> float:
    """DFSAttn's, in thirds of the noise."""
    return 0.75 if ratio < log_snr(2 / 3) else 0.5 if ratio < log_snr(1 / 3) else 0.25


# The curve


def test_the_log_signal_to_noise_ratio_of_flow_matching():
    assert log_snr(0.5) == 0 and log_snr(0.9) == pytest.approx(2 * math.log(1 / 9)) and log_snr(0.1) == pytest.approx(-log_snr(0.9))
    # The first and the last timestep have finite ones.
    assert -18.5 < log_snr(1.0) < -18 < 18 < log_snr(0.0) < 18.5


@pytest.mark.parametrize("tau", [0.9, 0.99, 0.999])
def test_the_curve_is_the_published_one(tau):
    curve = NoiseDensity(0.1, reached=0.6, halfway=0.9, most=0.8, tau=tau)
    assert curve(log_snr(0.9)) == pytest.approx(0.45)
    assert curve(log_snr(0.6)) == pytest.approx(0.1 + 0.7 * (1 - tau))
    k = math.log(tau / (1 - tau)) / abs(log_snr(0.6) - log_snr(0.9))
    for noise in (0.0, 0.2, 0.7, 0.95, 1.0):
        ratio = log_snr(noise)
        assert curve(ratio) == pytest.approx(0.1 + 0.7 * (1 - 1 / (1 + math.exp(-k * (ratio - log_snr(0.9))))))
    # Far outside it neither overflows nor leaves its range.
    assert curve(-1e6) == pytest.approx(0.8) and curve(1e6) == pytest.approx(0.1)
    densities = [curve(log_snr(i / 100)) for i in range(101)]
    assert densities == sorted(densities)


def test_a_schedule_by_noise_is_a_value():
    schedule = Schedule.by_noise(0.2, reached=0.5, dense_layers=(0,), refresh=5)
    assert schedule == Schedule(density=NoiseDensity(0.2, reached=0.5), dense_layers=(0,), refresh=5)
    assert hash(schedule) == hash(Schedule.by_noise(0.2, reached=0.5, dense_layers=(0,), refresh=5)) != hash(Schedule.by_noise(0.2))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert Schedule.by_noise(0.2).follows_steps and not Schedule(density=0.2).follows_steps


@pytest.mark.parametrize("options, message", [
    (dict(least=0), "least and most must be densities.* got least = 0 and most = 1.0"),
    (dict(least=0.5, most=0.4), "got least = 0.5 and most = 0.4"), (dict(least=0.5, most=1.5), "got least = 0.5 and most = 1.5"),
    (dict(least=0.2, reached=0.9, halfway=0.8), "0 < reached < halfway < 1.*got reached = 0.9 and halfway = 0.8"),
    (dict(least=0.2, reached=0), "got reached = 0"), (dict(least=0.2, halfway=1), "halfway = 1"), (dict(least=float("nan")), "least = nan"),
    (dict(least=0.2, tau=0.5), r"tau must lie in \(0.5, 1\), got 0.5"), (dict(least=0.2, tau=1), "tau must lie")])
def test_bad_curves(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule.by_noise(**options)


# Few values


def test_a_density_of_few_values_keeps_them():
    assert levels_of(falling) == (0.25, 0.5, 0.75) and levels_of(lambda ratio: 0.3) == (0.3,)
    schedule = Schedule(density=falling)
    assert [schedule.levels[schedule.level_at(noise)] for noise in (1.0, 0.7, 0.5, 0.2, 0.0)] == [0.75, 0.75, 0.5, 0.25, 0.25]


def test_a_smooth_density_takes_the_nearest_of_few():
    levels = Schedule.by_noise(0.1).levels
    # Nearly 1 is dense.
    assert len(levels) == LEVELS and levels[0] == pytest.approx(0.1, rel=1e-3) and levels[-1] == 1
    factors = [high / low for low, high in zip(levels, levels[1:])]
    assert factors == pytest.approx([factors[0]] * 3)
    for i in range(1, 100):
        chosen = levels[nearest(levels, i / 100)]
        assert chosen == min(levels, key=lambda level: max(level / (i / 100), i / 100 / level))


@pytest.mark.parametrize("options, error, message", [
    (dict(density=0), ValueError, r"density must lie in \(0, 1\], a share of the tile pairs, got 0"),
    (dict(density=1.2), ValueError, "density must lie in .*got 1.2"), (dict(density=float("nan")), ValueError, "density must lie"),
    (dict(density="fast"), TypeError, "density must be a number, got 'fast'"), (dict(density=True), TypeError, "density must be a number"),
    (dict(density=lambda ratio: 2.0), ValueError, r"schedule's density must give values in \(0, 1\], got 2.0 for a log sig"),
    (dict(density=lambda ratio: None), TypeError, "schedule's density must be a number, got None"),
    (dict(density=lambda ratio: float("nan") if ratio > 18 else 0.5), ValueError, "got nan for a log signal-to-noise ratio of 18.4")])
def test_bad_densities(options, error, message):
    with pytest.raises(error, match=message):
        Schedule(**options)


# What it takes the place of


def test_it_takes_the_place_of_the_family_s_budget_in_all_variants():
    config = with_density(SSTAConfig.hunyuan_video_15(), 0.3)
    assert config.density == 0.3 and config.topk is None and config.tile_thw == (6, 8, 8)
    image = config.for_canvas((1, 45, 80))
    assert (image.density, image.topk, image.tile_thw) == (0.3, None, (1, 16, 24)) and config.for_canvas((31, 45, 80)).topk is None
    for name in ("hunyuan_video_15", "wan", "ltx"):
        with apply_ssta(TINY[name].build(), schedule=Schedule(density=0.3)) as handle:
            assert handle.config.density == 0.3 and handle.config.topk is None


def test_it_takes_the_place_of_another_density():
    assert with_density(replace(TILES, density=0.7), 0.2, chosen=True) == replace(TILES, density=0.2)
    varied = replace(TILES, density=0.7, variants=((1, {"density": 0.9, "tile_thw": (1, 4, 4)}),))
    assert with_density(varied, 0.2, chosen=True).for_canvas((1, 8, 8)) == replace(TILES, tile_thw=(1, 4, 4), density=0.2)


@pytest.mark.parametrize("config, message", [
    (SPARSE, "got topk = 2 in config and density = 0.4 in schedule; leave topk out of config"),
    (SSTAConfig(threshold=0.9), "got threshold = 0.9 in config and density = 0.4 in schedule"),
    (SSTAConfig(budget=lambda scores: scores > 0), "got budget = .* in config and density = 0.4 in schedule"),
    (SSTAConfig(variants=((1, {"topk": 3}),)), "got topk = 3 in config and density = 0.4"),
    (WINDOW, "schedule's density = 0.4 must fit the configuration: sparse_type must be 'ssta' .* got 'sta'")])
@pytest.mark.parametrize("density", [0.4, lambda ratio: 0.4])
def test_a_budget_that_somebody_chose_is_not_lost(config, message, density):
    model = TINY["wan"].build()
    with pytest.raises(ValueError, match=message):
        apply_ssta(model, config, schedule=Schedule(density=density))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("density", [0.5, lambda ratio: 0.5])
def test_layers_of_their_own_keep_their_budget(density):
    model, call = TINY["wan"].build(layers=4), TINY["wan"].call()
    own = replace(TILES, density=0.25)
    # Also where it is the model's too.
    for config in (TILES, own):
        with apply_ssta(model, config, schedule=Schedule(density=density, layer_configs={1: own}, dense_layers=(3,))) as handle:
            run(model, call)
            assert [layer.density for layer in handle.report()] == [0.5, 0.25, 0.5, 1]


# What is computed


@pytest.mark.parametrize("name", ["wan", "ltx", "mochi", "cogvideox"])
def test_steps_have_the_density_of_their_noise(monkeypatch, name):
    tiny = PIPELINES[name]
    pipe, densities = tiny.build(), []
    layer = processor.ssta_layer

    def noted(query, key, value, layout, config, **options):
        densities.append(config.density)
        return layer(query, key, value, layout, config, **options)

    monkeypatch.setattr(processor, "ssta_layer", noted)
    with apply_ssta(pipe, TILES, schedule=Schedule(density=falling)) as handle:
        latents(pipe, steps=9, **tiny.call)
        levels = pipe.scheduler.timesteps / 1000
        levels = 1 - levels if name == "mochi" else levels
        expected = [falling(log_snr(float(level))) for level in levels]
        assert densities[::len(densities) // 9] == expected and len(set(expected)) >= 2
        report = handle.report()
        # Tiles of text are computed always, so that there is a little more than the video's.
        assert all(run.densities[0] >= min(expected) and run.densities[1] >= max(expected) for run in report)
        assert all(run.densities[0] < run.sparse_density < run.densities[1] for run in report)
        if name == "wan":
            assert report[0].densities == (0.25, 0.75) and report[0].sparse_density == pytest.approx(sum(expected) / 9)
            assert report.mean_density() == pytest.approx(sum(expected) / 9)
            assert "25.0% to 75.0%" in str(report)


def test_without_a_scheduler_the_timestep_is_read():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, TILES, schedule=Schedule(density=falling)) as handle:
        for timestep, density in ((900, 0.75), (500, 0.5), (100, 0.25)):
            run(model, call | {"timestep": torch.tensor([timestep])})
            assert handle.report()[0].density == density
        with pytest.raises(ValueError, match="must be called with a timestep for schedule's density, got none"):
            model.blocks[0].attn1.processor.context.capture(model, (call["hidden_states"], None, None), {})


def test_dense_rules_come_first_and_a_density_of_1_is_dense():
    pipe, call = PIPELINES["wan"].build(), PIPELINES["wan"].call
    with apply_ssta(pipe, TILES, schedule=Schedule(density=falling, dense_steps=0.5)) as handle:
        latents(pipe, steps=8, **call)
        assert [(run.dense_steps, run.steps) for run in handle.report()] == [(4, 8)] * 2
    with apply_ssta(pipe, TILES, schedule=Schedule(density=falling, dense_above=0.5)) as handle:
        latents(pipe, steps=8, **call)
        assert handle.report()[0].dense_steps == int((pipe.scheduler.timesteps > 500).sum())
        assert handle.report()[0].densities[1] <= 0.5
    with apply_ssta(pipe, TILES, schedule=Schedule.by_noise(0.25, reached=0.5, halfway=0.8)) as handle:
        latents(pipe, steps=8, **call)
        dense, runs = handle.report()[0].dense_steps, handle.report()
        # As many as lie above the middle of the last two levels, by factors.
        (third, last), curve = handle.schedule.levels[-2:], handle.schedule.density
        assert dense == sum(curve(log_snr(t / 1000)) > math.sqrt(third * last) for t in pipe.scheduler.timesteps.tolist()) > 0
        assert runs.mean_density() == pytest.approx((dense + (8 - dense) * runs[0].sparse_density) / 8)


def test_another_density_chooses_anew():
    pipe, call = PIPELINES["wan"].build(), PIPELINES["wan"].call
    with apply_ssta(pipe, TILES, schedule=Schedule(density=falling, refresh=100)) as handle:
        latents(pipe, steps=9, **call)
        assert handle.report()[0].chosen_steps == 3


def test_a_number_is_the_configuration_s_density():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, replace(TILES, density=0.5), schedule=Schedule()):
        expected = run(model, call)
    with apply_ssta(model, TILES, schedule=Schedule(density=0.5)) as handle:
        assert torch.equal(run(model, call), expected) and handle.report()[0].densities is None
        assert handle.report()[0].thw == CANVAS


def test_a_density_that_follows_the_noise_cannot_be_exported_or_traced():
    model = TINY["wan"].build()
    call = {name: value for name, value in TINY["wan"].call().items() if name != "return_dict"}
    with apply_ssta(model, TILES, schedule=Schedule(density=falling)):
        with pytest.raises(Exception, match="schedule must not follow the steps under torch.export.* density = <function"):
            torch.export.export(model, (), call | {"return_dict": False}, strict=False)
