"""Beyond the heads: rings of ranks that have the same heads, each rank with rows of its own, to which the ring gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .exchange import Exchange, Place, Run, deal, wants_gradient
from .kernels import BlockLists, take_tokens
from .memo import remember, remember_plain
from .parallel import Checked, Exchanged, Shards, agreed_between, runs_of
from .ranks import group_of
from .sequence import TokenLayout

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from .layout import TileLayout


@dataclass(frozen=True)
class Rings:
    """How the ranks of a mesh (ring, heads) share one sequence out. All of them hold shares of it, in the order of the mesh. Ranks along
    the second dimension exchange heads for tokens, which gives each its ring position's piece of the sequence; ranks along the first,
    which then have the same heads, gather the pieces of q, k and v. Each attends for the rows of its own piece and of a share of what is
    whole, which the ring gathers again.

    Args:
        group: the ring.
        ranks, rank: its size, and this rank's place in it.
        inner: this ring position's piece of the sequence, between the ranks that exchange heads.
        outer: the whole sequence's shares.
    """

    group: ProcessGroup
    ranks: int
    rank: int
    inner: Shards
    outer: Shards

    @classmethod
    def of(cls, mesh: DeviceMesh, layout: TokenLayout, split: str = "video") -> Rings:
        """How ``mesh``, of two dimensions, shares ``layout`` out; the rest as ``Shards.of``."""
        runs = runs_of(layout, split)
        ring, heads = group_of(mesh, 0), group_of(mesh, 1)
        places = [(dist.get_world_size(group), dist.get_rank(group)) for group in (ring, heads)]
        return _rings(cls, ring, heads, runs, *places[0], *places[1])

    def check(self, name: str, x: Any) -> None:
        """As ``Shards.check``."""
        self.outer.check(name, x)

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """As ``Shards.deal_heads``, over the ranks that exchange heads."""
        return self.inner.deal_heads(total, key_heads)

    def agreed(self, check: Callable[[], Checked], facts: Callable[[Checked], dict[str, object]]) -> Checked:
        """As ``Shards.agreed``, between all ranks of the mesh."""
        return agreed_between((self.inner.group, self.group), self.outer.runs, check, facts)

    def exchange(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Exchanged]:
        """As ``Shards.exchange``: ``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``."""
        heads = q.shape[1], k.shape[1]
        pieces = self.inner.to_heads(q, k, v, key_heads=heads[1])
        # What is whole is whole already.
        q, k, v = _gather(self, pieces, [self._pieces(place) if place.shared else (place.length,) for place in self.outer.places])
        return q, k, v, Exchanged(self.inner, *heads, self)

    def rows(self, tiles: TileLayout) -> Rows:
        """This rank's rows of the layer: its piece of each shared run, and a share of each whole one."""
        spans = []
        for place in self.outer.places:
            counts = self._pieces(place)
            spans.append((place.start + sum(counts[:self.rank]), counts[self.rank]))
        return _rows(tiles, tuple(spans))

    def join(self, out: Tensor) -> Tensor:
        """``[B, H_r, n, D]`` of this rank's rows, in the sequence's order -> of the tokens that ``inner`` shares out."""
        counts = [self._pieces(place) for place in self.outer.places]
        return _gather(self, (out,), [(of[self.rank],) if place.shared else of for place, of in zip(self.outer.places, counts)])[0]

    def _pieces(self, place: Place) -> tuple[int, ...]:
        """The tokens of a run whose rows each place of the ring has."""
        width = self.inner.ranks
        return tuple([sum(place.held[width * at:width * (at + 1)]) for at in range(self.ranks)]) if place.shared \
            else deal(place.length, self.ranks)


@remember_plain
def _rings(
    kind: type[Rings], ring: ProcessGroup, heads: ProcessGroup, runs: tuple[Run, ...], ranks: int, rank: int, width: int, place: int,
) -> Rings:
    held = [run.held(ranks * width)[width * rank:width * (rank + 1)] for run in runs]
    inner = tuple([Run(sum(own), True) if run.shared else run for run, own in zip(runs, held)])
    return kind(ring, ranks, rank, Shards(heads, inner, width, place), Shards(heads, runs, ranks * width, rank * width + place))


class Rows(NamedTuple):
    """Some rows of a layer of P slots in T tiles: n tokens of the sequence.

    Args:
        slots: int64 ``[n]``, ascending.
        offsets: int32 ``[T + 1]``: tile i has the rows from ``offsets[i]`` up to ``offsets[i + 1]``, which may be none.
        before: int32 ``[T]``: how many slots of a dense tile lie before its first row here; 0 for video tiles, whose slots all are valid.
        of_token: int64 ``[n]``, the row of each of the tokens, in the sequence's order.
        of_slot: int64 ``[P]``, the row of each slot, -1 = not of these.
    """

    slots: Tensor
    offsets: Tensor
    before: Tensor
    of_token: Tensor
    of_slot: Tensor

    def lists(self, blocks: BlockLists) -> BlockLists:
        """A layer's lists for these rows alone; every tile stays a block, of as many rows as it has here."""
        # Without rows, a list is nothing to walk.
        counts = blocks.counts.masked_fill(self.offsets.diff() == 0, 0)
        lengths = None if blocks.q_lengths is None else (blocks.q_lengths - self.before).clamp(min=0)
        return replace(blocks, counts=counts, q_offsets=self.offsets, q_lengths=lengths)

    def spread(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, H, n, D]`` and ``[B, H, n]`` of the rows, of all slots; others attended to nothing."""
        if not len(self.slots):
            # Of which nothing can be taken; they stay in the graph, whose backward all ranks walk.
            number = len(self.of_slot)
            return pad(out, (0, 0, 0, number)), pad(lse, (0, number), value=-torch.inf)
        others = self.of_slot < 0
        return take_tokens(out, self.of_slot), lse.index_select(2, self.of_slot.clamp(min=0)).masked_fill(others, -torch.inf)


@remember(64)
def _rows(tiles: TileLayout, spans: tuple[tuple[int, int], ...]) -> Rows:
    """The rows of the tokens in ``spans``, (first, number) each."""
    slots, of_token = torch.cat([tiles.inverse.narrow(0, first, count) for first, count in spans]).sort()
    tile = torch.bucketize(slots, tiles.offsets[1:], right=True)
    counts = torch.zeros_like(tiles.lengths).scatter_add(0, tile, torch.ones_like(tile, dtype=tiles.lengths.dtype))
    places = torch.arange(len(slots), device=tiles.device)
    of_slot = torch.full((tiles.num_slots,), -1, device=tiles.device).scatter(0, slots, places)
    offsets = pad(counts.cumsum(0), (1, 0)).int()
    # A tile without rows has no first one, whatever is found here.
    before = pad(slots, (0, 1))[offsets[:-1]].int() - tiles.offsets[:-1]
    before[:tiles.num_video_tiles] = 0
    return Rows(slots, offsets, before, places.scatter(0, of_token, places), of_slot)


def _gather(rings: Rings, xs: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Parts of runs, gathered: tensors ``[B, H_r, own parts, D]`` -> ``[B, H_r, all parts, D]``, differentiable.

    Args:
        counts: of each run the tokens that each place of the ring has, or just its tokens where it stays as it is.
    """
    return _Gather.apply(rings, tuple(counts), *xs) if wants_gradient(*xs) else _gathered(rings, xs, counts)


def _gathered(rings: Rings, xs: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    joined, parts = torch.cat([x.permute(2, 0, 1, 3) for x in xs], 2), []
    width = prod(joined.shape[1:])
    own = [of[rings.rank] if len(of) > 1 else of[0] for of in counts]
    for part, of in zip(joined.split(own), counts):
        if len(of) > 1:
            # To each the same.
            sent = Exchange(rings.group, part.reshape(-1).repeat(rings.ranks), [count * width for count in of],
                            [part.numel()] * rings.ranks)
            part = sent.wait().view(sum(of), *joined.shape[1:])
        parts.append(part)
    return _apart(torch.cat(parts), xs)


def _scattered(rings: Rings, xs: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """The adjoint: of each ``[B, H_r, all parts, D]`` what the ring's ranks have of this one's parts, summed in their order."""
    joined, parts = torch.cat([x.permute(2, 0, 1, 3) for x in xs], 2), []
    width = prod(joined.shape[1:])
    for part, of in zip(joined.split([sum(of) for of in counts]), counts):
        if len(of) > 1:
            own = of[rings.rank]
            sent = Exchange(rings.group, part.reshape(-1), [own * width] * rings.ranks, [count * width for count in of])
            part = sent.wait().view(rings.ranks, own, *joined.shape[1:]).sum(0)
        parts.append(part)
    return _apart(torch.cat(parts), xs)


def _apart(joined: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([part.permute(1, 2, 0, 3) for part in joined.split([x.shape[1] for x in xs], 2)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rings: Rings, counts: tuple[tuple[int, ...], ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rings, ctx.counts = rings, counts
        return _gathered(rings, xs, counts)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_scattered(ctx.rings, grads, ctx.counts)
