"""Sampling the small video model, and how far a sample is from the dense one: in pixels, latents, velocities and held-out loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from video_model import SHIFT, PatchAutoencoder, VideoModel

from ssta.pipelines.evaluation import quality

# Shares of the steps at which velocities are compared, in percent, and held-out losses taken.
VELOCITIES = (0, 20, 40, 60, 80, 100)
LOSSES = (15, 35, 55, 75, 90)
# LPIPS runs a network on every frame: so many are left out between two.
LPIPS_EVERY = 6


def step_at(percent: float, steps: int) -> int:
    return round(percent / 100 * (steps - 1))


class Sampler:
    """``len(labels)`` videos by Euler's method, from the noise of ``seed``.

    Attributes:
        enter: told of every step before the model runs.
        scheduler: counts the steps; ``apply_ssta`` is given it.
        noise: float32 ``[V, C, T, H, W]``.
    """

    def __init__(self, model: VideoModel, labels: list[int], seed: int, steps: int) -> None:
        self.model, self.steps = model, steps
        self.enter: Callable[[int], None] = lambda step: None
        device = next(model.parameters()).device
        size = model.size
        generator = torch.Generator().manual_seed(seed)
        # One after the other, so that a video is the same however many there are.
        noise = [torch.randn(size.channels, *size.canvas, generator=generator) for _ in labels]
        self.noise = torch.stack(noise).to(device)
        self.condition = model.condition(torch.tensor(labels, device=device))
        self.scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT)

    def times(self) -> Tensor:
        """The timesteps of a new generation. Each must reach the model as a view of them, which says which step it is."""
        self.scheduler.set_timesteps(self.steps, device=self.noise.device)
        return self.scheduler.timesteps

    @torch.no_grad()
    def sample(self, seen: Callable[[Tensor, Tensor], None] | None = None) -> Tensor:
        """Latents. ``seen(x, velocity)`` is called at every step."""
        x = self.noise.clone()
        for step, t in enumerate(self.times()):
            self.enter(step)
            v = velocity(self.model, x, t, self.condition)
            if seen:
                seen(x, v)
            x = self.scheduler.step(v, t, x, return_dict=False)[0].float()
        return x


def velocity(model: VideoModel, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
    """Float32 velocity at timestep ``t`` (no dimension, a view of the scheduler's)."""
    dtype = model.dit.patch_embedding.weight.dtype
    return model.dit(x.to(dtype), t.expand(len(x)), condition.to(dtype), return_dict=False)[0].float()


class Trajectory:
    """The dense trajectory of the first ``videos`` videos: where it was and which way it went, at each step."""

    def __init__(self, sampler: Sampler, videos: int) -> None:
        self._sampler, self._videos = sampler, min(videos, len(sampler.noise))
        self._steps: list[tuple[Tensor, Tensor]] = []

    def keep(self, x: Tensor, v: Tensor) -> None:
        self._steps.append((x[:self._videos].clone(), v[:self._videos].clone()))

    @torch.no_grad()
    def follow(self, after_step: Callable[[], None] = lambda: None, sampler: Sampler | None = None) -> list[float]:
        """The velocities' relative error at each step along it, where the model as it now is would go from the very same place; or another
        model, of a ``sampler`` of the same videos."""
        sampler, errors = sampler or self._sampler, []
        for step, (t, (x, dense)) in enumerate(zip(sampler.times(), self._steps)):
            sampler.enter(step)
            v = velocity(sampler.model, x, t, sampler.condition[:self._videos])
            errors.append((v - dense).norm() / dense.norm())
            after_step()
        return torch.stack(errors).tolist()


@torch.no_grad()
def held_out_loss(sampler: Sampler, latents: Tensor) -> float:
    """Mean squared error of the velocity of held-out ``latents``, float32 ``[N, C, T, H, W]``, at some of the sampler's steps, in their
    order and always with the same noise; whatever follows the steps does so here too."""
    model = sampler.model
    generator = torch.Generator().manual_seed(99)
    noise = torch.randn(latents.shape, generator=generator).to(latents.device)
    condition = model.condition(torch.full((len(latents),), model.no_clip, device=latents.device))
    times, losses = sampler.times(), []
    for step in sorted({step_at(percent, sampler.steps) for percent in LOSSES}):
        sigma = times[step] / 1000
        sampler.enter(step)
        v = velocity(model, (1 - sigma) * latents + sigma * noise, times[step], condition)
        losses.append((v - (noise - latents)).square().mean())
    return float(torch.stack(losses).mean())


class Reference:
    """Dense samples, against which others from the same noise are held."""

    def __init__(self, latents: Tensor, autoencoder: PatchAutoencoder) -> None:
        self.latents, self._autoencoder = latents, autoencoder
        self.videos = [autoencoder.decode(x[None])[0] for x in latents]

    def compare(self, latents: Tensor) -> list[dict[str, float]]:
        """For each video: psnr (dB), ssim, lpips where installed, latent_error (relative)."""
        found = []
        for x, dense, frames in zip(latents, self.latents, self.videos):
            video = self._autoencoder.decode(x[None])[0]
            of = {"psnr": quality.psnr(video, frames), "ssim": quality.ssim(video, frames),
                  "latent_error": quality.relative_difference(x, dense)}
            if find_spec("lpips") is not None:
                of["lpips"] = quality.lpips_distance(video[::LPIPS_EVERY], frames[::LPIPS_EVERY])
            found.append(of)
        return found


def mean_and_spread(values: Iterable[float]) -> tuple[float | str, float | str]:
    """Mean and standard deviation; "" for what there is not, as for the spread of infinities."""
    values = list(values)
    if not values:
        return "", ""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else ""
