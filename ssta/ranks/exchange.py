"""How tokens and heads change places between ranks: what is packed, sent and received, and the gradients of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import Deferred
from ..kernels.memo import remember_plain
from ..kernels.operators import differentiable_once
from .runs import RunPlace, SharedSequence
from .world import in_graph

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# For each of several tensors, how many heads each rank has.
Deals = tuple[tuple[int, ...], ...]

# Packets, one for each rank, are laid out by token, batch element and head. So what comes from all ranks, in their order, is a run's tokens
# in theirs: nothing is unpacked on the way to heads, and at batch 1 nothing is packed on the way back.


class Incoming:
    """Each ``[B, H, S_r, D]`` on its way to ``[B, H_r, S, D]``, all in one buffer ``[S, B, heads of all tensors, D]``.

    What is deferred comes by itself, of as many heads for every rank: its kernel then writes packets, and what is whole into the buffer.

    Args:
        graph: whether it is a step of a graph.
    """

    def __init__(self, shards: SharedSequence, xs: Sequence[Tensor | Deferred], deals: Deals, graph: bool) -> None:
        self._own, self._graph = [counts[shards.rank] for counts in deals], graph
        deferred = xs[0] if isinstance(xs[0], Deferred) else None
        tensors = [x for x in xs if isinstance(x, Tensor)]
        batch, dim = xs[0].shape[0], xs[0].shape[3]
        self._width = batch, sum(self._own), dim
        # A graph has no buffer that is written to in parts.
        self._buffer = None if graph else _empty(xs[0], shards.length, *self._width)
        self._coming: list[Collective | Batch] = []
        parts: list[Tensor | Collective] = []
        shared = [place for place in shards.places if place.shared]
        with torch.no_grad():
            for place in shards.places:
                if place.shared:
                    if len(shared) == 1 or self._buffer is None:
                        parts.append(self._exchange(shards, xs, deals, place))
                elif deferred is not None and self._buffer is not None:
                    first, into = shards.rank * self._own[0], self._into(place)
                    deferred.part(place.local, place.length, slice(first, first + self._own[0])).write(into.permute(1, 2, 0, 3))
                else:
                    own = [x.narrow(2, place.local, place.length).narrow(1, sum(counts[:shards.rank]), counts[shards.rank])
                           .permute(2, 0, 1, 3) for x, counts in zip(tensors, deals)]
                    if self._buffer is None:
                        parts.append(torch.cat(own, 2))
                    else:
                        _copy(own, self._into(place).split(self._own, 2))
            if len(shared) > 1 and self._buffer is not None:
                # In one collective: a small one by itself would hold up those behind it, until others' products let it begin.
                self._coming = [Batch(shards.group, shards.rank, [
                    (_sent(xs, deals, place, shards, graph), self._goes(shards, deals, place), self._into(place), place.held)
                    for place in shared])]
            else:
                self._coming = [part for part in parts if isinstance(part, Collective)]
        # A graph has nothing else to take them from.
        self._parts = parts if self._buffer is None else []

    def _into(self, place: RunPlace) -> Tensor:
        assert self._buffer is not None
        return self._buffer if place.length == len(self._buffer) else self._buffer.narrow(0, place.start, place.length)

    def _exchange(self, shards: SharedSequence, xs: Sequence[Tensor | Deferred], deals: Deals, place: RunPlace) -> Collective:
        comes = [count * prod(self._width) for count in place.held]
        return Collective(shards.group, _sent(xs, deals, place, shards, self._graph), comes, self._goes(shards, deals, place),
                          self._graph, None if self._buffer is None else self._into(place))

    def _goes(self, shards: SharedSequence, deals: Deals, place: RunPlace) -> list[int]:
        return [place.held[shards.rank] * self._width[0] * total * self._width[2] for total in _totals(deals)]

    @property
    def in_place(self) -> bool:
        """Whether what comes has its memory already; in a graph waiting makes it."""
        return self._buffer is not None

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several; once, and the caller's from then on."""
        if self._buffer is not None:
            for coming in self._coming:
                coming.wait()
            buffer, self._buffer, self._coming = self._buffer, None, []
            return self._apart(buffer)
        parts = [part if isinstance(part, Tensor) else part.wait().view(-1, *self._width) for part in self._parts]
        return self._apart(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _apart(self, buffer: Tensor) -> Any:
        by_head = buffer.permute(1, 2, 0, 3)
        return by_head if len(self._own) == 1 else by_head.split(self._own, 1)


class Batch:
    """Several packets for each rank, and from each, in one collective. Not for a graph.

    Args:
        group: the ranks.
        rank: this one's number in it.
        runs: of each run what is sent, flat, and how many elements of it go to each rank; where what comes goes, and how much of it, along
            its first dimension, comes from each.
    """

    def __init__(self, group: ProcessGroup, rank: int, runs: Sequence[tuple[Tensor, Sequence[int], Tensor, Sequence[int]]]) -> None:
        operations: list[dist.P2POp] = []
        for send, goes, into, comes in runs:
            sends, receives, ranks = send.split(list(goes)), into.split(list(comes)), len(goes)
            receives[rank].view(-1).copy_(sends[rank])
            for step in range(1, ranks):
                to, of = (rank + step) % ranks, (rank - step) % ranks
                # Neither side of nothing takes part.
                operations += [dist.P2POp(dist.isend, sends[to], group=group, group_peer=to)] if sends[to].numel() else []
                operations += [dist.P2POp(dist.irecv, receives[of], group=group, group_peer=of)] if receives[of].numel() else []
        self._works = dist.batch_isend_irecv(operations) if operations else []
        # Their memory is the operations' until then.
        self._tensors: list[Tensor] = [x for send, _, into, _ in runs for x in (send, into)]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors = []


def send_tokens(shards: SharedSequence, xs: Sequence[Tensor], deals: Deals, gather: bool) -> tuple[Tensor, ...]:
    """Each ``[B, H_r, S, D]`` -> ``[B, H, S_r, D]`` in one exchange. Of whole runs ``gather`` has the heads of all ranks; without it other
    ranks' heads are zeros."""
    places = tuple([place for place in shards.places if place.shared or gather])
    if not places:
        # Each rank has what it wants of whole runs: there is nothing to send.
        return tuple([_with_own_heads(shards, x, x, own).transpose(1, 2) for x, own in zip(xs, deals)])
    by_token = [x.permute(2, 0, 1, 3) for x in xs]
    joined = by_token[0] if len(xs) == 1 else torch.cat(by_token, 2)
    if len(places) == 1 and places[0].shared:
        packets = joined.narrow(0, places[0].start, places[0].length)
    else:
        packets = torch.cat([joined.narrow(0, first, count) for first, count in _packet_spans(places, shards.ranks)])
    outs = _returned(shards, packets, deals, places)
    if len(places) < len(shards.places):
        outs = [_with_own_heads(shards, out, x, own) for out, x, own in zip(outs, xs, deals)]
    return tuple([out.transpose(1, 2) for out in outs])


@remember_plain
def _packet_spans(places: tuple[RunPlace, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """(first token, tokens) of what each rank is sent, one after the other: its shares, and what is whole."""
    return tuple([(place.start + (sum(place.held[:to]) if place.shared else 0), place.held[to]) for to in range(ranks) for place in places])


def _returned(shards: SharedSequence, packets: Tensor, deals: Deals, places: Sequence[RunPlace]) -> list[Tensor]:
    """Packets ``[tokens of all, B, own heads of all tensors, D]`` -> each tensor's ``[B, own tokens of places, H, D]``."""
    rank, totals, (_, batch, width, dim) = shards.rank, _totals(deals), packets.shape
    graph = in_graph(packets)
    counts = [sum([place.held[to] for place in places]) for to in range(shards.ranks)]
    tokens = counts[rank]
    # From each rank this one's tokens, of the other's heads.
    comes, goes = [tokens * batch * total * dim for total in totals], [count * batch * width * dim for count in counts]
    coming = Collective(shards.group, packets.contiguous().view(-1), comes, goes, graph)
    received, = _in_words(coming.wait().view(-1, dim), graph=graph)
    words = received.shape[1]
    outs = [_empty(received, batch, tokens, sum(own), words) for own in deals]
    if _even(deals):
        by_rank = received.view(shards.ranks, tokens, batch, width, words).permute(2, 1, 0, 3, 4).split([own[0] for own in deals], 3)
        _copy(by_rank, [out.view(batch, tokens, shards.ranks, own[0], words) for out, own in zip(outs, deals)])
    else:
        for of, (part, total) in enumerate(zip(received.split([count // dim for count in comes]), totals)):
            _copy(part.view(tokens, batch, total, words).transpose(0, 1).split([own[of] for own in deals], 2),
                  [out.narrow(2, sum(own[:of]), own[of]) for out, own in zip(outs, deals)])
    return [out.view(packets.dtype) for out in outs]


def _in_words(*xs: Tensor, graph: bool) -> tuple[Tensor, ...]:
    """Tensors of one dtype seen as words of 16 bytes where all can be: a copy in pieces then moves as much at once. In a graph as they
    are."""
    if graph:
        return xs
    per_word = 16 // xs[0].element_size()
    for x in xs:
        *strides, last = x.stride()
        if last != 1 or any([number % per_word for number in (x.storage_offset(), x.shape[-1], *strides)]) or x.data_ptr() % 16:
            return xs
    return tuple([x.view(torch.complex128) for x in xs])


def _with_own_heads(shards: SharedSequence, out: Tensor, x: Tensor, own: tuple[int, ...]) -> Tensor:
    """``[B, shared tokens of S_r, H, D]`` with the whole runs of x ``[B, H_r, S, D]`` in their places, zeros in other ranks' heads."""
    rank, at = shards.rank, 0
    parts: list[Tensor] = []
    before, after = sum(own[:rank]), sum(own[rank + 1:])
    for place in shards.places:
        if place.shared:
            parts.append(out.narrow(1, at, place.held[rank]))
            at += place.held[rank]
        else:
            parts.append(torch.nn.functional.pad(x.narrow(2, place.start, place.length).transpose(1, 2), (0, 0, before, after)))
    return torch.cat(parts, 1)


def _sum_tokens(shards: SharedSequence, x: Tensor, own: tuple[int, ...]) -> Tensor:
    """``[B, H, S_r, D]`` -> ``[B, H_r, S, D]`` in one exchange; what ranks have of a whole run is summed, rank after rank."""
    held, width = shards.local_length, (x.shape[0], own[shards.rank], x.shape[3])
    comes, goes = [count * prod(width) for count in shards.lengths], [held * width[0] * count * width[2] for count in own]
    graph = in_graph(x)
    packets = _packets((x,), (own,), 0, held, graph)
    received = Collective(shards.group, packets, comes, goes, graph).wait().view(-1, *width).split(shards.lengths)
    of_places = [packet.split([place.held[of] for place in shards.places]) for of, packet in enumerate(received)]
    parts: list[Tensor] = []
    for number, place in enumerate(shards.places):
        of_ranks = [packet[number] for packet in of_places]
        parts.extend(of_ranks if place.shared else [torch.stack(of_ranks).sum(0)])
    return torch.cat(parts).permute(1, 2, 0, 3)


def _packets(xs: Sequence[Tensor], deals: Deals, first: int, tokens: int, graph: bool) -> Tensor:
    """Some tokens of each ``[B, H, S_r, D]``, flat: for each rank ``[tokens, B, its heads of all tensors, D]``."""
    ranks, batch = len(deals[0]), xs[0].shape[0]
    words = [_some(x, first, tokens) for x in _in_words(*xs, graph=graph)]
    dim = words[0].shape[3]
    if _even(deals):
        own = [counts[0] for counts in deals]
        packets = _empty(words[0], ranks, tokens, batch, sum(own), dim)
        _copy([_for_ranks(x, ranks, heads) for x, heads in zip(words, own)], packets.split(own, 3))
        return packets.view(xs[0].dtype).view(-1)
    dealt = [x.permute(2, 0, 1, 3).split(counts, 2) for x, counts in zip(words, deals)]
    packets = _empty(words[0], tokens * batch * sum(_totals(deals)), dim)
    for to, packet in enumerate(packets.split([tokens * batch * total for total in _totals(deals)])):
        own = [counts[to] for counts in deals]
        _copy([parts[to] for parts in dealt], packet.view(tokens, batch, sum(own), dim).split(own, 2))
    return packets.view(xs[0].dtype).view(-1)


def _empty(like: Tensor | Deferred, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _copy(xs: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for x, of in zip(xs, into):
        of.copy_(x)


def _some(x: Tensor, first: int, tokens: int) -> Tensor:
    return x if x.shape[2] == tokens else x.narrow(2, first, tokens)


def _for_ranks(x: Tensor, ranks: int, heads: int) -> Tensor:
    """``[B, H, n, D]`` seen as ``[ranks, n, B, heads, D]``."""
    return x.view(x.shape[0], ranks, heads, *x.shape[2:]).permute(1, 3, 0, 2, 4)


def _even(deals: Deals) -> bool:
    """Whether each rank has as many heads of each tensor."""
    return all([len({*counts}) == 1 for counts in deals])


def _sent(xs: Sequence[Tensor | Deferred], deals: Deals, place: RunPlace, shards: SharedSequence, graph: bool) -> Tensor:
    """A shared run's packets, flat. What is deferred the kernel writes there at once; each rank has as many heads of it."""
    x, held = xs[0], place.held[shards.rank]
    if not isinstance(x, Deferred):
        return _packets([x for x in xs if isinstance(x, Tensor)], deals, place.local, held, graph)
    batch, heads, _, dim = x.shape
    packets = _empty(x, shards.ranks, held, batch, heads // shards.ranks, dim)
    x.part(place.local, held).write(packets.permute(2, 0, 3, 1, 4))
    return packets.view(-1)


def _totals(deals: Deals) -> list[int]:
    """How many heads each rank has of all tensors together."""
    return [sum(counts) for counts in zip(*deals)]


class Collective:
    """One collective between the ranks of ``group``: ``goes[r]`` of the elements of ``send`` go to rank r, and ``comes[r]`` come from it,
    ``into`` a tensor of so many. graph: as of ``Incoming``."""

    def __init__(self, group: ProcessGroup, send: Tensor, comes: list[int], goes: list[int], graph: bool, into: Tensor | None = None
                 ) -> None:
        self._wait: Callable[[], object] | None = None
        # Its memory is the collective's until it was waited for.
        self._sent: Tensor | None = None
        if graph:
            self._received = torch.ops._c10d_functional.all_to_all_single(send, comes, goes, group.group_name)
            return
        self._received = _empty(send, sum(comes)) if into is None else into.view(-1)
        # The library has a faster way for equal sizes.
        even = len({*comes}) == len({*goes}) == 1
        self._wait = dist.all_to_all_single(self._received, send, None if even else comes, None if even else goes, group=group,
                                            async_op=True).wait
        self._sent = send

    def wait(self) -> Tensor:
        """What came, flat. On a GPU the stream waits for it, the host does not."""
        if self._wait is None:
            return torch.ops._c10d_functional.wait_tensor(self._received)
        self._wait()
        self._sent = None
        return self._received


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: SharedSequence, deals: Deals, arrival: Incoming | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.deals = shards, deals
        arrived = (arrival or Incoming(shards, xs, deals, in_graph(*xs))).wait()
        return (arrived,) if len(xs) == 1 else arrived

    @staticmethod
    @differentiable_once("ssta_attention")
    def backward(ctx, saved: tuple[()], *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *send_tokens(ctx.shards, grads, ctx.deals, gather=False)


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: SharedSequence, deal: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.shards, ctx.deal = shards, deal
        return send_tokens(shards, (x,), (deal,), gather=True)[0]

    @staticmethod
    @differentiable_once("ssta_attention")
    def backward(ctx, saved: tuple[()], grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _sum_tokens(ctx.shards, grad, ctx.deal)
