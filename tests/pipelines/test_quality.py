"""The measures between two videos."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from ssta.pipelines.evaluation import quality
from ssta.pipelines.evaluation.quality import describe, lpips_distance, psnr, relative_difference, ssim


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


def test_frames_that_are_the_same_do_not_hide_the_others():
    """A video that begins with a given image often has that in common with the reference."""
    video = torch.rand(3, 3, 16, 16)
    other = torch.cat([video[:1], video[1:] + 0.1])
    assert psnr(other, video) == pytest.approx(20, abs=1e-4)
    assert relative_difference(torch.zeros(3), torch.zeros(3)) == 0


def test_lpips_loads_its_network_once_and_takes_the_mean_over_frames(monkeypatch):
    made = []

    class Network(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()
            made.append((net, verbose))

        def forward(self, x, y):
            assert x.shape == (1, 3, 16, 16) and x.dtype == torch.float32 and x.min() >= -1
            return (x - y).abs().mean()

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Network))
    quality._lpips_network.cache_clear()
    video = torch.rand(2, 3, 16, 16, dtype=torch.float16)
    other = video.clone()
    other[1] = 1 - other[1]
    # The frames' distances are twice their differences, and the first one's is zero.
    expected = float((other[1].float() - video[1].float()).abs().mean())
    for _ in range(2):
        assert lpips_distance(other, video) == pytest.approx(expected, rel=1e-5)
    assert made == [("alex", False)]
    quality._lpips_network.cache_clear()
