"""What stands around one layer on ranks: Around, the exchanges that are its first and last steps; and Exchange, of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .exchange import Incoming, return_packets
from .group import group_named
from .runs import RunPlace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..spec import LayerSpec


class Around(NamedTuple):
    """What a layer exchanges before its first step and after its last where nobody differentiates it and no graph holds it. Plain values.

    Attributes:
        places, length, ranks, rank: as of ``Shards``.
        name: by which torch.distributed finds the group. A layer is remembered, and must not keep the group.
        q_deal, kv_deal: how many heads each rank has.
        together: whether q, k and v go in one collective; else each by itself, packed while the one before it is on its way.
    """

    places: tuple[RunPlace, ...]
    length: int
    ranks: int
    rank: int
    name: str
    q_deal: tuple[int, ...]
    kv_deal: tuple[int, ...]
    together: bool

    @property
    def group(self) -> ProcessGroup:
        return group_named(self.name)

    def enter(self, q: Any, k: Any, v: Any, note: Callable[[str], object]) -> tuple[Any, Any, Any]:
        """A rank's ``[B, H, S_r, D]`` -> ``[B, H_r, S, D]`` as tensors, or on their way; what was sent before stays on its way.

        Args:
            note: called with "arrived" where they are tensors.
        """
        if not isinstance(q, Tensor):
            return q, k, v
        if self.together:
            q, k, v = Incoming(self, (q, k, v), (self.q_deal, self.kv_deal, self.kv_deal), graph=False).wait()
            note("arrived")
            return q, k, v
        # v and k are brought into tiles while q is on its way.
        v, k, q = (Incoming(self, (x,), (deal,), graph=False)
                   for x, deal in ((v, self.kv_deal), (k, self.kv_deal), (q, self.q_deal)))
        return q, k, v

    def leave(self, out: Tensor) -> Tensor:
        """``[B, H_r, tokens of all packets, D]`` in the order of ``packet_spans`` -> ``[B, H, S_r, D]``."""
        return return_packets(self, out.permute(2, 0, 1, 3), (self.q_deal,), self.places)[0].transpose(1, 2)


class Exchange:
    """q, k and v of one call of a layer on ranks, and the way back of its result.

    Attributes:
        arriving: q, k and v as the layer takes them; its own from then on.
        spec: the layer of this rank: of its heads, or of its rows.
        around: what the layer exchanges itself; None where q, k and v have all tokens already and ``back`` exchanges the result.
    """

    def __init__(self, arriving: tuple[Any, Any, Any], spec: LayerSpec, back: Callable[[Tensor], Tensor], note: Callable[[str], object],
                 around: Around | None = None) -> None:
        self.arriving, self.spec, self.around, self._back, self._note = arriving, spec, around, back, note

    def take(self) -> tuple[Any, Any, Any]:
        """``arriving``, of which nothing is kept here."""
        arriving, self.arriving = self.arriving, (None, None, None)
        return arriving

    def ready(self) -> tuple[Tensor, Tensor, Tensor]:
        """``take`` for attention of another kind than a layer's: all tokens of this rank's heads, as tensors."""
        q, k, v = self.take()
        if self.around is not None:
            q, k, v = self.around.enter(q, k, v, self._note)
            self.around, self.spec = None, self.spec._replace(returned=None)
            if not isinstance(q, Tensor):
                v, k, q = v.wait(), k.wait(), q.wait()
                self._note("arrived")
        return q, k, v

    def back(self, out: Tensor) -> Tensor:
        """What the layer gave -> this rank's ``[B, H, S_r, D]``."""
        if self.around is not None:
            return out
        self._note("attended")
        return self._back(out)
