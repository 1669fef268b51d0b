"""Presets by name: every family has all of them, in its own tiles; near the dense video costs more; its own presets come first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import TINY
from tiny_pipelines import PIPELINES, latents

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.families import PLACES
from ssta.pipelines.patch.register import _registered, family_of, preset_names, preset_settings
from ssta.pipelines.schedule.presets import OWN_PRESETS, PRESETS


@pytest.mark.parametrize("name", list(TINY))
def test_every_family_has_every_preset_in_its_own_tiles(name):
    model = TINY[name].build()
    family = family_of(model)
    default = family.default_config()
    for preset, density in PRESETS.items():
        with apply_ssta(model, preset=preset) as handle:
            config = handle.config
            assert (config.density, config.compensation, config.compensation_parts, config.topk) == (density, "linear", 2, None)
            assert (config.tile_thw, config.kernel_thw, config.pad_type) == (default.tile_thw, default.kernel_thw, "none")
            assert handle.schedule == family.default_schedule() and handle.schedule.dense_layers and not handle.schedule.counts_steps


def test_the_default_is_one_of_them_and_a_schedule_may_be_another():
    near, balanced, fast, *few = PRESETS.values()
    assert list(PRESETS) == ["near", "balanced", "fast", "8 steps", "4 steps"]
    assert few == [balanced, 0.2] and near > balanced > fast
    pipe = PIPELINES["wan"].build()
    with apply_ssta(pipe) as handle:
        default = handle.config
    with apply_ssta(pipe, preset="balanced", schedule=Schedule.warm_up()) as handle:
        assert handle.config == default and handle.schedule == Schedule.warm_up()


def test_names_of_families_own_presets_are_known_without_their_code():
    assert set(OWN_PRESETS) == {name for model in PLACES for name in _registered(model).presets}


def test_variants_keep_their_tiles():
    config, _ = preset_settings(family_of(TINY["hunyuan_video_15"].build()), "fast")
    assert config.for_canvas((1, 45, 80)).tile_thw == (1, 8, 16) and config.for_canvas((31, 45, 80)).tile_thw == (4, 4, 8)
    assert config.for_canvas((1, 45, 80)).density == config.density == PRESETS["fast"]


def test_a_family_s_own_presets_come_first():
    family = family_of(TINY["hunyuan_video_15"].build())
    assert preset_names(family) == ("hunyuan_video_15_sparse", "near", "balanced", "fast", "8 steps", "4 steps")
    config, schedule = preset_settings(family, "hunyuan_video_15_sparse")
    assert (config, schedule) == (SSTAConfig.hunyuan_video_15(), Schedule()) and config.compensation == "none"
    own = replace(family, presets={"near": lambda: (SSTAConfig(), Schedule())})
    assert preset_names(own) == ("near", "balanced", "fast", "8 steps", "4 steps")
    assert preset_settings(own, "near") == (SSTAConfig(), Schedule())
    with pytest.raises(ValueError, match="preset must be one of 'near', .*, '4 steps' for HunyuanVideo15Trans.*, got 'far'"):
        preset_settings(own, "far")


@pytest.mark.parametrize("name", list(TINY))
def test_by_default_what_is_left_out_is_estimated(name):
    assert family_of(TINY[name].build()).default_config().compensation == "linear"


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_pipeline_follows_a_preset(preset):
    tiny = PIPELINES["hunyuan_video"]
    pipe = tiny.build()
    with apply_ssta(pipe, preset=preset) as handle:
        assert latents(pipe, steps=10, **tiny.call).isfinite().all()
        report = handle.report()
        assert [(run.dense_steps, run.steps) for run in report] == [(10, 10), (0, 10)]
