"""Does training through SSTA make up for the tiles that are dropped? The same steps from the same weights, with SSTA and without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from clips import Clips
from measure import failure
from measure_quality import Bench
from quality_grid import Entry
from train_video import Plan, train
from video_model import VideoModel, pixels

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta

# Below the rate that the weights were trained at.
RATE = 3e-4


def fine_tune(bench: Bench, clips: Clips, configs: dict[str, SSTAConfig], seconds: float) -> Iterator[dict]:
    """Rows: the weights as they are, trained densely for ``seconds``, and trained for as many steps through each of ``configs``; each with
    its loss under the configuration and densely, of the clips that it is trained on: a dozen are learnt by heart, and the loss of others
    rises and falls with that more than with what is dropped."""
    latents = torch.cat([bench.autoencoder.encode(pixels(clip.take(*bench.checkpoint.size.pixels)[None])) for clip in clips.train]).float()
    entries = [Entry("fine-tune", name, config) for name, config in configs.items()]

    def row(trained: str, entry: Entry, loss: float, dense: float, **more: object) -> dict:
        return dict(what="fine-tune", group=entry.group, name=f"{entry.name}, {trained}", loss=loss, loss_dense=dense,
                    loss_above=100 * (loss / dense - 1), **more)

    def losses(model: VideoModel, of: list[Entry]) -> tuple[float, list[float]]:
        """Densely, and under each of ``of``; of a copy, because ``model`` is compiled as it was trained."""
        copy = VideoModel(model.size, model.no_clip)
        copy.load_state_dict(model.state_dict())
        copy = bench.loaded(copy.to(bench.device))
        return bench.loss_of(copy, bench.all_dense, latents), [bench.loss_of(copy, entry, latents) for entry in of]

    def tuned(plan: Plan, what: str, config: SSTAConfig | None = None) -> tuple[VideoModel, int]:
        """(the model, how many steps it was trained)."""
        model = bench.checkpoint.model(bench.device)
        # Nothing counts steps in training, so no schedule has a meaning there.
        with nullcontext() if config is None else apply_ssta(model.dit, config, schedule=Schedule()):
            steps = train(model, bench.autoencoder, clips.train, plan, f"fine-tuning, {what}")
        return model, steps

    dense, found = losses(bench.checkpoint.model(bench.device), entries)
    for entry, loss in zip(entries, found):
        yield row("before", entry, loss, dense)
    plan = Plan(seconds, rate=RATE, small=0.0, seed=bench.checkpoint.train_seed + 1)
    model, steps = tuned(plan, "dense")
    best, without = losses(model, entries)
    for entry, loss in zip(entries, without):
        yield row("trained densely", entry, loss, best)
    plan = replace(plan, seconds=math.inf, steps=steps)
    for entry, start in zip(entries, without):
        try:
            model, _ = tuned(plan, entry.name, entry.config)
            dense, (loss,) = losses(model, [entry])
        # One that cannot be trained must not take the others' rows with it.
        except Exception as error:
            yield dict(what="fine-tune", group=entry.group, name=f"{entry.name}, trained through it", note=failure(error))
            continue
        gap = start - best
        yield row("trained through it", entry, loss, dense, gap_closed=100 * (1 - (loss - best) / gap) if gap > 0 else "")
