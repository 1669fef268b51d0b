"""Clip and Measurement: what a comparison generates, and what one configuration gave for it; both as JSON holds them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..patch.report import RunReport


@dataclass(frozen=True)
class Clip:
    """One video to generate.

    Attributes:
        prompt: None = what the call has, such as embeddings.
        seed: of the noise.
        image: the first frame, for image-to-video pipelines: a file or an address; None = what the call has.
    """

    prompt: str | None = None
    seed: int = 0
    image: str | None = None

    @property
    def name(self) -> str:
        """For files: the prompt's first words, a hash of prompt and image, and the seed."""
        words = re.sub(r"[^a-z0-9]+", "-", (self.prompt or "clip").lower()).strip("-")[:40].strip("-")
        return "-".join(filter(None, (words, digest(repr((self.prompt, self.image)).encode())[:6], f"s{self.seed}")))


@dataclass(frozen=True)
class Measurement:
    """What one configuration gave for one clip.

    Attributes:
        seconds: per denoising step, the mean of the run: the transformers' forwards and what happens between them.
        wall_seconds: of the whole call, with encoding and decoding.
        density: attended tile pairs over all, the mean over layers and steps; None without SSTA.
        exact_mass: share of the softmax mass that was computed exactly, over the layers that ran sparsely and at their last step: the mean,
            the lowest 5th percentile, and the worst head; None where nothing ran sparsely or nothing says.
        without_estimate: share of these layers' heads that have no estimate: what they do not compute exactly is dropped;
            ``exact_mass`` leaves them out. None where that is None for another reason.
        kernels: what the layers ran last, each once, as ``LayerRun.implementation`` has it; empty without SSTA.
        dense_kernels: what dense steps and layers ran, seen in two steps of warm-up; empty without SSTA or where nothing is dense.
        canvas: (t, h, w) in tokens; None without SSTA.
        latent_difference: relative difference of the latents from the reference's, as the VAE got them, or, where nothing was decoded, as
            the pipeline returned them. None for the reference, and so are the next three.
        psnr: in dB, of the frames.
        ssim: of the frames.
        lpips: of the frames; None where that package is not installed.
    """

    seconds: float
    wall_seconds: float
    density: float | None = None
    exact_mass: tuple[float, float, float] | None = None
    without_estimate: float | None = None
    kernels: tuple[str, ...] = ()
    dense_kernels: tuple[str, ...] = ()
    canvas: tuple[int, int, int] | None = None
    latent_difference: float | None = None
    psnr: float | None = None
    ssim: float | None = None
    lpips: float | None = None


def exact_mass(report: RunReport) -> tuple[float, float, float] | None:
    """``Measurement.exact_mass`` of a report."""
    masses = [run.exact_mass for run in report if run.exact_mass is not None]
    if not masses:
        return None
    mean, fifth, worst = zip(*masses)
    return sum(mean) / len(mean), min(fifth), min(worst)


def without_estimate(report: RunReport) -> float | None:
    """``Measurement.without_estimate`` of a report."""
    heads = [run.without_estimate for run in report if run.without_estimate is not None]
    return sum(without for without, _ in heads) / sum(of for _, of in heads) if heads else None


def plain(value: Any) -> Any:
    """What JSON can hold of ``value``: tensors and images by a hash of what is in them, dataclasses by their fields, functions and whatever
    else by name; floats that JSON has not as "inf", "-inf" and "nan"."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Tensor):
        kept = value.detach().cpu().contiguous()
        mark = digest(kept.flatten().view(torch.uint8).numpy().tobytes() if kept.numel() else b"")
        return f"tensor {list(kept.shape)} {str(kept.dtype).removeprefix('torch.')} {mark}"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [plain(item) for item in value]
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{type(value).__name__} {value.size} {digest(value.tobytes())}"
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__qualname__


def measurement_of(found: Mapping[str, Any]) -> Measurement:
    """A Measurement again, out of ``plain``.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Measurement(**{field.name: _number(found[field.name]) for field in fields(Measurement)})


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return float(value)
    if isinstance(value, list):
        return tuple(value)
    return value


def write_json(path: Path, value: Any) -> None:
    """All of it or nothing, whenever it is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file cannot be read or holds none; begins with ``what``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} must be a file of JSON that can be read, got {path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} must hold a JSON object, got {type(found).__name__} in {path}")
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
