"""Which rows of a layer are computed: all of them, or those of some tokens, as where ranks share rows out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import BlockLists
from .kernels.memo import remember
from .layout import TileLayout

if TYPE_CHECKING:
    from .kernels import Backend


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The rows of a layer that are computed: all P slots of its T tiles, or n of them. Every tile stays a block, of as many rows as it has
    among these.

    Args:
        returned: int64, the row of each token of the result, in its order.
        held: int64, which of these tokens each row holds, -1 = padding.
        slot_of_token, token_of_slot: the same of the slots of all rows.
        slots: int64 ``[n]``, ascending; None = all, and so are the others.
        offsets: int32 ``[T + 1]``: tile i has the rows from ``offsets[i]`` up to ``offsets[i + 1]``, which may be none.
        ahead: int32 ``[P + 1]``: how many rows lie ahead of each slot, and ahead of the end.
        starts: int32 ``[T]``: each tile's first slot.
        of_slot: int64 ``[P]``, the row of each slot, -1 = not of these.
    """

    returned: Tensor
    held: Tensor
    slot_of_token: Tensor
    token_of_slot: Tensor
    slots: Tensor | None = None
    offsets: Tensor | None = None
    ahead: Tensor | None = None
    starts: Tensor | None = None
    of_slot: Tensor | None = None

    def take(self, backend: Backend, q: Tensor) -> Tensor:
        """The rows of q ``[B, H, P, D]``."""
        return q if self.slots is None else backend.take(q, self.slots)

    def lists(self, blocks: BlockLists) -> BlockLists:
        """A layer's lists for these rows."""
        if self.offsets is None or self.ahead is None or self.starts is None:
            return blocks
        # Without rows, a list is nothing to walk.
        counts = blocks.counts.masked_fill(self.offsets.diff() == 0, 0)
        lengths = blocks.q_lengths
        if lengths is not None:
            # A tile's rows may have gaps: those of its valid slots are counted.
            lengths = self.ahead.take((self.starts + lengths).long()) - self.offsets[:-1]
        return replace(blocks, counts=counts, q_offsets=self.offsets, q_lengths=lengths)

    def spread(self, backend: Backend, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows have, in the places of all; others attended to nothing."""
        if self.of_slot is None:
            return out, lse
        if not out.shape[2]:
            number = len(self.of_slot)
            return pad(out, (0, 0, 0, number)), pad(lse, (0, number), value=-torch.inf)
        others = self.of_slot < 0
        return backend.take(out, self.of_slot), lse.index_select(2, self.of_slot.clamp(min=0)).masked_fill(others, -torch.inf)

    def gathered(self, backend: Backend, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of ``spread``."""
        return (out, lse) if self.slots is None else (backend.take(out, self.slots), lse.index_select(2, self.slots))

    def to_slots(self, backend: Backend, x: Tensor) -> Tensor:
        """Rows' gradients in the places of all, zeros in the others."""
        return x if self.of_slot is None else in_places(backend, x, self.of_slot)


def in_places(backend: Backend, x: Tensor, index: Tensor) -> Tensor:
    """What x ``[B, H, n, D]`` has at each of ``index``, zeros at -1; n may be 0."""
    return backend.take(x, index) if x.shape[2] else x.new_zeros(*x.shape[:2], len(index), x.shape[3])


def all_rows(tiles: TileLayout, returned: tuple[tuple[int, int], ...] | None = None) -> LayerRows:
    """returned: as ``LayerSpec`` has it."""
    slots = tiles.inverse if returned is None else torch.cat([tiles.inverse.narrow(0, first, count) for first, count in returned])
    return LayerRows(slots, tiles.returned, slots, tiles.returned)


@remember(64)
def some_rows(tiles: TileLayout, spans: tuple[tuple[int, int], ...]) -> LayerRows:
    """The rows of the tokens in ``spans``, (first token, tokens) each."""
    slots, of_token = torch.cat([tiles.inverse.narrow(0, first, count) for first, count in spans]).sort()
    tile = torch.bucketize(slots, tiles.offsets[1:], right=True)
    counts = torch.zeros_like(tiles.lengths).scatter_add(0, tile, torch.ones_like(tile, dtype=tiles.lengths.dtype))
    places = torch.arange(len(slots), device=tiles.device)
    of_slot = torch.full((tiles.num_slots,), -1, device=tiles.device).scatter(0, slots, places)
    offsets = pad(counts.cumsum(0), (1, 0)).int()
    ahead = pad((of_slot >= 0).cumsum(0), (1, 0)).int()
    slot_of_token = torch.empty_like(slots).scatter(0, of_token, slots)
    token_of_slot = torch.full_like(of_slot, -1).scatter(0, slots, of_token)
    return LayerRows(places.scatter(0, of_token, places), of_token, slot_of_token, token_of_slot, slots, offsets, ahead,
                     tiles.offsets[:-1], of_slot)
