"""Does training through SSTA make up for the tiles that are dropped? The same steps from the same weights, with SSTA and without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from clips import Clips
from few_steps import distil
from measure import failure
from measure_quality import Bench
from quality_grid import Entry
from train_video import Example, Plan, compiled, train
from video_model import VideoModel, pixels

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta, teacher_student

Velocities = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Below the rate that the weights were trained at.
RATE = 3e-4
# Towards its own velocities: what remains to be learned is little, and less than a higher rate disturbs.
FEW_RATE = 1e-4
# What is learned through SSTA: the clips' velocities, as in the training before, or those of the frozen dense model.
LOSSES = {"diffusion": "trained through it", "distill": "distilled"}


def ready(bench: Bench, model: VideoModel) -> VideoModel:
    """A copy to sample with, because ``model`` is compiled as it was trained."""
    copy = VideoModel(model.size, model.no_clip)
    copy.load_state_dict(model.state_dict())
    return bench.loaded(copy.to(bench.device))


@contextmanager
def through(bench: Bench, model: VideoModel, config: SSTAConfig | None, distilled: bool) -> Iterator[Velocities | None]:
    """Within it ``model`` is trained through ``config``; None = densely. Gives its velocities beside those of the frozen model under
    measurement where it is ``distilled``."""
    # Nothing counts steps in training, so no schedule has a meaning there.
    with nullcontext() if config is None else apply_ssta(model.dit, config, schedule=Schedule()):
        if not distilled:
            yield None
            return
        teacher = bench.checkpoint.model(bench.device).requires_grad_(False)
        if bench.device.type == "cuda":
            compiled(teacher)
        yield teacher_student(model, teacher)


def fine_tune(bench: Bench, clips: Clips, configs: dict[str, SSTAConfig], seconds: float, losses_of: Sequence[str] = ("diffusion",),
              ) -> Iterator[dict]:
    """Rows: the weights as they are, trained densely for ``seconds``, and trained for as many steps through each of ``configs``, with each
    of the losses ``losses_of``; each with its loss under the configuration and densely, of the clips that it is trained on: a dozen are
    learnt by heart, and the loss of others rises and falls with that more than with what is dropped.

    ``gap_closed`` is a share of what the configuration loses with weights that know nothing of it: for "diffusion" loss, of the weights
    that were trained densely for as long; for "distill" squared distance of the velocities to the teacher's, the weights as they were.
    """
    latents = torch.cat([bench.autoencoder.encode(pixels(clip.take(*bench.checkpoint.size.pixels)[None])) for clip in clips.train]).float()
    entries = [Entry("fine-tune", name, config) for name, config in configs.items()]

    def row(trained: str, entry: Entry, loss: float, dense: float, **more: object) -> dict:
        return dict(what="fine-tune", group=entry.group, name=f"{entry.name}, {trained}", loss=loss, loss_dense=dense,
                    loss_above=100 * (loss / dense - 1), **more)

    def losses(model: VideoModel, of: list[Entry]) -> tuple[float, list[float]]:
        """Densely, and under each of ``of``."""
        return bench.loss_of(model, bench.all_dense, latents), [bench.loss_of(model, entry, latents) for entry in of]

    def tuned(plan: Plan, what: str, config: SSTAConfig | None = None, distilled: bool = False) -> tuple[VideoModel, int]:
        """(the model, how many steps it was trained)."""
        model = bench.checkpoint.model(bench.device)
        with through(bench, model, config, distilled) as both:
            steps = train(model, bench.autoencoder, clips.train, plan, f"fine-tuning, {what}", velocities=both)
        return ready(bench, model), steps

    untrained = ready(bench, bench.checkpoint.model(bench.device))
    dense, found = losses(untrained, entries)
    errors = [bench.velocity_error_of(untrained, entry) for entry in entries]
    for entry, loss, error in zip(entries, found, errors):
        yield row("before", entry, loss, dense, velocity_error=error)
    plan = Plan(seconds, rate=RATE, small=0.0, seed=bench.checkpoint.train_seed + 1)
    model, steps = tuned(plan, "dense")
    best, without = losses(model, entries)
    for entry, loss in zip(entries, without):
        yield row("trained densely", entry, loss, best)
    plan = replace(plan, seconds=math.inf, steps=steps)
    for name in losses_of:
        for entry, start, error in zip(entries, without, errors):
            try:
                model, _ = tuned(plan, f"{entry.name}, {name}", entry.config, name == "distill")
                dense, (loss,) = losses(model, [entry])
                after = bench.velocity_error_of(model, entry) if name == "distill" else ""
            # One that cannot be trained must not take the others' rows with it.
            except Exception as reason:
                yield dict(what="fine-tune", group=entry.group, name=f"{entry.name}, {LOSSES[name]}", note=failure(reason))
                continue
            left, gap = (after**2, error**2) if name == "distill" else (loss - best, start - best)
            yield row(LOSSES[name], entry, loss, dense, velocity_error=after, gap_closed=closed(left, gap))


def fine_tune_few(bench: Bench, lines: Example, entries: Sequence[Entry], steps: int) -> Iterator[dict]:
    """Rows of the model in a few steps: as it is, and after so many ``steps`` of training through each of ``entries`` towards the
    velocities of ``lines``, which are its own dense ones where its own generations come by. ``gap_closed`` is as in ``fine_tune``, for
    "distill"; samples are held against the dense ones of the model as it was."""
    untrained = ready(bench, bench.checkpoint.model(bench.device))

    def row(trained: str, entry: Entry, model: VideoModel) -> dict:
        return dict(what="fine-tune", group=entry.group, name=f"{entry.name}, {trained}", **bench.samples_of(model, entry),
                    velocity_error=bench.velocity_error_of(model, entry))

    for entry in entries:
        before = row("before", entry, untrained)
        yield before
        model = bench.checkpoint.model(bench.device)
        plan = Plan(math.inf, steps, rate=FEW_RATE, small=0.0, seed=bench.checkpoint.train_seed + 1)
        with through(bench, model, entry.config, False):
            distil(model, lines, plan, f"fine-tuning, {entry.name}")
        after = row(LOSSES["distill"], entry, ready(bench, model))
        yield dict(after, gap_closed=closed(after["velocity_error"] ** 2, before["velocity_error"] ** 2))


def closed(left: float, gap: float) -> float | str:
    """Percent of a gap of which so much is left; "" where there was none."""
    return 100 * (1 - left / gap) if gap > 0 else ""
