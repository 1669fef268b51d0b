"""The shapes that every benchmark shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ssta import SSTAConfig

WINDOW = (3, 3, 3)
# What q and k hold: normal numbers; both times 3; one key in 200 ten times as long, as attention sinks and text are.
INPUTS = ("randn", "long", "outlier")


@dataclass(frozen=True)
class Problem:
    """Attention over ``tokens`` in blocks of ``block``, as many heads for keys as for queries."""

    tokens: int
    heads: int = 16
    head_dim: int = 128
    block: int = 384
    batch: int = 1
    inputs: str = "randn"  # one of INPUTS

    @property
    def blocks(self) -> int:
        return self.tokens // self.block


@dataclass(frozen=True)
class Pattern:
    """Which blocks every query block attends to, the same number ``kept`` for each.

    "full": all. "window": the 3 x 3 x 3 neighbours, as ``ssta`` takes them, where the blocks are the tiles of a video.
    "random": ``kept`` at random, other ones for every head.
    """

    name: str
    kept: int

    def mask(self, problem: Problem, device: str) -> Tensor:
        """bool ``[1, 1, N, N]``, or ``[B, H, N, N]`` where heads differ; True keeps the block."""
        if self.name == "full":
            return torch.ones(1, 1, problem.blocks, problem.blocks, dtype=torch.bool, device=device)
        if self.name == "window":
            from ssta.window import near  # which other checkouts may not have

            return near([tile_grid(problem.blocks)], WINDOW, device)[None, None]
        scores = torch.rand(problem.batch, problem.heads, problem.blocks, problem.blocks, device=device)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(self.kept).indices, True)


def draw(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient, ``[B, H, S, D]``, of the problem's ``inputs``."""
    size = (problem.batch, problem.heads, problem.tokens, problem.head_dim)
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
    if problem.inputs == "long":
        q, k = q * 3, k * 3
    elif problem.inputs == "outlier":
        k *= torch.where(torch.rand((*size[:3], 1), device=device) < 1 / 200, 10.0, 1.0).to(dtype)
    return q, k, v, dout


def full(problem: Problem) -> Pattern:
    return Pattern("full", problem.blocks)


def window(problem: Problem) -> Pattern:
    kept = 1
    for n, k in zip(tile_grid(problem.blocks), WINDOW):
        kept *= min(n, k)
    return Pattern("window", kept)


def kept(problem: Problem, number: int | float) -> Pattern:
    """A random pattern of ``number`` blocks; below 1 a share of all of them."""
    return Pattern("random", number if isinstance(number, int) else max(1, round(number * problem.blocks)))


def tile_grid(tiles: int) -> tuple[int, int, int]:
    """(t, h, w) of the video that so many tiles could be: of all boxes the one with the least surface, t <= h <= w.

    360 tiles give (6, 6, 10), the 720p canvas of HunyuanVideo 1.5 at 121 frames.
    """
    boxes = [(t, h, tiles // (t * h)) for t in range(1, tiles + 1) if tiles % t == 0
             for h in range(t, tiles // t + 1) if tiles // t % h == 0 and h <= tiles // (t * h)]
    return min(boxes, key=lambda box: box[0] * box[1] + box[1] * box[2] + box[0] * box[2])


def pairs(problem: Problem, kept_blocks: int) -> int:
    """(query token, key token) pairs over batch and heads."""
    return problem.batch * problem.heads * problem.tokens * kept_blocks * problem.block


@dataclass(frozen=True)
class LayerShape:
    """One attention layer of a video model: canvas in latent tokens, conditions behind it, ``valid`` of them real."""

    name: str
    thw: tuple[int, int, int]
    text: int
    valid: int
    heads: int
    head_dim: int
    config: SSTAConfig
    kv_heads: int | None = None

    @property
    def tokens(self) -> int:
        t, h, w = self.thw
        return t * h * w + self.text

    def attention_config(self, name: str) -> SSTAConfig:
        """On this canvas, of a name in rows.DEFAULTS; any other is a padding for the published configuration of the layer."""
        config = DEFAULTS[name] if name in DEFAULTS else replace(self.config, pad_type=name)
        return config.for_canvas(self.thw)


@dataclass(frozen=True)
class ErrorShape:
    """Query and key blocks of ``lengths`` tokens, of which the first ``real`` count (None: all)."""

    pattern: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    real: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


# What bench_kernels.py measures: problems, and the patterns on each.
SHARES = (0.6, 0.4, 0.2)
KERNELS = {
    Problem(46_080): (full, window, partial(kept, number=0.4), partial(kept, number=0.2)),
    Problem(46_080, head_dim=64): (partial(kept, number=0.4),),
    Problem(138_240): (partial(kept, number=56),),
    # What 16 heads over 8 GPUs leave to one.
    Problem(138_240, heads=2): (partial(kept, number=56),),
    Problem(23_040, heads=24): (partial(kept, number=18),),
    Problem(11_520): (partial(kept, number=12),),
    Problem(11_520, heads=2): (partial(kept, number=12),),
    Problem(5_760, heads=12): (partial(kept, number=5),),
    # Tiles of 4 x 4 x 8 tokens, and of 4 x 4 x 4.
    Problem(30_720, block=128): (partial(kept, number=24),),
    Problem(75_520, heads=12, block=128): (partial(kept, number=88),),
    Problem(113_664, block=128): (partial(kept, number=133),),
    Problem(30_720, block=64): (partial(kept, number=48),)}
EVERY_PATTERN = (full, window, *(partial(kept, number=share) for share in SHARES))
KERNELS_FULL = {Problem(tokens, heads): EVERY_PATTERN for heads in (16, 1) for tokens in (11_520, 23_040, 46_080, 92_160, 138_240)}
KERNELS_FULL |= {Problem(46_080, head_dim=64): EVERY_PATTERN, Problem(138_240): (*EVERY_PATTERN, partial(kept, number=56)),
                 Problem(138_240, heads=2): (partial(kept, number=56),)}
KERNELS_CPU = {Problem(1_536, heads=2, head_dim=64, block=96): (full, window, partial(kept, number=0.4))}
KERNELS_CPU |= {Problem(6_144, heads=2, block=block): (partial(kept, number=0.28),) for block in (64, 128, 256)}

# HunyuanVideo 1.5 at 121 frames: 31 latent frames, 16 x smaller in space; 729 image + 1000 LLM + 256 byT5 condition tokens.
# Wan 2.1 at 81 frames and LTX-Video at 121 (VAE 8 x 32 x 32) attend to their text elsewhere and have no published SSTA setting: here a
# tenth and a fifth of the tiles besides a window.
HUNYUAN = SSTAConfig.hunyuan_video_15()
# What apply_ssta(pipe) chooses for models that were not trained with SSTA; spelled out, so that another checkout computes the same.
DEFAULT = SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(1, 1, 1), sparse_type="block_attn", density=0.15, compensation="linear",
                     compensation_parts=2, variants=((1, {"tile_thw": (1, 8, 16)}),))
DEFAULTS = {"default": DEFAULT, "one part": replace(DEFAULT, compensation_parts=1)}
LAYERS = (LayerShape("HunyuanVideo 1.5, 720p", (31, 45, 80), 1985, 900, 16, 128, HUNYUAN),
          LayerShape("HunyuanVideo 1.5, 480p", (31, 30, 53), 1985, 900, 16, 128, HUNYUAN),
          LayerShape("Wan 2.1, 720p", (21, 45, 80), 0, 0, 40, 128, SSTAConfig(topk=24)),
          LayerShape("LTX-Video, 1216 x 704", (16, 22, 38), 0, 0, 32, 64, SSTAConfig(kernel_thw=(1, 3, 3), topk=9)))
LAYERS_CPU = (LayerShape("small", (7, 12, 20), 40, 25, 2, 64, replace(HUNYUAN, variants=(), tile_thw=(2, 4, 4), topk=4)),
              LayerShape("small, no text", (5, 12, 20), 0, 0, 2, 64, SSTAConfig(tile_thw=(2, 4, 4), topk=4)))

# What bench_host.py measures.
HOST = (LAYERS[0], LAYERS[3])
HOST_CPU = LAYERS_CPU

# What ranks share out in bench_parallel.py: layers of the models in models.py, with as many tiles as they have there; small ones, of which
# the exchange and the host take a larger part; heads that ranks cannot share evenly; grouped-query attention; and a very large one.
SHARED = (LAYERS[0], LayerShape("Wan 2.1 14B, 720p", (21, 45, 80), 0, 0, 40, 128, SSTAConfig(topk=32)),
          LayerShape("Wan 2.1 1.3B, 480p", (21, 30, 52), 0, 0, 12, 128, SSTAConfig(topk=24)),
          LayerShape("13 heads, 9 x 31 x 53", (9, 31, 53), 0, 0, 13, 128, SSTAConfig(topk=16)),
          LayerShape("8 over 2 heads, 9 x 31 x 53", (9, 31, 53), 0, 0, 8, 128, SSTAConfig(topk=16), kv_heads=2),
          LayerShape("HunyuanVideo 1.5, 720p, 241 frames", (61, 45, 80), 1985, 900, 16, 128, HUNYUAN))
SHARED_CPU = (LayerShape("small", (7, 12, 16), 18, 6, 4, 32, replace(HUNYUAN, variants=(), tile_thw=(2, 4, 4), topk=4)),
              LayerShape("small, no text", (5, 12, 16), 0, 0, 4, 32, SSTAConfig(tile_thw=(2, 4, 4), topk=4), kv_heads=2))

ERRORS = (ErrorShape("uniform", (384,) * 8, 4, 2, 128),
          ErrorShape("ragged", (384, 336, 7, 0, 384, 320, 250, 384), 4, 2, 128, real=(384, 336, 7, 0, 300, 320, 1, 0)))
# Small enough for Triton's interpreter.
ERRORS_CPU = (ErrorShape("uniform", (48,) * 5, 2, 1, 64),
              ErrorShape("ragged", (48, 40, 7, 0, 48, 33), 2, 1, 64, real=(48, 40, 7, 0, 20, 0)))
