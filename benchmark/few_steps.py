"""The small video model for few steps: trained on pairs of noise and what its own many steps made of it, at the levels of few steps; and
trained on towards what it does itself at these steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from sample_quality import Sampler
from torch import Tensor
from train_video import Example, Plan, flow_loss, generators, optimise
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


def reflow(model: VideoModel, pairs: Pairs, levels: Tensor, plan: Plan, what: str) -> int:
    """Trains ``model`` so that its way from each noise to its sample is a straight line (Liu et al., Flow straight and fast, 2022), at
    ``levels`` alone. Returns the number of steps."""
    draws, _ = generators(model, plan)

    def examples(small: bool) -> Example:
        chosen = torch.randint(len(pairs.labels), (model.size.batch,), generator=draws).to(pairs.labels.device)
        sigma = levels[torch.randint(len(levels), (model.size.batch,), generator=draws).to(levels.device)]
        return pairs.samples[chosen], sigma, pairs.noise[chosen], model.condition(pairs.labels[chosen])

    return optimise(model, examples, partial(flow_loss, model), plan, what)


@torch.no_grad()
def lines_of(model: VideoModel, batches: int, size: int, steps: int) -> Example:
    """What ``model``, made ready by ``as_loaded``, does in ``batches`` times ``size`` generations: the line through each state that they
    come by, along the velocity there, from a sample at no noise to noise alone. In the place of conditions are labels ``[N]``."""
    found: list[Example] = []
    for number in range(batches):
        labels = [(number * size + i) % model.no_clip for i in range(size)]
        sampler, states = Sampler(model, labels, FIRST_SEED + number, steps), []
        sampler.sample(seen=lambda *state, states=states: states.append(state))
        for t, (x, v) in zip(sampler.times(), states):
            sigma = t / 1000
            found.append((x - sigma * v, sigma.expand(size), x + (1 - sigma) * v, torch.tensor(labels, device=x.device)))
    samples, sigmas, noises, labels_of = (torch.cat(parts) for parts in zip(*found))
    return samples, sigmas, noises, labels_of


def distil(model: VideoModel, lines: Example, plan: Plan, what: str) -> int:
    """Trains ``model`` towards the velocities that ``lines`` go along. Returns the number of steps."""
    draws, _ = generators(model, plan)

    def examples(small: bool) -> Example:
        chosen = torch.randint(len(lines[0]), (model.size.batch,), generator=draws).to(lines[0].device)
        samples, sigma, noise, labels = (x[chosen] for x in lines)
        return samples, sigma, noise, model.condition(labels)

    return optimise(model, examples, partial(flow_loss, model), plan, what)
