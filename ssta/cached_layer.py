"""A layer whose keys a cache holds: what it does with a chunk, and what stays of it, in the tensors of a ``Storage``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .budget import counts_at
from .config import SSTAConfig
from .kernels.memo import Unplanned, remember
from .layer import Held, Tiled, prepared
from .ring import ChunkPlaces, Counts, Geometry, chunk_places, put, ring_of, spread
from .scoring import descriptors
from .selection import Selection
from .spec import LayerSpec

if TYPE_CHECKING:
    from .kernels.lowering.plans import Plan
    from .kernels.tail import KeyStatistics

# The fields of ``KeyStatistics`` that a cache keeps: which tokens are of which unit, "order", says nothing that these do not.
_STATISTICS = "log_count", "k_mean", "v_mean", "moments", "covariances"


class Storage(NamedTuple):
    """A cache's memory, written in place. P places and K video tiles of ``Ring.tiles``.

    Attributes:
        k, v: ``[B, Hkv, P, D]``.
        counts: how many frames are where.
        k_means: float32 ``[B, Hkv, K, D]``, of layers that score by means; NaN of tiles that hold nothing. Else None.
        statistics: of layers that estimate; else None.
    """

    k: Tensor
    v: Tensor
    counts: Counts
    k_means: Tensor | None
    statistics: KeyStatistics | None

    @property
    def known(self) -> list[Tensor]:
        """What is known of tiles."""
        known = [] if self.statistics is None else [getattr(self.statistics, name) for name in _STATISTICS]
        return [*([] if self.k_means is None else [self.k_means]), *known]

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
        self.blocks = tiles.offsets, tiles.num_tiles, tiles.longest_video_tile
        self.parts = spec.config.compensation_parts
        # Entries of a page, and of the chunk, in what is known of units.
        self.of_page, self.of_chunk = geometry.layer_tiles * self.parts, tiles.num_tiles * self.parts
        self.rows = torch.arange(tiles.num_tiles + 1, dtype=torch.float64, device=device)

        self.one = self._statistics_of_one() if spec.estimates else None
        # Where kernels do everything, all steps of a call are planned as one; torch moves a chunk that is shorter than others.
        self._whole = self.backend.plans(self._write) if self.places.in_chunk is None else None
        self._constants: dict[int, Tensor] = {}

    def _statistics_of_one(self) -> KeyStatistics:
        """Such as of one tile."""
        tokens = self.ring.tiles.longest_video_tile
        x = torch.zeros(1, self.spec.kv_heads, tokens, self.spec.head_dim, dtype=self.spec.dtype, device=self.ring.device)
        bounds = torch.arange(2, dtype=torch.int32, device=self.ring.device) * tokens
        return replace(self.backend.key_statistics(x, x, (bounds, 1, tokens), self.parts, True), order=None)

    # Memory

    def storage(self, tensors: list[Tensor]) -> Storage:
        """What ``Storage.tensors`` gave."""
        k, v, *rest = tensors
        counts, rest = Counts(*rest[:4]), rest[4:]
        k_means = rest.pop(0) if _by_means(self.spec) else None
        known: dict[str, Any] = dict(zip(_STATISTICS, rest))
        return Storage(k, v, counts, k_means, None if self.one is None else replace(self.one, **known))

    def new(self, batch: int) -> Storage:
        """That of an empty cache."""
        spec, ring = self.spec, self.ring
        shape, tiles = (batch, spec.kv_heads), ring.tiles
        k, v = (torch.zeros(*shape, tiles.num_slots, spec.head_dim, dtype=spec.dtype, device=ring.device) for _ in range(2))
        known = [torch.zeros(*shape, tiles.num_video_tiles, spec.head_dim, device=ring.device)] if _by_means(spec) else []
        if self.one is not None:
            like = [getattr(self.one, name) for name in _STATISTICS]
            known += [x.new_zeros(*shape, tiles.num_video_tiles * self.parts, *x.shape[3:]) for x in like]
        storage = self.storage([k, v, *ring.new_counts(), *known])
        self.clear(storage)
        return storage

    def clear(self, storage: Storage) -> None:
        """Empties it of frames."""
        for x in (storage.counts.frames, storage.counts.place, storage.counts.kept):
            x.zero_()
        self._say_empty(storage, slice(None))

    def _say_empty(self, storage: Storage, units: slice) -> None:
        """That tiles hold nothing, in whose place others then are put."""
        if storage.k_means is not None:
            storage.k_means[:, :, units].fill_(torch.nan)
        if storage.statistics is not None:
            storage.statistics.log_count[:, :, slice(*[None if x is None else x * self.parts for x in (units.start, units.stop)])].fill_(
                -torch.inf)

    # A chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, storage: Storage, lengths: Tensor, k_per_row: Tensor | None = None, *,
               dense: bool, describe: bool) -> Tensor:
        """Attention of a chunk, whose keys and values are put into the memory for the chunk at hand.

        Args:
            lengths, k_per_row: as of ``Held``.
            dense: everything exactly.
            describe: even so, put what is known of the chunk's tiles where ``keep`` finds it.
        """
        if self._whole is not None:
            held = (storage.k, storage.v, lengths, k_per_row, *storage.known)
            planned = self._whole.planned((query, key, value), held, dense, describe)
            if not isinstance(planned, Unplanned):
                return planned(query, key, value, *[x for x in held if x is not None])[0]
        return self._steps(query, key, value, storage, lengths, k_per_row, dense, describe)

    def _write(self, plan: Plan, xs: Sequence[Any], held: Sequence[Any], dense: bool, describe: bool) -> None:
        """The plan of ``attend``."""
        (query, key, value), (k, v, lengths, k_per_row, *known) = xs, held
        storage = self.storage([k, v, *self.ring.new_counts(), *known])
        plan.results.append(self._steps(query, key, value, storage, lengths, k_per_row, dense, describe))
        # They live as long as the layer, because a captured graph, which may hold it, reads them after the plan is gone.
        self._constants.update({id(x): x for x in plan.constants})

    def _steps(self, query: Tensor, key: Tensor, value: Tensor, storage: Storage, lengths: Tensor, k_per_row: Tensor | None, dense: bool,
               describe: bool) -> Tensor:
        """``attend``, one step after the other."""
        move = self.layer.tiles.move
        into = [self.ring.tokens(x)[1] for x in (storage.k, storage.v)]
        if self.places.in_chunk is None:
            k, v = into
            q, q_means, k_means = self.backend.gather_into(query, key, value, move, k, v)
        else:
            q, k, v, q_means, k_means = self.backend.gather(query, key, value, move, move)
            for x, place in zip((k, v), into):
                put(x, place, self.places.in_chunk)
        if describe or not dense:
            self._describe(storage, k, v, k_means)
        del k, v
        held = Held(lengths, storage.statistics, k_per_row)
        tiled = Tiled(q, storage.k, storage.v, q_means, storage.k_means, held)
        layer, selection = self.layer, None
        if dense:
            layer = self.dense
            selection = Selection(layer.fixed.relisted(*self.every, lengths))
        return layer.run(tiled, selection=selection).out

    def _describe(self, storage: Storage, k: Tensor, v: Tensor, k_means: Tensor | None) -> None:
        """Puts what is known of the chunk's tiles where the chunk at hand has its place."""
        if self.places.in_chunk is not None:
            self._say_empty(storage, slice(self.geometry.pages * self.geometry.layer_tiles, None))
        if storage.statistics is not None:
            found = self.backend.key_statistics(k, v, self.blocks, self.parts, True)
            for name in _STATISTICS:
                put(getattr(found, name), self.ring.units(getattr(storage.statistics, name), self.parts)[1], None)
        if storage.k_means is not None:
            put(descriptors(k, self.layer.tiles) if k_means is None else k_means, self.ring.units(storage.k_means, 1)[1], None)

    def keep(self, storage: Storage, fill: bool, cut: bool, settled: bool) -> None:
        """The chunk at hand stays, and what leaves the window goes.

        Args:
            fill: whether the sink may have room.
            cut: whether a tile may have lost some of its frames.
            settled: whether all pages are full and stay so.
        """
        ring, places, geometry = self.ring, self.places, self.geometry
        if fill:
            self._fill_sink(storage)
        written, oldest = (ring.turn(storage.counts, places), None) if settled else ring.roll(storage.counts, places)
        at = (written[0] * geometry.page_tokens + places.in_pages) % (geometry.pages * geometry.page_tokens)
        for x in (storage.k, storage.v):
            pages, chunk, *_ = ring.tokens(x)
            pages.index_copy_(2, at, chunk if places.in_chunk is None else chunk.index_select(2, places.in_chunk))
        if storage.statistics is not None:
            units = spread(written, self.of_page)
            for name in _STATISTICS:
                pages, chunk = ring.units(getattr(storage.statistics, name), self.parts)
                pages.index_copy_(2, units, chunk.narrow(2, 0, self.of_chunk))
        if storage.k_means is not None:
            pages, chunk = ring.units(storage.k_means, 1)
            pages.index_copy_(2, spread(written, geometry.layer_tiles), chunk.narrow(2, 0, self.layer.tiles.num_tiles))
        if oldest is None:
            return
        empty = (storage.counts.frames == 0)[:, None]
        if storage.statistics is not None:
            ring.units(storage.statistics.log_count, self.parts)[0].unflatten(2, (geometry.pages, -1)).masked_fill_(empty, -torch.inf)
        if storage.k_means is not None:
            ring.units(storage.k_means, 1)[0].unflatten(2, (geometry.pages, -1)).masked_fill_(empty[..., None], torch.nan)
        if cut:
            self.describe_pages(storage, oldest)

    def _fill_sink(self, storage: Storage) -> None:
        """Those of the chunk's frames that the sink has room for go there."""
        ring, places = self.ring, self.places
        here, token = ring.fills(storage.counts, places.frames)
        at = places.tiles.inverse[token]
        at = at if places.in_chunk is None else places.in_chunk[at]
        for x in (storage.k, storage.v):
            _, chunk, sink, _ = ring.tokens(x)
            sink.copy_(torch.where(here, chunk.index_select(2, at), sink))

    def describe_pages(self, storage: Storage, pages: Tensor) -> None:
        """Finds anew what is known of the tiles of ``pages``, int64 ``[n]``."""
        ring, number = self.ring, len(pages)
        lengths = storage.counts.frames[pages][:, None] * ring.areas
        k, v = (self._of_pages(x, pages) for x in (storage.k, storage.v))
        starts = torch.arange(number, device=ring.device)[:, None] * self.geometry.page_tokens + ring.starts
        if storage.statistics is not None:
            # A tile, then what lies between it and the next one, which is a block that nobody asks about.
            bounds = torch.stack([starts, starts + lengths], -1).flatten()
            offsets = torch.cat([bounds, bounds.new_full((1,), k.shape[2])]).int()
            found = self.backend.key_statistics(k, v, (offsets, 2 * starts.numel(), self.ring.tiles.longest_video_tile), self.parts, True)
            for name in _STATISTICS:
                x = getattr(found, name).unflatten(2, (starts.numel(), 2, self.parts))[:, :, :, 0].flatten(2, 3)
                ring.units(getattr(storage.statistics, name), self.parts)[0].index_copy_(2, spread(pages, self.of_page), x)
        if storage.k_means is not None:
            token = torch.arange(ring.tiles.longest_video_tile, device=ring.device)
            inside = (token < lengths[..., None]).flatten(0, 1)[..., None]
            at = (starts[..., None] + token).clamp(max=k.shape[2] - 1)
            tokens = k.index_select(2, at.flatten()).unflatten(2, inside.shape[:2]).float().masked_fill(~inside, 0)
            means = (tokens.sum(3) / inside.sum(1)).to(k.dtype).float()
            ring.units(storage.k_means, 1)[0].index_copy_(2, spread(pages, self.geometry.layer_tiles), means)

    def _of_pages(self, x: Tensor, pages: Tensor) -> Tensor:
        """The tokens ``[B, Hkv, n * page_tokens, D]`` of pages."""
        return self.ring.tokens(x)[0].unflatten(2, (self.geometry.pages, -1)).index_select(2, pages).flatten(2, 3)

    def known(self, storage: Storage) -> list[Tensor]:
        """What of ``Held`` follows from the frames that there are: lengths, and k_per_row of layers that compute a density."""
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
