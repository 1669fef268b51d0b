"""The small video model chunk after chunk: trained on all chunks of a video at once, sampled through a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from clips import Clip
from diffusers import FlowMatchEulerDiscreteScheduler
from few_steps import Pairs
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from train_video import Example, Plan, batch, generators, noise_levels, optimise
from video_model import SHIFT, ModelSize, PatchAutoencoder, VideoModel

from ssta import SSTAConfig, TileCache

# Of a training video.
CHUNKS = 4
Attend = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]


def chunk_frames(size: ModelSize) -> int:
    """Latent frames of a chunk."""
    return size.canvas[0] // CHUNKS


class Positions(nn.Module):
    """In the place of the model's: rotary positions of ``frames`` frames from ``first`` on, however many it is shown.

    Attributes:
        first, frames: as the caller sets them.
    """

    def __init__(self, rope: nn.Module, frames: int) -> None:
        super().__init__()
        self.rope, self.first, self.frames = rope, 0, frames

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        _, channels, _, height, width = x.shape
        whole = self.rope(x.new_empty(1).expand(1, channels, self.first + self.frames, height, width))
        return tuple([of[:, self.first * height * width:] for of in whole])


class Attention:
    """A self-attention processor that leaves rotary positions and attention to ``attend(q, k, v, rotary)``, ``[N, S, H, D]`` all."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
                 attention_mask: Tensor | None = None, rotary_emb: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert rotary_emb is not None
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states)), attn.to_v(hidden_states)
        out = self.attend(*[x.unflatten(2, (attn.heads, -1)) for x in (q, k, v)], rotary_emb)
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(hidden_states)))


def turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """``x [N, S, H, D]`` with rotary positions, as diffusers' processor applies them."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2).type_as(x)


# Training: the chunks of a video lie side by side in the batch, each with a noise level of its own.


def chunked(model: VideoModel) -> VideoModel:
    """``model`` with self-attention from each chunk of a video to itself and those before it; in place."""
    model.dit.rope = Positions(model.dit.rope, model.size.canvas[0])
    for block in model.dit.blocks:
        block.attn1.set_processor(Attention(_causal))
    return model


def _causal(q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    tokens = q.shape[1]
    q, k, v = (x.unflatten(0, (-1, CHUNKS)).flatten(1, 2) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (turned(q, rotary), turned(k, rotary), v))
    out = [scaled_dot_product_attention(q[:, :, end - tokens:end], k[:, :, :end], v[:, :, :end])
           for end in range(tokens, q.shape[2] + 1, tokens)]
    return torch.stack([x.transpose(1, 2) for x in out], 1).flatten(0, 1)


def chunk_loss(model: VideoModel, latents: Tensor, sigma: Tensor, noise: Tensor, condition: Tensor) -> Tensor:
    """Mean squared error of the velocities of those chunks whose noise level, of ``sigma [B, chunks]``, is not 0."""
    def in_batch(x: Tensor) -> Tensor:
        return x.unflatten(2, (CHUNKS, -1)).transpose(1, 2).flatten(0, 1)

    latents, noise, levels = in_batch(latents), in_batch(noise), sigma.flatten()
    s = levels.view(-1, 1, 1, 1, 1)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        velocity = model((1 - s) * latents + s * noise, levels, condition.repeat_interleave(CHUNKS, 0))
    error = (velocity.float() - (noise - latents)).square().mean((1, 2, 3, 4))
    return (error * (levels > 0)).sum() / (levels > 0).sum()


def train_chunks(model: VideoModel, autoencoder: PatchAutoencoder, clips: list[Clip], plan: Plan, what: str) -> int:
    """Trains a ``chunked`` model on random windows of clips; returns the number of steps."""
    draws, noises = generators(model, plan)

    def examples(small: bool) -> Example:
        latents, condition = batch(model, autoencoder, clips, small, draws)
        sigma = after_clean_ones(noise_levels(len(latents) * CHUNKS, SHIFT, draws).view(-1, CHUNKS), draws)
        return latents, sigma.to(latents.device), torch.randn(latents.shape, device=latents.device, generator=noises), condition

    return optimise(model, examples, partial(chunk_loss, model), plan, what)


def reflow_chunks(model: VideoModel, pairs: Pairs, levels: Tensor, plan: Plan, what: str) -> int:
    """Trains a ``chunked`` model on pairs at ``levels`` alone, as few_steps.reflow does whole ones."""
    draws, _ = generators(model, plan)

    def examples(small: bool) -> Example:
        chosen = torch.randint(len(pairs.labels), (model.size.batch,), generator=draws).to(pairs.labels.device)
        sigma = after_clean_ones(levels.cpu()[torch.randint(len(levels), (model.size.batch, CHUNKS), generator=draws)], draws)
        return pairs.samples[chosen], sigma.to(levels.device), pairs.noise[chosen], model.condition(pairs.labels[chosen])

    return optimise(model, examples, partial(chunk_loss, model), plan, what)


def after_clean_ones(sigma: Tensor, draws: torch.Generator) -> Tensor:
    """``sigma [B, chunks]`` with a random number of leading chunks, never all, clean, as they are when a chunk is sampled."""
    clean = torch.randint(sigma.shape[1], (len(sigma), 1), generator=draws)
    return sigma.masked_fill(torch.arange(sigma.shape[1]) < clean, 0)


# Sampling


class Rollout:
    """Videos chunk after chunk, from the noise of ``seed``, by Euler's method.

    Attributes:
        frames: latent frames of a chunk.
        noise: float32 ``[V, C, chunks * frames, H, W]``.
    """

    def __init__(self, model: VideoModel, labels: list[int], seed: int, chunks: int) -> None:
        self.model, self.chunks, self.frames = model, chunks, chunk_frames(model.size)
        device = next(model.parameters()).device
        _, height, width = model.size.canvas
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(model.size.channels, chunks * self.frames, height, width, generator=generator) for _ in labels]
        self.noise = torch.stack(noise).to(device)
        self.labels = torch.tensor(labels, device=device)
        self.condition = model.condition(self.labels)

    @torch.no_grad()
    def sample(self, config: SSTAConfig, steps: int) -> Tensor:
        """Latents; each chunk attends to itself and to as many chunks before it as the last one of a training video, as ``config`` says, in
        all steps and in the pass whose keys and values stay."""
        size, dtype = self.model.size, self.model.dit.patch_embedding.weight.dtype
        thw, keep = (self.frames, *size.canvas[1:]), False
        positions = self.model.dit.rope = Positions(_plain(self.model.dit.rope), self.frames)

        def attend(cache: TileCache, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (turned(q, rotary), turned(k, rotary), v))
            return cache.attend(q, k, v, thw, keep=keep, start=positions.first).transpose(1, 2)

        for block in self.model.dit.blocks:
            block.attn1.set_processor(Attention(partial(attend, TileCache(config, window=size.canvas[0] - self.frames))))
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT)
        scheduler.set_timesteps(steps, device=self.noise.device)
        levels = scheduler.sigmas.to(self.noise.device)
        done = []
        for number in range(self.chunks):
            positions.first = number * self.frames
            x = self.noise[:, :, positions.first:positions.first + self.frames]
            for sigma, after in zip(levels, levels[1:]):
                x = x + (after - sigma) * self._velocity(x, sigma, dtype)
            keep = True
            self._velocity(x, 0 * levels[0], dtype)
            keep = False
            done.append(x)
        return torch.cat(done, 2)

    def _velocity(self, x: Tensor, sigma: Tensor, dtype: torch.dtype) -> Tensor:
        return self.model.dit(x.to(dtype), (1000 * sigma).expand(len(x)), self.condition.to(dtype), return_dict=False)[0].float()


def _plain(rope: nn.Module) -> nn.Module:
    return rope.rope if isinstance(rope, Positions) else rope
