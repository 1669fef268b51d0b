"""compare: generates the same clips with several configurations, and measures each against the first."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import load_image
from torch import Tensor

from ..patch.apply import transformers_of
from ..patch.report import RunReport, Stopwatch
from ..schedule.progress import Progress
from .configurations import Configuration, running
from .quality import describe, relative_difference, write_video
from .record import Clip, Folder, Measurement, settings_of
from .table import Evaluation

# The tensors of a video that are compared. "latents": flat, as the VAE decodes them, or as the pipeline returns them where nothing is
# decoded. "frames": float16 [F, 3, H, W] in [0, 1], half the size of float32 and finer than a screen's 8 bits.
Video = dict[str, Tensor]


def compare(
    pipe: Any, configurations: Sequence[Configuration], call: Mapping[str, Any], clips: Sequence[Clip] = (Clip(),), *,
    model: str | None = None, output: str | Path | None = None, resume: bool = False, videos: bool = False, fps: int = 16,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Generates every clip with every configuration, each clip from the same noise, and measures each against the first configuration.

    Clip by clip, all configurations one after the other, so that their times are of the same minutes. Each configuration is warmed up by
    two steps. The first one's videos are kept on disk, so memory does not grow with the clips. Processes with clips of their own can share
    an output folder.

    Args:
        pipe: a pipeline of a supported family, without SSTA.
        configurations: at least one, each of another name; the first is the reference, ``dense(pipe)`` as a rule.
        call: the pipeline's arguments that all clips share, among them ``num_inference_steps``; ``output_type`` "pt" or "latent",
            default "pt".
        clips: at least one, each once.
        model: the weights' name in records; default the place that the pipeline was loaded from, or its class.
        output: folder for references, measurements and videos; default a temporary one.
        resume: go on in a folder that holds part of this comparison already, perhaps with more configurations and clips.
        videos: write each clip and configuration as an MP4, the reference on the left; needs imageio and imageio-ffmpeg.
        fps: of the MP4s, frames in a second.
        say: is called with a sentence at each step of the work, with the time that is left.

    Raises:
        ValueError: no configuration or clip, or one twice; an output folder that holds another comparison, or this one without ``resume``;
            another backend that took the reference's kernels; a pipeline that several ranks share; or a refusal of ``apply_ssta``.
    """
    for name, items in (("configurations", [configuration.name for configuration in configurations]), ("clips", list(clips))):
        if not items:
            raise ValueError(f"{name} must hold at least one, got none")
        item, times = Counter(items).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{name} must each be there once, got {item!r} twice")
    call = {"output_type": "pt", **call}
    if call["output_type"] not in ("pt", "latent"):
        raise ValueError(f"output_type must be 'pt' or 'latent', got {call['output_type']!r}")
    for _, transformer in transformers_of(pipe):
        if getattr(transformer, "_parallel_config", None):
            raise ValueError(f"pipe must run on one rank, got {type(transformer).__name__} after enable_parallelism: give each GPU a "
                             "process with clips of its own and the same output")
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssta-compare-")) if output is None else output)
        folder = Folder(path, settings_of(pipe, model, call, configurations), resume)
        work = _Comparison(pipe, configurations, clips, call, folder, videos, fps, say)
        for clip in clips:
            work.clip(clip)
        return Evaluation(folder.settings, {configuration.name: {clip: folder.measurement(clip, configuration.name) for clip in clips}
                                            for configuration in configurations})


@dataclass
class _Comparison:
    """The arguments of ``compare``, and how one clip goes."""

    pipe: Any
    configurations: Sequence[Configuration]
    clips: Sequence[Clip]
    call: dict[str, Any]
    folder: Folder
    videos: bool
    fps: int
    say: Callable[[str], None]
    # Names of the configurations that were warmed up.
    warm: set[str] = field(default_factory=set)

    def clip(self, clip: Clip) -> None:
        """Generates and measures one clip with the configurations that lack it."""
        first = self.configurations[0]
        missing = [configuration for configuration in self.configurations if not self.folder.file(clip, configuration.name).exists()]
        if missing and first not in missing and not self.folder.reference_file(clip).exists():
            missing = [first, *missing]
        for configuration in missing:
            video, measured = self._generate(clip, configuration)
            if configuration is first:
                self.folder.keep(clip, video)
            else:
                measured = self._measured(clip, configuration, video, measured)
            self.folder.finish(clip, configuration.name, measured)
            self._progress(clip, configuration, measured)

    def _generate(self, clip: Clip, configuration: Configuration) -> tuple[Video, Measurement]:
        call = dict(self.call)
        if clip.prompt is not None:
            call["prompt"] = clip.prompt
        if clip.image is not None:
            call["image"] = load_image(clip.image)
        with running(self.pipe, configuration) as handle:
            if configuration.name not in self.warm:
                self.say(f"{configuration.name}: two steps to warm up")
                _generate(self.pipe, call | {"num_inference_steps": 2, "output_type": "latent"}, clip.seed)
                if handle is not None:
                    self._require_other_kernels(clip, configuration, handle.report())
                self.warm.add(configuration.name)
            self.say(f"{configuration.name}: generating {clip.name}")
            video, seconds, wall = _generate(self.pipe, call, clip.seed)
            if handle is None:
                return video, Measurement(seconds, wall)
            report = handle.report()
        return video, Measurement(seconds, wall, report.mean_density(), report.exact_mass(), report.without_estimate(),
                                  tuple(dict.fromkeys(run.implementation for run in report)), _dense_kernels(report), report[0].thw)

    def _require_other_kernels(self, clip: Clip, configuration: Configuration, report: RunReport) -> None:
        """Refuses a noise floor that attends with the reference's kernels."""
        first, kernels = self.configurations[0], _dense_kernels(report)
        if not configuration.all_dense or configuration.backend == first.backend:
            return
        if kernels == self.folder.measurement(clip, first.name).dense_kernels:
            raise ValueError(f"{configuration.name} must attend with other kernels than {first.name}, got {', '.join(kernels)} for both; "
                             "where text is masked, dense steps run the library's own kernels: take stock, or dense@ with one of those")

    def _measured(self, clip: Clip, configuration: Configuration, video: Video, measured: Measurement) -> Measurement:
        """``measured`` with the differences from the reference; writes the MP4."""
        reference = self.folder.reference(clip)
        if "latents" in video:
            measured = replace(measured, latent_difference=relative_difference(video["latents"], reference["latents"]))
        if "frames" not in video:
            return measured
        if self.videos:
            path = self.folder.video(clip, configuration.name)
            write_video(torch.cat([reference["frames"], video["frames"]], dim=-1), str(path), fps=self.fps)
        quality = describe(video["frames"], reference["frames"])
        return replace(measured, psnr=quality["psnr"], ssim=quality["ssim"], lpips=quality["lpips"])

    def _progress(self, clip: Clip, configuration: Configuration, measured: Measurement) -> None:
        """Says how much is finished, and the time that the rest takes at the same mean."""
        pairs = [(clip, configuration.name) for clip in self.clips for configuration in self.configurations]
        seconds = [self.folder.measurement(*pair).wall_seconds for pair in pairs if self.folder.file(*pair).exists()]
        left = round((len(pairs) - len(seconds)) * sum(seconds) / len(seconds))
        quality = "" if measured.psnr is None else f", {measured.psnr:.2f} dB"
        rest = f"; about {timedelta(seconds=left)} left" if len(seconds) < len(pairs) else ""
        self.say(f"[{len(seconds)}/{len(pairs)}] {configuration.name}: {clip.name} took {measured.wall_seconds:.1f} s{quality}{rest}")


def _dense_kernels(report: RunReport) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.dense_by for run in report if run.dense_by is not None))


def _generate(pipe: Any, call: dict, seed: int) -> tuple[Video, float, float]:
    """(the first video of the call, seconds per step, of the whole call).

    The time of the steps is from the beginning of the transformers' first forward to the end of their last one. A call that starts in the
    middle of the schedule has fewer steps than the scheduler.
    """
    watch, progress = Stopwatch(), Progress(pipe)
    steps = 0

    def begin(model, args, kwargs):
        nonlocal steps
        if not steps:
            step = progress.step(kwargs.get("timestep"))
            steps = len(pipe.scheduler.timesteps) if step is None else step.total
            watch.start(next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))

    start = time.perf_counter()
    with ExitStack() as stack:
        for _, model in transformers_of(pipe):
            stack.enter_context(model.register_forward_pre_hook(begin, with_kwargs=True))
            stack.enter_context(model.register_forward_hook(lambda *_: watch.stop()))
        latents = stack.enter_context(_decoded(pipe))
        out = pipe(**call, generator=torch.Generator().manual_seed(seed), return_dict=False)[0][0].cpu()
    wall, seconds = time.perf_counter() - start, watch.seconds()
    assert seconds is not None
    if call["output_type"] == "latent":
        video = {"latents": out}
    else:
        # An image is a video of one frame.
        video = {"frames": (out[None] if out.dim() == 3 else out).half()}
        if latents:
            video["latents"] = torch.cat([x.flatten() for x in latents])
    return video, seconds / steps, wall


@contextmanager
def _decoded(pipe: Any) -> Iterator[list[Tensor]]:
    """The latents that the pipeline's VAE decodes, on the CPU; pipelines return them only instead of frames."""
    vae: Any = getattr(pipe, "vae", None)
    taken: list[Tensor] = []
    if not hasattr(vae, "decode"):
        yield taken
        return
    stock, own = vae.decode, vars(vae).get("decode")

    def decode(*args, **kwargs):
        taken.append((args[0] if args else next(iter(kwargs.values()))).detach().cpu())
        return stock(*args, **kwargs)

    vae.decode = decode
    try:
        yield taken
    finally:
        del vae.decode
        if own is not None:
            vae.decode = own
