"""Configurations of a comparison, from text and in a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from tiny_hunyuan import SPARSE, tiny_transformer
from tiny_pipelines import PIPELINES, latents

from ssta import SSTAConfig
from ssta.pipelines import WAN, Schedule
from ssta.pipelines.evaluation import configurations
from ssta.pipelines.evaluation.compare import _parser
from ssta.pipelines.evaluation.configurations import Configuration, dense, parse_configuration, running
from ssta.pipelines.schedule.presets import OWN_PRESETS, PRESETS


@pytest.fixture
def pipe(monkeypatch):
    """A Wan pipeline whose family has a top-k by default, and presets."""
    estimated = SSTAConfig(density=0.2, compensation="linear", compensation_parts=2, sampling_type="error")
    presets = {"dense enough": lambda: (SSTAConfig(density=0.3, lambda_=0.5), Schedule()),
               "estimated": lambda: (estimated, Schedule())}
    family = replace(WAN, default_config=lambda: SSTAConfig(topk=32, variants=((1, {"topk": 8}),)), presets=presets)
    monkeypatch.setattr(configurations, "family_of", lambda model: family)
    return PIPELINES["wan"].build()


def test_names(pipe):
    default = parse_configuration("default", pipe)
    assert (default.config, default.schedule) == (SSTAConfig(topk=32, variants=((1, {"topk": 8}),)), Schedule(dense_layers=(0,)))
    assert parse_configuration("stock", pipe) == Configuration("stock", None)
    assert parse_configuration("dense", pipe) == dense(pipe) and dense(pipe).schedule == Schedule(dense_steps=1.0)
    assert dense(pipe).all_dense and not default.all_dense and not Configuration("stock", None).all_dense
    assert parse_configuration("dense enough", pipe).config == SSTAConfig(density=0.3, lambda_=0.5)


def test_presets_of_all_families(pipe):
    fast = parse_configuration("fast", pipe)
    assert fast.config.density < parse_configuration("near", pipe).config.density and fast.config.compensation == "linear"
    made = parse_configuration("fast,dense_steps=0,density=0.5", pipe)
    assert made.schedule == replace(fast.schedule, dense_steps=0)
    assert made.config == replace(fast.config, density=0.5, variants=())


def test_a_familys_own_presets():
    sparse = parse_configuration("hunyuan_video_15_sparse", tiny_transformer(layers=1))
    assert (sparse.config, sparse.schedule) == (SSTAConfig.hunyuan_video_15(), Schedule())


def test_fields(pipe):
    text = ("topk=3, tile_thw=2x4x4,kernel_thw=1x1x1,mask_share_within_head=True,dense_steps=0,densities=1;0.5,"
            "dense_layers=0;-1;blocks.1.attn1,lambda_=0.5")
    made = parse_configuration(text, pipe)
    assert made.config == SSTAConfig(topk=3, tile_thw=(2, 4, 4), kernel_thw=(1, 1, 1), mask_share_within_head=True, lambda_=0.5)
    assert made.schedule == Schedule(dense_layers=(0, -1, "blocks.1.attn1"), densities=(1, 0.5)) and made.name == text
    # Those of the schedule alone leave the configuration its variants.
    assert parse_configuration("dense_steps=0.5", pipe).config == parse_configuration("default", pipe).config
    made = parse_configuration("dense enough,dense_steps=0.5,tile_thw=4x8x8", pipe)
    assert made.config == SSTAConfig(density=0.3, lambda_=0.5, tile_thw=(4, 8, 8)) and made.schedule == Schedule(dense_steps=0.5)


@pytest.mark.parametrize("text, config", [
    ("density=0.2", SSTAConfig(density=0.2)),
    ("density=.2,lambda_=0.5,compensation=linear", SSTAConfig(density=0.2, lambda_=0.5, compensation="linear")),
    ("topk=None", SSTAConfig()),
    ("dense enough,topk=5", SSTAConfig(topk=5, lambda_=0.5)),
    ("dense enough,density=0.1", SSTAConfig(density=0.1, lambda_=0.5)),
    ("estimated,compensation=none", SSTAConfig(density=0.2)),
    ("estimated,compensation_parts=1",
     SSTAConfig(density=0.2, compensation="linear", sampling_type="error"))])
def test_what_takes_the_place_of_what(pipe, text, config):
    assert parse_configuration(text, pipe).config == config


@pytest.mark.parametrize("text, message", [
    ("quick", "a configuration must be 'stock', 'default', 'dense', 'dense enough', 'estimated', 'near', .* or fields .*, got 'quick'"),
    ("topk=", "got 'topk='"), ("topk=0", "topk=0: topk must be at least 1, got 0"), ("topk=many", "topk must be an int"),
    ("tile_thw=2x4", "tile_thw must have three entries"), ("tile_thw=axbxc", "tile_thw"), ("dense_steps=2", "dense_steps must lie in"),
    ("pad_type=mirror", "pad_type must be one of"), ("stock,topk=3", "got 'stock'"), ("default,fast", "got 'fast'"),
    ("refresh=5", "got 'refresh=5'"),
    ("density=2", "density=2: density must lie in"), ("density=0.2,topk=3", "topk must be None with a density"),
    ("dense@", "must have a backend after @, got 'dense@'"), ("dense@fastest", "backend must be one of .*_native_cudnn.*, got 'fastest'"),
    ("stock@triton", "without SSTA, got 'triton'")])
def test_bad_configurations(pipe, text, message):
    with pytest.raises(ValueError, match=message):
        parse_configuration(text, pipe)


def test_a_backend_holds_while_the_configuration_runs_and_leaves_nothing():
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    active = _AttentionBackendRegistry.get_active_backend()[0]
    before = latents(pipe, **tiny.call)
    attention = pipe.transformer.blocks[0].attn1
    with running(pipe, parse_configuration("dense@_native_math", pipe)) as handle:
        math = latents(pipe, **tiny.call)
        assert {run.implementation for run in handle.report()} == {"dense, _native_math"}
    assert not torch.equal(math, before)
    torch.testing.assert_close(math, before)
    with running(pipe, parse_configuration("stock@_native_math", pipe)) as handle:
        assert handle is None and attention.processor._attention_backend == "_native_math"
        torch.testing.assert_close(latents(pipe, **tiny.call), before)
    assert attention.processor._attention_backend is None and _AttentionBackendRegistry.get_active_backend()[0] == active
    assert torch.equal(latents(pipe, **tiny.call), before)
    # One of the library's is for what is sparse too.
    with running(pipe, Configuration("mine", SPARSE, Schedule(), "reference")) as handle:
        latents(pipe, **tiny.call)
        assert {run.implementation for run in handle.report()} == {"reference"}
    with pytest.raises(ValueError, match="backend must be one that runs here, got '_native_npu'"):
        with running(pipe, Configuration("npu", None, backend="_native_npu")):
            pass


def test_the_command_s_help_names_every_preset():
    words = " ".join(_parser().format_help().split())
    for name in (*PRESETS, *OWN_PRESETS):
        assert repr(name) in words
