"""What stands around a layer on ranks: Shares, how they share a sequence; and Sent, what is on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..kernels import Deferred
from ..spec import LayerSpec, Peers
from .agreement import refuse, settle
from .around import Exchange
from .exchange import Deals, Incoming, ToHeads
from .runs import HeldTokens, Run, RunPlace, dealt, held_by

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .shards import Shards

# (first token, tokens) each: rows of a layer, as ``LayerSpec`` has them.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shares(ABC):
    """How ranks share one sequence of S tokens out: ``Shards``, and ``Rings`` beyond the heads.

    Attributes:
        runs: the sequence. A rank's own sequence consists of its share of each shared run and of each whole run, in the order of runs.
        ranks, rank: how many there are, and which this process is.
        places: where the runs lie.
        length: S.
        lengths: the tokens that each rank holds.
        local_length: those of this rank, S_r.
    """

    runs: tuple[Run, ...]
    ranks: int
    rank: int
    places: tuple[RunPlace, ...] = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    local_length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in zip(HeldTokens._fields, held_by(self.runs, self.ranks, self.rank)):
            object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The ranks, by the dimensions of their mesh, the last one first."""

    @property
    def head_ranks(self) -> int:
        """How many of them exchange heads."""
        return self.ranks

    @abstractmethod
    def start(self, *xs: Tensor | Deferred, key_heads: int | None = None) -> Sent:
        """This rank's ``[B, H, S_r, D]``, on their way."""

    @abstractmethod
    def exchange(self, query: Any, key: Any, value: Any, spec: LayerSpec, note: Callable[[str], object]) -> Exchange:
        """``exchanged`` of ranks that agree."""

    def exchanged(self, query: Any, key: Any, value: Any, spec: LayerSpec, text_mask: object, note: Callable[[str], object]) -> Exchange:
        """q, k and v for a layer of one process, and the way back, once the ranks agree on what they attend to.

        Args:
            query, key, value: this rank's tensors ``[B, H, S_r, D]``, or all three as ``start`` sent them; their shapes are checked.
            spec: the layer of all ranks together.
            note: as ``attend`` takes it.

        Raises:
            TypeError, ValueError: what the ranks were not given alike, and what another one refused.
        """
        batch, unmasked = query.shape[0], text_mask is None
        self.agreed(None if spec.config.holds_functions else (spec, batch, unmasked), lambda: {
            "layout": spec.layout, "query's batch, heads and head_dim": (batch, spec.heads, spec.head_dim), "key's heads": spec.kv_heads,
            "dtype": spec.dtype, "device": spec.device.type, "config": spec.config, "scale": spec.scale,
            "deterministic": spec.deterministic, "impl": spec.impl, "gradients": spec.recorded,
            "text_mask": "none" if unmasked else "given"})
        if isinstance(query, Sent):
            check_sent(self, spec, query, key, value)
        return self.exchange(query, key, value, spec, note)

    def deal_heads(self, total: int, key_heads: int | None = None) -> tuple[int, ...]:
        """How many of ``total`` heads each of the ranks has that exchange heads. ``key_heads``: of grouped-query attention, whose key heads
        are dealt out, each with all its query heads.

        Raises:
            ValueError: ranks would be left without a head, or total is no multiple of key_heads.
        """
        return dealt(total, total if key_heads is None else key_heads, self.head_ranks)

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

    def agreed(self, call: Hashable, facts: Callable[[], dict[str, object]]) -> None:
        """That all ranks make this call with the same facts; see ``agreement.settle``."""
        settle(self.groups, None if call is None else (self.runs, call), lambda: {"sequence": self.runs, **facts()})

    def refuse(self, error: TypeError | ValueError) -> NoReturn:
        """Raises what is wrong on this rank, and says it to the others."""
        refuse(self.groups, error)

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
        self.shards: Shares = shards
        self.deals, self.requires_grad = deals, recorded
        batch, _, _, dim = xs[0].shape
        self.shape = torch.Size((batch, deals[0][shards.rank], shards.length, dim))
        self.dtype, self.device = xs[0].dtype, xs[0].device
        # Packets are copies: what nobody wants a gradient of need not be kept.
        self._by: Shards | None = shards
        self._xs = xs if recorded else ()
        self._incoming = incoming

    @property
    def heads(self) -> int:
        """H, of the first tensor."""
        return sum(self.deals[0])

    @property
    def waits(self) -> bool:
        """Whether what comes may be waited for as late as it is read: nobody differentiates it, and it is no part of a graph."""
        return not self.requires_grad and self._incoming is not None and self._incoming.in_place

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several; once, and the caller's from then on. On a GPU only the stream waits.

        Raises:
            RuntimeError: it was called before.
        """
        if self._by is None:
            raise RuntimeError("what was sent can be waited for once, and was: nothing is kept of it here")
        if self.requires_grad:
            found = ToHeads.apply(self._by, self.deals, self._incoming, *self._xs)
            found = found[0] if len(found) == 1 else found
        else:
            assert self._incoming is not None, "only with gradients a graph has the exchange inside one function of autograd"
            found = self._incoming.wait()
        self._by = self._incoming = None
        self._xs = ()
        return found


def own_spec(spec: LayerSpec, group: ProcessGroup, heads: int, kv_heads: int, rows: Spans | None = None) -> LayerSpec:
    """The layer of a rank that has so many heads of ``spec``, the others of ``group`` having the rest, or only some rows of them."""
    peers = Peers(group.group_name, spec.heads, spec.kv_heads) if spec.config.mask_share_within_head else None
    return spec._replace(heads=heads, kv_heads=kv_heads, rows=rows, peers=peers)


def check_sent(shares: Shares, spec: LayerSpec, query: Sent, key: Sent, value: Sent) -> None:
    """That q, k and v were sent one by one by ``shares``, the heads of query with their key heads."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shards != shares:
            raise ValueError(f"{name} must have been sent by the layer's own shards, {shares}, got {x.shards}")
        if len(x.deals) != 1:
            raise ValueError(f"{name} must have been sent by itself, got {len(x.deals)} tensors")
    if query.deals[0] != shares.deal_heads(spec.heads, spec.kv_heads) or key.deals != value.deals:
        raise ValueError(f"query, key and value must have been sent with key_heads {spec.kv_heads}, got heads {query.deals[0]}, "
                         f"{key.deals[0]} and {value.deals[0]} on the ranks")
