"""Training of the small video model by rectified flow, for so many seconds or so many steps, and on from where it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from clips import Clip
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from video_model import CROP, HALVED, SHIFT, WHOLE, PatchAutoencoder, VideoModel, pixels

# Share of the samples that do not say which clip they are from; held-out clips are judged like these.
UNLABELLED = 0.15
SMALL_SHIFT = 2.0
DECAY = 0.998
SAVE_EVERY = 60.0


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        seconds: from the end of the first step on, which compiles; math.inf where ``steps`` alone counts.
        steps: at most so many; None = as many as there is time for.
        rate: the highest learning rate.
        small: share of it all on quarter canvases, which are cheap, at the beginning.
        seed: of everything random.
        begun: share that was done before, in [0, 1).
    """

    seconds: float
    steps: int | None = None
    rate: float = 1e-3
    small: float = 0.12
    seed: int = 0
    begun: float = 0.0


# Latents ``[B, C, T, H, W]``, noise levels ``[B]``, noise, and conditions.
Example = tuple[Tensor, Tensor, Tensor, Tensor]


def train(model: VideoModel, autoencoder: PatchAutoencoder, clips: list[Clip], plan: Plan, what: str,
          save: Callable[[int], None] = lambda steps: None, velocities: Callable[..., tuple[Tensor, Tensor]] | None = None) -> int:
    """``optimise`` on random windows of clips: by rectified flow or, where ``velocities`` gives a teacher's and the model's velocity,
    towards the teacher's."""
    draws, noises = generators(model, plan)

    def examples(small: bool) -> Example:
        latents, condition = batch(model, autoencoder, clips, small, draws)
        sigma = noise_levels(len(latents), SMALL_SHIFT if small else SHIFT, draws).to(latents.device)
        return latents, sigma, torch.randn(latents.shape, device=latents.device, generator=noises), condition

    loss = partial(flow_loss, model) if velocities is None else partial(distillation_loss, velocities)
    return optimise(model, examples, loss, plan, what, save)


def generators(model: VideoModel, plan: Plan) -> tuple[torch.Generator, torch.Generator]:
    """(of draws on the host, of noise where the model is)."""
    device = next(model.parameters()).device
    return torch.Generator().manual_seed(2 * plan.seed + 1), torch.Generator(device).manual_seed(2 * plan.seed + 2)


def optimise(model: VideoModel, examples: Callable[[bool], Example], loss_of: Callable[..., Tensor], plan: Plan, what: str,
             save: Callable[[int], None] = lambda steps: None) -> int:
    """Trains ``model`` in place, to the moving average of its weights; returns the number of steps.

    Args:
        examples: what a step is trained on; told whether on small canvases.
        loss_of: the loss of an example.
        save: called with the number of steps and the average in place, every minute, and before it is interrupted.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    parameters = list(model.parameters())
    average = [x.detach().clone() for x in parameters]
    if device.type == "cuda":
        compiled(model)
    model.train()
    start = saved = time.perf_counter()
    watch = _Watch(what)
    step, done = 0, plan.begun
    try:
        while done < 1:
            small = done < plan.small
            example = examples(small)
            with fast_attention(device):
                loss = loss_of(*example)
                loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            # Up within 60 steps, and down over the last 40 %.
            optimizer.param_groups[0]["lr"] = rate = plan.rate * min(1.0, (step + 1) / 60) * min(1.0, max(0.02, (1 - done) / 0.4))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch._foreach_lerp_(average, [x.detach() for x in parameters], 1 - min(DECAY, (1 + step) / (10 + step)))
            step += 1
            watch.note(step, loss, len(example[0]), rate, small)
            now = time.perf_counter()
            if step == 1:
                start = now
            shares = ((now - start) / plan.seconds, step / plan.steps if plan.steps else 0.0)
            done = plan.begun + (1 - plan.begun) * max(shares)
            if now - saved > SAVE_EVERY and done < 1:
                with averaged(parameters, average):
                    save(step)
                saved = time.perf_counter()
    except KeyboardInterrupt:
        with averaged(parameters, average):
            save(step)
        raise
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
    print(f"{what}: {step} steps in {time.perf_counter() - start:.0f} s", flush=True)
    return step


def batch(model: VideoModel, autoencoder: PatchAutoencoder, clips: list[Clip], small: bool,
          draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """(latents, condition) of random windows of random clips."""
    size, (frames, height, width) = model.size, model.size.pixels
    count = size.small_batch if small else size.batch
    labels = torch.randint(len(clips), (count,), generator=draws)
    shown = WHOLE if not small else HALVED if float(torch.rand((), generator=draws)) < 0.6 else CROP
    if shown == CROP:
        height, width = height // 2, width // 2
    video = pixels(torch.stack([clips[label].take(frames, height, width, draws) for label in labels.tolist()]))
    if shown == HALVED:
        video = nn.functional.avg_pool3d(video, (1, 2, 2))
    labels[torch.rand(count, generator=draws) < UNLABELLED] = model.no_clip
    return autoencoder.encode(video), model.condition(labels.to(video.device), shown)


def noise_levels(count: int, shift: float, draws: torch.Generator) -> Tensor:
    """Logit-normal, moved towards noise by ``shift`` (Esser et al., Scaling rectified flow transformers, 2024)."""
    sigma = torch.randn(count, generator=draws).sigmoid()
    return shift * sigma / (1 + (shift - 1) * sigma)


def flow_loss(model: VideoModel, latents: Tensor, sigma: Tensor, noise: Tensor, condition: Tensor) -> Tensor:
    """Squared error of the velocity at ``(1 - sigma) latents + sigma noise``."""
    s = sigma.view(-1, 1, 1, 1, 1)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        velocity = model((1 - s) * latents + s * noise, sigma, condition)
    return (velocity.float() - (noise - latents)).square().mean()


def distillation_loss(velocities: Callable[..., tuple[Tensor, Tensor]], latents: Tensor, sigma: Tensor, noise: Tensor,
                      condition: Tensor) -> Tensor:
    """Squared difference of the two velocities at ``(1 - sigma) latents + sigma noise``. A condition is the model's own: the teacher's
    is the same until it is trained, and no gradient is to move it."""
    s = sigma.view(-1, 1, 1, 1, 1)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        teacher, student = velocities((1 - s) * latents + s * noise, sigma, condition.detach())
    return (student.float() - teacher.float()).square().mean()


def compiled(model: VideoModel) -> None:
    """Compiles the blocks, for each of the two sizes of canvas."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    model.dit.compile_repeated_blocks(fullgraph=True, dynamic=False)


@contextmanager
def fast_attention(device: torch.device) -> Iterator[None]:
    """Within it torch's attention takes cuDNN's kernel where it can, whose backward is the fastest on Hopper."""
    if device.type != "cuda":
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


@contextmanager
def averaged(parameters: list[nn.Parameter], average: list[Tensor]) -> Iterator[None]:
    """Within it the parameters are their moving average."""
    with torch.no_grad():
        kept = [x.detach().clone() for x in parameters]
        torch._foreach_copy_(parameters, average)
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, kept)


class _Watch:
    """Prints the mean loss and the samples a second, every so many steps, which is when the device is waited for."""

    def __init__(self, what: str, every: int = 100) -> None:
        self._what, self._every = what, every
        self._clear(None)

    def _clear(self, small: bool | None) -> None:
        self._total, self._steps, self._samples, self._small, self._since = 0.0, 0, 0, small, time.perf_counter()

    def note(self, step: int, loss: Tensor, samples: int, rate: float, small: bool) -> None:
        if small != self._small:
            self._clear(small)
        self._total, self._steps, self._samples = self._total + loss.detach(), self._steps + 1, self._samples + samples
        if step > 1 and step % self._every:
            return
        mean = float(self._total) / self._steps
        if not math.isfinite(mean):
            raise FloatingPointError(f"{self._what}: the loss of step {step} is {mean}")
        # The first step compiles.
        speed = f", {self._samples / (time.perf_counter() - self._since):.1f} samples/s" if step > 1 else ""
        print(f"{self._what}: step {step}, {'quarter' if small else 'whole'} canvases, loss {mean:.4f}, rate {rate:.1e}{speed}", flush=True)
        self._clear(small)
