"""The settings and layouts of SSTA in vLLM-Omni, which need nothing of it: what is taken, what is refused, and with which words."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ssta import DenseRun, TokenLayout, VideoGrid
from ssta.pipelines.patch.family import small_tiles
from ssta.pipelines.plugs.vllm_omni import VARIABLE, Settings, config_from, register, sequence_layout


def video(prefix_len=None, latent_grid=None, used_len=None, spans=()):
    return SimpleNamespace(prefix_len=prefix_len, latent_grid=latent_grid, used_len=used_len,
                           video_spans=tuple(SimpleNamespace(start=start, latent_grid=grid) for start, grid in spans))


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_settings_are_vllm_omnis_options(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"tile_thw": [4, 4, 8], "compensation": "linear"}')
    settings = Settings.of({"sparsity": 0.8, "start_step": 5, "end_step": 1, "precision": "bf16", "skip_layers": [0, 39]})
    config = settings.config
    assert (config.density, config.tile_thw, config.compensation, config.variants) == (0.2, (4, 4, 8), "linear", ())
    assert (settings.first_steps, settings.last_steps, settings.dense_layers) == (5, 1, {0, 39})
    assert str(settings) == "density 0.2, compensation 'linear', dense steps: first 5, last 1, dense layers: 0, 39"


def test_without_fields_the_defaults_are_those_of_models_without_published_settings():
    assert config_from("{}") == small_tiles()
    assert Settings.of({"sparsity": 0.8}).config == replace(small_tiles(), density=0.2)


def test_no_sparsity_is_dense_and_says_so():
    settings = Settings.of({"sparsity": 0.0})
    assert settings.config is None and "dense in all" in str(settings)


@pytest.mark.parametrize("options, words", [
    (None, r"block_sparse must come with sparsity .* got \[\]"),
    ({"sparsity": 0.5, "keep_first_frame": True}, "got .*keep_first_frame"),
    ({"sparsity": 1.0}, r"block_sparse.sparsity must lie in \[0, 1\).* got 1.0"),
    ({"sparsity": 0.5, "precision": "fp8"}, "block_sparse.precision must be 'bf16'.* got 'fp8'")])
def test_options_that_say_something_else_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Settings.of(options)


@pytest.mark.parametrize("text, error, words", [
    ("", ValueError, "must be a JSON object"), ("[1]", TypeError, r"must be a JSON object .* got '\[1\]'"),
    ('{"density": 0.1}', ValueError, "got density; the density is 1 - block_sparse.sparsity"), ('{"tiles": 3}', ValueError, "got tiles"),
    ('{"tile_thw": [0, 8, 8]}', ValueError, f"{VARIABLE}: tile_thw"), ('{"compensation": 1}', (TypeError, ValueError), "compensation")])
def test_an_environment_that_says_something_impossible_is_refused(text, error, words, monkeypatch):
    with pytest.raises(error, match=words):
        config_from(text)
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(error, match=words):
        register()


def test_unasked_nothing_is_registered_or_imported():
    # vLLM-Omni is not installed here: to look for it would raise.
    assert register() is None


@pytest.mark.parametrize("layout, tokens, segments", [
    (video(0, (2, 4, 8), 64), 64, (VideoGrid(2, 4, 8),)),
    (video(0, (2, 4, 8), 64), 70, (VideoGrid(2, 4, 8),)),
    (video(5, (2, 4, 8)), 72, (DenseRun(5), VideoGrid(2, 4, 8))),
    (video(5, (2, 4, 8), 71), 80, (DenseRun(5), VideoGrid(2, 4, 8), DenseRun(2))),
    (video(used_len=100, spans=[(75, (1, 4, 4)), (3, (2, 4, 8))]), 128,
     (DenseRun(3), VideoGrid(2, 4, 8), DenseRun(8), VideoGrid(1, 4, 4), DenseRun(9)))])
def test_a_layout_is_dense_runs_and_grids_without_the_padding(layout, tokens, segments):
    assert sequence_layout(layout, tokens) == TokenLayout(segments)


@pytest.mark.parametrize("layout", [None, video(), video(prefix_len=3), video(latent_grid=(2, 4, 8))])
def test_a_video_of_unknown_place_is_words(layout):
    assert "video layout" in sequence_layout(layout, 100)


@pytest.mark.parametrize("layout, words", [
    (video(0, (2, 4, 8)), "ends at 64, used_len 64 and 60 tokens"), (video(0, (2, 4, 8), 50), "used_len 50"),
    (video(used_len=60, spans=[(0, (1, 4, 8)), (30, (1, 2, 2))]), "starts at 30 before 32"), (video(-1, (1, 4, 8)), "starts at -1"),
    (video(0, (0, 4, 8)), "VideoGrid.t")])
def test_a_layout_that_contradicts_itself_is_refused(layout, words):
    with pytest.raises(ValueError, match=words):
        sequence_layout(layout, 60)
