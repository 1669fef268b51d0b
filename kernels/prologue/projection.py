"""q, k or v as a projection leaves them, and what is still to be done to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


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
        """Of some of its tokens and heads."""
        norm, angles = self.norm, self.angles
        if norm is not None:
            norm = replace(norm, weight=norm.weight[heads] if norm.weight.dim() == 2 else norm.weight,
                           rstd=None if norm.rstd is None else norm.rstd[:, tokens])
        if angles is not None:
            cos, sin = (of[:, heads if of.shape[1] > 1 else slice(None), tokens] for of in angles)
            angles = cos, sin
        return Projection(self.x[:, heads, tokens], norm, angles)
