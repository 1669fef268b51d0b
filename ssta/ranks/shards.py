"""Heads for tokens: Shards says how ranks share a sequence out, and exchanges a rank's tokens of all heads for all tokens of its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor

from ..kernels import Deferred
from ..sequence import TokenLayout
from .agreement import agree, refuse
from .exchange import Deals, Incoming, ToHeads, ToTokens, send_tokens
from .group import resolve_group
from .runs import SharedSequence, dealt, runs_of
from .world import in_graph, recorded

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


class Shards(SharedSequence):
    """How the ranks of a group share one sequence of S tokens out; see ``SharedSequence``. Made by ``Shards.of``. Lengths are known on the
    host, so no collective carries a size and nothing waits for the device."""

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | None, layout: TokenLayout, split: str = "video") -> Shards:
        """How ``group`` shares out ``layout``, the whole sequence; as ``ssta_attention`` takes them, None = the default group."""
        runs, group = runs_of(layout, split), resolve_group(group)
        return cls(runs, group.size(), group.rank(), group)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}: {self.local_length:,} of {self.length:,} tokens"

    def heads(self, total: int, key_heads: int | None = None) -> tuple[int, int]:
        """(first, last): this rank has the heads from first up to last; the rest as ``deal_heads``."""
        counts = self.deal_heads(total, key_heads)
        first = sum(counts[:self.rank])
        return first, first + counts[self.rank]

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """How many of ``total`` heads each of the ranks has. ``key_heads``: of grouped-query attention, whose key heads are dealt out, each
        with all its query heads.

        Raises:
            ValueError: ranks would be left without a head, or total is no multiple of key_heads.
        """
        return dealt(total, total if key_heads is None else key_heads, self.ranks)

    def check(self, name: str, x: Any, length: int | None = None) -> None:
        """That ``x``, under its ``name``, is ``[B, H, S_r, D]``."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        self._check_shape(name, x.shape, self.local_length if length is None else length)

    def whole(self, name: str, x: Any) -> tuple[int, ...]:
        """``[B, H, S, D]`` of all ranks together, of x, which is this rank's share or what was sent of it; raises as ``check``."""
        if not isinstance(x, Sent):
            self.check(name, x)
        return x.shape[0], x.heads if isinstance(x, Sent) else x.shape[1], self.length, x.shape[3]

    def check_sent(self, query: Sent, key: Sent, value: Sent) -> None:
        """That q, k and v were sent one by one between these ranks, the heads of query with their key heads."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.shards != self:
                raise ValueError(f"{name} must have been sent by the layer's own shards, {self}, got {x.shards}")
            if len(x.deals) != 1:
                raise ValueError(f"{name} must have been sent by itself, got {len(x.deals)} tensors")
        if query.deals[0] != self.deal_heads(query.heads, key.heads) or key.deals != value.deals:
            raise ValueError(f"query, key and value must have been sent with key_heads {key.heads}, got heads {query.deals[0]}, "
                             f"{key.deals[0]} and {value.deals[0]} on the ranks")

    def agreed(self, facts: dict[str, object]) -> None:
        """That all ranks make a call with the same facts; see ``agreement.agree``."""
        agree(self.group, {"sequence": self.runs, **facts})

    def refuse(self, error: TypeError | ValueError) -> NoReturn:
        """Raises what is wrong on this rank, and says it to the others."""
        refuse(self.group, error)

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
        try:
            deals = self._checked(xs, key_heads)
        except (TypeError, ValueError) as error:
            self.refuse(error)
        like = xs[0]
        batch, heads, _, dim = like.shape
        self.agreed({"x's batch": batch, "x's heads": heads, "x's head_dim": dim, "x's dtype": like.dtype, "x's device": like.device.type,
                     "heads of all ranks": deals, "gradients": recorded(*xs)})
        return self.send(xs, deals)

    def send(self, xs: tuple[Tensor | Deferred, ...], deals: Deals) -> Sent:
        """``start`` of tensors that are checked, once the ranks agree. deals: of each tensor how many heads each rank has."""
        only = xs[0] if len(xs) == 1 else None
        if isinstance(only, Deferred) and only.ready is None and len(set(deals[0])) == 1:
            return Sent(self, xs, deals, Incoming(self, xs, deals, graph=False), False)
        tensors = tuple([x.materialize() if isinstance(x, Deferred) else x for x in xs])
        wanted, graph = recorded(*tensors), in_graph(*tensors)
        # A graph with gradients has the exchange inside one autograd function.
        return Sent(self, tensors, deals, None if wanted and graph else Incoming(self, tensors, deals, graph), wanted)

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
        deal = self.deal_heads(heads, key_heads)
        if x.shape[1] != deal[self.rank]:
            raise ValueError(f"x must have rank {self.rank}'s {deal[self.rank]} of {heads} heads, got {x.shape[1]}")
        return ToTokens.apply(self, deal, x) if recorded(x) else send_tokens(self, (x,), (deal,), gather=True)[0]

    def _checked(self, xs: tuple[Tensor | Deferred, ...], key_heads: int | None) -> Deals:
        """How many heads of each tensor each rank has, after the checks of ``start``."""
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
        return tuple([self.deal_heads(x.shape[1], key_heads) for x in xs])

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


class Sent:
    """Tensors on their way from tokens to heads; made by ``Shards.start``.

    Attributes:
        shards: how the ranks share the sequence out.
        deals: of each tensor how many heads each rank has.
        shape, dtype, device: of what comes, where it is one tensor: ``[B, H_r, S, D]``.
        requires_grad: whether a gradient is wanted.
    """

    def __init__(self, shards: Shards, xs: tuple[Tensor | Deferred, ...], deals: Deals, incoming: Incoming | None, recorded: bool) -> None:
        self.shards, self.deals, self.requires_grad = shards, deals, recorded
        batch, _, _, dim = xs[0].shape
        self.shape = torch.Size((batch, deals[0][shards.rank], shards.length, dim))
        self.dtype, self.device = xs[0].dtype, xs[0].device
        # Packets are copies: tensors without a gradient need not be saved.
        self._xs = xs if recorded else ()
        self._incoming, self._waited = incoming, False

    @property
    def heads(self) -> int:
        """H, of the first tensor."""
        return sum(self.deals[0])

    @property
    def plain(self) -> bool:
        """Whether no gradient is wanted and no graph holds the exchange, so that each tensor may be waited for where it is read."""
        return not self.requires_grad and self._incoming is not None and self._incoming.in_place

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several; once, and the caller's from then on. On a GPU only the stream waits.

        Raises:
            RuntimeError: it was called before.
        """
        if self._waited:
            raise RuntimeError("what was sent can be waited for once, and was: nothing is kept of it here")
        self._waited = True
        incoming, self._incoming = self._incoming, None
        xs, self._xs = self._xs, ()
        if self.requires_grad:
            arrived = ToHeads.apply(self.shards, self.deals, incoming, *xs)
            return arrived[0] if len(arrived) == 1 else arrived
        assert incoming is not None, "only with gradients a graph has the exchange inside one function of autograd"
        return incoming.wait()
