"""What the tiles that were not selected are worth: an estimate of their part of attention, merged with the exact part by lse.

The formulas, for one head with scale s. Key tiles are estimated as units u: whole tiles, or with ``parts`` = 2 the halves of a tile whose
tokens are ordered by their projection on the tile's first principal key direction. Unit u has n_u tokens, mean key and value kb_u and vb_u,
covariances C_u of keys with values and S_u of keys; G_I is the second moment of some of query tile I's queries, which speak for it. Then

    h_Iu = s^2 / 2 <G_I, S_u>                                   half the variance of a unit's scores, as a query tile sees it
    l_qu = s q . kb_u + log n_u + min(h_Iu, 1)                  the log of a unit's estimated mass
    m_Iu = mean over the same queries of the softmax over all units of l_qu, of which "error" selects by m_Iu h_Iu
    w_qu = softmax over the units of unselected tiles,  z_q = logsumexp
    M_I  = sum over u of (m_Iu / their sum over the units of unselected tiles) sqrt(min(1, 1 / h_Iu)) C_u
    out  = sum over u of w_qu vb_u + s q^T M_I

For tiles drawn from a Gaussian, s q^T C_u is how far a softmax inside the unit moves its mean value, and h how much its mass exceeds that
of its mean key. Real tiles have bounded tails, so both are damped where h > 1. The queries that speak for their tile in h and m are spread
over it: 32 or, of tiles of more than 128 tokens, 64. Errors are the same within 1 % as where all do. A head
whose tiles' tokens differ too much to be estimated together (h above 3 in the mean, weighted by mass) does without.

Gradients flow through w, kb, vb and C to q, k and v; h, the damping, m and the halves count as constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .kernels import (
    CAP,
    ITERATIONS,
    BlockEstimates,
    add_tail,
    estimate_blocks,
    kernels_run,
    per_query_head,
    sampled_queries,
    useful_heads,
    without_autocast,
)
from .memo import remember

if TYPE_CHECKING:
    from .config import SSTAConfig
    from .kernels import BlockLists
    from .layout import TiledQKV, TileLayout


class _Tiles:
    """The video tokens of a layout, tile by tile: ``[..., P, *]`` in tiled order <-> ``[..., N, L, *]``, the end of short tiles unused."""

    def __init__(self, layout: TileLayout) -> None:
        self.number, self.longest = layout.num_video_tiles, _longest(layout)
        self.slots = sum([segment.num_slots for segment in layout.video])
        self.lengths = layout.lengths[:self.number].long()
        starts = layout.offsets[:self.number].long()
        place = torch.arange(self.longest, device=layout.device)
        self.valid = place < self.lengths[:, None]
        self._index = (starts[:, None] + place).clamp(max=self.slots - 1).flatten()
        slot = torch.arange(self.slots, device=layout.device)
        self.of_slot = torch.bucketize(slot, layout.offsets[1:self.number + 1], right=True)
        self._back = self.of_slot * self.longest + slot - starts[self.of_slot]

    def cut(self, x: Tensor) -> Tensor:
        """``[B, H, P, C]`` -> ``[B, H, N, L, C]``, zeros where a tile has no token."""
        return x.index_select(2, self._index).unflatten(2, (self.number, self.longest)).masked_fill(~self.valid[..., None], 0)

    def join(self, x: Tensor) -> Tensor:
        """``[B, H, N, L, C]`` -> ``[B, H, slots, C]``."""
        return x.flatten(2, 3).index_select(2, self._back)

    def members(self, parts: int) -> tuple[Tensor, Tensor]:
        """(bool ``[N, parts, L]``: the places of a tile's order that a unit takes; int64 ``[N, parts]``: how many)."""
        bounds = self.lengths[:, None] * torch.arange(parts + 1, device=self.lengths.device) // parts
        place = torch.arange(self.longest, device=self.lengths.device)
        return (place >= bounds[:, :-1, None]) & (place < bounds[:, 1:, None]), bounds.diff()

    def sample(self) -> tuple[Tensor, Tensor]:
        """(int64 ``[N, n]``: places of the queries that speak for a tile, bool ``[N, n]``: those that are there).

        One of each of n equal runs of the tile's tokens; all tokens where there are no more.
        """
        number = sampled_queries(self.longest)
        run = torch.arange(number, device=self.lengths.device)
        low = run * self.lengths[:, None] // number
        length = (run + 1) * self.lengths[:, None] // number - low
        # Places spread evenly by the golden ratio, and not in step with the lines of a picture.
        return (low + (run * 40503 % 65536 * length >> 16)).clamp(max=self.longest - 1), length > 0


@remember(64)
def _tiles(layout: TileLayout) -> _Tiles:
    return _Tiles(layout)


def estimate_tiles(tiled: TiledQKV, config: SSTAConfig, scale: float, useful: Tensor | None = None) -> BlockEstimates:
    """What the selection and the estimate need to know of a layer's N video tiles, of which there is at least one.

    Args:
        tiled: q, k and v in the order of the tiles.
        config: its compensation, which is not "none", and its parts.
        scale: factor on the scores.
        useful: ``BlockEstimates.useful`` of the call whose selection is attended to again.
    """
    q, k, v, layout = tiled.held_q(), tiled.k, tiled.v, tiled.layout
    if kernels_run(q):
        return estimate_blocks(q, k, v, layout.offsets, layout.num_video_tiles, _longest(layout), scale=scale,
                               parts=config.compensation_parts, useful=useful)
    # Autocast would compute in half precision.
    with torch.no_grad(), without_autocast(q.device.type):
        return _estimate_in_torch(q, k, v, layout, config, scale, useful)


def compensate(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, blocks: BlockLists, estimates: BlockEstimates,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the tiles that ``blocks`` leaves out estimated, from attention to those that it lists.

    Args:
        out: ``[B, H, P, D]`` in tiled order, over the listed tiles; may be written over where no gradient is asked for.
        lse: ``[B, H, P]``, float32 or float64, its log-sum-exp; likewise.
        q, k, v: ``[B, H, P, D]`` and ``[B, Hkv, P, D]``, those of ``estimates``.
        layout: the tiled order.
        blocks: the tiles that each tile attends to exactly.

    Returns:
        (out, lse), as the arguments of these names, differentiable in out, lse, q, k and v; rows that leave nothing out, and those of
        text, are the same bits as before. And ``[B, H, N]`` in lse's dtype, the share of the softmax that was computed exactly, mean of a
        query tile's rows, NaN where a head does without the estimate of what is left out; a constant.
    """
    out, lse, share = _merged(out, lse, q, k, v, layout, blocks, estimates, scale)
    useful = estimates.useful
    if useful is not None:
        incomplete = blocks.counts[..., :layout.num_video_tiles] < layout.num_tiles
        share = share.masked_fill(incomplete & ~useful[..., None], torch.nan)
    return out, lse, share


def _merged(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, blocks: BlockLists, estimates: BlockEstimates,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernels_run(q):
        return add_tail(out, lse, q, k, v, layout.offsets, layout.num_video_tiles, _longest(layout), blocks, estimates, scale=scale,
                        owned=True)
    with without_autocast(q.device.type):
        return _compensate_in_torch(out, lse, q, k, v, layout, blocks, estimates, scale)


def mass_summary(exact_mass: Tensor) -> tuple[float, float, float] | None:
    """Of shares ``[B, H, N]`` that were computed exactly: the mean, the 5th percentile over query tiles of all heads, and the mean of the
    worst head, leaving out heads without an estimate; None if all are. Synchronises the device."""
    shares = exact_mass.double().cpu()
    shares = shares[~shares.isnan().any(2)]
    if not shares.numel():
        return None
    lowest = shares.flatten().sort().values
    return float(shares.mean()), float(lowest[int(0.05 * (len(lowest) - 1))]), float(shares.mean(1).min())


def _longest(layout: TileLayout) -> int:
    return max([segment.longest_tile for segment in layout.video])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _estimate_in_torch(
    q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, config: SSTAConfig, scale: float, useful: Tensor | None = None,
) -> BlockEstimates:
    tiles, parts = _tiles(layout), config.compensation_parts
    q_tiles, k_tiles, v_tiles = (tiles.cut(_wide(x)) for x in (q, k, v))
    finite = (k_tiles.isfinite() & v_tiles.isfinite()).flatten(3).all(-1)
    k_tiles = k_tiles.masked_fill(~finite[..., None, None], 0)
    order = _principal_order(k_tiles, tiles) if parts > 1 else None
    members, counts = tiles.members(parts)
    log_count = counts.to(k_tiles.dtype).log().expand(*finite.shape, parts).masked_fill(~finite[..., None], -torch.inf).flatten(2)
    k_mean, k_spread = _units(k_tiles, members, counts, order)
    variance = per_query_head(k_spread.mT @ k_spread / counts.clamp(min=1)[..., None, None], q.shape[1]).flatten(2, 3)
    sampled, counted = tiles.sample()
    queries = q_tiles.gather(3, sampled[..., None].expand(*q_tiles.shape[:2], -1, -1, q_tiles.shape[-1]))
    # A query that is not finite is no part of what its tile has in common.
    sound = queries.isfinite().all(-1, keepdim=True) & counted[..., None]
    queries, number = queries.masked_fill(~sound, 0), counted.sum(1).clamp(min=1)[:, None]
    half_variance = 0.5 * scale**2 * ((queries.mT @ queries / number[..., None]).flatten(3) @ variance.flatten(3).mT)
    logits = scale * queries.flatten(2, 3) @ per_query_head(k_mean.flatten(2, 3), q.shape[1]).mT
    bias = _bias(log_count, half_variance)
    mass = (logits.unflatten(2, sampled.shape) + bias[..., None, :]).softmax(-1).nan_to_num(0)
    mass = (mass * sound).sum(3) / number
    useful = useful_heads((mass * half_variance).sum(-1)) if useful is None else useful
    return BlockEstimates(parts, log_count, half_variance, mass, order, useful=useful)


def _bias(log_count: Tensor, half_variance: Tensor) -> Tensor:
    """``[B, H, N, U]``: what a unit's logit has beside its mean key's."""
    return per_query_head(log_count, half_variance.shape[1])[:, :, None] + half_variance.clamp(max=CAP)


def _principal_order(k_tiles: Tensor, tiles: _Tiles) -> Tensor:
    """int64 ``[B, Hkv, N, L]``: each tile's places by ascending projection of its key on the tile's first principal direction."""
    mean = k_tiles.sum(3, keepdim=True) / tiles.lengths.clamp(min=1)[:, None, None]
    spread = (k_tiles - mean).masked_fill(~tiles.valid[..., None], 0)
    variance = spread.mT @ spread
    # From the diagonal, so that nothing is drawn; 1 keeps tiles of one key apart from 0 / 0.
    direction = 1 + variance.diagonal(dim1=-2, dim2=-1)[..., None]
    for _ in range(ITERATIONS):
        direction = variance @ direction
        direction = direction / torch.linalg.vector_norm(direction, dim=-2, keepdim=True).clamp(min=1e-20)
    place = (spread @ direction)[..., 0].masked_fill(~tiles.valid, torch.inf)
    return place.argsort(dim=-1, stable=True)


def _units(x: Tensor, members: Tensor, counts: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """``[B, H, N, L, D]`` -> (means ``[B, H, N, parts, D]``, deviations from them ``[B, H, N, parts, L, D]``, 0 for what is elsewhere)."""
    if order is not None:
        x = x.gather(3, order[..., None].expand_as(x))
    x = x[:, :, :, None].masked_fill(~members[..., None], 0)
    means = x.sum(4) / counts.clamp(min=1)[..., None]
    return means, (x - means[..., None, :]).masked_fill(~members[..., None], 0)


def _compensate_in_torch(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, blocks: BlockLists, estimates: BlockEstimates,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tiles, heads = _tiles(layout), q.shape[1]
    q_tiles = tiles.cut(_wide(q))
    # Of a tile of one token one half is empty, which is nothing bad.
    unsound = estimates.log_count.isneginf().unflatten(-1, (-1, estimates.parts)).all(-1)[..., None, None]
    members, counts = tiles.members(estimates.parts)
    (k_mean, k_spread), (v_mean, v_spread) = (
        _units(tiles.cut(_wide(x)).masked_fill(unsound, 0), members, counts, estimates.order) for x in (k, v))
    k_mean, v_mean = (per_query_head(x.flatten(2, 3), heads) for x in (k_mean, v_mean))
    half_variance = estimates.half_variance
    selected = blocks.to_mask()[..., :tiles.number, :tiles.number].repeat_interleave(estimates.parts, -1)
    useful = estimates.useful
    if useful is not None:
        selected = selected | ~useful[..., None, None]
    bias = _bias(estimates.log_count, half_variance).masked_fill(selected, -torch.inf)
    logits = scale * tiles.join(q_tiles) @ k_mean.mT + bias.index_select(2, tiles.of_slot)
    # A row that leaves nothing out has no estimate; measured from 0 its weights are 0 instead of NaN.
    nothing = logits.isneginf().all(-1, keepdim=True)
    tail_lse = logits.masked_fill(nothing, 0).logsumexp(-1, keepdim=True)
    weights = (logits - tail_lse).exp()
    covariance = per_query_head((k_spread.mT @ v_spread / counts.clamp(min=1)[..., None, None]).flatten(2, 3), heads)
    damping = (CAP / half_variance.clamp(min=1e-6)).clamp(max=1).sqrt()
    left = estimates.mass.masked_fill(selected, 0)
    mixture = left / left.sum(-1, keepdim=True).clamp(min=1e-30) * damping
    matrix = (mixture @ covariance.flatten(3)).unflatten(3, covariance.shape[-2:])
    tail = weights @ v_mean + scale * tiles.join(q_tiles @ matrix)
    exact, exact_lse = out[:, :, :tiles.slots], lse[:, :, :tiles.slots, None]
    total = torch.logaddexp(exact_lse, tail_lse)
    merged = (exact_lse - total).exp() * exact + (tail_lse - total).exp() * tail
    merged, total = torch.where(nothing, exact, merged.to(out.dtype)), torch.where(nothing, exact_lse, total)
    share = tiles.cut((exact_lse - total).detach().exp()).sum((3, 4)) / tiles.lengths.clamp(min=1)
    return torch.cat((merged, out[:, :, tiles.slots:]), 2), torch.cat((total[..., 0], lse[:, :, tiles.slots:]), 2), share
