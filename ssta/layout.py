"""Where tokens go: TileLayout is a sequence cut into tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from .checks import require_choice, require_device, require_tile
from .config import PAD_TYPES
from .cut import Cut, TiledSegment, cut_of, in_sequence, tile_index
from .kernels import Deferred, take_tokens
from .kernels.checks import check_tensor
from .kernels.memo import remember, traced
from .sequence import TokenLayout, require_layout

# A layer takes tokens that are ready, or that are materialised on the way into the tiles.
Input = Tensor | Deferred


@dataclass(frozen=True, eq=False, repr=False)
class TileLayout(Cut):
    """A sequence of S tokens cut into tiles, as ``Cut`` says it in plain numbers, and on a device where tokens go. Made by ``tile_layout``.
    Attention has tensors of its own: what is written to these changes ``tile`` and ``untile`` of this object alone.

    Args:
        source: int64 ``[P]``. The token that each slot holds; -1 = a zero token.
        inverse: int64 ``[S]``. The slot of each token; the first one where padding repeats the token.
        returned: int64 ``[P]``. The token that ``untile`` takes from each slot; -1 = none, the slot is padding.
        offsets: int32 ``[N + M + 1]``. Tile i owns the slots from ``offsets[i]`` up to ``offsets[i + 1]``.
        lengths: int32 ``[N + M]``. The slots of each tile.
        row_major: int64 ``[P]``. The slot of each position of the padded segments, taken t-major, then h, then w, segment after
            segment, video first.
    """

    source: Tensor
    inverse: Tensor
    returned: Tensor
    offsets: Tensor
    lengths: Tensor
    row_major: Tensor

    @cached_property
    def move(self) -> tuple[Tensor, Tensor, int]:
        """The order as the step "gather" takes it: source, offsets, and that means of the video tiles are wanted. The same object every
        time, by which the step knows that queries and keys have one order."""
        return self.source, self.offsets, self.num_video_tiles

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.source.device

    def clone(self) -> TileLayout:
        """The same layout, its tensors in memory of their own."""
        cloned: dict[str, Any] = {of.name: x.clone() for of in fields(self) if isinstance(x := getattr(self, of.name), Tensor)}
        return replace(self, **cloned)

    def __repr__(self) -> str:
        tile = " x ".join(map(str, self.tile_thw))
        lengths = f"{self.max_tile_length} slots each" if self.tile_length else f"at most {self.max_tile_length} slots each"
        return (f"TileLayout of {str(self.tokens).removeprefix('TokenLayout of ')}\n"
                f"  cut into {self.num_video_tiles} video tiles of {tile} and {self.num_dense_tiles} dense tiles, {lengths}\n"
                f"  padding {self.padding!r}: {self.num_slots:,} slots, on {self.device}")

    def tile(self, x: Tensor) -> Tensor:
        """``[B, H, S, D]`` of any dtype in the sequence's order -> ``[B, H, P, D]`` in tiled order, in x's memory order; differentiable."""
        check_tensor("x", x, None, (None, None, self.tokens.length, None), "[B, H, tokens, D]", self.device)
        return take_tokens(x, self.source)

    def untile(self, x: Tensor) -> Tensor:
        """``[B, H, P, D]`` in tiled order -> ``[B, H, S, D]`` in the sequence's order, no padding, in x's memory order; differentiable."""
        check_tensor("x", x, None, (None, None, self.num_slots, None), "[B, H, tokens in tiles, D]", self.device)
        return take_tokens(x, self.inverse)

    def collect(self, x: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The transpose of ``tile``: for each token the sum over its slots. Written as gathers by ``take``, as ``Backend`` has it, so that
        nothing is added atomically and the same inputs give the same bits."""
        if self.num_slots == self.tokens.length:
            return take(x, self.inverse)
        parts = [self._fold(x, segment, take) for segment in in_sequence(self.tokens, self.video, self.dense)]
        if x.stride(1) < x.stride(2):
            return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
        return torch.cat(parts, 2)

    def spread(self, x: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``[B, H, N, D]``, a row for each video tile -> ``[B, H, P, D]``: each slot has its tile's, dense ones zeros."""
        return take(heads_by_row(x), tile_of_slot(self))

    def _fold(self, x: Tensor, segment: TiledSegment, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """One segment's part of ``collect``: padding is added to the last frame, row and column, or dropped where it is zeros."""
        if self.padding == "zero" and segment.kind == "video":
            return take(x, self.inverse[segment.first_token:segment.first_token + prod(segment.extent)])
        positions = self.row_major[segment.first_slot:segment.first_slot + segment.num_slots]
        cube = take(x, positions).unflatten(2, segment.padded)
        for axis, (real, padded) in enumerate(zip(segment.extent, segment.padded), start=2):
            if real < padded:
                last = cube.narrow(axis, real - 1, padded - real + 1).sum(axis, keepdim=True)
                cube = torch.cat([cube.narrow(axis, 0, real - 1), last], axis)
        return cube.flatten(2, 4)


def tile_layout(
    tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str = "none", device: torch.device | str = "cpu",
) -> TileLayout:
    """``tokens`` cut into tiles. The 64 layouts used last are remembered, until somebody writes to their tensors; everything is computed on
    ``device``, without waiting for it.

    Args:
        tokens: the sequence.
        tile_thw: tokens of a video tile along (t, h, w).
        padding: "none", "zero" or "repeat"; see ``TileLayout``.
        device: where its tensors are.

    Raises:
        TypeError: tokens is no TokenLayout, tile_thw not three ints, or device none.
        ValueError: an entry of tile_thw below 1, an unknown padding, a device that is not there, or so large a tile that almost everything
            would be padding: more than 64 slots a token, and more than 2 ** 20 of them.
    """
    options = (require_layout("tokens", tokens), require_tile("tile_thw", tile_thw), require_choice("padding", padding, PAD_TYPES),
               require_device("device", device))
    if traced():
        return checked_layout(*options)
    made, versions = _callers_layout(*options)
    return made if _versions(made) == versions else checked_layout(*options).clone()


@remember(64)
def _callers_layout(*options: Any) -> tuple[TileLayout, tuple[int, ...]]:
    """A layout apart from the one that attention has, and how often its tensors had been written to when it was made."""
    made = checked_layout(*options).clone()
    return made, _versions(made)


def _versions(layout: TileLayout) -> tuple[int, ...]:
    return tuple([x._version for x in vars(layout).values() if isinstance(x, Tensor)])


@remember(64)
def checked_layout(tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str, device: torch.device) -> TileLayout:
    """``tile_layout`` of arguments that were checked before, such as those of an SSTAConfig."""
    cut = cut_of(tokens, tile_thw, padding)
    video, dense = cut.video, cut.dense
    slots, sources, inverses, lengths = [], [], [], []
    for segment in (*video, *dense):
        slot, token, tile_lengths = tile_index(segment, padding == "zero" and segment.kind == "video", device)
        slots.append(slot.flatten())
        sources.append(token.flatten())
        t, h, w = segment.extent
        inverses.append(slot[:t, :h, :w].flatten())
        lengths.append(tile_lengths)
    row_major = torch.cat(slots)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *lengths]).cumsum(0)
    source = torch.zeros_like(row_major).scatter(0, row_major, torch.cat(sources))
    inverse = torch.cat(in_sequence(tokens, inverses[:len(video)], inverses[len(video):]))
    returned = torch.full_like(source, -1).scatter(0, inverse, torch.arange(len(inverse), device=device))
    return TileLayout(tokens, tile_thw, padding, source, inverse, returned, offsets.int(), offsets.diff().int(), row_major)


@remember(64)
def tile_of_slot(layout: TileLayout) -> Tensor:
    """int64 ``[P]``, the video tile of each slot; -1 = a slot of a dense tile."""
    tiles = torch.bucketize(torch.arange(layout.num_slots, device=layout.device), layout.offsets[1:], right=True)
    return tiles.masked_fill(tiles >= layout.num_video_tiles, -1)


def heads_by_row(x: Tensor) -> Tensor:
    """x ``[B, H, N, D]`` with the heads of a row side by side in memory, as projections leave those of a token."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
