"""How the segments of a sequence are cut into tiles, in plain numbers; and the index arithmetic of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from .kernels.memo import remember_plain
from .sequence import DenseRun, TokenLayout, VideoGrid

# Padding beyond both is no plan but a mistake: slots for each token, and slots at all.
MOST_PADDING = 64
MOST_PADDED = 1 << 20


@dataclass(frozen=True)
class TiledSegment:
    """How one segment is cut. A dense run counts as a grid of one row: (1, 1, length), with tiles (1, 1, tokens of a tile).

    Args:
        kind: "video" or "dense".
        first_token: where the segment starts in the sequence.
        first_slot: where it starts in tiled order.
        extent: its tokens along (t, h, w).
        tile: tokens of a tile along (t, h, w).
        padded: the extent after padding; equal to ``extent`` where nothing is padded.
    """

    kind: str
    first_token: int
    first_slot: int
    extent: tuple[int, int, int]
    tile: tuple[int, int, int]
    padded: tuple[int, int, int]

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles along (t, h, w), partial ones included."""
        t, h, w = (-(-n // size) for n, size in zip(self.extent, self.tile))
        return t, h, w

    @property
    def num_tiles(self) -> int:
        return prod(self.tiles)

    @property
    def num_slots(self) -> int:
        """Tokens including padding."""
        return prod(self.padded)

    @property
    def longest_tile(self) -> int:
        """Slots of the first tile, which none exceeds."""
        return prod([min(n, size) for n, size in zip(self.padded, self.tile)])


def cut_segments(tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str
                 ) -> tuple[tuple[TiledSegment, ...], tuple[TiledSegment, ...]]:
    """The video and the dense segments with their place in the sequence and, video first, among the slots."""
    starts, start = [], 0
    for segment in tokens.segments:
        starts.append(start)
        start += segment.length
    video: list[TiledSegment] = []
    dense: list[TiledSegment] = []
    slot = 0
    for kind, found, segment_type in (("video", video, VideoGrid), ("dense", dense, DenseRun)):
        for segment, start in zip(tokens.segments, starts):
            if not isinstance(segment, segment_type):
                continue
            extent, tile = (segment.thw, tile_thw) if isinstance(segment, VideoGrid) else ((1, 1, segment.length), (1, 1, prod(tile_thw)))
            t, h, w = extent if padding == "none" else (-(-n // size) * size for n, size in zip(extent, tile))
            found.append(TiledSegment(kind, start, slot, extent, tile, (t, h, w)))
            slot += t * h * w
    if padding != "none" and slot > max(MOST_PADDING * tokens.length, MOST_PADDED):
        raise ValueError(f"tile_thw must not be so large that padding {padding!r} makes more than {MOST_PADDING} slots of a token, "
                         f"got {tile_thw}, which makes {slot:,} of {tokens.length:,} tokens")
    return tuple(video), tuple(dense)


@dataclass(frozen=True, eq=False, repr=False)
class Cut:
    """A sequence of S tokens cut into N video tiles and, after them, M dense tiles, which together have P slots; in plain numbers.

    Tiles follow the segments; inside a video grid they go t-major, then h, then w, and so do the tokens inside a tile. The last tile
    along an axis may be partial: with padding "none" it has fewer slots, with "zero" and "repeat" it is filled up with zero tokens
    or with repetitions of the grid's last frame, row and column; with these two, dense tiles are filled up by repeating the run's last
    token.

    Args:
        tokens: the sequence.
        tile_thw: tokens of a video tile along (t, h, w); a dense tile holds as many.
        padding: "none", "zero" or "repeat".

    Attributes:
        video, dense: how each video grid and each dense run is cut.
        num_video_tiles, num_dense_tiles, num_tiles: N, M and N + M.
        num_slots: P, the tokens including padding.
        tile_length: slots of every tile, None where tiles differ.
        max_tile_length, longest_video_tile: slots of the longest tile, and of the longest video tile, 0 without video.
        tile_grids: tiles along (t, h, w) of each video grid.
        moves: whether the order of tiles is another than the sequence's, or holds padding.
    """

    tokens: TokenLayout
    tile_thw: tuple[int, int, int]
    padding: str
    video: tuple[TiledSegment, ...] = field(init=False)
    dense: tuple[TiledSegment, ...] = field(init=False)
    num_video_tiles: int = field(init=False)
    num_dense_tiles: int = field(init=False)
    num_tiles: int = field(init=False)
    num_slots: int = field(init=False)
    tile_length: int | None = field(init=False)
    max_tile_length: int = field(init=False)
    longest_video_tile: int = field(init=False)
    tile_grids: tuple[tuple[int, int, int], ...] = field(init=False)
    moves: bool = field(init=False)

    def __post_init__(self) -> None:
        video, dense = cut_segments(self.tokens, self.tile_thw, self.padding)
        segments = (*video, *dense)
        whole = all([n % size == 0 for segment in segments for n, size in zip(segment.padded, segment.tile)])
        num_video_tiles, num_dense_tiles = (sum([segment.num_tiles for segment in part]) for part in (video, dense))
        num_slots = sum([segment.num_slots for segment in segments])
        for name, value in (
                ("video", video), ("dense", dense), ("num_video_tiles", num_video_tiles), ("num_dense_tiles", num_dense_tiles),
                ("num_tiles", num_video_tiles + num_dense_tiles), ("num_slots", num_slots),
                ("tile_length", prod(self.tile_thw) if whole else None),
                ("max_tile_length", max([segment.longest_tile for segment in segments])),
                ("longest_video_tile", max([0, *[segment.longest_tile for segment in video]])),
                ("tile_grids", tuple([segment.tiles for segment in video])),
                ("moves", len(video) > 0 or num_slots != self.tokens.length)):
            object.__setattr__(self, name, value)


cut_of = remember_plain(Cut)


def in_sequence(tokens: TokenLayout, video: Sequence, dense: Sequence) -> list:
    """One item for each video grid and one for each dense run, in the order of the segments in the sequence."""
    grids, runs = iter(video), iter(dense)
    return [next(grids if isinstance(segment, VideoGrid) else runs) for segment in tokens.segments]


def tile_index(segment: TiledSegment, zeros: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each position of the padded segment its slot and its token (-1 for padding that is ``zeros``), int64 ``[T, H, W]`` each;
    and the number of slots of each tile, int64 ``[tiles]``."""
    _, rows, columns = segment.padded
    axes, lengths = [], []
    for axis, (real, padded, size) in enumerate(zip(segment.extent, segment.padded, segment.tile)):
        at = torch.arange(padded, device=device)
        begin = at // size * size
        shape = [-1 if other == axis else 1 for other in range(3)]
        # Where the position's tile begins, the tile's slots, the place inside the tile, the nearest real position, whether it is padding.
        parts = (begin, (padded - begin).clamp(max=size), at - begin, at.clamp(max=real - 1), at >= real)
        axes.append([part.view(shape) for part in parts])
        lengths.append((padded - torch.arange(0, padded, size, device=device)).clamp(max=size))
    (t0, t_len, t_in, t, t_pad), (h0, h_len, h_in, h, h_pad), (w0, w_len, w_in, w, w_pad) = axes
    # Slots before the tile: whole layers of tiles, then whole rows of tiles in its layer, then tiles in its row.
    before = t0 * rows * columns + t_len * (h0 * columns + h_len * w0)
    slot = segment.first_slot + before + (t_in * h_len + h_in) * w_len + w_in
    token = segment.first_token + (t * segment.extent[1] + h) * segment.extent[2] + w
    if zeros:
        token = token.masked_fill(t_pad | h_pad | w_pad, -1)
    t_lengths, h_lengths, w_lengths = lengths
    return slot, token, (t_lengths[:, None, None] * h_lengths[:, None] * w_lengths).flatten()
