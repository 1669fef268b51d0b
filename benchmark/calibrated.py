"""What calibration gains on the small video model: densities chosen layer by layer against one for all, at the same cost."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from measure_quality import Bench
from quality_grid import DENSITIES, LINEAR, MIDDLE, Entry, Triple, kept
from sample_quality import Sampler

from ssta.pipelines import Schedule
from ssta.pipelines.calibrate import calibrate

# Videos and steps that are calibrated on, from noise that no measured sample starts from.
VIDEOS, STEPS, SEED = 2, 10, 5000


def calibrated(bench: Bench, tile: Triple) -> Iterator[Entry]:
    """One density for all layers, the densities that ``calibrate`` chooses at that cost, and those it would choose if all layers' errors
    counted alike; each measured once, each chosen from again for every density."""
    model = bench.model
    tiles = prod(-(-n // size) for n, size in zip(model.size.canvas, tile))
    sampler = Sampler(model, list(range(min(VIDEOS, len(bench.checkpoint.clips)))), SEED, STEPS)
    given = dict(run=sampler.sample, scheduler=sampler.scheduler, schedule=Schedule(), config=kept(tile, MIDDLE, **LINEAR), density=MIDDLE)
    weighted = calibrate(model.dit, **given, extra=model.size.layers)
    alike = calibrate(model.dit, **given, extra=0)
    print(weighted, flush=True)
    # Of the few tiles of a toy less than one in each row cannot be chosen.
    for density in (density for density in DENSITIES if density * tiles >= 2):
        yield Entry("calibrated", f"linear {density:g}, calibrated", weighted.chosen(density=density))
        yield Entry("calibrated", f"linear {density:g}, calibrated, layers alike", alike.chosen(density=density))
