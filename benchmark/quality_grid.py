"""What bench_quality.py measures: names, configurations and schedules. To measure another one, add a line here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from video_model import ModelSize

from ssta import SSTAConfig
from ssta.pipelines import Schedule

Triple = tuple[int, int, int]
# Shares of the tile pairs; of 45 tiles 4 or 5, 7 and 14.
DENSITIES = (0.1, 0.156, 0.3)


@dataclass(frozen=True)
class Entry:
    """One configuration.

    Attributes:
        group: what it is a case of; plots have a colour for each.
        name: unique.
        config, schedule: what ``apply_ssta`` is given; no config = diffusers' own processors.
        backend: of diffusers, for its own processors.
        noise: added to the seed of the noise.
        shown: whether the contact sheet has it.
    """

    group: str
    name: str
    config: SSTAConfig | None = None
    schedule: Schedule = field(default_factory=Schedule)
    backend: str = "native"
    noise: int = 0
    shown: bool = False


@dataclass(frozen=True)
class Tiles:
    """The tiles that fit a canvas: the one that most entries have, and others by what they are."""

    main: Triple
    others: tuple[Triple, ...]


FULL_TILES = Tiles((4, 8, 8), ((2, 8, 8), (4, 4, 8), (6, 8, 8)))
TOY_TILES = Tiles((2, 4, 4), ((1, 4, 4),))


def dense_entry(layers: int) -> Entry:
    """Every layer dense at every step, through the same kernel as the dense steps of a warm-up."""
    return Entry("dense", "dense", SSTAConfig(topk=1), Schedule(dense_layers=tuple(range(layers))), shown=True)


def kept(size: ModelSize, tile: Triple, density: float, **options) -> SSTAConfig:
    """The configuration that keeps this share of the tiles in every row, by budget alone unless ``options`` say otherwise."""
    tiles = prod(-(-tokens // of) for tokens, of in zip(size.canvas, tile))
    return SSTAConfig(**{"tile_thw": tile, "kernel_thw": (1, 1, 1), "sparse_type": "block_attn", "topk": max(1, round(density * tiles)),
                         **options})


def grid(size: ModelSize, tiles: Tiles, gpu: bool) -> list[Entry]:
    entries = [*floors(gpu), *dropped(size, tiles), *windows(size, tiles), *schedules(size, tiles), *other_tiles(size, tiles)]
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names), names
    return entries


def floors(gpu: bool) -> Iterator[Entry]:
    """What rounding alone changes, and what lies between two samples that have nothing to do with each other."""
    yield Entry("dense", "dense, diffusers' own processors")
    for backend in ("_native_cudnn", "_native_flash") if gpu else ("_native_math",):
        yield Entry("dense", f"dense, backend {backend.removeprefix('_native_')}", backend=backend)
    yield Entry("dense", "dense, other noise", noise=1000)


def dropped(size: ModelSize, tiles: Tiles) -> Iterator[Entry]:
    """SSTA as published: what is not selected gives nothing."""
    yield Entry("everything", "everything selected", kept(size, tiles.main, 1.0))
    for density in DENSITIES:
        yield Entry("dropped", f"dropped {density:g}", kept(size, tiles.main, density), shown=density == 0.156)
    yield Entry("dropped", "dropped 0.156, importance", kept(size, tiles.main, 0.156, sampling_type="importance"))
    yield Entry("dropped", "dropped 0.156, shared heads", kept(size, tiles.main, 0.156, mask_share_within_head=True))
    yield Entry("dropped", "dropped, threshold 0.9", kept(size, tiles.main, 1.0, threshold=0.9))


def windows(size: ModelSize, tiles: Tiles) -> Iterator[Entry]:
    for window in ((1, 3, 3), (3, 3, 3)):
        yield Entry("window", f"window {_by(window)}", kept(size, tiles.main, 0.1, sparse_type="sta", kernel_thw=window))
    yield Entry("window", "window 1x3x3 and 0.1", kept(size, tiles.main, 0.1, sparse_type="ssta", kernel_thw=(1, 3, 3)))


def schedules(size: ModelSize, tiles: Tiles) -> Iterator[Entry]:
    for density in (0.156, 0.3):
        yield Entry("warm-up", f"dropped {density:g}, warm-up 15 %", kept(size, tiles.main, density), Schedule(dense_steps=0.15),
                    shown=density == 0.156)


def other_tiles(size: ModelSize, tiles: Tiles) -> Iterator[Entry]:
    for tile in tiles.others:
        yield Entry("tiles", f"dropped 0.156, tile {_by(tile)}", kept(size, tile, 0.156))


def fine_tuned(size: ModelSize, tiles: Tiles) -> dict[str, SSTAConfig]:
    """What models are fine-tuned through."""
    return {"dropped 0.15": kept(size, tiles.main, 0.15)}


def _by(triple: Triple) -> str:
    return "x".join(map(str, triple))
