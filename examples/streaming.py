"""Generates video chunk after chunk with Wan 2.1 1.3B in the way of Self-Forcing, and says how many frames a second that are: a few
denoising passes for each chunk, whose queries attend to a window of earlier chunks through a TileCache, and one more pass whose keys and
values stay.

With --model, a folder or repository of diffusers with Wan's whole pipeline, it writes a video; the weights of the transformer should be
ones that were trained to generate so, such as Self-Forcing's. Without, the transformer has random weights, and only the time means
anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from ssta import SSTAConfig, TileCache
from ssta.pipelines.evaluation.quality import require_video_writer, write_video

# Of a denoising pass: how much of its input is noise. Self-Forcing's four steps at Wan's shift of 5.
SIGMAS = (1.0, 0.9375, 0.8333, 0.625)
TINY = dict(num_attention_heads=2, attention_head_dim=24, ffn_dim=64, num_layers=2, text_dim=32)
WAN = dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30)


class Concatenated:
    """What TileCache stands in for: dense attention to earlier chunks' keys and values, one behind the other."""

    def __init__(self, window: int, sink: int) -> None:
        self.window, self.sink = window, sink
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], *, keep: bool, start: int) -> Tensor:
        t, h, w = thw
        held = (torch.cat([*frames, own], 2) for frames, own in ((self.keys, key), (self.values, value)))
        out = scaled_dot_product_attention(query, *held)
        if keep:
            for frames, own in ((self.keys, key), (self.values, value)):
                frames += own.split(h * w, 2)
                del frames[self.sink:max(self.sink, len(frames) - self.window)]
        return out


class Streamed:
    """A self-attention processor that attends through a cache."""

    def __init__(self, cache: TileCache | Concatenated, stream: Stream) -> None:
        self.cache, self.stream = cache, stream

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
                 attention_mask: Tensor | None = None, rotary_emb: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert rotary_emb is not None
        query, key = (_turned(norm(linear(hidden_states)).unflatten(2, (attn.heads, -1)), *rotary_emb)
                      for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)))
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        now = self.stream
        out = self.cache.attend(*[x.transpose(1, 2) for x in (query, key, value)], now.thw, keep=now.keep, start=now.first)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


class Stream(nn.Module):
    """Where a generation stands, and rotary positions from there on, in the place of the model's.

    Attributes:
        first: the number of the chunk's first frame.
        keep: whether the keys and values of this pass stay.
        thw: the chunk's tokens.
    """

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope, self.first, self.keep, self.thw = rope, 0, False, (0, 0, 0)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        batch, channels, t, height, width = hidden_states.shape
        _, p_h, p_w = self.rope.patch_size
        self.thw = t, height // p_h, width // p_w
        # Positions from the video's first frame on, of which the chunk's are the last.
        whole = self.rope(hidden_states.new_empty(1).expand(batch, channels, self.first + t, height, width))
        return tuple([x[:, self.first * self.thw[1] * self.thw[2]:] for x in whole])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as WanAttnProcessor applies them."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2).type_as(x)


def streamed(transformer: WanTransformer3DModel, cache: Callable[[], TileCache | Concatenated]) -> Stream:
    """Puts a cache into every self-attention of the model, which is changed for good."""
    stream = transformer.rope = Stream(transformer.rope)
    for block in transformer.blocks:
        block.attn1.set_processor(Streamed(cache(), stream))
    return stream


@torch.no_grad()
def generate(transformer: WanTransformer3DModel, stream: Stream, noise: Tensor, text: Tensor, frames: int) -> tuple[Tensor, list[float]]:
    """(latents of the video, seconds of each chunk) from noise ``[B, C, T, H, W]``, ``frames`` at a time."""
    synchronize = torch.cuda.synchronize if noise.is_cuda else lambda: None
    done, seconds = [], []
    for first in tqdm(range(0, noise.shape[2], frames), unit="chunk"):
        stream.first, start = first, time.perf_counter()
        x = noise[:, :, first:first + frames]
        for number, sigma in enumerate(SIGMAS):
            stream.keep = False
            clean = x - sigma * _velocity(transformer, x, sigma, text)
            if number + 1 < len(SIGMAS):
                x = torch.lerp(clean, torch.randn_like(clean), SIGMAS[number + 1])
        stream.keep = True
        _velocity(transformer, clean, 0.0, text)
        synchronize()
        seconds.append(time.perf_counter() - start)
        done.append(clean)
    return torch.cat(done, 2), seconds


def _velocity(transformer: WanTransformer3DModel, x: Tensor, sigma: float, text: Tensor) -> Tensor:
    return transformer(x, torch.full((len(x),), 1000 * sigma, device=x.device), text, return_dict=False)[0]


def main(arguments: list[str] | None = None) -> float:
    """Runs the command line; returns frames of video a second, at the last chunk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or repository of the pipeline; random weights of Wan 2.1 1.3B's size if left out")
    parser.add_argument("--prompt", default="A cat walks on the grass, realistic", help="with --model: what to show")
    parser.add_argument("--attention", choices=("sparse", "dense"), default="sparse", help="TileCache, or SDPA over concatenated keys")
    parser.add_argument("--density", type=float, default=0.25, help="share of the tile pairs to compute exactly (default 0.25)")
    parser.add_argument("--tile", type=int, nargs=3, default=(3, 10, 8), metavar=("T", "H", "W"), help="tokens of a tile (default 3 10 8)")
    parser.add_argument("--chunks", type=int, default=9, help="how many (default 9)")
    parser.add_argument("--frames", type=int, default=3, help="latent frames of a chunk (default 3)")
    parser.add_argument("--window", type=int, default=18, help="latent frames before the chunk that are attended to (default 18)")
    parser.add_argument("--sink", type=int, default=0, help="first latent frames that always are (default 0)")
    parser.add_argument("--height", type=int, default=480, help="pixels (default 480)")
    parser.add_argument("--width", type=int, default=832, help="pixels (default 832)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--tiny", action="store_true", help="a transformer that a CPU can run")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help="with --model: file to write")
    options = parser.parse_args(arguments)
    for name, each in (("chunks", 1), ("frames", 1), ("window", 1), ("height", 16), ("width", 16)):
        if (came := getattr(options, name)) < each or came % each:
            parser.error(f"--{name} must be at least {each}{' and a multiple of it' if each > 1 else ''}, got {came}")
    try:
        return run(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> float:
    """What the command line asks for."""
    gpu = torch.cuda.is_available()
    if not (gpu or options.tiny):
        sys.exit("a CUDA GPU is needed for a model of this size; --tiny runs on a CPU")
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(options.seed)
    config = SSTAConfig(tuple(options.tile), density=options.density, compensation="linear")

    def cache() -> TileCache | Concatenated:
        if options.attention == "dense":
            return Concatenated(options.window, options.sink)
        return TileCache(config, window=options.window, sink=options.sink, chunk=options.frames)

    pipe = None
    if options.model is not None:
        require_video_writer()
        pipe = WanPipeline.from_pretrained(options.model, dtype=dtype).to(device)
        transformer, text = pipe.transformer, pipe.encode_prompt(options.prompt, do_classifier_free_guidance=False, device=device)[0]
    else:
        with torch.device(device):
            transformer = WanTransformer3DModel(**(TINY if options.tiny else WAN)).to(dtype)
            text = torch.randn(1, 512, transformer.config.text_dim, dtype=dtype)
    stream = streamed(transformer.requires_grad_(False), cache)
    noise = torch.randn(1, transformer.config.in_channels, options.chunks * options.frames, options.height // 8, options.width // 8,
                        device=device, dtype=dtype)
    latents, seconds = generate(transformer, stream, noise, text, options.frames)
    if pipe is not None:
        of, shape = pipe.vae.config, (1, -1, 1, 1, 1)
        mean, deviation = (torch.tensor(x, device=device, dtype=dtype).view(shape) for x in (of.latents_mean, of.latents_std))
        video = pipe.vae.decode(latents * deviation + mean, return_dict=False)[0]
        write_video((video[0].float() / 2 + 0.5).clamp(0, 1).permute(1, 0, 2, 3).cpu(), str(options.output), fps=16)
    # A latent frame is four of video.
    rates = [4 * options.frames / of_chunk for of_chunk in seconds]
    print(f"{options.attention}: {rates[-1]:.2f} frames a second at the last chunk, {rates[len(rates) // 2]:.2f} in the middle; "
          f"{1e3 * seconds[-1] / (len(SIGMAS) + 1):.1f} ms a pass of the transformer")
    return rates[-1]


if __name__ == "__main__":
    main()
