"""Heads for tokens: Shards says how ranks share a sequence out, and exchanges a rank's tokens of all heads for all tokens of its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from ..kernels import Deferred
from ..sequence import TokenLayout
from ..spec import LayerSpec, Peers
from .around import Around, Exchange
from .exchange import Deals, Incoming, ToTokens, packet_spans, send_tokens
from .group import group_named, resolve_group
from .runs import Run, runs_of
from .shares import Sent, Shares, own_spec
from .world import in_graph, recorded

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# Up to so many bytes of queries a rank q, k and v go together: they are on their way for no longer than the host needs for one exchange
# (benchmark/NOTES.md).
TOGETHER = 16 * 2**20


@dataclass(frozen=True)
class Shards(Shares):
    """How the ranks of a group share one sequence of S tokens out. Made by ``Shards.of``. Lengths are known on the host, so no collective
    carries a size and nothing waits for the device.

    Attributes:
        group: the ranks.
    """

    group: ProcessGroup

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

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        return (self.group,)

    def exchange(self, query: Any, key: Any, value: Any, spec: LayerSpec, note: Callable[[str], object]) -> Exchange:
        q_deal, kv_deal = self.deal_heads(spec.heads, spec.kv_heads), self.deal_heads(spec.kv_heads)
        own = own_spec(spec, self.group, q_deal[self.rank], kv_deal[self.rank])
        back = partial(self.to_tokens, heads=spec.heads, key_heads=spec.kv_heads)
        given, sent = (query, key, value), isinstance(query, Sent)
        if all([x.waits for x in given]) if sent else not (spec.recorded or in_graph(*given)):
            # What ranks hold may differ, and all of them must do the same.
            bytes_a_rank = query.shape[0] * spec.heads * self.length * spec.head_dim * query.dtype.itemsize / self.ranks
            around = Around(self.places, self.length, self.ranks, self.rank, self.group.group_name, q_deal, kv_deal,
                            together=bytes_a_rank <= TOGETHER)
            # The layer gives packets, so that nothing is packed again.
            return Exchange(given, own._replace(returned=packet_spans(self.places, self.ranks)), back, note, around)
        arrived = tuple([x.wait() for x in given]) if sent else self._send(given, (q_deal, kv_deal, kv_deal)).wait()
        note("arrived")
        return Exchange(arrived, own, back, note)

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
        call = batch, heads, dim, like.dtype, like.device.type, deals, recorded(*xs)
        self.agreed(("start", *call), lambda: dict(zip((
            "x's batch", "x's heads", "x's head_dim", "x's dtype", "x's device", "heads of all ranks", "gradients"), call)))
        return self._send(xs, deals)

    def to_all(self, *xs: Tensor) -> Any:
        """A rank's tokens, gathered with those of the others, which have the same heads: ``[B, H, S_r, D]`` -> ``[B, H, S, D]``. As
        ``to_heads``, of which every rank gets all heads."""
        if self.ranks == 1:
            return xs[0] if len(xs) == 1 else xs
        return self._send(xs, tuple([(x.shape[1],) * self.ranks for x in xs])).wait()

    def _send(self, xs: tuple[Tensor | Deferred, ...], deals: Deals) -> Sent:
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
        deals = (self.deal_heads(heads, key_heads),)
        if x.shape[1] != deals[0][self.rank]:
            raise ValueError(f"x must have rank {self.rank}'s {deals[0][self.rank]} of {heads} heads, got {x.shape[1]}")
        if recorded(x):
            return ToTokens.apply(self, deals, x)
        return send_tokens(self, (x,), deals, gather=True)[0]

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


def all_heads(peers: Peers, q_means: Tensor, k_means: Tensor) -> tuple[Tensor, Tensor]:
    """What each rank has of its heads, of all: ``[B, H_r, N, C]`` -> ``[B, H, N, C]``, and so of key heads. Without gradients."""
    group = group_named(peers.group)
    own, keys = (Shards((Run(x.shape[2], False),), group.size(), group.rank(), group) for x in (q_means, k_means))
    if own.ranks == 1:
        return q_means, k_means
    q, = send_tokens(own, (q_means,), (own.deal_heads(peers.heads, peers.kv_heads),), gather=True)
    k, = send_tokens(keys, (k_means,), (own.deal_heads(peers.kv_heads),), gather=True)
    return q.contiguous(), k.contiguous()
