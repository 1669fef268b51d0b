"""The tail: what blocks that no list names would have added to attention, estimated from their means and covariances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of h: beyond it the estimate is damped.
CAP = 1.0
# Of h's mean weighted by mass: heads above it are not compensated.
USELESS = 3.0
# Of the power iteration that finds a block's first principal direction.
ITERATIONS = 10


@dataclass(frozen=True, eq=False)
class BlockEstimates:
    """What is known of N blocks before any is selected; constants to autograd. U = parts * N units, of block u // parts.

    Attributes:
        parts: units of a block.
        linear: whether covariances and h take part in the estimate.
        log_count: float32 ``[B, Hkv, U]``, log of a unit's tokens; -inf where it has none, or its block holds NaN or inf: nothing is
            estimated of that.
        half_variance: h, float32 ``[B, H, N, U]``, half the variance of a unit's scores as a query block sees it; None where neither the
            estimate nor a score asks for it.
        mass: float32 ``[B, H, N, U]``, the mean over a query block's tokens of softmax over all units; None where h is.
        order: int32 ``[B, Hkv, P]``, which token each place of the compensated blocks takes when units divide them; None where that is
            its own. (int64 ``[B, Hkv, N, L]``, places of a block, where plain torch made it.)
        k_mean: ``[B, Hkv, U, D]`` in the dtype that kernels multiply; None where plain torch runs, which makes it anew for autograd.
    """

    parts: int
    linear: bool
    log_count: Tensor
    half_variance: Tensor | None = None
    mass: Tensor | None = None
    order: Tensor | None = None
    k_mean: Tensor | None = None

    def scores(self) -> Tensor:
        """mass x h, float32 ``[B, H, N, N]``: how far each block's estimate may be off; -inf for blocks that hold NaN or inf."""
        assert self.mass is not None and self.half_variance is not None
        scores = (self.mass * self.half_variance).unflatten(-1, (-1, self.parts)).sum(-1)
        bad = self.log_count.isneginf().unflatten(-1, (-1, self.parts)).any(-1)
        return scores.masked_fill(per_query_head(bad, scores.shape[1])[:, :, None], -torch.inf)

    def useful(self) -> Tensor | None:
        """bool ``[B, H]``: the heads that are compensated; None = all."""
        if self.mass is None or self.half_variance is None:
            return None
        return (self.mass * self.half_variance).sum(-1).mean(-1) <= USELESS


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, ...]`` -> ``[B, H, ...]``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
