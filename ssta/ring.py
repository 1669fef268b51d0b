"""Where the frames of a cache lie: a ring of pages that each hold one layer of tiles, behind it the chunk at hand, the sink, and text.

A page's tiles always begin at the same places. In a tile the newest frame comes first, so that frames leave a page, oldest first, by its
tiles becoming shorter: nothing moves, and what is left stays in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.memo import remember
from .layout import checked_layout, tile_of_slot
from .sequence import DenseRun, TokenLayout, VideoGrid


class Geometry(NamedTuple):
    """What decides where a cache's frames lie.

    Attributes:
        chunk: the most frames of a chunk.
        height, width: of a frame, in tokens.
        tile: tokens of a tile along (t, h, w). Slots hold as many frames as tiles do.
        window, sink: frames.
        text: the most tokens of text.
    """

    chunk: int
    height: int
    width: int
    tile: tuple[int, int, int]
    window: int
    sink: int
    text: int

    @classmethod
    def of(cls, chunk: int, height: int, width: int, tile_thw: tuple[int, int, int], window: int, sink: int, text: int) -> Geometry:
        """A geometry whose tiles have at most ``tile_thw[0]`` frames. A chunk's frames are shared out evenly among its tiles, so that pages
        that chunks fill hold no more than these do."""
        layers = -(-chunk // tile_thw[0])
        return cls(chunk, height, width, (-(-chunk // layers), tile_thw[1], tile_thw[2]), window, sink, text)

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.height * self.width

    @property
    def layer_tiles(self) -> int:
        """Tiles of a page."""
        return -(-self.height // self.tile[1]) * -(-self.width // self.tile[2])

    @property
    def pages(self) -> int:
        """As many as hold the window wherever it begins in a chunk."""
        return -(-self.window // self.chunk) * self.layers(self.chunk)

    @property
    def page_tokens(self) -> int:
        return self.tile[0] * self.frame

    def layers(self, frames: int) -> int:
        """The pages that a chunk takes."""
        return -(-frames // self.tile[0])

    def thw(self, frames: int) -> tuple[int, int, int]:
        return frames, self.height, self.width

    def cuts(self, first: int) -> bool:
        """Whether a tile ever loses some of its frames and keeps others; ``first``: frames of the first chunk."""
        return any([frames % self.tile[0] for frames in (self.window, self.sink, self.chunk, first)])

    def settles(self, first: int) -> bool:
        """Whether a full window looks the same from then on: all pages stay full."""
        return not self.cuts(first) and self.window == self.pages * self.tile[0]

    @property
    def kv_layout(self) -> TokenLayout:
        """What a cache's memory consists of."""
        page, chunk = VideoGrid(self.tile[0], self.height, self.width), VideoGrid(*self.thw(self.chunk))
        runs = [DenseRun(tokens) for tokens in (self.sink * self.frame, self.text) if tokens]
        return TokenLayout((page,) * self.pages + (chunk, *runs))


class Counts(NamedTuple):
    """How many frames are where, on the device: int64, written in place.

    Attributes:
        frames: ``[pages]``, of each page.
        place: ``[1]``, the page that is written next. From there on pages are in the order of their age, the oldest first.
        kept: ``[1]``, frames that were kept in all.
        text: ``[1]``, tokens of text.
    """

    frames: Tensor
    place: Tensor
    kept: Tensor
    text: Tensor


class Ring:
    """The places of a cache's memory, as tensors on a device. Made by ``ring_of``.

    Attributes:
        geometry: what they follow from.
        tiles: the memory cut into tiles, which come in this order: those of each page, the chunk's, the sink's, the text's.
        areas: int64 ``[layer_tiles]``, tokens of a frame in each tile of a page.
        starts: int64 ``[layer_tiles]``, where each tile of a page begins in it.
        parts: tokens of all pages, of the chunk at hand, of the sink, of the text.
        page_tiles: tiles of all pages.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self.tiles = checked_layout(geometry.kv_layout, geometry.tile, "none", device)
        self.areas = checked_layout(TokenLayout((VideoGrid(*geometry.thw(1)),)), (1, *geometry.tile[1:]), "none", device).lengths.long()
        self.starts = (self.areas.cumsum(0) - self.areas) * geometry.tile[0]
        self.parts = geometry.pages * geometry.page_tokens, geometry.chunk * geometry.frame, geometry.sink * geometry.frame, geometry.text
        self.page_tiles = geometry.pages * geometry.layer_tiles
        self.order = torch.arange(geometry.pages, device=device)
        # How many tokens of their run lie before the tiles of sink and text, and how many tokens these have.
        self.before = torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *[
            torch.arange(0, run.extent[2], run.tile[2], device=device) for run in self.tiles.dense]])
        self.sizes = self.tiles.lengths[self.tiles.num_video_tiles:].long()
        self.of_sink = -(-geometry.sink * geometry.frame // prod(geometry.tile))

    def new_counts(self) -> Counts:
        """The counts of an empty cache."""
        return Counts(*[torch.zeros(number, dtype=torch.int64, device=self.device) for number in (self.geometry.pages, 1, 1, 1)])

    def turn(self, counts: Counts, chunk: ChunkPlaces) -> None:
        """``roll`` where all pages are full and stay so."""
        counts.place.add_(len(chunk.begins)).remainder_(self.geometry.pages)
        counts.kept.add_(chunk.frames)

    def roll(self, counts: Counts, chunk: ChunkPlaces) -> Tensor:
        """Counts a chunk in, and out what leaves the window: int64 ``[1]``, the page of the oldest frame that is left; any if none is."""
        frames, place, kept, _ = counts
        window, sink, pages = self.geometry.window, self.geometry.sink, self.geometry.pages
        in_sink = (sink - kept).clamp(min=0)
        written = (place + self.order[:len(chunk.begins)]) % pages
        self.turn(counts, chunk)
        frames.index_copy_(0, written, (chunk.ends - torch.maximum(chunk.begins, in_sink)).clamp(min=0))
        # From the newest on.
        by_age = (place - 1 - self.order) % pages
        have = frames[by_age]
        newer = have.cumsum(0) - have
        have = torch.minimum(have, (window - newer).clamp(min=0))
        frames.index_copy_(0, by_age, have)
        # By a tensor of one number, not by the number, which the host would wait for.
        return by_age.index_select(0, ((have > 0).sum() - 1).clamp(min=0)[None])

    def fills(self, counts: Counts, frames: int) -> tuple[Tensor, Tensor]:
        """What of a chunk of ``frames``, before it is counted in, the sink has room for: (bool ``[S, 1]``, which of the sink's tokens come
        with it; int64 ``[S]``, the number that such a token has in the chunk)."""
        token = torch.arange(self.geometry.sink * self.geometry.frame, device=self.device) - counts.kept * self.geometry.frame
        last = frames * self.geometry.frame - 1
        return ((token >= 0) & (token <= last))[:, None], token.clamp(0, last)

    def sink_start(self, counts: Counts) -> Tensor:
        """int64 ``[]``, the number of a first frame with which the sink ends where what else is held begins."""
        return (counts.kept - counts.frames.sum() - counts.kept.clamp(max=self.geometry.sink))[0]

    def lengths(self, counts: Counts, chunk: ChunkPlaces) -> Tensor:
        """int32 ``[1, 1, T]``, the tokens of each tile that count where ``chunk`` is at hand."""
        pages = (counts.frames[:, None] * self.areas).flatten()
        sink = counts.kept.clamp(max=self.geometry.sink) * self.geometry.frame
        filled = torch.cat([sink.expand(self.of_sink), counts.text.expand(len(self.before) - self.of_sink)])
        runs = torch.minimum((filled - self.before).clamp(min=0), self.sizes)
        return torch.cat([pages, chunk.lengths, runs]).int()[None, None]

    def count_text(self, lengths: Tensor, tokens: int) -> None:
        """Says in what ``lengths`` gave that there are so many tokens of text."""
        text = slice(self.of_sink, None)
        lengths[0, 0, self.tiles.num_video_tiles:][text].copy_(torch.minimum((tokens - self.before[text]).clamp(min=0), self.sizes[text]))

    def tokens(self, x: Tensor) -> Sequence[Tensor]:
        """A cache's keys or values ``[B, Hkv, P, D]`` in parts: the pages', the chunk's, the sink's and the text's."""
        return x.split_with_sizes(self.parts, 2)

    def units(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is known of video tiles in parts: the pages', and the chunk's."""
        in_pages = x.shape[2] // self.tiles.num_video_tiles * self.page_tiles
        return x.narrow(2, 0, in_pages), x.narrow(2, in_pages, x.shape[2] - in_pages)

    def in_sequence(self, frames: list[int], place: int, kept: int, text: int) -> Iterator[tuple[VideoGrid | DenseRun, Tensor]]:
        """What a cache of these counts holds: text, the sink, then each page's frames from the oldest on, with their places in its memory
        in the order of the sequence."""
        geometry, tokens = self.geometry, torch.arange(self.tiles.num_slots, device=self.device)
        pages, _, in_sink, in_text = self.tokens(tokens[None, None])
        for run, number in ((in_text, text), (in_sink, min(kept, geometry.sink) * geometry.frame)):
            if number:
                yield DenseRun(number), run[0, 0, :number]
        for page in ((place + self.order) % geometry.pages).tolist():
            if frames[page]:
                places = chunk_places(geometry, frames[page], self.device)
                yield VideoGrid(*geometry.thw(frames[page])), page * geometry.page_tokens + places.in_pages[places.tiles.inverse]


class ChunkPlaces:
    """Where a chunk of some frames goes. Made by ``chunk_places``.

    Attributes:
        frames: how many.
        tiles: the chunk cut into tiles, in whose order it is brought.
        lengths: int64, the tokens of the chunk's tiles in a cache's memory; 0 of those that a shorter chunk leaves empty.
        whole: whether it fills the memory for the chunk at hand, in which its tokens then lie in the order of its tiles.
        in_chunk: int64 ``[tokens]``, where each token of the tiles lies there.
        in_pages: int64 ``[tokens]``, where in pages one after another.
        begins, ends: int64 ``[layers]``, the frames of each page's layer: from begins up to ends.
    """

    def __init__(self, geometry: Geometry, frames: int, device: torch.device) -> None:
        self.frames = frames
        self.tiles = tiles = checked_layout(TokenLayout((VideoGrid(*geometry.thw(frames)),)), geometry.tile, "none", device)
        ring = ring_of(geometry, device)
        first = ring.tiles.num_video_tiles - geometry.layers(geometry.chunk) * geometry.layer_tiles
        self.lengths = torch.zeros(ring.tiles.num_video_tiles - first, dtype=torch.int64, device=device)
        self.lengths[:tiles.num_tiles] = tiles.lengths
        tile = tile_of_slot(tiles)
        token = torch.arange(tiles.num_slots, device=device) - tiles.offsets[tile]
        self.whole = frames == geometry.chunk
        self.in_chunk = token + (ring.tiles.offsets[first + tile] - ring.tiles.offsets[first])
        of_layer = tile % geometry.layer_tiles
        area = ring.areas[of_layer]
        depth = tiles.lengths[tile] // area
        flipped = (depth - 1 - token // area) * area + token % area
        self.in_pages = tile // geometry.layer_tiles * geometry.page_tokens + ring.starts[of_layer] + flipped
        self.begins = torch.arange(0, frames, geometry.tile[0], device=device)
        self.ends = (self.begins + geometry.tile[0]).clamp(max=frames)


ring_of, chunk_places = remember(64)(Ring), remember(64)(ChunkPlaces)


def spread(places: Tensor, each: int) -> Tensor:
    """The entries of things of ``each`` entries at ``places``."""
    return (places[:, None] * each + torch.arange(each, device=places.device)).flatten()
