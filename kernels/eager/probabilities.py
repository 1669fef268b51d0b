"""What native sparse attention's selection asks of attention, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def importance(q: Tensor, k: Tensor, lse: Tensor, firsts: Tensor, seen: Tensor, scale: float) -> Tensor:
    """As in portable/probabilities.py, for any floating-point inputs. ``firsts`` and ``seen`` are not needed: all rows are computed."""
    group = q.shape[1] // k.shape[1]
    queries = (q.float() * scale).unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
    row_lse = lse.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)[..., None]
    return torch.baddbmm(-row_lse, queries, k.permute(1, 2, 0).float()).exp_().unflatten(1, (-1, group)).sum(2)
