"""A layer whose keys a cache holds: what it does with a chunk, and what stays of it, in the tensors of a ``Storage``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .budget import counts_at
from .config import SSTAConfig
from .kernels.memo import remember
from .layer import HeldKeys, Tiled, prepared
from .ring import ChunkPlaces, Counts, Geometry, chunk_places, ring_of, spread
from .scoring import descriptors
from .selection import Selection
from .spec import LayerSpec

if TYPE_CHECKING:
    from .kernels.estimate import Estimate


@dataclass(frozen=True, eq=False)
class Storage:
    """A cache's memory, written in place.

    Attributes:
        counts: how many frames are where.
        k, v: ``[B, Hkv, P, D]``, every place of ``Ring.tiles``.
        k_means: float32 ``[B, Hkv, K, D]`` of every video tile, NaN of those that hold nothing; None of layers that do not score by means.
        statistics: of every video tile; None of layers that do not estimate.
    """

    counts: Counts
    k: Tensor
    v: Tensor
    k_means: Tensor | None
    statistics: Estimate | None

    @property
    def known(self) -> list[Tensor]:
        """All that is known of the tiles."""
        return [*([] if self.k_means is None else [self.k_means]), *([] if self.statistics is None else self.statistics.cached.values())]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.k, self.v, *self.counts, *self.known]


def _by_means(spec: LayerSpec) -> bool:
    return spec.chooses and spec.config.scored_by != "error"


class CachedLayer:
    """A chunk of some frames that attends through a cache. Made by ``cached_layer``.

    Args:
        geometry: of the cache.
        spec: of the layer; its kv_layout is the cache's memory.
    """

    def __init__(self, geometry: Geometry, spec: LayerSpec) -> None:
        device = spec.device
        self.geometry, self.spec = geometry, spec
        self.ring = ring_of(geometry, device)
        self.places: ChunkPlaces = chunk_places(geometry, spec.layout.video[0].t, device)
        self.layer = prepared(spec)
        self.backend = self.layer.backend
        # The same keys without a choice: all of them.
        self.dense = prepared(spec._replace(config=SSTAConfig(spec.config.tile_thw)))
        tiles, kv_tiles = self.layer.tiles, self.layer.kv_tiles
        every = torch.arange(kv_tiles.num_tiles, dtype=torch.int32, device=device)
        self.every = (torch.full((1, 1, tiles.num_tiles), kv_tiles.num_tiles, dtype=torch.int32, device=device),
                      every.expand(1, 1, tiles.num_tiles, -1).contiguous())
        self.parts = spec.config.compensation_parts
        self.rows = torch.arange(tiles.num_tiles + 1, dtype=torch.float64, device=device)
        # The numbers of all units that a chunk can have.
        self.every_unit = torch.arange(tiles.num_tiles * self.parts, device=device)
        # Statistics of no tiles, by which those of a cache are put together again.
        self.none = self._room(torch.zeros(1, spec.kv_heads, 0, spec.head_dim, dtype=spec.dtype, device=device), 0)

    def _room(self, k: Tensor, tiles: int) -> Estimate | None:
        """For statistics of so many tiles of keys such as k."""
        return self.backend.room_for_statistics(k, tiles, self.parts) if self.spec.estimates else None

    # Memory

    def storage(self, tensors: list[Tensor]) -> Storage:
        """What ``Storage.tensors`` gave."""
        k, v, *rest = tensors
        counts, known = Counts(*rest[:len(Counts._fields)]), rest[len(Counts._fields):]
        k_means = known.pop(0) if _by_means(self.spec) else None
        return Storage(counts, k, v, k_means, None if self.none is None else self.none.with_cached(known))

    def new(self, batch: int) -> Storage:
        """That of an empty cache."""
        spec, ring = self.spec, self.ring
        shape, tiles = (batch, spec.kv_heads), ring.tiles
        k, v = (torch.zeros(*shape, tiles.num_slots, spec.head_dim, dtype=spec.dtype, device=ring.device) for _ in range(2))
        k_means = None
        if _by_means(spec):
            k_means = torch.zeros(*shape, tiles.num_video_tiles, spec.head_dim, dtype=torch.float32, device=ring.device)
        storage = Storage(ring.new_counts(), k, v, k_means, self._room(k, tiles.num_video_tiles))
        self.clear(storage)
        return storage

    def clear(self, storage: Storage) -> None:
        """Empties it of frames."""
        for x in (storage.counts.frames, storage.counts.place, storage.counts.kept):
            x.zero_()
        self._say_empty(storage)

    def _say_empty(self, storage: Storage, part: int | None = None, pages: Tensor | None = None) -> None:
        """That video tiles hold nothing, in whose place others then are put: all, or one part of ``Ring.units``, or of the first part those
        of ``pages``, bool ``[n]``."""
        log_count = None if storage.statistics is None else storage.statistics.log_count
        for x, empty in ((storage.k_means, torch.nan), (log_count, -torch.inf)):
            if x is None:
                continue
            x = x if part is None else self.ring.units(x)[part]
            if pages is None:
                x.fill_(empty)
            else:
                x.unflatten(2, (len(pages), -1)).masked_fill_(pages.view(-1, *[1] * (x.dim() - 2)), empty)

    # A chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, storage: Storage, lengths: Tensor, k_per_row: Tensor | None = None, *,
               dense: bool, describe: bool) -> Tensor:
        """Attention of a chunk, whose keys and values are put into the memory for the chunk at hand.

        Args:
            lengths, k_per_row: as of ``HeldKeys``.
            dense: everything exactly.
            describe: even so, put what is known of the chunk's tiles where ``keep`` finds it.
        """
        move, k, v = self.layer.tiles.move, self.ring.tokens(storage.k)[1], self.ring.tokens(storage.v)[1]
        if self.places.whole:
            q, q_means, k_means = self.backend.gather_into(query, key, value, move, k, v)
        else:
            q, own_k, own_v, q_means, k_means = self.backend.gather(query, key, value, move, move)
            for x, into in ((own_k, k), (own_v, v)):
                into.index_copy_(2, self.places.in_chunk, x)
            k, v = own_k, own_v
        if describe or not dense:
            self._describe(storage, k, v, k_means)
        del k, v
        held = HeldKeys(lengths, storage.statistics, k_per_row)
        tiled = Tiled(q, storage.k, storage.v, q_means, storage.k_means, held)
        layer, selection = self.layer, None
        if dense:
            layer = self.dense
            selection = Selection(layer.fixed.relisted(*self.every, lengths))
        return layer.run(tiled, selection=selection).out

    def _describe(self, storage: Storage, k: Tensor, v: Tensor, k_means: Tensor | None) -> None:
        """Puts what is known of the chunk's tiles where the chunk at hand has its place."""
        if not self.places.whole:
            self._say_empty(storage, 1)
        if storage.statistics is not None:
            found = self.backend.key_statistics(k, v, self.layer.q_blocks, self.parts, True)
            self.backend.write_statistics(found, storage.statistics, self.ring.page_tiles * self.parts)
        if storage.k_means is not None:
            k_means = descriptors(k, self.layer.tiles) if k_means is None else k_means
            storage.k_means.narrow(2, self.ring.page_tiles, k_means.shape[2]).copy_(k_means)

    def keep(self, storage: Storage, fill: bool, cut: bool, settled: bool) -> None:
        """The chunk at hand stays, and what leaves the window goes.

        Args:
            fill: whether the sink may have room.
            cut: whether a tile may have lost some of its frames.
            settled: whether all pages are full and stay so.
        """
        ring, places, of = self.ring, self.places, self.geometry
        if fill:
            self._fill_sink(storage)
        k_means, statistics = storage.k_means, storage.statistics
        self.backend.write_ring((storage.k, storage.v), places.in_chunk, places.in_pages, storage.counts.place, of.page_tokens,
                                of.pages * of.page_tokens)
        for xs, each in (([] if k_means is None else [k_means], of.layer_tiles),
                         ([] if statistics is None else [*statistics.cached.values()], of.layer_tiles * self.parts)):
            if xs:
                units = self.every_unit[:len(places.begins) * each]
                self.backend.write_ring(xs, units, units, storage.counts.place, each, of.pages * each)
        if settled:
            ring.turn(storage.counts, places)
            return
        oldest = ring.roll(storage.counts, places)
        self._say_empty(storage, 0, storage.counts.frames == 0)
        if cut:
            self.describe_pages(storage, oldest)

    def _fill_sink(self, storage: Storage) -> None:
        """Those of the chunk's frames that the sink has room for go there."""
        ring, places = self.ring, self.places
        here, token = ring.fills(storage.counts, places.frames)
        at = places.in_chunk[places.tiles.inverse[token]]
        for x in (storage.k, storage.v):
            _, chunk, sink, _ = ring.tokens(x)
            sink.copy_(torch.where(here, chunk.index_select(2, at), sink))

    def describe_pages(self, storage: Storage, pages: Tensor) -> None:
        """Finds anew what is known of the tiles of ``pages``, int64 ``[n]``."""
        ring, number = self.ring, len(pages)
        lengths = storage.counts.frames[pages][:, None] * ring.areas
        k, v = (ring.tokens(x)[0].unflatten(2, (self.geometry.pages, -1)).index_select(2, pages).flatten(2, 3)
                for x in (storage.k, storage.v))
        starts = torch.arange(number, device=ring.device)[:, None] * self.geometry.page_tokens + ring.starts
        if storage.statistics is not None:
            # A tile, then what lies between it and the next one, which is a block that nobody asks about.
            bounds = torch.stack([starts, starts + lengths], -1).flatten()
            offsets = torch.cat([bounds, bounds.new_full((1,), k.shape[2])]).int()
            found = self.backend.key_statistics(k, v, (offsets, 2 * starts.numel(), self.ring.tiles.longest_video_tile), self.parts, True)
            own = found.with_cached(x.unflatten(2, (2 * starts.numel(), -1))[:, :, ::2].flatten(2, 3) for x in found.cached.values())
            self.backend.write_statistics(own, storage.statistics, spread(pages, self.geometry.layer_tiles * self.parts))
        if storage.k_means is not None:
            token = torch.arange(ring.tiles.longest_video_tile, device=ring.device)
            inside = (token < lengths[..., None]).flatten(0, 1)[..., None]
            at = (starts[..., None] + token).clamp(max=k.shape[2] - 1)
            tokens = k.index_select(2, at.flatten()).unflatten(2, inside.shape[:2]).float().masked_fill(~inside, 0)
            means = (tokens.sum(3) / inside.sum(1)).to(k.dtype).float()
            storage.k_means.index_copy_(2, spread(pages, self.geometry.layer_tiles), means)

    def known(self, storage: Storage) -> list[Tensor]:
        """What of ``HeldKeys`` follows from the frames that there are: lengths, and k_per_row of layers that compute a density."""
        lengths = self.ring.lengths(storage.counts, self.places)
        config = self.spec.config
        if config.density is None or not self.spec.chooses:
            return [lengths]
        tiles = (lengths[0, 0, :self.ring.tiles.num_video_tiles] > 0).sum()
        window, = self.layer.fixed.window
        return [lengths, counts_at(self.rows, tiles * config.density, window).int()[None, None]]


def plan_of(geometry: Geometry, spec: LayerSpec) -> str:
    """What ``cached_layer`` reads."""
    return repr((tuple(geometry), spec.text))


@remember(64)
def cached_layer(plan: str, device: torch.device) -> CachedLayer:
    """The layer of a ``plan_of``."""
    geometry, spec = ast.literal_eval(plan)
    return CachedLayer(Geometry(*geometry), LayerSpec.from_text(spec, device))
