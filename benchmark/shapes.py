"""The shapes that every benchmark shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelShape:
    """Uniform blocks of ``block`` tokens, ``kept`` of them at random for every query block."""

    tokens: int
    kept: int
    block: int = 384
    heads: int = 16
    head_dim: int = 128
    batch: int = 1

    @property
    def blocks(self) -> int:
        return self.tokens // self.block

    @property
    def pairs(self) -> int:
        """(query token, key token) pairs over batch and heads."""
        return self.batch * self.heads * self.tokens * self.kept * self.block


@dataclass(frozen=True)
class LayerShape:
    """One attention layer of a video model: canvas in latent tokens, conditions behind it, ``valid`` of them real."""

    name: str
    thw: tuple[int, int, int]
    text: int
    valid: int
    heads: int
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        t, h, w = self.thw
        return t * h * w + self.text


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


KERNELS = (KernelShape(46_080, 48), KernelShape(46_080, 24), KernelShape(138_240, 56))
KERNELS_CPU = (KernelShape(3_072, 4, heads=2),)

# HunyuanVideo 1.5 at 121 frames: 31 latent frames, 16 x smaller in space; 729 image + 1000 LLM + 256 byT5 condition tokens.
LAYERS = (LayerShape("hunyuan-video-1.5 720p", (31, 45, 80), 1985, 900, 16),
          LayerShape("hunyuan-video-1.5 480p", (31, 30, 53), 1985, 900, 16))
LAYERS_CPU = (LayerShape("small", (7, 12, 20), 96, 50, 2),)

ERRORS = (ErrorShape("uniform", (384,) * 8, 4, 2, 128),
          ErrorShape("ragged", (384, 336, 7, 0, 384, 320, 250, 384), 4, 2, 128, real=(384, 336, 7, 0, 300, 320, 1, 0)))
# Small enough for Triton's interpreter.
ERRORS_CPU = (ErrorShape("uniform", (48,) * 5, 2, 1, 64),
              ErrorShape("ragged", (48, 40, 7, 0, 48, 33), 2, 1, 64, real=(48, 40, 7, 0, 20, 0)))
