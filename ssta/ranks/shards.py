"""Heads for tokens: Shards says how ranks share a sequence out, and exchanges a rank's tokens of all heads for all tokens of its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import Deferred
from ..sequence import TokenLayout
from ..spec import Peers
from .exchange import Incoming, ToTokens, packet_slots, send_packets, send_tokens
from .group import resolve_group, settle
from .runs import Division, deal, runs_of
from .shares import Exchange, Sent, sent_apart
from .world import in_graph, recorded

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


@dataclass(frozen=True)
class Shards(Division):
    """How the ranks of a group share one sequence of S tokens out. Made by ``Shards.of``. Lengths are known on the host, so no collective
    carries a size and nothing waits for the device.
    """

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shards:
        """How ``group`` shares ``layout`` out.

        Args:
            group: the ranks; None = the default group.
            layout: the whole sequence.
            split: "video" = each video grid by itself, dense runs are whole on every rank; "each" = these too, each by itself; "all" = the
                whole sequence as one run. A run's shares are ``torch.tensor_split``'s.

        Raises:
            TypeError, ValueError: the argument's name, what was required and what came.
        """
        runs, group = runs_of(layout, split), resolve_group(group)
        return cls(group, runs, dist.get_world_size(group), dist.get_rank(group))

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
        self._check_shape(name, x.shape, self.local_length if length is None else length)

    def _check_shape(self, name: str, shape: torch.Size, length: int) -> None:
        if len(shape) != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(shape)}")
        if shape[2] != length:
            raise ValueError(f"{name} must have {self._expected(length)}, got {shape[2]} in shape {tuple(shape)}")

    def _expected(self, length: int) -> str:
        if length != self.local_length or self.length == length:
            return f"the sequence's {length} tokens"
        shared = sum([run.length for run in self.runs if run.shared])
        whole = self.length - shared
        share = f"rank {self.rank} of {self.ranks}'s share of {self.local_length - whole} of {shared} tokens"
        return f"{share} and the {whole} that are whole, together {length}" if whole else share

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The ranks, as ``Rings`` has them too."""
        return (self.group,)

    def agreed(self, call: Any, check: Callable[[], dict[str, object]]) -> None:
        """That this rank's call is right and all ranks make it with the same facts; see ``group.settle``."""
        settle(self.groups, None if call is None else (self.runs, call), self.runs, lambda: {"sequence": self.runs, **check()})

    def exchange(self, query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, note: Callable[[str], object]) -> Exchange:
        """q, k and v to heads, and the way back.

        Args:
            note: called with "arrived" once what comes is being waited for.
        """
        if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
            heads, key_heads = query.shape[1], key.shape[1]
            plain = not (recorded(query, key, value) or in_graph(query, key, value))
            if not plain or not query.is_cuda:
                arriving: tuple = self._send(query, key, value, key_heads=key_heads).wait()
                note("arrived")
                return self._exchange(arriving, heads, key_heads, plain)
            # Each is packed while the one before it is on its way, and v and k are brought into tiles while q is.
            value, key = self._send(value), self._send(key)
            query = self._send(query, key_heads=key_heads)
        assert isinstance(query, Sent) and isinstance(key, Sent) and isinstance(value, Sent), "the layer has checked that"
        heads, key_heads = sent_apart(self, query, key, value)
        if query.waits and key.waits and value.waits:
            return self._exchange((query.then(note), key, value), heads, key_heads, True)
        arriving = query.wait(), key.wait(), value.wait()
        note("arrived")
        return self._exchange(arriving, heads, key_heads, False)

    def _exchange(self, arriving: tuple, heads: int, key_heads: int, packed: bool) -> Exchange:
        """With ``packed`` the layer gives packets, so that nothing is packed again."""
        peers, back = Peers(self.group.group_name, heads, key_heads), partial(self.to_tokens, heads=heads, key_heads=key_heads)
        if not packed:
            return Exchange(arriving, None, peers, back)
        deals = self.deal_heads(heads, key_heads)
        return Exchange(arriving, None, peers, back, partial(packet_slots, self), lambda out: send_packets(self, out, deals))

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

    def start(self, *xs: Tensor | Deferred, key_heads: int | None = None) -> Sent:
        """``to_heads`` that does not wait: the device goes on with other work until ``Sent.wait``. Ranks must start exchanges in the same
        order. What is deferred is finished on its way into what is sent."""
        call = "start", key_heads, *[(type(x), x.shape, x.dtype, x.device, recorded(x)) if isinstance(x, (Tensor, Deferred))
                                               else None for x in xs]
        self.agreed(call, lambda: self._facts(xs, key_heads))
        return self._send(*xs, key_heads=key_heads)

    def _send(self, *xs: Tensor | Deferred, key_heads: int | None = None) -> Sent:
        deals = tuple([self.deal_heads(x.shape[1], key_heads) for x in xs])
        only = xs[0] if len(xs) == 1 else None
        if isinstance(only, Deferred) and only.ready is None and len(set(deals[0])) == 1:
            return Sent(self, xs, deals, Incoming(self, xs, deals), False)
        tensors = tuple([x.materialize() if isinstance(x, Deferred) else x for x in xs])
        wanted = recorded(*tensors)
        # A graph with gradients has the exchange inside one autograd function.
        return Sent(self, tensors, deals, None if wanted and in_graph(*tensors) else Incoming(self, tensors, deals), wanted)

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
        if recorded(x):
            return ToTokens.apply(self, deals, x)
        return send_tokens(self, (x,), deals, gather=True)[0]

    def _facts(self, xs: tuple[Tensor | Deferred, ...], key_heads: int | None) -> dict[str, object]:
        """What ranks compare of ``start``, after its checks."""
        if not xs:
            raise ValueError("to_heads must be given at least one tensor, got none")
        for x in xs:
            if isinstance(x, Deferred):
                self._check_shape("x", x.shape, self.local_length)
            else:
                self.check("x", x)
        like = xs[0]
        for x in xs[1:]:
            if x.shape[0] != like.shape[0] or x.shape[3] != like.shape[3] or x.dtype != like.dtype or x.device != like.device:
                raise ValueError(f"tensors that are exchanged together must be alike in batch, head_dim, dtype and device, got "
                                 f"{tuple(like.shape)} {like.dtype} {like.device} and {tuple(x.shape)} {x.dtype} {x.device}")
        return {**alike("x", like), "heads": tuple([self.deal_heads(x.shape[1], key_heads) for x in xs]), "gradients": recorded(*xs)}


def alike(name: str, x: Tensor | Deferred) -> dict[str, object]:
    """What all ranks' ``[B, H, S_r, D]`` have in common."""
    batch, heads, _, dim = x.shape
    return {f"{name}'s batch, heads and head_dim": (batch, heads, dim), f"{name}'s dtype": x.dtype, f"{name}'s device": x.device.type}
