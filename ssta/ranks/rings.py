"""Beyond the heads: rings of ranks that have the same heads, each rank with rows of its own, to which the ring gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..kernels import Deferred
from ..kernels.memo import remember_plain
from ..sequence import TokenLayout
from ..spec import LayerSpec
from .around import Exchange
from .group import group_of, is_mesh
from .runs import Run, deal, held_by, runs_of
from .shards import Shards
from .shares import Sent, Shares, Spans, own_spec

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


@dataclass(frozen=True)
class Piece(Run):
    """A shared run of which the places of a ring have ``counts`` tokens."""

    counts: tuple[int, ...]

    def held(self, ranks: int) -> tuple[int, ...]:
        return self.counts


class Pieces(NamedTuple):
    """What a place of a ring has of a sequence.

    Attributes:
        runs: its piece of the sequence, which the ranks that exchange heads share out.
        rows: the tokens whose rows it computes: of its piece, and a share of what is whole.
        gathered: the sequence as the ring shares it out.
        joined: the rows of all pieces as the ring shares them out, who gathers those of what is whole; None where nothing is.
    """

    runs: tuple[Run, ...]
    rows: Spans
    gathered: tuple[Run, ...]
    joined: tuple[Run, ...] | None


@remember_plain
def pieces_of(runs: tuple[Run, ...], size: int, place: int, width: int) -> Pieces:
    """The pieces of place ``place`` in a ring of ``size`` places, at each of which ``width`` ranks exchange heads."""
    places = held_by(runs, size * width, place * width).places
    held = [tuple([sum(of.held[width * at:width * (at + 1)]) for at in range(size)]) if of.shared else deal(of.length, size)
            for of in places]
    own = tuple([Run(counts[place], True) if run.shared else run for run, counts in zip(runs, held)])
    rows = tuple([(of.start + sum(counts[:place]), counts[place]) for of, counts in zip(places, held)])
    # What is whole is whole already, but for its rows.
    gathered = tuple([Piece(run.length, True, counts) if run.shared else run for run, counts in zip(runs, held)])
    joined = None if size == 1 or all([run.shared for run in runs]) else tuple(
        [Run(counts[place], False) if run.shared else Piece(run.length, True, counts) for run, counts in zip(runs, held)])
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

    def exchange(self, query: Any, key: Any, value: Any, spec: LayerSpec, note: Callable[[str], object]) -> Exchange:
        """``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``, of which this rank computes the rows of its piece."""
        own: tuple[Any, ...] = query, key, value
        if isinstance(query, Sent):
            own = query.wait(), key.wait(), value.wait()
        elif self.inner.ranks > 1:
            own = self.inner.to_heads(*own, key_heads=spec.kv_heads)
        q, k, v = self._in_ring(self._pieces.gathered).to_all(*own)
        note("arrived")
        heads, kv_heads = (deal[self.inner.rank] for deal in (self.deal_heads(spec.heads, spec.kv_heads), self.deal_heads(spec.kv_heads)))
        return Exchange((q, k, v), own_spec(spec, self.inner.group, heads, kv_heads, self._pieces.rows),
                        partial(self._back, heads=spec.heads, key_heads=spec.kv_heads), note)

    def _in_ring(self, runs: tuple[Run, ...]) -> Shards:
        return Shards(runs, self.size, self.place, self.ring)

    def _back(self, out: Tensor, heads: int, key_heads: int) -> Tensor:
        """``[B, H_r, n, D]`` of this rank's rows, in the sequence's order -> ``[B, H, S_r, D]``."""
        if self._pieces.joined is not None:
            out = self._in_ring(self._pieces.joined).to_all(out)
        return out if self.inner.ranks == 1 else self.inner.to_tokens(out, heads, key_heads=key_heads)


def shares_of(group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shares:
    """How ``group`` shares ``layout`` out: heads among all its ranks, or, in a mesh of two dimensions, rows along the first one too."""
    if is_mesh(group) and group.ndim == 2:
        return Rings.of(group, layout, split)
    return Shards.of(group, layout, split)
