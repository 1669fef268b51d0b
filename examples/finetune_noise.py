"""How finetune.py adds noise and takes it away: by the scheduler's own kind of diffusion, with its own prediction as the target."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler
from finetune_clips import Sample, to_frames
from torch import Tensor


class Noise:
    """Noisy latents, the time that belongs to them, and what the model is to say of them.

    Flow matching: x = (1 - s) latents + s noise, and the velocity noise - latents. The noise level s is logit-normal, shifted towards
    noise as the scheduler shifts its own (Esser et al., Scaling rectified flow transformers, 2024). Diffusion: a uniform timestep, with
    the scheduler's ``add_noise`` and its prediction type.
    """

    def __init__(self, scheduler: Any, tokens: int) -> None:
        if isinstance(scheduler, CogVideoXDPMScheduler):
            # Of the same noise; a step of DPM-Solver's has to be given more than others.
            scheduler = CogVideoXDDIMScheduler.from_config(scheduler.config)
        config = scheduler.config
        self.scheduler = scheduler
        self.prediction = config.get("prediction_type", "epsilon")
        self.steps = config.get("num_train_timesteps", 1000)
        self.flow = ("FlowMatch" in type(scheduler).__name__ or bool(config.get("use_flow_sigmas"))
                     or self.prediction == "flow_prediction")
        if not self.flow and (not hasattr(scheduler, "alphas_cumprod") or self.prediction not in ("epsilon", "v_prediction", "sample")):
            raise ValueError(f"--model must have a scheduler of flow matching or of diffusion, got {type(scheduler).__name__} with "
                             f"prediction_type = {self.prediction!r}")
        self.inverted = bool(config.get("invert_sigmas"))
        # As the pipelines reckon it, a line through two lengths.
        low, high = config.get("base_image_seq_len") or 256, config.get("max_image_seq_len") or 4096
        least, most = config.get("base_shift") or 0.5, config.get("max_shift") or 1.15
        self.mu = least + (most - least) * (tokens - low) / (high - low)
        self.shift = math.exp(self.mu) if config.get("use_dynamic_shifting") else config.get("flow_shift") or config.get("shift") or 1.0

    def level(self, draws: torch.Generator) -> float:
        """A noise level in (0, 1), or a timestep."""
        if not self.flow:
            return float(torch.randint(self.steps, (), generator=draws))
        s = float(torch.randn((), generator=draws).sigmoid())
        return self.shift * s / (1 + (self.shift - 1) * s)

    def noised(self, latents: Tensor, noise: Tensor, level: float) -> tuple[Tensor, Tensor, Tensor]:
        """(noisy latents, timestep ``[1]``, the target)."""
        device = latents.device
        if self.flow:
            velocity = latents - noise if self.inverted else noise - latents
            time = self.steps * (1 - level if self.inverted else level)
            return (1 - level) * latents + level * noise, torch.tensor([time], device=device), velocity
        timestep = torch.tensor([int(level)], device=device)
        noisy = self.scheduler.add_noise(latents, noise, timestep)
        if self.prediction == "v_prediction":
            return noisy, timestep, self.scheduler.get_velocity(latents, noise, timestep)
        return noisy, timestep, noise if self.prediction == "epsilon" else latents

    def timesteps(self, count: int, device: torch.device) -> tuple[Any, Tensor]:
        """(a scheduler that is about to begin, its timesteps)."""
        scheduler = copy.deepcopy(self.scheduler)
        dynamic = scheduler.config.get("use_dynamic_shifting") and "mu" in inspect.signature(scheduler.set_timesteps).parameters
        scheduler.set_timesteps(count, device=device, **({"mu": self.mu} if dynamic else {}))
        return scheduler, scheduler.timesteps

    def passing(self, velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Where a generation of ``count`` steps from noise ``x`` comes by: what the model is given at each, with the timestep ``[1]``, and
        last the latents, at no time. A step is computed when what comes after it is asked for."""
        scheduler, timesteps = self.timesteps(count, x.device)
        x = x * getattr(scheduler, "init_noise_sigma", 1.0)
        for t in timesteps:
            inputs, time = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x, t.expand(1)
            yield inputs, time
            x = scheduler.step(velocity(inputs, time), t, x, return_dict=False)[0]
        yield x, timesteps[:0]


@torch.no_grad()
def generate(model: Callable[..., Any], noise: Noise, sample: Sample, negative: Sample | None, steps: int, guidance: float, seed: int,
             dtype: torch.dtype) -> Tensor:
    """Latents like the sample's for its prompt, from noise."""
    def velocity(inputs: Tensor, time: Tensor) -> Tensor:
        def of(call: dict[str, Any]) -> Tensor:
            return model(hidden_states=inputs.to(dtype), timestep=time, **call, return_dict=False)[0].float()

        found = of(sample.call)
        if negative is not None and guidance != 1:
            without = of(negative.call)
            found = without + guidance * (found - without)
        return found

    x = torch.randn(sample.latents.shape, generator=torch.Generator().manual_seed(seed)).to(sample.latents.device)
    *_, (latents, _) = noise.passing(velocity, x, steps)
    return latents


def save_grid(pipe: Any, samples: list[Sample], path: Path) -> None:
    """A picture: a row for each sample, of its first, middle and last frame."""
    from PIL import Image

    rows = []
    for sample in samples:
        frames = to_frames(pipe, sample)
        rows.append(torch.cat([frames[i] for i in (0, len(frames) // 2, len(frames) - 1)], dim=2))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * torch.cat(rows, dim=1)).round().byte().permute(1, 2, 0).numpy()).save(path)


if __name__ == "__main__":
    print("This is a module of examples/finetune.py, which says what it can do: --help.")
