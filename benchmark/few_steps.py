"""The small video model for few steps: trained on pairs of noise and what its own many steps made of it, at the levels of few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sample_quality import Sampler, velocity
from torch import Tensor
from train_video import Example, Plan, distillation_loss, flow_loss, generators, optimise
from video_model import VideoModel

# Of the noise of pairs, far from those that are sampled.
FIRST_SEED = 10_000
# Below the rate that the weights were trained at.
RATE = 5e-4


@dataclass(frozen=True)
class Pairs:
    """Noise and samples, float32 ``[N, C, T, H, W]``, and the samples' labels, int64 ``[N]``."""

    noise: Tensor
    samples: Tensor
    labels: Tensor

    def first(self, number: int) -> Pairs:
        return Pairs(*(x[:number] for x in (self.noise, self.samples, self.labels)))

    @classmethod
    def of(cls, model: VideoModel, batches: int, size: int, steps: int) -> Pairs:
        """``batches`` times ``size`` samples of ``model``, made ready by ``as_loaded``; all labels in turn."""
        found = []
        for number in range(batches):
            labels = [(number * size + i) % model.no_clip for i in range(size)]
            sampler = Sampler(model, labels, FIRST_SEED + number, steps)
            found.append((sampler.noise, sampler.sample(), torch.tensor(labels, device=sampler.noise.device)))
        return cls(*(torch.cat(of) for of in zip(*found)))


def levels_of(model: VideoModel, *numbers: int) -> Tensor:
    """The noise levels at which a sampler of so many steps asks the model, of each of ``numbers``."""
    return torch.cat([Sampler(model, [0], 0, steps).times() / 1000 for steps in numbers]).unique()


def reflow(model: VideoModel, pairs: Pairs, levels: Tensor, plan: Plan, what: str,
           velocities: Callable[..., tuple[Tensor, Tensor]] | None = None) -> int:
    """Trains ``model`` so that its way from each noise to its sample is a straight line (Liu et al., Flow straight and fast, 2022), at
    ``levels`` alone; or, where ``velocities`` gives a teacher's and the model's velocity, towards the teacher's. Returns the number of
    steps."""
    draws, _ = generators(model, plan)

    def examples(small: bool) -> Example:
        chosen = torch.randint(len(pairs.labels), (model.size.batch,), generator=draws).to(pairs.labels.device)
        sigma = levels[torch.randint(len(levels), (model.size.batch,), generator=draws).to(levels.device)]
        return pairs.samples[chosen], sigma, pairs.noise[chosen], model.condition(pairs.labels[chosen])

    loss = partial(flow_loss, model) if velocities is None else partial(distillation_loss, velocities)
    return optimise(model, examples, loss, plan, what)


@torch.no_grad()
def paired_loss(sampler: Sampler, pairs: Pairs) -> float:
    """Mean squared error of the velocity on the straight lines of ``pairs``, at all of the sampler's steps in their order."""
    condition, losses = sampler.model.condition(pairs.labels), []
    for step, t in enumerate(sampler.times()):
        sampler.enter(step)
        sigma = t / 1000
        v = velocity(sampler.model, (1 - sigma) * pairs.samples + sigma * pairs.noise, t, condition)
        losses.append((v - (pairs.noise - pairs.samples)).square().mean())
    return float(torch.stack(losses).mean())
