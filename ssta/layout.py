"""Where tokens go: TileLayout is a sequence cut into tiles, TiledQKV are the q, k and v of a layer in its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from .checks import require_choice, require_device, require_tile
from .config import PAD_TYPES
from .cut import TiledSegment, cut_segments, in_sequence, tile_index
from .kernels import Deferred, gather_blocks, kernels_run, require_strided, take_tokens
from .memo import remember
from .sequence import DenseRun, TokenLayout, VideoGrid

# The tokens of tiles: ready, or materialised on the way into the tiles.
Input = Tensor | Deferred


@dataclass(slots=True, eq=False)
class TiledQKV:
    """q, k and v in tile order, with the means of their video tiles. Made by ``TileLayout.tile_qkv``; owns q's memory.

    Args:
        layout: the order; N video tiles, P slots.
        q: ``[B, H, P, D]``; None once ``release_q`` has given it away.
        k, v: ``[B, Hkv, P, D]``.
        q_mean, k_mean: float32 ``[B, H, N, D]`` and ``[B, Hkv, N, D]``, those of ``scoring.descriptors``. None where plain torch runs, to
            which they would be a pass of their own.
    """

    layout: TileLayout
    q: Tensor | None
    k: Tensor
    v: Tensor
    q_mean: Tensor | None = None
    k_mean: Tensor | None = None

    def held_q(self) -> Tensor:
        """q.

        Raises:
            RuntimeError: it was released, and its memory may hold something else.
        """
        if self.q is None:
            raise RuntimeError("q was released by release_q(): whoever took it may have written over its memory")
        return self.q

    def release_q(self) -> Tensor:
        """q, which is the caller's from now on, to be written over; nobody finds it here any more.

        Raises:
            RuntimeError: it was released before.
        """
        q, self.q = self.held_q(), None
        return q


@dataclass(frozen=True, eq=False, repr=False)
class TileLayout:
    """A sequence of S tokens cut into N video tiles and, after them, M dense tiles, which together have P slots.

    Tiles follow the segments; inside a video grid they go t-major, then h, then w, and so do the tokens inside a tile. The last tile
    along an axis may be partial: with padding "none" it has fewer slots, with "zero" and "repeat" it is filled up with zero tokens
    or with repetitions of the grid's last frame, row and column; with these two, dense tiles are filled up by repeating the run's last
    token. Made by ``tile_layout``. Its tensors are shared between calls: do not write to them.

    Args:
        tokens: the sequence.
        tile_thw: tokens of a video tile along (t, h, w); a dense tile holds as many.
        padding: "none", "zero" or "repeat".
        video: how each video grid is cut.
        dense: how each dense run is cut.
        source: int64 ``[P]``. The token that each slot holds; -1 = a zero token.
        inverse: int64 ``[S]``. The slot of each token; the first one where padding repeats the token.
        returned: int64 ``[P]``. The token that ``untile`` takes from each slot; -1 = none, the slot is padding.
        offsets: int32 ``[N + M + 1]``. Tile i owns the slots from ``offsets[i]`` up to ``offsets[i + 1]``.
        lengths: int32 ``[N + M]``. The slots of each tile.
        row_major: int64 ``[P]``. The slot of each position of the padded segments, taken t-major, then h, then w, segment after
            segment, video first.

    Attributes:
        num_video_tiles, num_dense_tiles, num_tiles: N, M and N + M.
        num_slots: P, the tokens including padding.
        tile_length: slots of every tile, None where tiles differ.
        max_tile_length: slots of the longest tile.
        tile_grids: tiles along (t, h, w) of each video grid.
        device: where the tensors are.
    """

    tokens: TokenLayout
    tile_thw: tuple[int, int, int]
    padding: str
    video: tuple[TiledSegment, ...]
    dense: tuple[TiledSegment, ...]
    source: Tensor
    inverse: Tensor
    returned: Tensor
    offsets: Tensor
    lengths: Tensor
    row_major: Tensor
    num_video_tiles: int = field(init=False)
    num_dense_tiles: int = field(init=False)
    num_tiles: int = field(init=False)
    num_slots: int = field(init=False)
    tile_length: int | None = field(init=False)
    max_tile_length: int = field(init=False)
    tile_grids: tuple[tuple[int, int, int], ...] = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        segments = (*self.video, *self.dense)
        video, dense = (sum([segment.num_tiles for segment in part]) for part in (self.video, self.dense))
        whole = all([n % size == 0 for segment in segments for n, size in zip(segment.padded, segment.tile)])
        for name, value in (
            ("num_video_tiles", video), ("num_dense_tiles", dense), ("num_tiles", video + dense),
            ("num_slots", sum([segment.num_slots for segment in segments])), ("tile_length", prod(self.tile_thw) if whole else None),
            ("max_tile_length", max([segment.longest_tile for segment in segments])),
            ("tile_grids", tuple([segment.tiles for segment in self.video])), ("device", self.source.device),
        ):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        tile = " x ".join(map(str, self.tile_thw))
        lengths = f"{self.max_tile_length} slots each" if self.tile_length else f"at most {self.max_tile_length} slots each"
        return (f"TileLayout of {str(self.tokens).removeprefix('TokenLayout of ')}\n"
                f"  cut into {self.num_video_tiles} video tiles of {tile} and {self.num_dense_tiles} dense tiles, {lengths}\n"
                f"  padding {self.padding!r}: {self.num_slots:,} slots, on {self.device}")

    def tile(self, x: Tensor) -> Tensor:
        """``[B, H, S, D]`` of any dtype in the sequence's order -> ``[B, H, P, D]`` in tiled order, in x's memory order; differentiable."""
        self._check("tile", x, self.tokens.length)
        return self._tile(x)

    def tile_qkv(self, q: Input, k: Input, v: Input) -> TiledQKV:
        """``tile`` of q ``[B, Hq, S, D]`` and of k and v ``[B, Hkv, S, D]``.

        On a GPU one kernel reads every token once and writes the tiles' means too. What is deferred, all three or none, is materialised
        on the way; its projections end where segments do.
        """
        for x in (q, k, v):
            if len(x.shape) != 4 or x.shape[2] != self.tokens.length:
                self._check("tile_qkv", x, self.tokens.length)
        if isinstance(q, Deferred):
            deferred: Any = q, k, v
            (tiled_q, q_mean), (tiled_k, k_mean), (tiled_v, _) = (x.gather_blocks(self.source, self.offsets, n) for x, n in zip(
                deferred, (self.num_video_tiles, self.num_video_tiles, 0)))
            return TiledQKV(self, tiled_q, tiled_k, tiled_v, q_mean, k_mean)
        # If q is a tensor, so are k and v; to ask a second time would cost every layer.
        if not kernels_run(q):
            return TiledQKV(self, self._tile(q), self._tile(k), self._tile(v))  # type: ignore[arg-type]
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):  # type: ignore[union-attr]
            return TiledQKV(self, *_TileQKV.apply(q, k, v, self))
        return TiledQKV(self, *gather_blocks(q, k, v, self.source, self.offsets, self.num_video_tiles))  # type: ignore[arg-type]

    def tile_arriving(self, q: Callable[[], Tensor], k: Callable[[], Tensor], v: Callable[[], Tensor]) -> TiledQKV:
        """``tile_qkv`` of what functions wait for, v, then k, then q, each tiled while those after it are on their way. Where
        ``kernels_run`` and nobody wants a gradient."""
        tiled_v = take_tokens(v(), self.source)
        tiled_k, k_mean = self._tile_one(k())
        tiled_q, q_mean = self._tile_one(q())
        return TiledQKV(self, tiled_q, tiled_k, tiled_v, q_mean, k_mean)

    def _tile_one(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q or k by itself, with its means: the same kernel without heads of k and v."""
        no_heads = x[:, :0]
        out, _, _, means, _ = gather_blocks(x, no_heads, no_heads, self.source, self.offsets, self.num_video_tiles)
        return out, means

    def untile(self, x: Tensor) -> Tensor:
        """``[B, H, P, D]`` in tiled order -> ``[B, H, S, D]`` in the sequence's order, no padding, in x's memory order; differentiable."""
        self._check("untile", x, self.num_slots)
        return _Untile.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else take_tokens(x, self.inverse)

    def _tile(self, x: Tensor) -> Tensor:
        return _Tile.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else take_tokens(x, self.source)

    def _check(self, wanted_by: str, x: Input, length: int) -> None:
        if not isinstance(x, (Tensor, Deferred)):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if isinstance(x, Tensor):
            require_strided("x", x)
        if len(x.shape) != 4 or x.shape[2] != length:
            raise ValueError(f"x must be [B, H, {length}, D] for {wanted_by} of this layout, got {tuple(x.shape)}")
        if x.device != self.device:
            raise ValueError(f"x must be on the layout's device {self.device}, got {x.device}")

    # The gradient of a gather is written as a gather too: it needs no atomic adds, so the same inputs give the same bits.

    def collect(self, x: Tensor) -> Tensor:
        """The transpose of ``tile``: for each token the sum over its slots."""
        if self.num_slots == self.tokens.length:
            return take_tokens(x, self.inverse)
        parts = [self._fold(x, segment) for segment in in_sequence(self.tokens, self.video, self.dense)]
        if x.stride(1) < x.stride(2):
            return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
        return torch.cat(parts, 2)

    def _fold(self, x: Tensor, segment: TiledSegment) -> Tensor:
        """One segment's part of ``collect``: padding is added to the last frame, row and column, or dropped where it is zeros."""
        if self.padding == "zero" and segment.kind == "video":
            return take_tokens(x, self.inverse[segment.first_token:segment.first_token + prod(segment.extent)])
        positions = self.row_major[segment.first_slot:segment.first_slot + segment.num_slots]
        cube = take_tokens(x, positions).unflatten(2, segment.padded)
        for axis, (real, padded) in enumerate(zip(segment.extent, segment.padded), start=2):
            if real < padded:
                last = cube.narrow(axis, real - 1, padded - real + 1).sum(axis, keepdim=True)
                cube = torch.cat([cube.narrow(axis, 0, real - 1), last], axis)
        return cube.flatten(2, 4)


class _Tile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layout: TileLayout) -> Tensor:
        ctx.layout = layout
        return take_tokens(x, layout.source)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.collect(grad), None


class _TileQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        outputs = gather_blocks(q, k, v, layout.source, layout.offsets, layout.num_video_tiles)
        ctx.mark_non_differentiable(*outputs[3:])
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *[ctx.layout.collect(grad) for grad in grads[:3]], None


class _Untile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layout: TileLayout) -> Tensor:
        ctx.layout = layout
        return take_tokens(x, layout.inverse)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return take_tokens(grad, ctx.layout.returned), None


def tile_layout(
    tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str = "none", device: torch.device | str = "cpu",
) -> TileLayout:
    """``tokens`` cut into tiles. The 64 layouts used last are remembered; everything is computed on ``device``, without waiting for it.

    Inside torch.compile its tensors come from one operator, which copies those that are remembered.

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
    if not isinstance(tokens, TokenLayout):
        raise TypeError(f"tokens must be a TokenLayout, got {type(tokens).__name__}")
    return checked_layout(tokens, require_tile("tile_thw", tile_thw), require_choice("padding", padding, PAD_TYPES),
                          require_device("device", device))


def checked_layout(tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str, device: torch.device) -> TileLayout:
    """``tile_layout`` of arguments that were checked before, such as those of an SSTAConfig."""
    make = _compiled_layout if torch.compiler.is_compiling() else _tile_layout
    return make(tokens, tile_thw, padding, device)


def _compiled_layout(tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str, device: torch.device) -> TileLayout:
    """``_tile_layout`` for a graph. Traced into it, the index arithmetic would be computed again in every call, and torch 2.11's compiler
    fails on it."""
    video, dense = cut_segments(tokens, tile_thw, padding)
    cut = (*video, *dense)
    segments = [n for segment in tokens.segments for n in (segment.thw if isinstance(segment, VideoGrid) else (0, 0, segment.length))]
    sizes = [sum([segment.num_slots for segment in cut]), tokens.length, sum([segment.num_tiles for segment in cut])]
    return TileLayout(tokens, tile_thw, padding, video, dense, *_layout_tensors(segments, list(tile_thw), padding, sizes, device))


@torch.library.custom_op(f"{__package__}::layout_tensors", mutates_args=())
def _layout_tensors(segments: list[int], tile_thw: list[int], padding: str, sizes: list[int], device: torch.device) -> list[Tensor]:
    """The tensors of the TileLayout of ``segments``, three numbers each: t, h, w, or 0, 0 and a dense run's length. ``sizes``: slots,
    tokens and tiles. Copies, because the graph owns what an operator returns."""
    triples = zip(segments[0::3], segments[1::3], segments[2::3])
    tokens = TokenLayout(tuple(VideoGrid(t, h, w) if t else DenseRun(w) for t, h, w in triples))
    layout = _tile_layout(tokens, tuple(tile_thw), padding, device)
    return [x.clone() for x in (layout.source, layout.inverse, layout.returned, layout.offsets, layout.lengths, layout.row_major)]


@_layout_tensors.register_fake
def _(segments, tile_thw, padding, sizes, device):
    slots, tokens, tiles = sizes
    long, short = dict(dtype=torch.int64, device=device), dict(dtype=torch.int32, device=device)
    return [torch.empty(slots, **long), torch.empty(tokens, **long), torch.empty(slots, **long), torch.empty(tiles + 1, **short),
            torch.empty(tiles, **short), torch.empty(slots, **long)]


@remember(64)
def _tile_layout(tokens: TokenLayout, tile_thw: tuple[int, int, int], padding: str, device: torch.device) -> TileLayout:
    video, dense = cut_segments(tokens, tile_thw, padding)
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
    return TileLayout(tokens, tile_thw, padding, video, dense, source, inverse, returned, offsets.int(), offsets.diff().int(), row_major)
