"""Rotary position embedding of neighbouring channels, as most video transformers have it, or of halves; in few passes over memory."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 are a point in the plane, rotated by the angle i.

    Args:
        x: ``[..., D]``.
        cos: float32, broadcasts to ``[..., D / 2]``.
        sin: as cos.

    Returns:
        x's shape and dtype; computed in float32 or wider, rounded once.
    """
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.addcmul(even * cos, odd, sin, value=-1), torch.addcmul(even * sin, odd, cos)
    return torch.stack([half.to(x.dtype) for half in rotated], dim=-1).flatten(-2)


def apply_rope_of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope`` where a point in the plane are channels i and D / 2 + i."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(first * sin, second, cos)
    return torch.cat([half.to(x.dtype) for half in rotated], dim=-1)
