"""Heads for tokens: Shards says how ranks share a sequence out, and exchanges a rank's tokens of all heads for all tokens of its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import require_choice
from ..kernels import Deferred
from ..kernels.memo import Kept, captured, traced
from ..kernels.operators import watched
from ..sequence import TokenLayout, VideoGrid
from ..spec import Peers
from .exchange import Arrival, Deals, Run, Shares, ToHeads, ToTokens, deal, packet_slots, send_packets, send_tokens, wants_gradient
from .group import agree, resolve_group

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..layout import TileLayout

SPLITS = ("video", "all", "each")
Checked = TypeVar("Checked")
# What the ranks of each group have found that they agree on: sequences, and all facts of a call. Ranks fill it alike, for they agree
# together.
_AGREED: WeakKeyDictionary[ProcessGroup, Kept] = WeakKeyDictionary()
FACTS_KEPT = 1024


@dataclass(frozen=True)
class Shards(Shares):
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

    def agreed(self, check: Callable[[], Checked], facts: Callable[[Checked], dict[str, object]]) -> Checked:
        """What ``check`` returns, which looks at this rank's arguments before anything is sent. The first time that a group comes with these
        facts every rank says what came of its check, and its facts, which waits for all of them: a rank that raised alone would leave the
        others waiting for good. Afterwards, in a graph and in its capture, each looks for itself, and so does a rank whose check fails
        for a sequence that was agreed on before.

        Args:
            facts: of what was checked, what must be the same on all ranks, by name.

        Raises:
            TypeError, ValueError: what check raises, at first on all ranks.
        """
        return agreed_between((self.group,), self.runs, check, facts)

    def exchange(self, query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, note: Callable[[str], object]) -> Exchanged:
        """q, k and v to heads, and the way back.

        Args:
            note: called with "arrived" once what comes is being waited for.
        """
        if isinstance(query, Sent):
            return Exchanged.of(self, query, key, value, note)
        heads, key_heads = query.shape[1], key.shape[1]
        plain = not (wants_gradient(query, key, value) or watched(query, key, value))
        if plain and query.is_cuda:
            # Each is packed while the one before it is on its way, and v and k are brought into tiles while q is.
            value, key = self.start(value), self.start(key)
            return Exchanged.of(self, self.start(query, key_heads=key_heads), key, value, note)
        arriving = self.to_heads(query, key, value, key_heads=key_heads)
        note("arrived")
        return Exchanged(self, heads, key_heads, arriving, plain)

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
        deals = self.agreed(lambda: self._deals(xs, key_heads), lambda deals: {**alike("x", xs[0]), "heads": deals})
        only = xs[0] if len(xs) == 1 else None
        if isinstance(only, Deferred) and only.ready is None and len(set(deals[0])) == 1:
            return Sent(self, (), deals, Arrival(self, xs, deals))
        tensors = tuple([x.materialize() if isinstance(x, Deferred) else x for x in xs])
        wanted = wants_gradient(*tensors)
        # A graph with gradients has the exchange inside one autograd function.
        arrival = None if wanted and watched(*tensors) else Arrival(self, tensors, deals)
        # Packets are copies: what nobody wants a gradient of need not be kept.
        return Sent(self, tensors if wanted else (), deals, arrival)

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
        if wants_gradient(x):
            return ToTokens.apply(self, deals, x)
        return send_tokens(self, (x,), deals, gather=True)[0]

    def _deals(self, xs: tuple[Tensor | Deferred, ...], key_heads: int | None) -> Deals:
        """How many heads of each of xs each rank has, after the checks of ``start``."""
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


def agreed_between(
    groups: tuple[ProcessGroup, ...], runs: tuple[Run, ...], check: Callable[[], Checked], facts: Callable[[Checked], dict[str, object]],
) -> Checked:
    """``Shards.agreed`` of one group, or of those of a mesh's dimensions, the last one first."""
    known = _AGREED.get(groups[0])
    try:
        result, error = check(), None
    except (TypeError, ValueError) as found:
        if traced() or captured() or known is not None and runs in known:
            raise
        result, error = None, found
    told = {} if result is None else {"sequence": runs, **facts(result)}
    key = len(groups), tuple(told.items())
    if traced() or captured() or known is not None and key in known:
        assert result is not None
        return result
    agree(groups, error, told)
    if known is None:
        known = _AGREED[groups[0]] = Kept(FACTS_KEPT)
    known[runs] = known[key] = True
    assert result is not None
    return result


def runs_of(layout: TokenLayout, split: str) -> tuple[Run, ...]:
    """What ``split`` shares out of ``layout``, after their checks."""
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {type(layout).__name__}")
    if require_choice("split", split, SPLITS) == "all":
        return (Run(layout.length, True),)
    return tuple([Run(segment.length, split == "each" or isinstance(segment, VideoGrid)) for segment in layout.segments])


class Sent:
    """Tensors on their way from tokens to heads; made by ``Shards.start``.

    Attributes:
        shards: between which ranks.
        deals: of each tensor how many heads each rank has.
    """

    def __init__(self, shards: Shards, xs: tuple[Tensor, ...], deals: Deals, arrival: Arrival | None) -> None:
        self.shards, self.deals = shards, deals
        # Those that want a gradient.
        self._xs: tuple[Tensor, ...] | None = xs
        self._arrival = arrival

    @property
    def ahead(self) -> tuple[Tensor, ...] | None:
        """What ``wait`` will return, one or several, of which only the shape may be asked before; None where waiting makes it."""
        return None if self._xs or self._arrival is None else self._arrival.ahead()

    def wait(self) -> Any:
        """``[B, H_r, S, D]`` of one tensor, a tuple of several; once, and the caller's from then on. On a GPU only the stream waits.

        Raises:
            RuntimeError: it was called before.
        """
        if self._xs is None:
            raise RuntimeError("what was sent can be waited for once, and was: nothing is kept of it here")
        if self._xs:
            outs = ToHeads.apply(self.shards, self.deals, self._arrival, *self._xs)
        else:
            assert self._arrival is not None
            outs = self._arrival.wait()
        self._xs = self._arrival = None
        return outs[0] if len(outs) == 1 else tuple(outs)


class Coming:
    """A tensor on its way, as a layer takes it: of a known kind, and there once it is waited for.

    Attributes:
        shape, dtype, device: of what comes.
    """

    def __init__(self, sent: Sent, ahead: Tensor, note: Callable[[str], object] | None = None) -> None:
        self._sent, self._note = sent, note
        self.shape, self.dtype, self.device = ahead.shape, ahead.dtype, ahead.device

    def wait(self) -> Tensor:
        """The tensor, once; the caller's from then on."""
        x = self._sent.wait()
        if self._note is not None:
            self._note("arrived")
        return x


class Exchanged:
    """What a layer gets of its ranks' exchange, and the way back.

    Args:
        shards: between which ranks.
        heads, key_heads: of query and of key, on all ranks together.
        arriving: q, k and v with all tokens of this rank's heads, or what they come as; the layer's own from then on.
        plain: whether nobody watches or wants a gradient.
    """

    rows = None

    def __init__(self, shards: Shards, heads: int, key_heads: int, arriving: tuple, plain: bool) -> None:
        self.shards, self.heads, self.key_heads, self.arriving, self._plain = shards, heads, key_heads, arriving, plain

    @classmethod
    def of(cls, shards: Shards, query: Sent, key: Any, value: Any, note: Callable[[str], object]) -> Exchanged:
        """Of q, k and v that were sent one by one.

        Raises:
            ValueError: between other ranks, several tensors at once, or heads of query that are not with their key heads.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.shards != shards:
                raise ValueError(f"{name} must have been sent by the layer's own shards, {shards}, got {x.shards}")
            if len(x.deals) != 1:
                raise ValueError(f"{name} must have been sent by itself, got {len(x.deals)} tensors")
        heads, key_heads = sum(query.deals[0]), sum(key.deals[0])
        if query.deals[0] != shards.deal_heads(heads, key_heads) or key.deals != value.deals:
            raise ValueError(f"query, key and value must have been sent with key_heads {key_heads}, got heads {query.deals[0]}, "
                             f"{key.deals[0]} and {value.deals[0]} on the ranks")
        ahead = [x.ahead for x in (query, key, value)]
        if None in ahead:
            arriving: tuple = (query.wait(), key.wait(), value.wait())
            note("arrived")
            return cls(shards, heads, key_heads, arriving, False)
        (q,), (k,), (v,) = ahead  # type: ignore[misc]
        return cls(shards, heads, key_heads, (Coming(query, q, note), Coming(key, k), Coming(value, v)), True)

    @property
    def peers(self) -> Peers:
        """The ranks that have the other heads."""
        return Peers(self.shards.group.group_name, self.heads, self.key_heads)

    def returned(self, tiles: TileLayout) -> Tensor | None:
        """In which order the layer gives its result: packets, so that nothing is packed again; None = the sequence's."""
        return packet_slots(self.shards, tiles) if self._plain else None

    def back(self, out: Tensor) -> Tensor:
        """What the layer gave in the order of ``returned``, ``[B, H_r, tokens, D]`` -> ``[B, H, S_r, D]``."""
        if self._plain:
            return send_packets(self.shards, out, self.shards.deal_heads(self.heads, self.key_heads))
        return self.to_tokens(out)

    def ready(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for attention of another kind than a layer's, once; its result goes back by ``to_tokens``."""
        (q, k, v), self.arriving = self.arriving, ()
        v, k, q = (x.wait() if isinstance(x, Coming) else x for x in (v, k, q))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """``[B, H_r, S, D]`` in the sequence's order -> ``[B, H, S_r, D]``."""
        return self.shards.to_tokens(out, self.heads, key_heads=self.key_heads)


def alike(name: str, x: Tensor | Deferred) -> dict[str, object]:
    """What all ranks' ``[B, H, S_r, D]`` have in common, for ``Shards.agreed``."""
    batch, heads, _, dim = x.shape
    return {f"{name}'s batch, heads and head_dim": (batch, heads, dim), f"{name}'s dtype": x.dtype, f"{name}'s device": x.device.type}
