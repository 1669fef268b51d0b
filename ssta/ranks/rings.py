"""Beyond the heads: rings of ranks that have the same heads, each rank with rows of its own, to which the ring gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..kernels import Deferred
from ..kernels.memo import remember_plain
from ..kernels.operators import differentiable_once
from ..sequence import TokenLayout
from ..spec import LayerSpec
from .exchange import Batch, Collective, Exchange
from .group import group_of, is_mesh
from .runs import Run, deal, held_by, runs_of
from .shards import Shards
from .shares import Sent, Shares, Spans, check_sent, own_spec
from .world import in_graph, recorded

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# For each run the tokens that each place of a ring has, or just its own number of tokens where it stays as it is.
Counts = tuple[tuple[int, ...], ...]


class Pieces(NamedTuple):
    """What a place of a ring has of a sequence.

    Attributes:
        runs: its piece of the sequence, which the ranks that exchange heads share out.
        rows: the tokens whose rows it computes: of its piece, and a share of what is whole.
        gathered: how the ring puts keys and values together.
        joined: how it puts the rows of what is whole together; None where nothing is.
    """

    runs: tuple[Run, ...]
    rows: Spans
    gathered: Counts
    joined: Counts | None


@remember_plain
def pieces_of(runs: tuple[Run, ...], size: int, place: int, width: int) -> Pieces:
    """Of the place ``place`` in a ring of ``size``, at each of whose places ``width`` ranks exchange heads."""
    places = held_by(runs, size * width, place * width).places
    held = [tuple([sum(of.held[width * at:width * (at + 1)]) for at in range(size)]) if of.shared else deal(of.length, size)
            for of in places]
    own = tuple([Run(counts[place], True) if run.shared else run for run, counts in zip(runs, held)])
    rows = tuple([(of.start + sum(counts[:place]), counts[place]) for of, counts in zip(places, held)])
    # What is whole is whole already, but for its rows.
    gathered = tuple([counts if run.shared else (run.length,) for run, counts in zip(runs, held)])
    joined = None if size == 1 or all([run.shared for run in runs]) else tuple(
        [(counts[place],) if run.shared else counts for run, counts in zip(runs, held)])
    return Pieces(own, rows, gathered, joined)


@dataclass(frozen=True)
class Rings(Shares):
    """How the ranks of a mesh (ring, heads) share one sequence out. All of them hold shares of it, in the order of the mesh. Ranks along
    the second dimension exchange heads for tokens, which gives each its ring position's piece of the sequence; ranks along the first,
    which then have the same heads, gather the pieces of q, k and v. Each attends for the rows of its own piece and of a share of what is
    whole, which the ring gathers again.

    Attributes:
        ring: the ranks along the first dimension.
        size, place: how many they are, and this rank's place among them.
        inner: this place's piece of the sequence, between the ranks that exchange heads.
    """

    ring: ProcessGroup
    size: int
    place: int
    inner: Shards
    _pieces: Pieces = field(repr=False, compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, layout: TokenLayout, split: str = "video") -> Rings:
        """How ``mesh``, of two dimensions, shares ``layout`` out; the rest as ``Shards.of``."""
        runs = runs_of(layout, split)
        ring, heads = group_of(mesh, 0), group_of(mesh, 1)
        size, place, width, column = ring.size(), ring.rank(), heads.size(), heads.rank()
        pieces = pieces_of(runs, size, place, width)
        return cls(runs, size * width, place * width + column, ring, size, place, Shards(pieces.runs, width, column, heads), pieces)

    def __str__(self) -> str:
        return f"{super().__str__()}, in rings of {self.size}"

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        return self.inner.group, self.ring

    @property
    def head_ranks(self) -> int:
        return self.inner.ranks

    def start(self, *xs: Tensor | Deferred, key_heads: int | None = None) -> Sent:
        """As ``Shards.start``, between the ranks that exchange heads."""
        sent = self.inner.start(*xs, key_heads=key_heads)
        sent.shards = self
        return sent

    def exchange(self, query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, spec: LayerSpec, note: Callable[[str], object]
                 ) -> Exchange:
        """``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``, of which this rank computes the rows of its piece."""
        if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
            own: tuple = query, key, value
            if self.inner.ranks > 1:
                own = self.inner.to_heads(*own, key_heads=spec.kv_heads)
        else:
            assert isinstance(query, Sent) and isinstance(key, Sent) and isinstance(value, Sent), "the call is checked"
            check_sent(self, spec, query, key, value)
            own = query.wait(), key.wait(), value.wait()
        q, k, v = _gather(self, own, self._pieces.gathered)
        note("arrived")
        heads, kv_heads = (deal[self.inner.rank] for deal in (self.deal_heads(spec.heads, spec.kv_heads), self.deal_heads(spec.kv_heads)))
        return Exchange((q, k, v), own_spec(spec, self.inner.group, heads, kv_heads, self._pieces.rows),
                        partial(self._back, heads=spec.heads, key_heads=spec.kv_heads))

    def _back(self, out: Tensor, heads: int, key_heads: int) -> Tensor:
        """``[B, H_r, n, D]`` of this rank's rows, in the sequence's order -> ``[B, H, S_r, D]``."""
        if self._pieces.joined is not None:
            out, = _gather(self, (out,), self._pieces.joined)
        return out if self.inner.ranks == 1 else self.inner.to_tokens(out, heads, key_heads=key_heads)


def shares_of(group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shares:
    """How ``group`` shares ``layout`` out: heads among all its ranks, or, in a mesh of two dimensions, rows along the first one too."""
    if is_mesh(group) and group.ndim == 2:
        return Rings.of(group, layout, split)
    return Shards.of(group, layout, split)


def _gather(rings: Rings, xs: Sequence[Tensor], counts: Counts) -> tuple[Tensor, ...]:
    """Parts of runs, gathered: tensors ``[B, H_r, own parts, D]`` -> ``[B, H_r, all parts, D]``, differentiable."""
    return _Gather.apply(rings, counts, *xs) if recorded(*xs) else _gathered(rings, xs, counts)


def _gathered(rings: Rings, xs: Sequence[Tensor], counts: Counts) -> tuple[Tensor, ...]:
    joined = torch.cat([x.permute(2, 0, 1, 3) for x in xs], 2)
    parts = list(joined.split([of[rings.place] if len(of) > 1 else of[0] for of in counts]))
    moved = [number for number, of in enumerate(counts) if len(of) > 1]
    # To each the same.
    came = _swap(rings, [[parts[number].reshape(-1)] * rings.size for number in moved], [counts[number] for number in moved], joined)
    for number, part in zip(moved, came):
        parts[number] = part
    return tuple([part.permute(1, 2, 0, 3) for part in torch.cat(parts).split([x.shape[1] for x in xs], 2)])


def _returned(rings: Rings, xs: Sequence[Tensor], counts: Counts) -> list[Tensor]:
    """The adjoint: what the ranks of a ring have of the gradients of one another's parts, summed over the ring, rank after rank."""
    joined = torch.cat([x.permute(2, 0, 1, 3) for x in xs], 2)
    parts = list(joined.split([sum(of) for of in counts]))
    moved = [number for number, of in enumerate(counts) if len(of) > 1]
    came = _swap(rings, [[piece.reshape(-1) for piece in parts[number].split(counts[number])] for number in moved],
                 [(counts[number][rings.place],) * rings.size for number in moved], joined)
    for number, part in zip(moved, came):
        parts[number] = part.unflatten(0, (rings.size, counts[number][rings.place])).sum(0)
    return [x.permute(1, 2, 0, 3) for x in torch.cat(parts).split([x.shape[1] for x in xs], 2)]


def _swap(rings: Rings, packets: list[list[Tensor]], comes: list[tuple[int, ...]], like: Tensor) -> list[Tensor]:
    """Of each run what comes from the places of the ring, ``[tokens of all, *like.shape[1:]]``.

    Args:
        packets: of each run what goes to each place, flat.
        comes: of each run how many tokens come from each.
    """
    width = prod(like.shape[1:])
    if in_graph(like):
        return [Collective(rings.ring, torch.cat(goes), [count * width for count in counts], [part.numel() for part in goes]).wait().view(
            -1, *like.shape[1:]) for goes, counts in zip(packets, comes)]
    into = [like.new_empty(sum(counts), *like.shape[1:]) for counts in comes]
    Batch(rings.ring, rings.place, [(goes, part.split(counts)) for goes, part, counts in zip(packets, into, comes)]).wait()
    return into


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rings: Rings, counts: Counts, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rings, ctx.counts = rings, counts
        return _gathered(rings, xs, counts)

    @staticmethod
    @differentiable_once("ssta_attention")
    def backward(ctx, saved: tuple[()], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_returned(ctx.rings, grads, ctx.counts)
