"""One trained video model under measurement: its dense samples, and a row for every configuration held against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean

import torch
from diffusers.models.attention_dispatch import attention_backend
from measure import failure, write_rows
from quality_grid import FULL_TILES, Entry, dense_entry, shown_as
from sample_quality import VELOCITIES, Reference, Sampler, Trajectory, held_out_loss, mean_and_spread, step_at
from self_attention import Replaced
from sheet import Sheet
from torch import Tensor
from video_model import Checkpoint, VideoModel, label_order

from ssta import SSTAConfig
from ssta.pipelines import LayerRun, Schedule, SSTAHandle, apply_ssta

# Of the videos, so many follow the dense trajectory, and are shown.
FOLLOWED = 2
SPREAD = ("psnr", "ssim", "lpips", "latent_error")
COLUMNS = ("what", "group", "name", "density", "exact_mass", *(f"{name}{end}" for name in SPREAD for end in ("", "_spread")),
           "velocity_error", *(f"velocity_{percent}" for percent in VELOCITIES), "loss", "loss_dense", "loss_above", "gap_closed", "note")


class Bench:
    """Samples ``videos`` videos for each of ``seeds`` noises in ``steps`` steps; rows go to the CSVs ``paths`` as they come."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, videos: int, seeds: int, steps: int, paths: list[Path]) -> None:
        self.checkpoint, self.device, self.steps, self.paths = checkpoint, device, steps, paths
        self.rows: list[dict] = []
        self.autoencoder = checkpoint.patches(device)
        self.held = checkpoint.held.float().to(device)
        self.model = self.loaded(checkpoint.model(device))
        order = label_order(len(checkpoint.clips))
        self._labels = [order[i % len(order)] for i in range(videos)]
        self._samplers = [self._sampler(seed, steps) for seed in range(seeds)]
        self._trajectory = Trajectory(self._samplers[0], FOLLOWED)
        self._references: list[Reference] = []
        self._dense_loss = 0.0
        self._same = dict(clips=checkpoint.source, train_seed=checkpoint.train_seed, train_steps=checkpoint.steps,
                          train_s=round(checkpoint.seconds), tokens=checkpoint.size.tokens, head_dim=checkpoint.size.head_dim,
                          videos=videos, seeds=seeds, steps=steps)
        self.sheet = Sheet(shown_as(FULL_TILES.others[0]).values())
        self.sheet.add("clips", list(self.autoencoder.decode(checkpoint.shown.float().to(device))))

    def _sampler(self, seed: int, steps: int) -> Sampler:
        return Sampler(self.model, self._labels, seed, steps)

    def loaded(self, model: VideoModel) -> VideoModel:
        return model.as_loaded(torch.bfloat16 if self.device.type == "cuda" else torch.float32)

    @property
    def all_dense(self) -> Entry:
        return dense_entry(self.checkpoint.size.layers)

    def dense(self) -> None:
        """Samples what all others are held against; comes first."""
        first = self._samplers[0]
        with under(self.all_dense, first):
            self._dense_loss = held_out_loss(first, self.held)
            first.sample(seen=self._trajectory.keep)
        self._references = [Reference(x, self.autoencoder) for x in self._sampled(self.all_dense)]
        self.sheet.add("dense", self._references[0].videos[:FOLLOWED])
        self._add_sample(self.all_dense, density=1.0, loss=self._dense_loss, loss_dense=self._dense_loss, loss_above=0.0)

    def measure(self, entry: Entry) -> None:
        """Adds the row of ``entry``; one that cannot run says why, and takes no other's row with it."""
        try:
            self._add_sample(entry, **(self._other_noise(entry) if entry.noise else self._measured(entry)))
        except Exception as error:
            self._add_sample(entry, note=failure(error))

    def _measured(self, entry: Entry) -> dict:
        first, runs = self._samplers[0], []
        with under(entry, first) as report:
            errors = self._trajectory.follow(lambda: runs.extend(report()))
            loss = held_out_loss(first, self.held)
        at = {f"velocity_{percent}": errors[step_at(percent, len(errors))] for percent in VELOCITIES}
        return dict(self._compared(entry, self._sampled(entry)), density=fmean(run.density for run in runs) if runs else 1.0,
                    exact_mass=_exact_mass(runs), velocity_error=fmean(errors), **at,
                    loss=loss, loss_dense=self._dense_loss, loss_above=100 * (loss / self._dense_loss - 1))

    def _other_noise(self, entry: Entry) -> dict:
        others = [self._sampler(seed + entry.noise, sampler.steps) for seed, sampler in enumerate(self._samplers)]
        with under(self.all_dense, others[0]):
            return dict(self._compared(entry, [other.sample() for other in others]), density=1.0)

    def _sampled(self, entry: Entry) -> list[Tensor]:
        """Latents for each seed."""
        found = []
        for sampler in self._samplers:
            with under(entry, sampler):
                found.append(sampler.sample())
        return found

    def _compared(self, entry: Entry, latents: list[Tensor]) -> dict:
        videos = [found for reference, x in zip(self._references, latents) for found in reference.compare(x)]
        if entry.shown:
            self.sheet.add(entry.shown, [self.autoencoder.decode(x[None])[0] for x in latents[0][:FOLLOWED]])
        columns = {}
        for name in videos[0]:
            columns[name], columns[f"{name}_spread"] = mean_and_spread(video[name] for video in videos)
        return columns

    def dense_samples(self, checkpoint: Checkpoint, steps: int) -> Reference:
        """Of another model of this kind, in so many steps, from the noise of the first seed."""
        sampler = Sampler(self.loaded(checkpoint.model(self.device)), self._labels, 0, steps)
        with under(self.all_dense, sampler):
            return Reference(sampler.sample(), self.autoencoder)

    def samples_of(self, model: VideoModel, entry: Entry) -> dict:
        """How near samples of another model of this kind, made ready by ``loaded``, under ``entry`` are to the dense ones of the model
        under measurement."""
        sampler = Sampler(model, self._labels, 0, self._samplers[0].steps)
        with under(entry, sampler):
            return self._compared(entry, [sampler.sample()])

    def loss_of(self, model: VideoModel, entry: Entry, latents: Tensor) -> float:
        """Loss of ``latents`` of another model of this kind, made ready by ``loaded``, under ``entry``."""
        sampler = Sampler(model, self._labels[:1], 0, self._samplers[0].steps)
        with under(entry, sampler):
            return held_out_loss(sampler, latents)

    def velocity_error_of(self, model: VideoModel, entry: Entry) -> float:
        """How far such a model's velocities under ``entry`` are from the dense ones of the model under measurement, on its trajectory."""
        sampler = Sampler(model, self._labels, 0, self._samplers[0].steps)
        with under(entry, sampler):
            return fmean(self._trajectory.follow(sampler=sampler))

    def _add_sample(self, entry: Entry, **found: object) -> None:
        self.add(dict(what="sample", group=entry.group, name=entry.name, **found))

    def add(self, found: dict) -> None:
        """Takes over a row, prints it, and writes all of them, so that an end before the last loses none."""
        row = {**dict.fromkeys(COLUMNS, ""), **found, **self._same}
        assert list(row) == [*COLUMNS, *self._same], f"{sorted(found)} must be among {COLUMNS}"
        self.rows.append(row)
        shown = ("density", "exact_mass", "psnr", "ssim", "latent_error", "velocity_error", "loss", "loss_above", "gap_closed", "note")
        print(f"{row['what']}: {row['name']}", *(f"{name} {_short(row[name])}" for name in shown if row[name] != ""), sep="  ", flush=True)
        for path in self.paths:
            write_rows(path, self.rows, quiet=True)


@contextmanager
def under(entry: Entry, sampler: Sampler) -> Iterator[Callable[[], list[LayerRun]]]:
    """Within it the sampler's model attends as ``entry`` says; its scheduler counts the steps. Gives the report of the last forward."""
    if entry.config is None:
        attend = Replaced(sampler.model.size.tokens, entry.attend) if entry.attend else nullcontext()
        with attention_backend(entry.backend), attend:
            yield list
        return
    all_dense = Schedule(dense_layers=tuple(range(sampler.model.size.layers)))

    def put_in(config: SSTAConfig | None) -> SSTAHandle:
        schedule = all_dense if config is None else entry.schedule
        return apply_ssta(sampler.model.dit, config or entry.config, schedule=schedule, scheduler=sampler.scheduler)

    now, handle = entry.config, put_in(entry.config)

    def enter(step: int) -> None:
        nonlocal now, handle
        if entry.put_in(step, sampler.steps) != now:
            handle.remove()
            now = entry.put_in(step, sampler.steps)
            handle = put_in(now)

    sampler.enter = enter
    try:
        yield lambda: handle.report()
    finally:
        handle.remove()
        sampler.enter = lambda step: None


def _exact_mass(runs: list[LayerRun]) -> float | str:
    """Mean share of the softmax; known of estimates alone, and 1 where a step of theirs is dense."""
    if all(run.exact_mass is None for run in runs):
        return ""
    return fmean(1.0 if run.exact_mass is None else run.exact_mass[0] for run in runs)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
