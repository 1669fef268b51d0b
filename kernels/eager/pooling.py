"""Block maxima of causal attention probabilities in plain torch, for one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .steps import GATHER_ELEMENTS, compute_dtype


def torch_pooling(q: Tensor, k: Tensor, scale: float, block_size: int, by_block: Tensor) -> Tensor:
    """Per token [Hq, L, ceil(L / block_size)] in q's dtype, of q [L, Hq, D] and k [L, Hkv, D]; ``by_block`` [Hq, N, N] takes the maxima
    per query block."""
    length, heads, _ = q.shape
    number = -(-length // block_size)
    keys = k.to(compute_dtype(q)).transpose(0, 1).repeat_interleave(heads // k.shape[1], 0)
    by_token = torch.zeros(heads, length, number, dtype=q.dtype, device=q.device)
    position = torch.arange(number * block_size, device=q.device)
    at_once = max(1, GATHER_ELEMENTS // max(heads * block_size * length, 1))
    for block in range(0, number, at_once):
        rows = slice(block * block_size, min((block + at_once) * block_size, length))
        past = min(block + at_once, number)
        scores = (q[rows].to(keys.dtype).transpose(0, 1) @ keys[:, :past * block_size].mT) * scale
        scores = torch.nn.functional.pad(scores, (0, past * block_size - scores.shape[-1]), value=float("-inf"))
        future = position[:past * block_size] > position[rows, None]
        peaks = scores.masked_fill(future, float("-inf")).softmax(-1).unflatten(-1, (past, block_size)).amax(-1)
        by_token[:, rows, :past] = peaks.to(q.dtype)
        peaks = torch.nn.functional.pad(peaks, (0, 0, 0, -peaks.shape[1] % block_size)).unflatten(1, (-1, block_size)).amax(2)
        by_block[:, block:past, :past] = peaks
    return by_token
