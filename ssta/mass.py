"""How much of the softmax was computed exactly where the rest is estimated, worked out when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExactMass(NamedTuple):
    """What the exact part's share of the softmax follows from.

    Attributes:
        shares: ``[B, H, N, T]``, as the step "combine" gives them; or where counts is None what is asked for.
        counts: int32 ``[B or 1, lists, T']``, how many tiles each of the N and of further tiles lists, for all heads, a key head or a head.
        useful: bool ``[B, H]``, the heads that have an estimate.
        tiles: that can be listed.
    """

    shares: Tensor
    counts: Tensor | None = None
    useful: Tensor | None = None
    tiles: int = 0

    def tensor(self) -> Tensor:
        """``[B, H, N]``, mean of each tile's rows; NaN where it is not known: where a tile that does not list all is of a head without an
        estimate."""
        if self.counts is None or self.useful is None:
            return self.shares
        share = self.shares.sum(-1)
        heads, counts = share.shape[1], self.counts[..., :share.shape[2]]
        counts = counts if counts.shape[1] in (1, heads) else counts.repeat_interleave(heads // counts.shape[1], 1)
        return share.masked_fill((counts < self.tiles) & ~self.useful[..., None], torch.nan)
