"""What lies between a projection and attention in one pass: RMS norm and rotary embedding of q or k, written where attention reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, computed in float32 and rounded to x's dtype.

    Args:
        weight: ``[D]``: each head has a mean of its own; ``[H * D]``: all heads of a token share one.
        eps: added to the mean.
        rounds_twice: x's dtype is rounded to before the weight too.
    """

    weight: Tensor
    eps: float
    rounds_twice: bool = False


def norm_and_turn(x: Tensor, out: Tensor, norm: RMSNorm | None = None, angles: tuple[Tensor, Tensor] | None = None) -> None:
    """Writes x to ``out``, normed and then turned, by Triton's kernel. Not differentiable.

    Args:
        x: ``[B, H, S, D]``, any strides; ``kernels_run(x)`` must be true.
        out: x's shape and dtype, the last stride 1, other memory than x's.
        norm: None leaves x as it is.
        angles: float32 cosines and sines, which broadcast to ``[B, H, S, D / 2]``, or to ``[B, H, S, D]`` with each of them twice in a row:
            channels 2i and 2i + 1 are a point in the plane and turned by angle i, in float32, rounded once. None turns nothing.
    """
    from .triton_rotary import norm_and_turn

    norm_and_turn(x, out, norm, angles)
