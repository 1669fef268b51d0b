"""What interfaces ask of attention's probabilities, in plain torch: a token's by key, summed over heads, and the maxima of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.eager.steps import GATHER_ELEMENTS, compute_dtype


def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float) -> Tensor:
    """See ``tokens.importance``; any floating-point inputs. ``firsts`` and ``seen`` are not needed: all rows are computed."""
    group = q.shape[1] // k.shape[1]
    queries = (q.float() * scale).unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
    row_lse = lse.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)[..., None]
    return torch.baddbmm(-row_lse, queries, k.permute(1, 2, 0).float()).exp_().unflatten(1, (-1, group)).sum(2)


def torch_pooling(q: Tensor, k: Tensor, scale: float, block_size: int, by_block: Tensor) -> Tensor:
    """Maxima of blocks per token, [Hq, L, ceil(L / block_size)] in q's dtype, of q [L, Hq, D] and k [L, Hkv, D] of one sequence;
    ``by_block`` [Hq, N, N] takes those per query block."""
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
