"""Which tiles one layer selected in one forward, kept for the recomputation of gradient checkpointing; where the layer finds it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ssta.kernels import BlockLists
from ssta.selection import Selection


class KeptSelection:
    """One layer's selection, and the query's shape that it was for; None before it was chosen.

    A bit for each pair of tiles: lists, whose rows of text hold every tile, are 32 times as much, and ascend in either form.
    """

    def __init__(self) -> None:
        self._bits: Tensor | None = None
        self._tiles = 0
        # The lists' fields that come after counts and indices.
        self._fields: tuple = ()
        self._shape: tuple[int, ...] | None = None
        # The heads whose other tiles are estimated.
        self._useful: Tensor | None = None

    def selection(self, shape: tuple[int, ...]) -> Selection | None:
        """What was chosen for a query of ``shape``."""
        if self._shape != shape or self._bits is None:
            return None
        lists = BlockLists.from_mask(_unpacked(self._bits, self._tiles), 1, 1)
        return Selection(BlockLists.from_fields(lists.counts, lists.indices, *self._fields), useful=self._useful)

    def keep(self, selection: Selection, shape: tuple[int, ...]) -> None:
        """Keeps ``selection``, which was made for a query of ``shape``, in place of what was kept before."""
        mask = selection.blocks.to_mask()
        self._bits, self._tiles, self._shape, self._useful = _packed(mask), mask.shape[-1], shape, selection.useful
        self._fields = selection.blocks.to_fields()[2:]


def _packed(mask: Tensor) -> Tensor:
    """uint8 ``[..., ceil(N / 8)]`` of bool ``[..., N]``."""
    rows = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (rows.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def _unpacked(bits: Tensor, length: int) -> Tensor:
    """bool ``[..., length]``, what was packed."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :length].bool()


class Holder:
    """Where a layer's processor finds the ``KeptSelection`` of its thread's forward; None = choose, and keep nothing."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __reduce__(self) -> tuple:
        return Holder, ()

    @property
    def frozen(self) -> KeptSelection | None:
        return getattr(self._thread, "frozen", None)

    @frozen.setter
    def frozen(self, kept: KeptSelection | None) -> None:
        self._thread.frozen = kept
