"""q, k or v as projections leave them, and the work still to be done: RMS norm, rotary embedding, streams joined, order of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Move(NamedTuple):
    """An order of blocks.

    Attributes:
        source: int64 ``[P]``, the token that each place of the order takes; -1 = zeros.
        offsets: int32 ``[T + 1]``: block i owns the places from ``offsets[i]`` up to ``offsets[i + 1]``; together they own all P.
        mean_blocks: of the first so many blocks means are wanted.
    """

    source: Tensor
    offsets: Tensor
    mean_blocks: int


def new_tokens(x: Tensor, tokens: int) -> Tensor:
    """Uninitialised ``[B, H, tokens, D]`` in x's memory order: where x's heads lie closer together than its tokens, as projections leave
    them, so do those of the result."""
    batch, heads, _, dim = x.shape
    if x.stride(1) < x.stride(2):
        row = heads * dim
        return x.new_empty_strided((batch, heads, tokens, dim), (tokens * row, dim, row, 1))
    return x.new_empty(batch, heads, tokens, dim)


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, computed in float32 and rounded to x's dtype.

    Args:
        weight: ``[D]``, or ``[H, D]`` where heads differ.
        eps: added to the mean.
        casts_before_weight: x is rounded to its dtype before the weight too.
        rstd: float32 ``[B, S]``: 1 / sqrt(mean + eps) of every token, where its heads share one mean, as ``across_heads`` makes it.
            None: the mean is over a head.
    """

    weight: Tensor
    eps: float
    casts_before_weight: bool = False
    rstd: Tensor | None = None

    @classmethod
    def across_heads(cls, x: Tensor, weight: Tensor, eps: float, casts_before_weight: bool = False) -> RMSNorm:
        """For x ``[B, H, S, D]``, with one mean over all heads of a token."""
        from .norm_rope_kernel import token_rstd

        return cls(weight, eps, casts_before_weight, token_rstd(x, eps))


@dataclass(frozen=True)
class Projection:
    """Consecutive tokens of q, k or v as their projection leaves them, and what is to be done to them.

    Args:
        x: ``[B, H, S, D]``, any strides; on a GPU, or in Triton's interpreter, and not float64.
        norm: None leaves x as it is.
        angles: float32 cosines and sines ``[B or 1, H or 1, S, D / 2]``, or ``[B or 1, H or 1, S, D]`` with each of them twice in a row:
            channels 2i and 2i + 1 are a point in the plane and rotated by angle i (RoPE), in float32, rounded once. None: no RoPE.
    """

    x: Tensor
    norm: RMSNorm | None = None
    angles: tuple[Tensor, Tensor] | None = None

    def part(self, tokens: slice, heads: slice) -> Projection:
        """The projection of some of its tokens and heads."""
        norm, angles = self.norm, self.angles
        if norm is not None:
            norm = replace(norm, weight=norm.weight[heads] if norm.weight.dim() == 2 else norm.weight,
                           rstd=None if norm.rstd is None else norm.rstd[:, tokens])
        if angles is not None:
            cos, sin = (of[:, heads if of.shape[1] > 1 else slice(None), tokens] for of in angles)
            angles = cos, sin
        return Projection(self.x[:, heads, tokens], norm, angles)

    def write(self, out: Tensor, order: tuple[Tensor, Tensor, Tensor, int] | None = None) -> None:
        """Writes the tensor that it stands for to ``out``; ``norm_rope_kernel.materialize`` says how ``out`` and ``order`` look."""
        from .norm_rope_kernel import materialize

        norm = self.norm
        weight, rstd = (None, None) if norm is None else (norm.weight, norm.rstd)
        eps, casts = (0.0, False) if norm is None else (float(norm.eps), norm.casts_before_weight)
        materialize(self.x, out, weight, rstd, eps, casts, self.angles, order)


@dataclass(frozen=True)
class Deferred:
    """q, k or v as a sequence of projections. Stands for the tensor ``[B, H, S, D]`` that ``materialize`` makes of it, and has no gradient.

    Args:
        projections: at least one, alike in all but their number of tokens.
    """

    projections: tuple[Projection, ...]

    @property
    def shape(self) -> torch.Size:
        batch, heads, _, dim = self._first.shape
        return torch.Size((batch, heads, sum(self.lengths), dim))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each projection."""
        return [projection.x.shape[2] for projection in self.projections]

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    def materialize(self) -> Tensor:
        """``[B, H, S, D]`` in the projections' memory order."""
        if self.ready is not None:
            return self.ready
        out = new_tokens(self._first, self.shape[2])
        self.write(out)
        return out

    @property
    def ready(self) -> Tensor | None:
        """The tensor, where nothing needs to be done to have it."""
        only = self.projections[0]
        return only.x if len(self.projections) == 1 and only.norm is None and only.angles is None else None

    def write(self, out: Tensor) -> None:
        """Writes the tensor to ``out``, ``[B, H, S, D]`` or ``[B, G, H / G, S, D]``, of any strides but the last, which is 1."""
        first = 0
        for projection, length in zip(self.projections, self.lengths):
            projection.write(out.narrow(-2, first, length))
            first += length

    def part(self, first: int, tokens: int, heads: slice = slice(None)) -> Deferred:
        """The projections of ``tokens`` tokens from ``first`` on, and of some heads."""
        parts, start = [], 0
        for projection, length in zip(self.projections, self.lengths):
            begin, end = max(first - start, 0), min(first + tokens - start, length)
            if begin < end:
                parts.append(projection.part(slice(begin, end), heads))
            start += length
        return Deferred(tuple(parts))

    def gather_blocks(self, source: Tensor, offsets: Tensor, mean_blocks: int) -> tuple[Tensor, Tensor]:
        """The same in the order of blocks, and the means of the first ``mean_blocks`` blocks; as ``Backend.gather``.

        A block's tokens must all come from one projection, and its first place must not be zeros.
        """
        batch, heads, _, dim = self.shape
        out = new_tokens(self._first, len(source))
        means = self._first.new_empty(batch, heads, mean_blocks, dim, dtype=torch.float32)
        first = 0
        for projection, length in zip(self.projections, self.lengths):
            projection.write(out, (source, offsets, means, first))
            first += length
        return out, means

    @property
    def _first(self) -> Tensor:
        return self.projections[0].x
