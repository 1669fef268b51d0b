"""The demo from its command line to its files, on a tiny canvas; the clip and the latents that it is made of."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def demo(monkeypatch):
    pytest.importorskip("diffusers", reason="the demo runs a diffusers model: pip install '.[pipelines]'")
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    return demo


@pytest.fixture
def clip(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import clip

    return clip


@pytest.mark.slow
def test_the_demo_end_to_end(demo, tmp_path, capsys):
    result = demo.main(["--canvas", "4x16x20", "--output", str(tmp_path), "--seed", "3"])
    assert json.loads((tmp_path / "report.json").read_text()) == result
    for picture in ("selection.png", "block_mask.png"):
        assert (tmp_path / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert result["canvas"] == [4, 16, 20] and result["seed"] == 3
    assert (result["video_tokens"], result["text_tokens"], result["valid_text_tokens"]) == (1280, 128, 72)
    assert result["tokens"] == 1280 + 128
    dense, every, sparse = result["runs"]
    assert dense["density"] == every["density"] == 1 and dense["relative_difference"] == 0
    # With every tile selected only rounding is left; SSTA drops tiles, and keeps most of the weight.
    assert every["relative_difference"] < (2e-2 if torch.cuda.is_available() else 1e-5)
    assert every["relative_difference"] < sparse["relative_difference"] < 0.1
    assert every["tiles"] == sparse["tiles"] == 12 + 1
    assert 0.2 < sparse["density"] < 0.5
    assert dense["seconds"] > 0 and sparse["seconds"] > 0 and every["seconds"] is None
    first = result["first_layer"]
    assert first["implementation"] == sparse["implementation"]
    assert sparse["density"] == pytest.approx(first["tile_density"], abs=0.05)
    assert first["tile_density"] < first["attention_kept"] < 1
    assert 0 < first["output_error"] < 0.5
    printed = capsys.readouterr().out
    assert "[" in printed and "running: SSTA" in printed
    assert ("A CPU is no place to judge speed" in printed) != torch.cuda.is_available()
    for run in result["runs"]:
        assert f"{run['density']:.1%}" in printed and run["run"] in printed


@pytest.mark.slow
def test_the_demo_prints_nothing_that_is_not_its_own(tmp_path):
    """In an environment that holds torchao, too, whose import is noisy."""
    run = subprocess.run([sys.executable, EXAMPLES / "demo.py", "--canvas", "2x8x8", "--output", str(tmp_path)], capture_output=True,
                         text=True)
    assert run.returncode == 0 and run.stderr == ""


def test_other_messages_of_the_same_packages_are_printed(demo, caplog):
    names = [*demo.NOISE, "diffusers"]
    before = {name: list(logging.getLogger(name).filters) for name in names}
    demo.leave_noise_out()
    try:
        for name, beginning in demo.NOISE.items():
            with caplog.at_level(logging.WARNING, logger=name):
                logging.getLogger(name).addHandler(caplog.handler)
                logging.getLogger(name).warning(f"{beginning} and so on", *(["x"] if "%s" in beginning else []))
                logging.getLogger(name).warning("something else")
                logging.getLogger(name).removeHandler(caplog.handler)
        assert {record.getMessage() for record in caplog.records} == {"something else"}
    finally:
        for name, filters in before.items():
            logging.getLogger(name).filters[:] = filters


@pytest.mark.parametrize("name", ["clip", "generate", "recipe", "finetune_clips", "finetune_noise"])
def test_a_module_says_whose_it_is(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    said = re.search(r'^if __name__ == "__main__":\n    print\("This is a module of .*?(examples/(\w+)\.py), .*"\)\n\Z', source, re.M)
    assert said and (EXAMPLES.parent / said[1]).is_file()


def test_make_demo_says_first_what_it_installs_and_needs_no_torchao(tmp_path):
    def commands(target):
        """What make would run in a fresh clone."""
        return subprocess.run(["make", "-n", target, f"VENV={tmp_path / 'venv'}"], cwd=EXAMPLES.parent, capture_output=True, text=True,
                              check=True).stdout

    demo = commands("demo")
    assert demo.index("takes some minutes") < demo.index("pip install")
    assert ".[triton,pipelines,plot]" in demo and "dev]" not in demo and "dev]" in commands("lint")


def test_the_large_sizes_way_through_the_demo(demo, tmp_path, monkeypatch):
    """720p but for its size: the preset, and dense attention without the S x S mask, here against diffusers' own with it."""
    tiny = dict(canvas=(3, 9, 10), heads=1, layers=2, refiner_layers=1, condition_tokens=(8, 8, 16), valid_tokens=(3, 9),
                condition_channels=(16, 16, 16), dtype=torch.float32, repeats=1, needs_gpu=False)
    large = replace(demo.SIZES["720p"], **tiny)
    monkeypatch.setitem(demo.SIZES, "720p", large)
    result = demo.main(["--size", "720p", "--output", str(tmp_path)])
    assert result["runs"][0]["run"] == "dense, without the S x S mask"
    assert result["first_layer"]["padding_share"] > 0

    from ssta.pipelines import apply_ssta

    model = demo.build_model(large, 0, torch.device("cpu"))
    inputs = demo.model_inputs(torch.randn(1, demo.LATENT_CHANNELS, *large.canvas), large, 0)
    with torch.inference_mode():
        stock = model(**inputs).sample
        with demo.dense_without_mask(model, sum(large.valid_tokens)):
            unmasked = model(**inputs).sample
        with apply_ssta(model, large.config):
            sparse = model(**inputs).sample
        again = model(**inputs).sample
    torch.testing.assert_close(unmasked, stock, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(sparse, stock, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, stock)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_sparse_layers_may_get_deferred_q_k_and_v(demo, tmp_path, monkeypatch):
    """As on a GPU, where norm, RoPE and tiles are one pass; here in Triton's interpreter."""
    from ssta.pipelines.patch import streams

    wanted = []
    monkeypatch.setattr(streams, "_by_kernel", lambda *stream: wanted.append(stream) or True)
    tiny = replace(demo.SIZES["small"], stock_dense=False, repeats=1, layers=1)
    monkeypatch.setitem(demo.SIZES, "small", tiny)
    result = demo.main(["--canvas", "2x4x8", "--output", str(tmp_path)])
    assert wanted and result["runs"][1]["relative_difference"] < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["small", "720p"])
def test_the_demo_on_a_gpu(demo, tmp_path, size):
    """There sparse layers get q, k and v deferred."""
    result = demo.main(["--size", size, "--canvas", "4x16x20", "--output", str(tmp_path)])
    _, every, sparse = result["runs"]
    assert every["relative_difference"] < 2e-2 and 0 < sparse["relative_difference"] < 0.5
    assert result["first_layer"]["implementation"] == sparse["implementation"]


def test_720p_refuses_without_a_gpu(demo, tmp_path):
    with pytest.raises(SystemExit, match="--size 720p requires an NVIDIA GPU, and torch sees none"):
        demo.main(["--size", "720p", "--output", str(tmp_path / "never")])
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("text", ["2x4", "2x0x4", "axbxc", "2x4x6x8", "-1x4x4"])
def test_a_bad_canvas_is_refused(demo, text, capsys):
    with pytest.raises(SystemExit):
        demo.parse([f"--canvas={text}"])
    assert "must be three positive numbers" in capsys.readouterr().err


def test_the_clip_is_seeded_and_its_twins_look_alike(clip):
    first, again, other = (clip.render_clip(5, 96, 128, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (5, 96, 128, 3) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[4])

    def colour(index, time):
        row, column = clip.thing_centre(index, time)
        y, x = int(row * 96), int(column * 128)
        return first[round(4 * time), y - 5:y + 6, x - 5:x + 6].mean((0, 1))

    for time in (0.0, 0.5, 1.0):
        for one, twin, stranger in ((0, 1, 2), (1, 0, 3), (2, 3, 0), (3, 2, 1)):
            assert (colour(one, time) - colour(twin, time)).norm() < 0.3 * (colour(one, time) - colour(stranger, time)).norm()


def test_latents_are_local_standardised_and_seeded(clip):
    pixels = clip.render_clip(4, 48, 64, seed=0)
    latents = clip.clip_to_latents(pixels, 12, seed=0)
    assert latents.shape == (1, 12, 2, 6, 8)
    torch.testing.assert_close(latents.mean((0, 2, 3, 4)), torch.zeros(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.var((0, 2, 3, 4), correction=0), torch.ones(12), atol=1e-4, rtol=0)
    assert torch.equal(latents, clip.clip_to_latents(pixels, 12, seed=0))
    assert not torch.equal(latents, clip.clip_to_latents(pixels, 12, seed=1))
    # Two clips that differ in one patch: before standardising, one token differs. Standardising is affine, so differences show it.
    changed = pixels.clone()
    changed[2:4, 16:24, 40:48] += torch.rand(2, 8, 8, 3)
    flat, other = (clip.clip_to_latents(x, 1, seed=0).flatten() for x in (pixels, changed))
    flat, other = (((x - x[0]) / (x[-1] - x[0])) for x in (flat, other))
    differs = (flat - other).abs() > 1e-3
    assert differs.nonzero().flatten().tolist() == [(1 * 6 + 2) * 8 + 5]


@pytest.mark.parametrize("shape, channels, message", [
    ((3, 16, 16, 3), 4, "clip must be"), ((2, 12, 16, 3), 4, "clip must be"), ((2, 16, 16), 4, "clip must be"),
    ((2, 16, 16, 3), 0, "channels must be between 1 and 384"), ((2, 16, 16, 3), 385, "channels must be between 1 and 384"),
])
def test_bad_clips_are_refused(clip, shape, channels, message):
    with pytest.raises(ValueError, match=message):
        clip.clip_to_latents(torch.zeros(shape), channels)
