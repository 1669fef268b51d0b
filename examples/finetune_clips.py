"""What finetune.py learns from: clips, encoded once by the pipeline's own VAE and text encoder, and kept as files."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate

CLIPS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
CACHED = (".safetensors", ".pt")
# What the model is called with where there is no prompt.
NEGATIVE = "negative_prompt"
# A pipeline's own layout of latents, by its transformer; the others' is [B, C, T, H, W].
PACKED, FRAMES_FIRST = ("LTXVideoTransformer3DModel",), ("CogVideoXTransformer3DModel",)
SUPPORTED = (*PACKED, *FRAMES_FIRST, "WanTransformer3DModel", "HunyuanVideoTransformer3DModel", "MochiTransformer3DModel")


@dataclass(frozen=True)
class Size:
    """Of a clip, in frames and pixels."""

    frames: int
    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Size:
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"--size must be FRAMESxHEIGHTxWIDTH, such as 81x480x832, got {text!r}")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Sample:
    """One clip as the transformer gets it.

    Attributes:
        latents: float32, normalised, in the layout that the transformer takes, with a batch of one.
        call: the rest of the transformer's arguments: text embeddings, masks, positions.
    """

    latents: Tensor
    call: dict[str, Any]

    def to(self, device: torch.device, dtype: torch.dtype) -> Sample:
        """On the device; what comes from a text encoder in ``dtype``, positions as they are."""
        def moved(name: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(moved(name, of) for of in value)
            if not isinstance(value, Tensor):
                return value
            text = value.is_floating_point() and name.startswith(("encoder_", "pooled_"))
            return value.to(device, dtype if text else value.dtype)

        return Sample(self.latents.to(device), {name: moved(name, value) for name, value in self.call.items()})


# Files


def clip_files(folder: Path) -> list[Path]:
    """The clips in ``folder``, by name."""
    if not folder.is_dir():
        raise ValueError(f"--clips must be a folder of clips, got {folder}")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in CLIPS)
    if not files:
        raise ValueError(f"--clips {folder} must hold clips ({', '.join(CLIPS)}), got none")
    return files


def cached_files(folder: Path) -> list[Path]:
    """The cached clips in ``folder``, by name."""
    if not folder.is_dir():
        raise ValueError(f"--cache must be a folder of cached latents where there are no --clips, got {folder}")
    files = sorted(path for path in folder.iterdir() if path.suffix in CACHED and path.stem != NEGATIVE)
    if not files:
        raise ValueError(f"--cache {folder} must hold cached latents ({', '.join(CACHED)}), got none")
    return files


def negative_file(folder: Path) -> Path | None:
    return next((path for ending in CACHED if (path := folder / f"{NEGATIVE}{ending}").is_file()), None)


def load_sample(path: Path) -> Sample:
    """What ``save_sample`` wrote, or a ``.pt`` of ``{"latents": Tensor, "call": {argument: value}}``."""
    try:
        if path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
            latents, call = found["latents"], found["call"]
        else:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                values = json.loads((file.metadata() or {}).get("call", "{}"))
            latents, call = tensors.pop("latents"), {}
            # The tenth part of a tuple comes after the second.
            for name in sorted(tensors, key=lambda name: (len(name), name)):
                kind, argument, *place = name.split(".")
                if kind != "call":
                    raise KeyError(f"call.* or latents, got {name}")
                call[argument] = (*call.get(argument, ()), tensors[name]) if place else tensors[name]
            call |= {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return Sample(latents.float(), dict(call))
    except Exception as error:
        raise ValueError(f"{path} must hold latents and what the model is called with, see docs/training.md, got {error!r}") from error


def save_sample(path: Path, sample: Sample, **made: str) -> None:
    """As safetensors: ``latents``, ``call.NAME`` or ``call.NAME.0``, ``.1`` and so on; numbers as JSON beside, and what it was made of."""
    tensors, values = {"latents": sample.latents.cpu().contiguous()}, {}
    for name, value in sample.call.items():
        parts = {f"call.{name}.{i}": of for i, of in enumerate(value)} if isinstance(value, tuple) else {f"call.{name}": value}
        if all(isinstance(of, Tensor) for of in parts.values()):
            tensors |= {key: of.cpu().contiguous() for key, of in parts.items()}
        else:
            values[name] = value
    beside = path.with_name(path.name + ".new")
    save_file(tensors, beside, {"call": json.dumps(values), **made})
    beside.replace(path)


def _made_of(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return {name: text for name, text in (file.metadata() or {}).items() if name != "call"}


# Clips


def read_clip(path: Path, size: Size) -> Tensor:
    """The first frames of a file, scaled to cover the size and cut to it: ``[1, 3, F, H, W]`` in [-1, 1]."""
    package = next((package for package in READERS if importlib.util.find_spec(package)), None)
    if package is None:
        raise ValueError(f"{path} can be read with PyAV or imageio, and neither is installed: pip install av, or "
                         "pip install imageio imageio-ffmpeg; or give cached latents alone, as --cache")
    frames = []
    try:
        for frame in READERS[package](path):
            frames.append(torch.as_tensor(frame).permute(2, 0, 1)[:3])
            if len(frames) == size.frames:
                break
    # The packages raise what they like.
    except Exception as error:
        raise ValueError(f"{path} cannot be read with {package} beyond frame {len(frames)}: {error}") from error
    if len(frames) < size.frames:
        raise ValueError(f"{path} must have the {size.frames} frames of --size {size}, got {len(frames)}")
    x = torch.stack(frames).float() / 127.5 - 1
    scale = max(size.height / x.shape[2], size.width / x.shape[3])
    covering = [max(want, round(scale * have)) for want, have in zip((size.height, size.width), x.shape[2:])]
    x = interpolate(x, covering, mode="bilinear", antialias=True).clamp(-1, 1)
    top, left = ((have - want) // 2 for have, want in zip(covering, (size.height, size.width)))
    return x[:, :, top:top + size.height, left:left + size.width].transpose(0, 1)[None].contiguous()


def _by_av(path: Path) -> Iterator[Any]:
    import av

    with av.open(str(path)) as file:
        for frame in file.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def _by_imageio(path: Path) -> Iterator[Any]:
    import imageio.v3

    yield from imageio.v3.imiter(path)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {"av": _by_av, "imageio": _by_imageio}


def caption_of(path: Path) -> str:
    """The text beside a clip, in a file of its name that ends in .txt; empty where there is none."""
    beside = path.with_suffix(".txt")
    return beside.read_text(encoding="utf-8").strip() if beside.is_file() else ""


# Encoding


class _Reached(Exception):
    """The pipeline has come to its transformer."""


def conditions(pipe: Any, prompt: str, latents: Tensor, size: Size) -> dict[str, Any]:
    """What the pipeline calls its transformer with for a prompt, besides latents and time; the transformer does not run."""
    taken: dict[str, Any] = {}

    def stop(module: Any, args: tuple, kwargs: dict) -> None:
        taken.update(kwargs)
        raise _Reached

    call: dict[str, Any] = dict(prompt=prompt, height=size.height, width=size.width, num_frames=size.frames, num_inference_steps=2,
                                output_type="latent", latents=latents.clone())
    # A model that was distilled takes guidance as a number, with every prompt; others must be called with the prompt alone.
    if "guidance" not in inspect.signature(type(pipe.transformer).forward).parameters:
        call["guidance_scale"] = 1.0
    hook = pipe.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        pipe(**call)
    except _Reached:
        pass
    finally:
        hook.remove()
    hidden, timestep = taken.pop("hidden_states"), taken.pop("timestep")
    if hidden.shape != latents.shape or timestep.shape != (1,):
        raise ValueError(f"--model must take noisy latents and one timestep, got {type(pipe).__name__}, whose transformer takes "
                         f"{tuple(hidden.shape)} for latents {tuple(latents.shape)}, and timesteps {tuple(timestep.shape)}")
    return {name: value for name, value in taken.items()
            if name not in ("return_dict", "attention_kwargs", "joint_attention_kwargs") and value is not None}


def kind_of(pipe: Any) -> str:
    """Class name of the pipeline's transformer, one of SUPPORTED."""
    found = [kind.__name__ for kind in type(getattr(pipe, "transformer", None)).__mro__ if kind.__name__ in SUPPORTED]
    if not found or getattr(pipe, "transformer_2", None) is not None:
        what = "two transformers" if found else type(getattr(pipe, "transformer", None)).__name__
        raise ValueError(f"--model must be a text-to-video pipeline with one transformer of {', '.join(SUPPORTED)}, got "
                         f"{type(pipe).__name__} with {what}")
    return found[0]


def _statistics(vae: Any) -> tuple[Any, Any, float]:
    """(mean, standard deviation, factor) that latents are normalised by, in the VAE's configuration or its buffers."""
    mean, std = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
    mean, std = (getattr(vae, name, of) if of is None else of for name, of in (("latents_mean", mean), ("latents_std", std)))
    mean, std = (torch.as_tensor(default if of is None else of).float().reshape(1, -1, 1, 1, 1)
                 for of, default in ((mean, 0.0), (std, 1.0)))
    return mean, std, getattr(vae.config, "scaling_factor", None) or 1.0


def to_latents(pipe: Any, video: Tensor) -> Tensor:
    """Pixels ``[1, 3, F, H, W]`` in [-1, 1] -> normalised latents in the transformer's layout."""
    kind, vae = kind_of(pipe), pipe.vae
    x = vae.encode(video.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
    mean, std, factor = _statistics(vae)
    x = (x - mean.cpu()) * factor / std.cpu()
    if kind in PACKED:
        return pipe._pack_latents(x, pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)
    return x.transpose(1, 2).contiguous() if kind in FRAMES_FIRST else x


def to_frames(pipe: Any, sample: Sample) -> Tensor:
    """Its latents as frames ``[F, 3, H, W]`` in [0, 1]."""
    kind, vae, x = kind_of(pipe), pipe.vae, sample.latents.float().cpu()
    if kind in PACKED:
        canvas = (sample.call[name] for name in ("num_frames", "height", "width"))
        x = pipe._unpack_latents(x, *canvas, pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)
    elif kind in FRAMES_FIRST:
        x = x.transpose(1, 2)
    mean, std, factor = _statistics(vae)
    x = (x * std.cpu() / factor + mean.cpu()).to(vae.device, vae.dtype)
    # A decoder that finishes the denoising is told that there is nothing left of it.
    timed = getattr(vae.config, "timestep_conditioning", False)
    video = vae.decode(x, torch.zeros(1, device=x.device, dtype=x.dtype) if timed else None, return_dict=False)[0] if kind in PACKED \
        else vae.decode(x, return_dict=False)[0]
    return (video[0].float().transpose(0, 1) / 2 + 0.5).clamp(0, 1).cpu()


@torch.no_grad()
def encode(pipe: Any, model: str, files: list[Path], folder: Path, size: Size, negative: str, share: slice,
           say: Callable[[str], None]) -> list[Path]:
    """The cache files of the clips; writes those of ``share`` that are not there, or were made otherwise, and the first share's negative
    prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"model": model, "size": str(size)}
    targets = {path: folder / f"{path.name}.safetensors" for path in files}
    for i, path in list(enumerate(files, 1))[share]:
        caption = caption_of(path)
        if _made_of(targets[path]) == made | {"prompt": caption}:
            continue
        say(f"encoding clip {i} of {len(files)}: {path.name}{'' if caption else ', which has no caption'}")
        latents = to_latents(pipe, read_clip(path, size))
        save_sample(targets[path], Sample(latents, conditions(pipe, caption, latents, size)), **made, prompt=caption)
    target = folder / f"{NEGATIVE}.safetensors"
    if not share.start and _made_of(target) != made | {"prompt": negative}:
        latents = load_sample(targets[files[0]]).latents
        save_sample(target, Sample(latents[:0], conditions(pipe, negative, latents, size)), **made, prompt=negative)
    return list(targets.values())


if __name__ == "__main__":
    print("This is a module of examples/finetune.py, which says what it can do: --help.")
