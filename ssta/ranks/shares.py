"""What stands around a layer on ranks: Shares, how they share a sequence; Sent, what is on its way; Exchange, q, k and v of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..kernels import Deferred
from ..spec import Peers
from .exchange import Deals, Incoming, ToHeads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..layout import TileLayout
    from .runs import Division, Run

# (first token, tokens) each: rows of a layer, as ``LayerSpec`` has them.
Spans = tuple[tuple[int, int], ...]


class Shares(Protocol):
    """How ranks share one sequence of S tokens out: ``Shards``, and ``Rings`` beyond the heads.

    Attributes:
        groups: the ranks, by the dimensions of their mesh, the last one first.
        runs: the sequence.
        ranks, rank: how many share it, and which of them this process is.
    """

    @property
    def groups(self) -> tuple[ProcessGroup, ...]: ...
    @property
    def runs(self) -> tuple[Run, ...]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...

    def check(self, name: str, x: Any, length: int | None = None) -> None:
        """That ``x`` is this rank's ``[B, H, S_r, D]``; TypeError or ValueError in the name ``name``."""

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """How many of ``total`` heads each rank has, of those that exchange heads."""

    def agreed(self, call: Any, check: Callable[[], dict[str, object]]) -> None:
        """That all ranks make this call; see ``Agreement.settle``."""

    def start(self, *xs: Tensor | Deferred, key_heads: int | None = None) -> Sent:
        """This rank's ``[B, H, S_r, D]``, on their way."""

    def exchange(self, query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, note: Callable[[str], object]) -> Exchange:
        """q, k and v for a layer of one process, and the way back; calls ``note`` with "arrived" once what comes is being waited for."""


class Sent:
    """Tensors on their way from tokens to heads; made by ``Shards.start``.

    Attributes:
        shards: how the ranks share the sequence out.
        deals: of each tensor how many heads each rank has.
        shape, dtype, device: of what comes, where it is one tensor: ``[B, H_r, S, D]``.
        recorded: whether a gradient is wanted.
    """

    def __init__(self, division: Division, xs: tuple[Tensor | Deferred, ...], deals: Deals, incoming: Incoming | None, recorded: bool
                 ) -> None:
        self.shards: Any = division
        self.deals, self.recorded = deals, recorded
        batch, _, _, dim = xs[0].shape
        self.shape = torch.Size((batch, deals[0][division.rank], division.length, dim))
        self.dtype, self.device = xs[0].dtype, xs[0].device
        # Packets are copies: what nobody wants a gradient of need not be kept.
        self._division: Division | None = division
        self._xs = xs if recorded else ()
        self._incoming = incoming
        self._arrived: Callable[[str], object] | None = None

    @property
    def heads(self) -> int:
        """H, of the first tensor."""
        return sum(self.deals[0])

    @property
    def waits(self) -> bool:
        """Whether what comes may be waited for as late as it is read: nobody differentiates it, and it is no part of a graph."""
        return not self.recorded and self._incoming is not None and self._incoming.in_place

    def then(self, note: Callable[[str], object]) -> Sent:
        """Itself, which calls ``note`` with "arrived" after it was waited for."""
        self._arrived = note
        return self

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several; once, and the caller's from then on. On a GPU only the stream waits.

        Raises:
            RuntimeError: it was called before.
        """
        if self._division is None:
            raise RuntimeError("what was sent can be waited for once, and was: nothing is kept of it here")
        if self.recorded:
            outs = ToHeads.apply(self._division, self.deals, self._incoming, *self._xs)
        else:
            assert self._incoming is not None, "only with gradients a graph has the exchange inside one function of autograd"
            outs = self._incoming.wait()
        self._division = self._incoming = None
        self._xs = ()
        if self._arrived is not None:
            self._arrived("arrived")
        return outs[0] if len(outs) == 1 else tuple(outs)


class Exchange:
    """q, k and v of one layer, which ranks have exchanged, and the way back of its result.

    Attributes:
        arriving: q, k and v with all tokens of this rank's heads, as a layer takes them; its own from then on.
        rows: the only rows that this rank computes; None = all.
        peers: the ranks that have the other heads.
        returned: gives for the queries' tiles the order in which ``back`` wants the result; None = the sequence's.
    """

    def __init__(self, arriving: tuple, rows: Spans | None, peers: Peers, back: Callable[[Tensor], Tensor],
                 returned: Callable[[TileLayout], Tensor] | None = None, back_packed: Callable[[Tensor], Tensor] | None = None) -> None:
        self.arriving, self.rows, self.peers, self.returned = arriving, rows, peers, returned
        self._back, self._back_packed = back, back_packed

    def take(self) -> tuple:
        """``arriving``, of which nothing is kept here."""
        arriving, self.arriving = self.arriving, ()
        return arriving

    def ready(self) -> tuple[Tensor, Tensor, Tensor]:
        """``take`` for attention of another kind than a layer's: tensors, and the result in the sequence's order."""
        q, k, v = self.take()
        self.returned = None
        v, k, q = (x.wait() if isinstance(x, Sent) else x for x in (v, k, q))
        return q, k, v

    def back(self, out: Tensor) -> Tensor:
        """What the layer gave of its rows, ``[B, H_r, n, D]``, in the order of ``returned`` -> this rank's ``[B, H, S_r, D]``."""
        if self.returned is None:
            return self._back(out)
        assert self._back_packed is not None, "it comes with returned"
        return self._back_packed(out)


def sent_apart(shares: Shares, query: Sent, key: Sent, value: Sent) -> tuple[int, int]:
    """(heads, key heads) of what was sent one by one by ``shares``.

    Raises:
        ValueError: between other ranks, several tensors at once, or heads of query that are not with their key heads.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shards != shares:
            raise ValueError(f"{name} must have been sent by the layer's own shards, {shares}, got {x.shards}")
        if len(x.deals) != 1:
            raise ValueError(f"{name} must have been sent by itself, got {len(x.deals)} tensors")
    heads, key_heads = query.heads, key.heads
    if query.deals[0] != shares.deal_heads(heads, key_heads) or key.deals != value.deals:
        raise ValueError(f"query, key and value must have been sent with key_heads {key_heads}, got heads {query.deals[0]}, "
                         f"{key.deals[0]} and {value.deals[0]} on the ranks")
    return heads, key_heads
