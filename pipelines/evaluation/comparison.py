"""compare: generates the same clips with several configurations, and measures each against the first."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import load_image
from torch import Tensor

from ..patch.apply import SSTAHandle, transformers_of
from ..patch.report import Stopwatch
from ..schedule.progress import Progress
from .configurations import Configuration, running
from .folder import Folder, Reference, settings_of
from .measurement import Clip, Measurement, exact_mass, without_estimate
from .quality import describe, relative_difference, write_video
from .table import Evaluation

# How `LayerRun.implementation` begins where a layer attended densely.
_DENSE = "dense, "


def compare(
    pipe: Any, configurations: Sequence[Configuration], call: Mapping[str, Any], clips: Sequence[Clip] = (Clip(),), *,
    model: str | None = None, output: str | Path | None = None, resume: bool = False, videos: bool = False, fps: int = 16,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Generates every clip with every configuration, each clip from the same noise, and measures each against the first configuration.

    Clip by clip, all configurations one after the other, so that their times are of the same minutes and an interrupted comparison has
    whole pairs. Each configuration is warmed up once, by two steps in which kernels are compiled. What the first one generated is kept on
    disk, its frames in 16 bits, so memory does not grow with the clips. Processes with clips of their own, one on each GPU, can share an
    output folder.

    Args:
        pipe: a pipeline of a supported family, without SSTA.
        configurations: at least one, each of another name; the first is the reference, ``dense(pipe)`` as a rule.
        call: the pipeline's arguments that all clips share, among them ``num_inference_steps``; ``output_type`` "pt" or "latent",
            default "pt".
        clips: at least one, each once.
        model: what records call the weights; default what the pipeline was loaded from, or its class.
        output: folder for the references, for what was measured, and for videos; default a temporary one.
        resume: go on in a folder that holds part of this comparison already: what is finished is not generated again. Configurations and
            clips may have been added.
        videos: write each clip and configuration as an MP4, the reference on the left; needs imageio and imageio-ffmpeg.
        fps: of the MP4s, frames in a second.
        say: told what is being done and how long the rest will take.

    Raises:
        ValueError: no configuration or clip, or one twice; an output folder that holds another comparison, or this one without ``resume``;
            another backend that took the reference's kernels; a pipeline that several ranks share; or what ``apply_ssta`` refuses.
    """
    for name, given in (("configurations", [configuration.name for configuration in configurations]), ("clips", list(clips))):
        if not given:
            raise ValueError(f"{name} must hold at least one, got none")
        twice = [item for item, count in Counter(given).items() if count > 1]
        if twice:
            raise ValueError(f"{name} must each be there once, got {twice[0]!r} twice")
    call = {"output_type": "pt", **call}
    if call["output_type"] not in ("pt", "latent"):
        raise ValueError(f"output_type must be 'pt' or 'latent', got {call['output_type']!r}")
    shared = [type(transformer).__name__ for _, transformer in transformers_of(pipe) if getattr(transformer, "_parallel_config", None)]
    if shared:
        raise ValueError(f"pipe must run on one rank, got {shared[0]} after enable_parallelism: give each GPU a process with clips of its "
                         "own and the same output")
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssta-compare-")) if output is None else output)
        folder = Folder.open(path, settings_of(pipe, model, call, configurations), resume)
        work = _Comparison(pipe, configurations, call, folder, videos, fps, say)
        for clip in clips:
            work.clip(clip, clips)
        names = [configuration.name for configuration in configurations]
        return Evaluation(folder.settings, {name: {clip: folder.measurement(clip, name) for clip in clips} for name in names})


class _Comparison:
    """The work of ``compare``: what is in it for every clip."""

    def __init__(self, pipe: Any, configurations: Sequence[Configuration], call: dict, folder: Folder, videos: bool, fps: int,
                 say: Callable[[str], None]) -> None:
        self.pipe, self.configurations, self.call, self.folder = pipe, configurations, call, folder
        self.videos, self.fps, self.say = videos, fps, say
        # By configuration, once it is warm: the kernels of its dense steps and layers, as far as they were seen, in order.
        self.dense_kernels: dict[str, dict[str, None]] = {}

    def clip(self, clip: Clip, clips: Sequence[Clip]) -> None:
        """Whatever is not finished of one clip."""
        first, *others = self.configurations
        missing = [configuration for configuration in others if not self.folder.finished(clip, configuration.name)]
        if self.folder.finished(clip, first.name) and (not missing or self.folder.has_reference(clip)):
            reference = self.folder.reference(clip) if missing else None
        else:
            reference, missing = None, [first, *missing]
        for configuration in missing:
            generated, measured, device = self._generate(clip, configuration)
            if reference is None:
                reference = generated
                self.folder.keep(clip, reference)
            else:
                measured = self._measured(clip, configuration, generated, measured, reference, device)
            self.folder.finish(clip, configuration.name, measured)
            self._progress(clip, configuration, measured, clips)

    def _generate(self, clip: Clip, configuration: Configuration) -> tuple[Reference, Measurement, torch.device]:
        call = dict(self.call)
        if clip.prompt is not None:
            call["prompt"] = clip.prompt
        if clip.image is not None:
            call["image"] = load_image(clip.image)
        with running(self.pipe, configuration) as handle:
            if configuration.name not in self.dense_kernels:
                self.say(f"{configuration.name}: two steps to warm up")
                self._warm_up(call, clip.seed, configuration, handle)
            self.say(f"{configuration.name}: generating {clip.name}")
            seen = self.dense_kernels[configuration.name]
            # A generation that starts in the middle may have no dense step among two. Looking waits for the device, so once will do.
            with ExitStack() if seen else self._looking(handle, seen, once=True):
                generated, seconds, wall, device = _generate(self.pipe, call, clip.seed)
            if handle is None:
                return generated, Measurement(seconds, wall), device
            report = handle.report()
        kernels = tuple(dict.fromkeys(run.implementation for run in report))
        return generated, Measurement(seconds, wall, report.mean_density(), exact_mass(report), without_estimate(report), kernels,
                                      tuple(seen), report[0].thw), device

    def _warm_up(self, call: dict, seed: int, configuration: Configuration, handle: SSTAHandle | None) -> None:
        seen: dict[str, None] = {}
        with self._looking(handle, seen):
            _generate(self.pipe, call | {"num_inference_steps": 2, "output_type": "latent"}, seed)
        self.dense_kernels[configuration.name] = seen
        first = self.configurations[0]
        if configuration.all_dense and configuration.backend != first.backend and seen == self.dense_kernels.get(first.name):
            raise ValueError(f"{configuration.name} must attend with other kernels than {first.name}, got {', '.join(seen)} for both; "
                             "where text is masked, dense steps run the library's own kernels: take stock, or dense@ with one of those")

    @contextmanager
    def _looking(self, handle: SSTAHandle | None, seen: dict[str, None], once: bool = False) -> Iterator[None]:
        """Notes in ``seen`` what attends densely in every forward, or in the first one."""
        def look(*_: object) -> None:
            assert handle is not None
            dense = [run.implementation for run in handle.report() if run.implementation.startswith(_DENSE)]
            seen.update(dict.fromkeys(name.removeprefix(_DENSE) for name in dense))
            if once:
                hooks.close()

        with ExitStack() as hooks:
            for _, model in () if handle is None else transformers_of(self.pipe):
                hooks.enter_context(model.register_forward_hook(look))
            yield

    def _measured(self, clip: Clip, configuration: Configuration, generated: Reference, measured: Measurement, reference: Reference,
                  device: torch.device) -> Measurement:
        if generated.latents is not None and reference.latents is not None:
            measured = replace(measured, latent_difference=relative_difference(generated.latents, reference.latents))
        if generated.frames is None or reference.frames is None:
            return measured
        found = describe(generated.frames, reference.frames, device)
        if self.videos:
            path = self.folder.video(clip, configuration.name)
            write_video(torch.cat([reference.frames, generated.frames], dim=-1), str(path), fps=self.fps)
        return replace(measured, psnr=found["psnr"], ssim=found["ssim"], lpips=found["lpips"])

    def _progress(self, clip: Clip, configuration: Configuration, measured: Measurement, clips: Sequence[Clip]) -> None:
        """Says how far it is; the rest takes as long as what each configuration took so far, on average."""
        names = [configuration.name for configuration in self.configurations]
        known = {name: [self.folder.measurement(c, name).wall_seconds for c in clips if self.folder.finished(c, name)] for name in names}
        every = [seconds for values in known.values() for seconds in values]
        left = sum((len(clips) - len(values)) * (sum(values) / len(values) if values else sum(every) / len(every))
                   for values in known.values())
        quality = "" if measured.psnr is None else f", {measured.psnr:.2f} dB"
        rest = f"; about {timedelta(seconds=round(left))} left" if left else ""
        done = f"[{len(every)}/{len(clips) * len(names)}]"
        self.say(f"{done} {configuration.name}: {clip.name} took {measured.wall_seconds:.1f} s{quality}{rest}")


def _generate(pipe: Any, call: dict, seed: int) -> tuple[Reference, float, float, torch.device]:
    """(the first video of the call, seconds per step, of the whole call, the device that denoised)."""
    start = time.perf_counter()
    with _denoising(pipe) as denoised, _decoded(pipe) as latents:
        out = pipe(**call, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]
    video = out[0].cpu()
    wall = time.perf_counter() - start
    if call["output_type"] == "latent":
        kept = Reference(video, None)
    else:
        # An image is a video of one frame.
        frames = video[None] if video.dim() == 3 else video
        kept = Reference(torch.cat([x.flatten() for x in latents]) if latents else None, frames.half())
    seconds = denoised.watch.seconds()
    assert seconds is not None and denoised.device is not None
    return kept, seconds / denoised.steps, wall, denoised.device


class _Denoising:
    """What the transformers' forwards of one call tell."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self.steps = 0
        # None before the first one.
        self.device: torch.device | None = None


@contextmanager
def _denoising(pipe: Any) -> Iterator[_Denoising]:
    """A stopwatch from the beginning of the first forward of any of the pipeline's transformers to the end of the last one, how many steps
    run, which are fewer than the scheduler has where the call starts in the middle, and where."""
    found, progress = _Denoising(), Progress(pipe)

    def start(model, args, kwargs):
        if found.device is None:
            step = progress.step(kwargs.get("timestep"))
            found.steps = len(pipe.scheduler.timesteps) if step is None else step.total
            found.device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            found.watch.start(found.device)

    with ExitStack() as hooks:
        for _, model in transformers_of(pipe):
            hooks.enter_context(model.register_forward_pre_hook(start, with_kwargs=True))
            hooks.enter_context(model.register_forward_hook(lambda *_: found.watch.stop()))
        yield found


@contextmanager
def _decoded(pipe: Any) -> Iterator[list[Tensor]]:
    """What the pipeline's VAE is given to decode, on the CPU: latents that pipelines return only instead of frames."""
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
        if own is None:
            del vae.decode
        else:
            vae.decode = own
