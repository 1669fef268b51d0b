"""Beyond the heads: rings of ranks that have the same heads, each rank with rows of its own, to which the ring gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..sequence import TokenLayout
from ..spec import Peers
from .exchange import Exchange, Place, Run, deal, wants_gradient
from .group import group_of, is_mesh
from .shards import Checked, Sent, Shards, agreed_between, runs_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


# (first token, tokens) of each run that a place of the ring has the rows of.
Spans = tuple[tuple[int, int], ...]


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
        (ranks, rank), (width, place) = places
        held = [run.held(ranks * width)[width * rank:width * (rank + 1)] for run in runs]
        inner = tuple([Run(sum(own), True) if run.shared else run for run, own in zip(runs, held)])
        return cls(ring, ranks, rank, Shards(heads, inner, width, place), Shards(heads, runs, ranks * width, rank * width + place))

    def check(self, name: str, x: Any) -> None:
        """As ``Shards.check``."""
        self.outer.check(name, x)

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """As ``Shards.deal_heads``, over the ranks that exchange heads."""
        return self.inner.deal_heads(total, key_heads)

    def agreed(self, check: Callable[[], Checked], facts: Callable[[Checked], dict[str, object]]) -> Checked:
        """As ``Shards.agreed``, between all ranks of the mesh."""
        return agreed_between((self.inner.group, self.group), self.outer.runs, check, facts)

    def exchange(self, query: Tensor, key: Tensor, value: Tensor, note: Callable[[str], object]) -> RingExchanged:
        """As ``Shards.exchange``: ``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``, of which this rank computes the rows of its piece."""
        if isinstance(query, Sent):
            raise TypeError("query, key and value must be tensors with a mesh of rings, got what was sent")
        heads, key_heads = query.shape[1], key.shape[1]
        pieces = (query, key, value)
        if self.inner.ranks > 1:
            pieces = self.inner.to_heads(*pieces, key_heads=key_heads)
        arriving = _gather(self, pieces, self._gathered)
        note("arrived")
        return RingExchanged(self, heads, key_heads, arriving)

    def join(self, out: Tensor) -> Tensor:
        """``[B, H_r, n, D]`` of this rank's rows, in the sequence's order -> of the tokens that ``inner`` shares out."""
        places = [place for place in self.outer.places if not place.shared]
        if self.ranks == 1 or not places:
            return out
        counts = [self._pieces(place) for place in self.outer.places]
        return _gather(self, (out,), [(of[self.rank],) if place.shared else of for place, of in zip(self.outer.places, counts)])[0]

    @property
    def _gathered(self) -> list[tuple[int, ...]]:
        # What is whole is whole already.
        return [self._pieces(place) if place.shared else (place.length,) for place in self.outer.places]

    def _spans(self, rank: int) -> Spans:
        counts = [(place.start, self._pieces(place)) for place in self.outer.places]
        return tuple([(start + sum(of[:rank]), of[rank]) for start, of in counts])

    def _pieces(self, place: Place) -> tuple[int, ...]:
        """The tokens of a run whose rows each place of the ring has."""
        width = self.inner.ranks
        return tuple([sum(place.held[width * at:width * (at + 1)]) for at in range(self.ranks)]) if place.shared \
            else deal(place.length, self.ranks)


class RingExchanged:
    """As ``Exchanged``, of rings."""

    returned = None

    def __init__(self, rings: Rings, heads: int, key_heads: int, arriving: tuple) -> None:
        self.rings, self.heads, self.key_heads, self.arriving = rings, heads, key_heads, arriving

    @property
    def rows(self) -> Spans:
        return self.rings._spans(self.rings.rank)

    @property
    def peers(self) -> Peers:
        return Peers(self.rings.inner.group.group_name, self.heads, self.key_heads)

    def back(self, out: Tensor) -> Tensor:
        """What the layer gave of this rank's rows, ``[B, H_r, n, D]`` -> ``[B, H, S_r, D]``."""
        out = self.rings.join(out)
        if self.rings.inner.ranks == 1:
            return out
        return self.rings.inner.to_tokens(out, self.heads, key_heads=self.key_heads)


def shares_of(group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shards | Rings:
    """How ``group`` shares ``layout`` out: heads among all its ranks, or, in a mesh of two dimensions, rows along the first one too."""
    if is_mesh(group) and group.ndim == 2:
        return Rings.of(group, layout, split)
    return Shards.of(group, layout, split)


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
    return tuple([part.permute(1, 2, 0, 3) for part in torch.cat(parts).split([x.shape[1] for x in xs], 2)])


class Return:
    """What the ranks of a ring have of the gradients of one another's pieces, on its way to them.

    Args:
        counts: of each run the tokens that each place of the ring has, or just its tokens where it stays as it is.
    """

    def __init__(self, rings: Rings, xs: Sequence[Tensor], counts: Sequence[tuple[int, ...]]) -> None:
        self._ranks, self._heads = rings.ranks, [x.shape[1] for x in xs]
        joined = torch.cat([x.permute(2, 0, 1, 3) for x in xs], 2)
        width = prod(joined.shape[1:])
        self._parts: list[tuple[Tensor | Exchange, tuple[int, ...]]] = []
        for part, of in zip(joined.split([sum(of) for of in counts]), counts):
            if len(of) == 1:
                self._parts.append((part, part.shape))
                continue
            own = of[rings.rank]
            sent = Exchange(rings.group, part.reshape(-1), [own * width] * rings.ranks, [count * width for count in of])
            self._parts.append((sent, (own, *joined.shape[1:])))

    def wait(self) -> list[Tensor]:
        """Of each its piece's ``[B, H_r, tokens of the piece, D]``, summed over the ring, rank after rank."""
        parts = [sent.wait().view(self._ranks, *shape).sum(0) if isinstance(sent, Exchange) else sent for sent, shape in self._parts]
        return [x.permute(1, 2, 0, 3) for x in torch.cat(parts).split(self._heads, 2)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rings: Rings, counts: tuple[tuple[int, ...], ...], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rings, ctx.counts = rings, counts
        return _gathered(rings, xs, counts)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *Return(ctx.rings, grads, ctx.counts).wait()
