"""Does training through SSTA make up for the tiles that are dropped? The same steps from the same weights, with SSTA and without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from clips import Clips
from measure_quality import Bench
from quality_grid import Entry
from train_video import Plan, train
from video_model import VideoModel

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta

# Below the rate that the weights were trained at.
RATE = 3e-4


def fine_tune(bench: Bench, clips: Clips, configs: dict[str, SSTAConfig], seconds: float) -> Iterator[dict]:
    """Rows: the weights as they are, trained densely for ``seconds``, and trained for as many steps through each of ``configs``; each with
    its held-out loss under the configuration and densely."""
    entries = [Entry("fine-tune", name, config) for name, config in configs.items()]

    def row(trained: str, entry: Entry, loss: float, dense: float, **more: float) -> dict:
        return dict(what="fine-tune", group=entry.group, name=f"{entry.name}, {trained}", loss=loss, loss_dense=dense,
                    loss_above=100 * (loss / dense - 1), **more)

    def losses(model: VideoModel, of: list[Entry]) -> tuple[float, list[float]]:
        """Densely, and under each of ``of``."""
        return bench.loss_of(model, bench.all_dense), [bench.loss_of(model, entry) for entry in of]

    plan = Plan(seconds, rate=RATE, small=0.0, seed=bench.checkpoint.train_seed + 1)
    before = bench.checkpoint.model(bench.device)
    dense, sparse = losses(before, entries)
    for entry, loss in zip(entries, sparse):
        yield row("before", entry, loss, dense)
    model = bench.checkpoint.model(bench.device)
    steps = train(model, bench.autoencoder, clips.train, plan, "fine-tuning, dense")
    best, sparse = losses(model, entries)
    for entry, loss in zip(entries, sparse):
        yield row("trained densely", entry, loss, best)
    plan = replace(plan, seconds=math.inf, steps=steps)
    for entry, without in zip(entries, sparse):
        model = bench.checkpoint.model(bench.device)
        assert entry.config is not None
        # Nothing counts steps in training: a schedule has no meaning there.
        with apply_ssta(model.dit, entry.config, schedule=Schedule()):
            train(model, bench.autoencoder, clips.train, plan, f"fine-tuning, {entry.name}")
        dense, (loss,) = losses(model, [entry])
        gap = without - best
        yield row("trained with SSTA", entry, loss, dense, gap_closed=100 * (1 - (loss - best) / gap) if gap > 0 else math.nan)
