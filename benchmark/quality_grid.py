"""What bench_quality.py measures: names, configurations and schedules. To measure another one, add a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import Tensor

from ssta import SSTAConfig
from ssta.pipelines import Schedule

Triple = tuple[int, int, int]
# Shares of the tile pairs; of 45 tiles 7, 13 or 14, and 4 or 5. MIDDLE is the one at which everything else is varied.
MIDDLE = 0.156
DENSITIES = (MIDDLE, 0.3, 0.1)
# Layers of HunyuanVideo 1.5.
DEPTH = 54
# Of the steps, which is one however few there are.
ONE_STEP = 0.01
# What the tiles that are not computed contribute, by name.
DROPPED: dict[str, object] = {}
LINEAR: dict[str, object] = {"compensation": "linear"}
LINEAR_2: dict[str, object] = {"compensation": "linear", "compensation_parts": 2}
WAYS = {"dropped": DROPPED, "linear": LINEAR, "linear 2 parts": LINEAR_2}


@dataclass(frozen=True)
class Entry:
    """One configuration.

    Attributes:
        group: what it is a case of; plots have a colour for each.
        name: unique.
        config, schedule: what ``apply_ssta`` is given; no config = diffusers' own processors.
        later: from which share of the steps on the configuration is another, and which; None in its place = dense.
        backend: of diffusers, for its own processors.
        attend: ``f(q, k, v)``, ``[B, H, S, D]``, in the place of these processors' dense self-attention.
        noise: added to the seed of the noise.
        shown: its label in the contact sheet; "" = the sheet leaves it out.
    """

    group: str
    name: str
    config: SSTAConfig | None = None
    schedule: Schedule = field(default_factory=Schedule)
    later: tuple[float, SSTAConfig | None] | None = None
    backend: str = "native"
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    noise: int = 0
    shown: str = ""

    def put_in(self, step: int, steps: int) -> SSTAConfig | None:
        """The configuration that step has; None = every layer is dense. The schedule may make it dense too."""
        share, last = self.later or (1.0, None)
        return self.config if step < round(share * steps) else last

    def configs(self, steps: int) -> list[SSTAConfig | None]:
        """What sparse layers have at each step; None where all are dense."""
        return [None if self.schedule.is_dense_step(step, steps) else self.put_in(step, steps) for step in range(steps)]


@dataclass(frozen=True)
class Tiles:
    """The tiles that fit a canvas: the one that most entries have, and others by what they are."""

    main: Triple
    others: tuple[Triple, ...]
    finer: tuple[Triple, ...]


FULL_TILES = Tiles((4, 8, 8), ((4, 4, 8), (2, 8, 8), (6, 8, 8), (4, 6, 8)), ((2, 4, 8), (4, 4, 4)))
TOY_TILES = Tiles((2, 4, 4), ((1, 4, 4),), ((1, 2, 4),))


def dense_entry(layers: int) -> Entry:
    """Every layer dense at every step, through the same kernel as the dense steps of a warm-up."""
    return Entry("dense", "dense", SSTAConfig(topk=1), Schedule(dense_layers=tuple(range(layers))), shown="dense")


def kept(tile: Triple, share: float, **options) -> SSTAConfig:
    """This share of the tile pairs, chosen by budget alone unless ``options`` say otherwise."""
    return SSTAConfig(**{"tile_thw": tile, "kernel_thw": (1, 1, 1), "sparse_type": "block_attn", "density": share, **options})


def grid(tiles: Tiles, gpu: bool) -> list[Entry]:
    """All of them, what matters most first; ``shown_as`` names those in the contact sheet."""
    main = tiles.main
    makers = (floors(gpu), ways(main, MIDDLE), warm_ups(main), ways(main, 0.3), ways(tiles.others[0], MIDDLE, _of_tile(tiles.others[0])),
              small_tiles(tiles.others[0]), front(tiles.others[0], tiles.finer), by_step(tiles.others[0]), by_similarity(main),
              ways(main, 0.1), *(other_tile(tile) for tile in tiles.others[1:]), windows(main), as_published(main), everything(main))
    labels = shown_as(tiles.others[0])
    entries = [replace(entry, shown=labels.get(entry.name, "")) for maker in makers for entry in maker]
    assert len({entry.name for entry in entries}) == len(entries), [entry.name for entry in entries]
    return entries


def shown_as(tile: Triple) -> dict[str, str]:
    """Of the configurations in the contact sheet the labels, by name; in the sheet's order, below "dense"."""
    named = _of_tile(tile)
    return {f"linear 2 parts {MIDDLE:g}{named}, first layer dense": "SSTA by default",
            f"linear 2 parts 0.1{named}, first layer dense": 'SSTA, preset "fast"',
            f"dropped {MIDDLE:g}{named}": "as many pairs as by default, the others dropped"}


def for_few_steps(tiles: Tiles) -> list[Entry]:
    """Those that have a meaning at a handful of steps: density, parts, tile, the first layer, and the first step; the defaults' tile
    first."""
    wanted = (tiles.others[0], tiles.main, *tiles.finer)
    some = [entry for entry in grid(tiles, gpu=False)
            if entry.config is not None and entry.config.tile_thw in wanted and entry.config.density not in (None, 1.0)
            and entry.config.sparse_type == "block_attn" and entry.config.sampling_type is None and not entry.config.mask_share_within_head
            and entry.later is None and entry.schedule.dense_steps <= ONE_STEP]
    return sorted(some, key=lambda entry: wanted.index(entry.config.tile_thw))


def overall(entry: Entry, times: list[float]) -> float:
    """Of sparse layers' ``times`` at each step and of the layers that the schedule keeps dense, whose time is 1, in a model of DEPTH."""
    dense = len(entry.schedule.dense_layers) / DEPTH
    return dense + (1 - dense) * fmean(times)


def floors(gpu: bool) -> Iterator[Entry]:
    """What rounding alone changes, and what lies between two samples that have nothing to do with each other."""
    yield Entry("dense", "dense, diffusers' own processors")
    for backend in ("_native_cudnn", "_native_flash") if gpu else ("_native_math",):
        yield Entry("dense", f"dense, backend {backend.removeprefix('_native_')}", backend=backend)
    yield Entry("dense", "dense, other noise", noise=1000)


def ways(tile: Triple, density: float, ending: str = "") -> Iterator[Entry]:
    for way, options in WAYS.items():
        yield Entry("tiles" if ending else way, f"{way} {density:g}{ending}", kept(tile, density, **options))


def by_similarity(tile: Triple) -> Iterator[Entry]:
    """What is computed exactly chosen as if nothing were estimated."""
    for way, options in WAYS.items():
        if options:
            yield Entry(way, f"{way} {MIDDLE:g}, by similarity", kept(tile, MIDDLE, sampling_type="similarity", **options))


def warm_ups(tile: Triple) -> Iterator[Entry]:
    for way, options in WAYS.items():
        yield Entry("warm-up", f"{way} {MIDDLE:g}, warm-up 15 %", kept(tile, MIDDLE, **options), Schedule(dense_steps=0.15))


def small_tiles(tile: Triple) -> Iterator[Entry]:
    """The defaults' tile, as it is used: with a warm-up, with a window, and with fewer of them."""
    config, named = kept(tile, MIDDLE, **LINEAR), f"linear {MIDDLE:g}{_of_tile(tile)}"
    yield Entry("tiles", f"{named}, warm-up 15 %", config, Schedule(dense_steps=0.15))
    yield Entry("tiles", f"{named}, window 3x3x3", replace(config, sparse_type="ssta", kernel_thw=(3, 3, 3)))
    for density in DENSITIES[1:]:
        for way, options in {"linear": LINEAR, "linear 2 parts": LINEAR_2}.items():
            yield Entry("tiles", f"{way} {density:g}{_of_tile(tile)}", kept(tile, density, **options))


def front(tile: Triple, finer: tuple[Triple, ...]) -> Iterator[Entry]:
    """Where the presets lie: density, parts, warm-up and the first layer, in the defaults' tile; and finer tiles."""
    for density in (0.05, 0.1, MIDDLE, 0.2, 0.3, 0.4):
        for way, options in {"linear": LINEAR, "linear 2 parts": LINEAR_2}.items():
            config, named = kept(tile, density, **options), f"{way} {density:g}{_of_tile(tile)}"
            if density not in DENSITIES:
                yield Entry("tiles", named, config)
            if density != 0.05:
                yield Entry("first layer", f"{named}, first layer dense", config, Schedule(dense_layers=(0,)))
        for steps, share in {"one step": ONE_STEP, "5 %": 0.05, "10 %": 0.1, "15 %": 0.15}.items():
            if density in (0.1, MIDDLE, 0.3):
                yield Entry("warm-up", f"{named}, warm-up {steps}, first layer dense", config,
                            Schedule(dense_steps=share, dense_layers=(0,)))
    for density in DENSITIES:
        for of in finer:
            yield Entry("tiles", f"linear {density:g}{_of_tile(of)}", kept(of, density, **LINEAR))


def by_step(tile: Triple) -> Iterator[Entry]:
    """The same pairs spent on early or on late steps, and dense steps at the end or at both ends."""
    low, middle, high = (kept(tile, density, **LINEAR_2) for density in (0.1, 0.2, 0.3))
    tiles, first = _of_tile(tile), Schedule(dense_steps=0.1)
    yield Entry("by step", f"linear 2 parts 0.3 then 0.1{tiles}", high, later=(0.5, low))
    yield Entry("by step", f"linear 2 parts 0.1 then 0.3{tiles}", low, later=(0.5, high))
    yield Entry("by step", f"linear 2 parts 0.1, last 10 % dense{tiles}", low, later=(0.9, None))
    yield Entry("by step", f"linear 2 parts 0.1, last 30 % at 0.2{tiles}", low, later=(0.7, middle))
    yield Entry("by step", f"linear 2 parts 0.1, first and last 10 % dense{tiles}", low, first, later=(0.9, None))


def other_tile(tile: Triple) -> Iterator[Entry]:
    yield from ways(tile, MIDDLE, _of_tile(tile))
    for density in DENSITIES[1:]:
        yield Entry("tiles", f"linear {density:g}{_of_tile(tile)}", kept(tile, density, **LINEAR))


def windows(tile: Triple) -> Iterator[Entry]:
    """A window alone, and one within the density."""
    for window in ((1, 3, 3), (3, 3, 3)):
        yield Entry("window", f"window {_by(window)}", SSTAConfig(tile_thw=tile, kernel_thw=window, sparse_type="sta"))
    for way, options in {"dropped": DROPPED, "linear": LINEAR}.items():
        yield Entry("window", f"{way} 0.3, window 1x3x3", kept(tile, 0.3, sparse_type="ssta", kernel_thw=(1, 3, 3), **options))


def as_published(tile: Triple) -> Iterator[Entry]:
    """Other selections that published checkpoints were trained with."""
    yield Entry("dropped", f"dropped {MIDDLE:g}, importance", kept(tile, MIDDLE, sampling_type="importance"))
    yield Entry("dropped", f"dropped {MIDDLE:g}, shared heads", kept(tile, MIDDLE, mask_share_within_head=True))
    yield Entry("dropped", "dropped, threshold 0.9", kept(tile, MIDDLE, density=None, topk=10**6, threshold=0.9))


def everything(tile: Triple) -> Iterator[Entry]:
    """Laws: nothing is left to drop or to estimate."""
    for way, options in WAYS.items():
        yield Entry("everything", f"{way} 1", kept(tile, 1.0, **options))


def fine_tuned(tile: Triple) -> dict[str, SSTAConfig]:
    """What models are fine-tuned through."""
    return {f"{way} 0.15": kept(tile, 0.15, **options) for way, options in {"dropped": DROPPED, "linear": LINEAR}.items()}


def few_tuned(tile: Triple) -> list[Entry]:
    """What models for few steps are fine-tuned through."""
    return [Entry("fine-tune", f"{way} 0.15{_of_tile(tile)}", kept(tile, 0.15, **WAYS[way])) for way in ("linear", "linear 2 parts")]


def _of_tile(tile: Triple) -> str:
    return f", tile {_by(tile)}"


def _by(triple: Triple) -> str:
    return "x".join(map(str, triple))
