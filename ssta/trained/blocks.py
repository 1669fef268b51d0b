"""Means of consecutive tokens, a block at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def block_means(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, ceil(S / size), D]``; the last block may be shorter."""
    whole = x.shape[2] // size * size
    means = [x[:, :, :whole].unflatten(2, (-1, size)).mean(3, dtype=dtype)] if whole else []
    if whole < x.shape[2]:
        means.append(x[:, :, whole:].mean(2, keepdim=True, dtype=dtype))
    return torch.cat(means, 2)
