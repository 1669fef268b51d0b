"""Which rows of a layer a place in a ring has, and which keys: its own come first, the rest once it has arrived."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import BlockLists, take_tokens
from .layout import TileLayout
from .memo import remember


class Rows(NamedTuple):
    """Some rows of a layer of P slots in T tiles: n tokens of the sequence.

    Args:
        slots: int64 ``[n]``, ascending.
        offsets: int32 ``[T + 1]``: tile i has the rows from ``offsets[i]`` up to ``offsets[i + 1]``, which may be none.
        before: int32 ``[T]``: how many slots of a dense tile lie before its first row here; 0 for video tiles, whose slots all are valid.
        of_token: int64 ``[n]``, the row of each of the tokens, in the sequence's order.
        of_slot: int64 ``[P]``, the row of each slot, -1 = not of these.
    """

    slots: Tensor
    offsets: Tensor
    before: Tensor
    of_token: Tensor
    of_slot: Tensor

    def lists(self, blocks: BlockLists) -> BlockLists:
        """A layer's lists for these rows alone; every tile stays a block, of as many rows as it has here."""
        return replace(blocks, **_own(blocks, self.offsets, self.before))

    def spread(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, H, n, D]`` and ``[B, H, n]`` of the rows, of all slots; others attended to nothing."""
        if not len(self.slots):
            # Of which nothing can be taken; they stay in the graph, whose backward all ranks walk.
            number = len(self.of_slot)
            return pad(out, (0, 0, 0, number)), pad(lse, (0, number), value=-torch.inf)
        others = self.of_slot < 0
        return take_tokens(out, self.of_slot), lse.index_select(2, self.of_slot.clamp(min=0)).masked_fill(others, -torch.inf)


# (first token, tokens) of each run that a place of the ring has the rows of.
Spans = tuple[tuple[int, int], ...]


@remember(64)
def rows_of(tiles: TileLayout, spans: Spans) -> Rows:
    """The rows of the tokens in ``spans``."""
    slots, of_token = torch.cat([tiles.inverse.narrow(0, first, count) for first, count in spans]).sort()
    tile = torch.bucketize(slots, tiles.offsets[1:], right=True)
    counts = torch.zeros_like(tiles.lengths).scatter_add(0, tile, torch.ones_like(tile, dtype=tiles.lengths.dtype))
    places = torch.arange(len(slots), device=tiles.device)
    of_slot = torch.full((tiles.num_slots,), -1, device=tiles.device).scatter(0, slots, places)
    offsets = _offsets(counts)
    return Rows(slots, offsets, _before(tiles, offsets, slots), places.scatter(0, of_token, places), of_slot)


@dataclass(frozen=True, eq=False)
class RingTiles:
    """A layer's T tiles of P slots as a place of the ring has them. Each token's rows are one place's, and a tile is whose its slots are:
    one place's, or shared. A place has the n slots of its rows, padding of its own tiles among them, and gets the r slots of all tiles
    that are not its alone.

    Args:
        source: int64 ``[n]``, for each own slot its token in the place's piece, -1 = zeros.
        offsets: int32 ``[T + 1]``: of tile i the own slots from ``offsets[i]`` up to ``offsets[i + 1]``.
        before: as of Rows.
        own: bool ``[T]``, the tiles that are this place's alone.
        of_token: int64, the own slot of each of the place's tokens, in the sequence's order.
        token_of: int64 ``[n]``, of each own slot which of them it holds, -1 = padding.
        of_slot: int64 ``[P]``, the own slot of each slot, -1 = another's.
        summed: int64 ``[C]``, the video tiles whose means places put together; the same for all of them.
        summed_slots: int64 ``[C * longest]``, of each of those tiles the own slots, -1 past them.
        rest: int64 ``[r]``, of each of the rest's slots its token in the sequence, -1 = zeros.
        rest_offsets: int32 ``[T + 1]``, where tiles lie in the rest.
        rest_of_slot: int64 ``[P]``, as of_slot.
    """

    tiles: TileLayout
    source: Tensor
    offsets: Tensor
    before: Tensor
    own: Tensor
    of_token: Tensor
    token_of: Tensor
    of_slot: Tensor
    summed: Tensor
    summed_slots: Tensor
    rest: Tensor
    rest_offsets: Tensor
    rest_of_slot: Tensor

    def lists(self, blocks: BlockLists) -> tuple[BlockLists, BlockLists]:
        """A layer's lists for the own rows: of the own tiles' keys, and of the rest's."""
        blocks = replace(blocks, **_own(blocks, self.offsets, self.before))
        return blocks.keeping(self.own, kv_offsets=self.offsets), blocks.keeping(~self.own, kv_offsets=self.rest_offsets)

    def to_tokens(self, x: Tensor, of_slot: Tensor) -> Tensor:
        """The adjoint of taking slots from the sequence: ``[B, H, own or rest's slots, D]`` -> ``[B, H, S, D]``."""
        if not x.shape[2]:
            return x.new_zeros(*x.shape[:2], self.tiles.tokens.length, x.shape[3])
        if self.tiles.num_slots == self.tiles.tokens.length:
            return take_tokens(x, of_slot[self.tiles.inverse])
        return self.tiles.collect(take_tokens(x, of_slot))


@remember(64)
def ring_tiles(tiles: TileLayout, every: tuple[Spans, ...], rank: int, in_piece: tuple[int, ...], sum_all: bool) -> RingTiles:
    """Waits for the device, the first time.

    Args:
        every: of each place in the ring the spans of its rows, run by run.
        rank: this place.
        in_piece: where, in this place's piece, its span of each run begins.
        sum_all: whether the means of all video tiles are put together, and not only of those that places share.
    """
    options: dict[str, Any] = dict(device=tiles.device, dtype=torch.int64)
    owner = torch.empty(tiles.tokens.length, **options)
    for place, spans in enumerate(every):
        for first, count in spans:
            owner[first:first + count] = place
    piece = torch.full_like(owner, -1)
    for (first, count), start in zip(every[rank], in_piece):
        piece[first:first + count] = torch.arange(start, start + count, **options)
    tile = torch.repeat_interleave(torch.arange(tiles.num_tiles, device=tiles.device), tiles.lengths, output_size=tiles.num_slots)
    token = tiles.source.clamp(min=0)
    # What pads a tile with zeros is whose the tile's first slot is, which always holds a token.
    owner_of_slot = torch.where(tiles.source < 0, owner[token[tiles.offsets[:-1].long()]][tile], owner[token])
    lowest, highest = (torch.zeros(tiles.num_tiles, **options).scatter_reduce(0, tile, owner_of_slot, how, include_self=False)
                       for how in ("amin", "amax"))
    shared, own = lowest != highest, (lowest == rank) & (highest == rank)
    slots, rest = (owner_of_slot == rank).nonzero()[:, 0], (~own[tile]).nonzero()[:, 0]
    offsets, rest_offsets = (_offsets(torch.bincount(tile[of], minlength=tiles.num_tiles)) for of in (slots, rest))
    of_slot, rest_of_slot = (torch.full((tiles.num_slots,), -1, **options).scatter(0, of, torch.arange(len(of), **options))
                             for of in (slots, rest))
    source = tiles.source[slots]
    of_token = of_slot[tiles.inverse[torch.cat([torch.arange(first, first + count, **options) for first, count in every[rank]])]]
    token_of = torch.full((len(slots),), -1, **options).scatter(0, of_token, torch.arange(len(of_token), **options))
    video = torch.arange(tiles.num_video_tiles, **options)
    summed = video if sum_all else video[shared[:tiles.num_video_tiles]]
    places = offsets[summed, None].long() + torch.arange(tiles.max_tile_length, **options)
    summed_slots = places.masked_fill(places >= offsets[summed + 1, None], -1).flatten()
    return RingTiles(
        tiles, torch.where(source < 0, -1, piece[source.clamp(min=0)]), offsets, _before(tiles, offsets, slots), own, of_token, token_of,
        of_slot, summed, summed_slots, tiles.source[rest], rest_offsets, rest_of_slot)


def _offsets(counts: Tensor) -> Tensor:
    return pad(counts.cumsum(0), (1, 0)).int()


def _before(tiles: TileLayout, offsets: Tensor, slots: Tensor) -> Tensor:
    # A tile without rows has no first one, whatever is found here.
    before = pad(slots, (0, 1))[offsets[:-1]].int() - tiles.offsets[:-1]
    before[:tiles.num_video_tiles] = 0
    return before


def _own(blocks: BlockLists, offsets: Tensor, before: Tensor) -> dict[str, Any]:
    """The fields that change where tiles have only some of their rows."""
    # Without rows, a list is nothing to walk.
    counts = blocks.counts.masked_fill(offsets.diff() == 0, 0)
    lengths = None if blocks.q_lengths is None else (blocks.q_lengths - before).clamp(min=0)
    return dict(counts=counts, q_offsets=offsets, q_lengths=lengths)

