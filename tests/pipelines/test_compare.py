"""The compare command and the measures behind it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_hunyuan import SPARSE, tiny_transformer
from tiny_pipelines import PIPELINES, latents, wan_with_frames

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.compare import Configuration, compare, dense, main, parse_configuration, table
from ssta.pipelines.quality import describe, psnr, relative_difference, ssim

# Measures


def test_psnr_and_relative_difference():
    video = torch.rand(3, 3, 16, 16)
    assert psnr(video, video) == math.inf and relative_difference(video, video) == 0
    # An error of 0.1 everywhere is 20 dB, and one of 0.01 is 40; the mean over frames.
    assert psnr(video + 0.1, video) == pytest.approx(20, abs=1e-4)
    assert psnr(torch.stack([video[0] + 0.1, video[1] - 0.01]), video[:2]) == pytest.approx(30, abs=1e-3)
    assert relative_difference(3 * video, video) == pytest.approx(2)
    for measure in (psnr, relative_difference, ssim):
        with pytest.raises(ValueError, match="video must have the reference's shape"):
            measure(video, video[:2])
    with pytest.raises(ValueError, match="frames"):
        psnr(video[0], video[0])


def test_ssim_is_its_definition():
    x, y = torch.rand(2, 1, 3, 13, 12, dtype=torch.float64).unbind()
    weights = torch.tensor([[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for j in range(11)] for i in range(11)], dtype=torch.float64)
    weights /= weights.sum()
    values = []
    for channel in range(3):
        for i in range(3):
            for j in range(2):
                a, b = (image[0, channel, i : i + 11, j : j + 11] for image in (x, y))
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                variance_a, variance_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
                covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
                values.append((2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)
                              / ((mean_a**2 + mean_b**2 + 1e-4) * (variance_a + variance_b + 9e-4)))
    assert ssim(x, y) == pytest.approx(float(torch.stack(values).mean()), abs=1e-5)
    assert ssim(x, x) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="at least 11 x 11"):
        ssim(x[..., :10], y[..., :10])


def test_latents_have_only_a_difference():
    quality = describe(torch.randn(144, 4), torch.randn(144, 4))
    assert quality["psnr"] is quality["ssim"] is quality["lpips"] is None and quality["relative_difference"] > 0


# Configurations


def test_configurations_from_text():
    pipe = PIPELINES["wan"].build()
    default = parse_configuration("default", pipe)
    assert (default.config, default.schedule) == (SSTAConfig(topk=32), Schedule.warm_up())
    assert parse_configuration("stock", pipe) == Configuration("stock", None)
    assert dense(pipe).schedule == Schedule(dense_steps=1)
    text = "topk=3, tile_thw=2x4x4,kernel_thw=1x1x1,mask_share_within_head=True,dense_steps=0,dense_layers=0;-1;blocks.1.attn1,lambda_=0.5"
    made = parse_configuration(text, pipe)
    assert made.config == replace(SSTAConfig(topk=3), tile_thw=(2, 4, 4), kernel_thw=(1, 1, 1), mask_share_within_head=True, lambda_=0.5)
    assert made.schedule == Schedule(dense_layers=(0, -1, "blocks.1.attn1")) and made.name == text
    sparse = parse_configuration("hunyuan_video_15_sparse", tiny_transformer(layers=1))
    assert (sparse.config, sparse.schedule) == (SSTAConfig.hunyuan_video_15(), Schedule())


@pytest.mark.parametrize("text, message", [
    ("fast", "a configuration must be 'default', 'stock' or fields such as topk=16 of .*dense_steps.*, got 'fast'"),
    ("topk=", "got 'topk='"), ("topk=0", "topk=0: topk must be at least 1, got 0"), ("topk=many", "topk must be an int"),
    ("tile_thw=2x4", "tile_thw must have three entries"), ("tile_thw=axbxc", "tile_thw"), ("dense_steps=2", "dense_steps must lie in"),
    ("pad_type=mirror", "pad_type must be one of")])
def test_bad_configurations(text, message):
    with pytest.raises(ValueError, match=message):
        parse_configuration(text, PIPELINES["wan"].build())


# Comparing


def test_compare_runs_every_configuration_from_the_same_noise_and_leaves_nothing():
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    before = latents(pipe, **tiny.call)
    said = []
    sparse = Configuration("sparse", SPARSE, Schedule(dense_steps=0.25))
    results = compare(pipe, [dense(pipe), Configuration("stock", None), sparse, replace(sparse, name="again")],
                      tiny.call | {"num_inference_steps": 4, "output_type": "latent"}, seed=2, say=said.append)
    assert torch.equal(latents(pipe, **tiny.call), before)
    exact, stock, first, again = results
    torch.testing.assert_close(stock.video, before[0])
    assert torch.equal(first.video, again.video) and first.quality == again.quality
    assert exact.quality is None and stock.quality["relative_difference"] < 1e-4 < first.quality["relative_difference"]
    assert exact.density == 1 and stock.density is None and stock.report is None
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.25)) as handle:
        assert torch.equal(latents(pipe, **tiny.call)[0], first.video)
        runs = handle.report()
        # Of four steps the first transformer takes two, of which one is dense.
        expected = sum((1 + run.density) / 2 if run.layer.startswith("transformer.") else run.density for run in runs) / 4
        assert first.density == pytest.approx(expected)
    assert all(0 < result.seconds < 1 for result in results)
    assert not pipe.transformer._forward_hooks and not pipe.transformer_2._forward_pre_hooks
    assert said[:2] == ["dense: two steps to warm up", "dense: generating"] and len(said) == 8
    lines = table(results).splitlines()
    assert len(lines) == 5 and lines[1].split()[:3] == ["dense", f"{exact.seconds:.3f}", "1.00"] and "100.0%" in lines[1]
    with pytest.raises(ValueError, match="configurations must hold at least one"):
        compare(pipe, [], tiny.call)


def test_the_command(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda name, **options: asked.append((name, options)) or wan_with_frames())
    results = main(["some/model", "--config", "topk=2,tile_thw=2x4x4,kernel_thw=1x1x1,dense_steps=0", "--config", "stock",
                    "--prompt", "a cat", "--height", "96", "--width", "128", "--num-frames", "9", "--steps", "3", "--dtype", "float32"])
    assert asked == [("some/model", {"torch_dtype": torch.float32})]
    assert [result.name for result in results][::2] == ["dense", "stock"] and results[1].video.shape == (9, 3, 96, 128)
    assert 5 < results[1].quality["psnr"] < 100 and 0 < results[1].quality["ssim"] < 1 and results[1].density < 0.7
    out = capsys.readouterr()
    assert out.out.count("\n") == 4 and "PSNR" in out.out and "generating" in out.err


@pytest.mark.parametrize("arguments, message", [
    (["--config", "topk=none"], "topk must be an int"), (["--height", "97"], "height"), (["--steps", "many"], "invalid int")])
def test_mistakes_on_the_command_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: wan_with_frames())
    with pytest.raises(SystemExit):
        main(["some/model", "--dtype", "float32", *arguments])
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_and_one_that_is_not_supported(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "error:" in capsys.readouterr().err
    pipe = wan_with_frames()
    pipe.transformer = torch.nn.Linear(2, 2)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: pipe)
    with pytest.raises(SystemExit):
        main(["some/model"])
    assert "model must be one of" in capsys.readouterr().err
