"""Which tiles one layer selected in one forward, kept for the recomputation of gradient checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor

from ssta.kernels import BlockLists
from ssta.selection import Selection


class KeptSelection:
    """One layer's selection, and the query's shape that it was for.

    A bit for each pair of tiles: lists, whose rows of text hold every tile, are 32 times as much, and ascend in either form.
    """

    def __init__(self) -> None:
        # The shape, bits, how many tiles they are of, what follows counts and indices among the lists' fields, and the heads whose other
        # tiles are estimated; None before there was a selection.
        self._kept: tuple[tuple[int, ...], Tensor, int, tuple, Tensor | None] | None = None

    def selection(self, shape: tuple[int, ...]) -> Selection | None:
        """What was chosen for a query of ``shape``."""
        if self._kept is None or self._kept[0] != shape:
            return None
        _, bits, tiles, fields, useful = self._kept
        lists = BlockLists.from_mask(_unpacked(bits, tiles), 1, 1)
        return Selection(BlockLists.from_fields(lists.counts, lists.indices, *fields), useful=useful)

    def keep(self, selection: Selection, shape: tuple[int, ...]) -> None:
        """Keeps ``selection``, which was made for a query of ``shape``, in place of what was kept before."""
        mask = selection.blocks.to_mask()
        self._kept = shape, _packed(mask), mask.shape[-1], selection.blocks.to_fields()[2:], selection.useful


def _packed(mask: Tensor) -> Tensor:
    """uint8 ``[..., ceil(N / 8)]`` of bool ``[..., N]``."""
    rows = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (rows.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def _unpacked(bits: Tensor, length: int) -> Tensor:
    """bool ``[..., length]``, what was packed."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :length].bool()
