"""LayerResult: what one run of a layer gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .selection import Selection

if TYPE_CHECKING:
    from .kernels import Route


class ExactMass(NamedTuple):
    """What the exact part's share of the softmax follows from.

    Attributes:
        shares: ``[B, H, N, T]``, as the step "merge" gives them; or where counts is None what is asked for.
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


class Tape(NamedTuple):
    """What a layer's backward needs of its forward, all in the order of the tiles.

    Attributes:
        q, k, v: as of ``Tiled``.
        out, lse: attention to the listed tiles alone.
        merged, merged_lse: with the estimate; None where nothing is estimated, and so are all others.
        estimate_lse, bias, mixture, log_count, order, k_mean, v_mean: of the estimate; see ``kernels.eager.estimate``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    merged: Tensor | None = None
    merged_lse: Tensor | None = None
    estimate_lse: Tensor | None = None
    bias: Tensor | None = None
    mixture: Tensor | None = None
    log_count: Tensor | None = None
    order: Tensor | None = None
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None


class LayerResult:
    """What one run of a layer gives. Of a sequence that ranks share out, ``out`` is this rank's tokens, and the rest is of its heads.

    Attributes:
        out: ``[B, H, S, D]`` in query's dtype, in the sequence's order.
        route: which kernels attended, and why no faster ones; None where an operator ran, which chooses by itself.
        selection: what was attended to, over the layout's tiles in tiled order.
        mass: what ``exact_mass`` is made of.
        tape: for a backward, of a layer that records a gradient; no longer there once autograd has saved it.
        means: of the video tiles of query, key and value in their dtype, ``[B, H, N, D]`` and twice ``[B, Hkv, K, D]``, where they were
            wanted; else none.
    """

    def __init__(self, out: Tensor, route: Route | None, selection: Selection, mass: ExactMass | None = None, tape: Tape | None = None,
                 means: tuple[Tensor, ...] = ()) -> None:
        self.out, self.route, self.selection, self.mass, self.tape, self.means = out, route, selection, mass, tape, means

    @property
    def exact_mass(self) -> Tensor | None:
        """With a compensation the share of the softmax that was computed exactly, the rest being estimated: float32 ``[B, H, N]`` (float64
        for float64 inputs), the mean of each video tile's rows; NaN for heads without an estimate. Worked out when asked for."""
        return None if self.mass is None else self.mass.tensor()
