"""Heads for tokens: Shards says how ranks share a sequence out, and exchanges a rank's tokens of all heads for all tokens of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import require_choice
from .memo import remember_plain
from .ranks import check_ranks, resolve_group
from .sequence import TokenLayout, VideoGrid

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

__all__ = ["SPLITS", "Run", "Sent", "Shards", "check_ranks", "deal"]

SPLITS = ("video", "all")


def deal(total: int, ranks: int) -> tuple[int, ...]:
    """How many of ``total`` each rank has, by ``torch.tensor_split``'s rule: the first ones have one more where they do not divide."""
    return tuple([total // ranks + (rank < total % ranks) for rank in range(ranks)])


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sequence: ``shared`` out over the ranks, or whole on every one of them."""

    length: int
    shared: bool


@dataclass(frozen=True)
class Shards:
    """How the ranks of a group share one sequence of S tokens out. Made by ``Shards.of``. Lengths are known on the host, so no collective
    carries a size and nothing waits for the device.

    Attributes:
        group: the ranks.
        runs: the sequence. A rank's own sequence consists of its share of each shared run and of each whole run, in the order of runs.
        ranks, rank: how many there are, and which this process is.
        length: S.
        lengths: the tokens that each rank holds.
        local_length: those of this rank, S_r.
    """

    group: ProcessGroup
    runs: tuple[Run, ...]
    ranks: int
    rank: int
    length: int = field(init=False, repr=False, compare=False)
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    local_length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = tuple([sum(held) for held in zip(*[self._held(run) for run in self.runs])])
        for name, value in (("length", sum([run.length for run in self.runs])), ("lengths", lengths), ("local_length", lengths[self.rank])):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shards:
        """How ``group`` shares ``layout`` out.

        Args:
            group: the ranks; None = the default group.
            layout: the whole sequence.
            split: "video" = each video grid by itself, dense runs are whole on every rank; "all" = the whole sequence as one run. A run's
                shares are ``torch.tensor_split``'s.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.
        """
        if not isinstance(layout, TokenLayout):
            raise TypeError(f"layout must be a TokenLayout, got {type(layout).__name__}")
        require_choice("split", split, SPLITS)
        group = resolve_group(group)
        return _shards(cls, group, layout, split, dist.get_world_size(group), dist.get_rank(group))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}: {self.local_length:,} of {self.length:,} tokens"

    def heads(self, total: int, key_heads: int | None = None) -> tuple[int, int]:
        """(first, last): this rank has the heads from first up to last, of ``total``. ``key_heads``: of grouped-query attention, whose key
        heads are dealt out, each with all its query heads.

        Raises:
            ValueError: ranks would be left without a head, or total is no multiple of key_heads.
        """
        counts = self.deal_heads(total, key_heads)
        first = sum(counts[:self.rank])
        return first, first + counts[self.rank]

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """How many of ``total`` heads each rank has; see ``heads``."""
        key_heads = total if key_heads is None else key_heads
        if key_heads < self.ranks:
            what = "heads" if key_heads == total else "key heads"
            raise ValueError(f"group must have at most as many ranks as there are {what}, got {self.ranks} ranks and {key_heads} {what}")
        if total % key_heads:
            raise ValueError(f"query's heads must be a multiple of key's {key_heads}, got {total}")
        return tuple([count * (total // key_heads) for count in deal(key_heads, self.ranks)])

    def check(self, name: str, x: Any, length: int | None = None) -> None:
        """That ``x`` is ``[B, H, S_r, D]``.

        Raises:
            TypeError, ValueError: in the name ``name``, with both numbers.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}")
        length = self.local_length if length is None else length
        if x.shape[2] != length:
            raise ValueError(f"{name} must have {self._expected(length)}, got {x.shape[2]} in shape {tuple(x.shape)}")

    def _expected(self, length: int) -> str:
        if length != self.local_length or self.length == length:
            return f"the sequence's {length} tokens"
        shared = sum([run.length for run in self.runs if run.shared])
        whole = self.length - shared
        share = f"rank {self.rank} of {self.ranks}'s share of {self.local_length - whole} of {shared} tokens"
        return f"{share} and the {whole} that are whole, together {length}" if whole else share

    @overload
    def to_heads(self, x: Tensor, /, *, key_heads: int | None = ...) -> Tensor: ...

    @overload
    def to_heads(self, x: Tensor, /, *xs: Tensor, key_heads: int | None = ...) -> tuple[Tensor, ...]: ...

    def to_heads(self, *xs: Tensor, key_heads: int | None = None) -> Tensor | tuple[Tensor, ...]:
        """A rank's tokens of all heads, exchanged for all tokens of its heads: ``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``.

        One exchange for each shared run, whatever the number of tensors; whole runs need none. What comes is a view of the buffer that was
        received into, ``[S, B, H_r, D]`` in memory. Differentiable; a rank's gradient of a whole run is the part that its own heads make,
        which adds up over the ranks.

        Args:
            xs: tensors alike in all but their heads; any strides.
            key_heads: as in ``heads``, for those with more heads.

        Returns:
            One tensor for one, a tuple for several.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came, before anything is sent.
        """
        return self.start(*xs, key_heads=key_heads).wait()

    def start(self, *xs: Tensor, key_heads: int | None = None) -> Sent:
        """``to_heads`` that does not wait: the device goes on with other work until ``Sent.wait``. Ranks must start exchanges in the same
        order."""
        if not xs:
            raise ValueError("to_heads must be given at least one tensor, got none")
        for x in xs:
            self.check("x", x)
        like = xs[0]
        for x in xs[1:]:
            if x.shape[0] != like.shape[0] or x.shape[3] != like.shape[3] or x.dtype != like.dtype or x.device != like.device:
                raise ValueError(f"tensors that are exchanged together must be alike in batch, head_dim, dtype and device, got "
                                 f"{tuple(like.shape)} {like.dtype} {like.device} and {tuple(x.shape)} {x.dtype} {x.device}")
        deals = tuple([self.deal_heads(x.shape[1], key_heads) for x in xs])
        traced_gradient = torch.compiler.is_compiling() and _wants_gradient(xs)
        # A graph with gradients has the exchange inside one autograd function.
        return Sent(self, xs, deals, None if traced_gradient else _Arrival(self, xs, deals))

    def to_tokens(self, x: Tensor, heads: int, *, key_heads: int | None = None) -> Tensor:
        """Back: all tokens of a rank's heads, exchanged for its tokens of all heads: ``[B, H_r, S, D]`` -> ``[B, H, S_r, D]``.

        One exchange, which gathers the heads of whole runs too. Differentiable: the gradients that ranks have of a whole run are summed.

        Args:
            x: any strides.
            heads: H.
            key_heads: as in ``heads``.

        Returns:
            ``[B, S_r, H, D]`` in memory.
        """
        self.check("x", x, self.length)
        deals = (self.deal_heads(heads, key_heads),)
        if x.shape[1] != deals[0][self.rank]:
            raise ValueError(f"x must have rank {self.rank}'s {deals[0][self.rank]} of {heads} heads, got {x.shape[1]}")
        if _wants_gradient((x,)):
            return _ToTokens.apply(self, deals, x)
        return _send_tokens(self, (x,), deals, gather=True)[0]

    def gather_heads(self, x: Tensor, heads: int, *, key_heads: int | None = None) -> Tensor:
        """Something of each of a rank's heads, such as the means of their tiles, of all heads: ``[B, H_r, N, C]`` -> ``[B, H, N, C]``; not
        differentiable."""
        whole = Shards(self.group, (Run(x.shape[2], False),), self.ranks, self.rank)
        return _send_tokens(whole, (x.detach(),), (self.deal_heads(heads, key_heads),), gather=True)[0]

    def _held(self, run: Run) -> tuple[int, ...]:
        """How many of a run's tokens each rank holds."""
        return deal(run.length, self.ranks) if run.shared else (run.length,) * self.ranks

    def _places(self) -> list[tuple[Run, int, int, tuple[int, ...]]]:
        """Of each run: it, where it starts in the sequence, where in this rank's, and how many of its tokens each rank holds."""
        places, start, local = [], 0, 0
        for run in self.runs:
            held = self._held(run)
            places.append((run, start, local, held))
            start, local = start + run.length, local + held[self.rank]
        return places


@remember_plain
def _shards(kind: type[Shards], group: ProcessGroup, layout: TokenLayout, split: str, ranks: int, rank: int) -> Shards:
    if split == "all":
        runs: tuple[Run, ...] = (Run(layout.length, True),)
    else:
        runs = tuple([Run(segment.length, isinstance(segment, VideoGrid)) for segment in layout.segments])
    return kind(group, runs, ranks, rank)


class Sent:
    """Tensors on their way from tokens to heads; see ``Shards.start``."""

    def __init__(self, shards: Shards, xs: tuple[Tensor, ...], deals: tuple[tuple[int, ...], ...], arrival: _Arrival | None) -> None:
        self.shards, self.heads = shards, tuple([x.shape[1] for x in xs])
        self._xs, self._deals, self._arrival = xs, deals, arrival
        self._done: Tensor | tuple[Tensor, ...] | None = None

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several. On a GPU the stream waits, not the host."""
        if self._done is None:
            if _wants_gradient(self._xs):
                outs = _ToHeads.apply(self.shards, self._deals, self._arrival, *self._xs)
            else:
                assert self._arrival is not None
                outs = self._arrival.wait()
            self._done = outs[0] if len(outs) == 1 else tuple(outs)
            self._xs, self._arrival = (), None
        return self._done


# Data is packed by destination, and in each packet by token, batch element and head. So what comes from all ranks in their order is a run's
# tokens in their order: nothing has to be unpacked.


class _Arrival:
    """All tokens of this rank's heads, on their way into one buffer ``[S, B, heads of all tensors, D]``."""

    def __init__(self, shards: Shards, xs: Sequence[Tensor], deals: Sequence[tuple[int, ...]]) -> None:
        self._own = [counts[shards.rank] for counts in deals]
        batch, dim, own = xs[0].shape[0], xs[0].shape[3], sum(self._own)
        self._works: list[Any] = []
        self._parts: list[Tensor] = []
        traced = torch.compiler.is_compiling()
        self._buffer = None if traced else xs[0].new_empty(shards.length, batch, own, dim)
        with torch.no_grad():
            for run, start, local, held in shards._places():
                into = None if self._buffer is None else self._buffer.narrow(0, start, run.length)
                if run.shared:
                    send = _packed(xs, deals, local, held[shards.rank])
                    sizes = [count * batch * own * dim for count in held], [len_ * batch * dim * held[shards.rank] for len_ in _totals(deals)]
                    if into is None:
                        self._parts.append(_traced_exchange(shards, send, *sizes).view(run.length, batch, own, dim))
                    else:
                        self._works.append((_start_exchange(shards, into.view(-1), send, *sizes), send))
                    continue
                mine = [x.narrow(2, local, run.length).narrow(1, sum(counts[:shards.rank]), count).permute(2, 0, 1, 3)
                        for x, counts, count in zip(xs, deals, self._own)]
                if into is None:
                    self._parts.append(torch.cat(mine, 2))
                else:
                    torch.cat(mine, 2, out=into)

    def wait(self) -> tuple[Tensor, ...]:
        buffer = self._buffer
        if buffer is None:
            parts = [torch.ops._c10d_functional.wait_tensor(part) for part in self._parts]
            buffer = parts[0] if len(parts) == 1 else torch.cat(parts)
        for work, _ in self._works:
            work.wait()
        self._works.clear()
        return tuple([part.permute(1, 2, 0, 3) for part in buffer.split(self._own, 2)])


def _send_tokens(shards: Shards, xs: Sequence[Tensor], deals: Sequence[tuple[int, ...]], gather: bool) -> tuple[Tensor, ...]:
    """Each ``[B, H_r, S, D]`` -> ``[B, H, S_r, D]``. Whole runs: ``gather`` the heads of all ranks, or zeros for those of others."""
    rank, batch, dim = shards.rank, xs[0].shape[0], xs[0].shape[3]
    places, totals = shards._places(), _totals(deals)
    sent = [place for place in places if place[0].shared or gather]
    packets = []
    for to in range(shards.ranks):
        for run, start, _, held in sent:
            first = start + sum(held[:to]) if run.shared else start
            packets.append([x.narrow(2, first, held[to]).permute(2, 0, 1, 3) for x in xs])
    heads_last = [packet[0] if len(xs) == 1 else torch.cat(packet, 2) for packet in packets]
    if len(sent) == 1 and sent[0][0].shared and len(xs) == 1:
        # All packets in a row are the run, in the memory order that attention leaves at batch 1.
        send = xs[0].narrow(2, sent[0][1], sent[0][0].length).permute(2, 0, 1, 3).reshape(-1)
    else:
        send = torch.cat([packet.reshape(-1) if packet.is_contiguous() else packet.contiguous().view(-1) for packet in heads_last])
    counts = [sum([held[to] for _, _, _, held in sent]) for to in range(shards.ranks)]
    sizes = [counts[rank] * batch * total * dim for total in totals], [count * batch * totals[rank] * dim for count in counts]
    if torch.compiler.is_compiling():
        receive = torch.ops._c10d_functional.wait_tensor(_traced_exchange(shards, send, *sizes))
    else:
        receive = send.new_empty(sum(sizes[0]))
        _start_exchange(shards, receive, send, *sizes).wait()
    # From each rank this one's tokens, of the other's heads.
    parts = [part.view(counts[rank], batch, total, dim).split([own[of] for own in deals], 2)
             for of, (part, total) in enumerate(zip(receive.split(sizes[0]), totals))]
    outs = []
    for number, own in enumerate(deals):
        out = torch.cat([part[number].transpose(0, 1) for part in parts], 2)
        if not gather and len(sent) < len(places):
            out = _with_own_heads(shards, out, xs[number], own)
        outs.append(out.transpose(1, 2))
    return tuple(outs)


def _with_own_heads(shards: Shards, out: Tensor, x: Tensor, own: tuple[int, ...]) -> Tensor:
    """``[B, shared tokens of S_r, H, D]`` with the whole runs of x ``[B, H_r, S, D]`` in their places, zeros in other ranks' heads."""
    rank, parts, at = shards.rank, [], 0
    before, after = sum(own[:rank]), sum(own[rank + 1:])
    for run, start, _, held in shards._places():
        if run.shared:
            parts.append(out.narrow(1, at, held[rank]))
            at += held[rank]
        else:
            parts.append(torch.nn.functional.pad(x.narrow(2, start, run.length).transpose(1, 2), (0, 0, before, after)))
    return torch.cat(parts, 1)


def _sum_tokens(shards: Shards, x: Tensor, own: tuple[int, ...]) -> Tensor:
    """``[B, H, S_r, D]`` -> ``[B, H_r, S, D]``: as to heads, and what ranks have of a whole run is summed, rank after rank."""
    rank, batch, dim = shards.rank, x.shape[0], x.shape[3]
    send = _packed((x,), (own,), 0, shards.local_length)
    sizes = [count * batch * own[rank] * dim for count in shards.lengths], [count * batch * dim * shards.local_length for count in own]
    if torch.compiler.is_compiling():
        receive = torch.ops._c10d_functional.wait_tensor(_traced_exchange(shards, send, *sizes))
    else:
        receive = send.new_empty(sum(sizes[0]))
        _start_exchange(shards, receive, send, *sizes).wait()
    packets = [part.view(length, batch, own[rank], dim) for part, length in zip(receive.split(sizes[0]), shards.lengths)]
    runs = [packet.split([shards._held(run)[of] for run in shards.runs]) for of, packet in enumerate(packets)]
    parts = []
    for number, run in enumerate(shards.runs):
        of_ranks = [run_parts[number] for run_parts in runs]
        parts.extend(of_ranks if run.shared else [torch.stack(of_ranks).sum(0)])
    return torch.cat(parts).permute(1, 2, 0, 3)


def _packed(xs: Sequence[Tensor], deals: Sequence[tuple[int, ...]], first: int, tokens: int) -> Tensor:
    """Tokens of each ``[B, H, S_r, D]`` as they are sent, flat: for each rank ``[tokens, B, its heads of all tensors, D]``."""
    ranks, (batch, _, _, dim) = len(deals[0]), xs[0].shape
    totals, pieces = _totals(deals), [x.narrow(2, first, tokens) for x in xs]
    if all([len(set(counts)) == 1 for counts in deals]):
        send = xs[0].new_empty(ranks, tokens, batch, totals[0], dim)
        for piece, into in zip(pieces, send.split([counts[0] for counts in deals], 3)):
            into.copy_(piece.unflatten(1, (ranks, into.shape[3])).permute(1, 3, 0, 2, 4))
        return send.view(-1)
    dealt = [piece.permute(2, 0, 1, 3).split(counts, 2) for piece, counts in zip(pieces, deals)]
    return torch.cat([torch.cat([parts[to] for parts in dealt], 2).flatten() for to in range(ranks)])


def _totals(deals: Sequence[tuple[int, ...]]) -> list[int]:
    """How many heads each rank has of all tensors together."""
    return [sum(counts) for counts in zip(*deals)]


def _start_exchange(shards: Shards, receive: Tensor, send: Tensor, comes: list[int], goes: list[int]) -> Any:
    even = len(set(comes)) == len(set(goes)) == 1
    return dist.all_to_all_single(receive, send, None if even else comes, None if even else goes, group=shards.group, async_op=True)


def _traced_exchange(shards: Shards, send: Tensor, comes: list[int], goes: list[int]) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(send, comes, goes, shards.group.group_name)


def _wants_gradient(xs: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in xs])


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: Shards, deals: tuple[tuple[int, ...], ...], arrival: _Arrival | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.deals = shards, deals
        return (arrival or _Arrival(shards, xs, deals)).wait()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_send_tokens(ctx.shards, grads, ctx.deals, gather=False)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shards: Shards, deals: tuple[tuple[int, ...], ...], x: Tensor) -> Tensor:
        ctx.shards, ctx.deals = shards, deals
        return _send_tokens(shards, (x,), deals, gather=True)[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _sum_tokens(ctx.shards, grad, ctx.deals[0])
