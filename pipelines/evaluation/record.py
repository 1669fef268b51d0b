"""Clips, measurements, and the folder of both, from which an interrupted comparison is resumed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import ssta

from ..patch.apply import transformers_of
from .configurations import Configuration

# The version of run.json and record.json; it changes when a field changes its meaning or goes.
SCHEMA = "ssta.compare/2"
_PACKAGES = ("diffusers", "transformers", "triton", "lpips")
T = TypeVar("T")


@dataclass(frozen=True)
class Clip:
    """One video to generate.

    Attributes:
        prompt: None = the call's own prompt or embeddings.
        seed: of the noise.
        image: the first frame, for image-to-video pipelines: a file or an address; None = the call's own.
    """

    prompt: str | None = None
    seed: int = 0
    image: str | None = None

    @property
    def name(self) -> str:
        """For files: the prompt's first words, a hash of prompt and image, and the seed."""
        words = re.sub(r"[^a-z0-9]+", "-", (self.prompt or "clip").lower()).strip("-")[:40].strip("-")
        return "-".join(filter(None, (words, _digest(repr((self.prompt, self.image)).encode())[:6], f"s{self.seed}")))


@dataclass(frozen=True)
class Measurement:
    """One configuration's result for one clip; docs/evaluation.md documents every field. Without SSTA its fields are None or empty, and
    the reference's last four are None."""

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

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measurement:
        """A Measurement from ``plain``'s form. Fields that an older file lacks have their defaults."""
        loaded: dict[str, Any] = {}
        for name, value in values.items():
            loaded[name] = tuple(value) if isinstance(value, list) else float(value) if isinstance(value, str) else value
        return cls(**loaded)


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: tensors and images by a hash of their contents, dataclasses by their fields, functions and other objects
    by name, and numbers that JSON lacks as "inf", "-inf" and "nan"."""
    names = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
    return json.loads(json.dumps(value, default=_plain), parse_constant=names.get)


def _plain(value: Any) -> Any:
    """A value of JSON's own kinds for one of another kind."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten()
        mark = _digest(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        return f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')} {mark}"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        return f"{type(value).__name__} {value.size} {_digest(value.tobytes())}"
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__qualname__


def settings_of(
    pipe: Any, model: str | None, call: Mapping[str, Any], configurations: Sequence[Configuration],
) -> dict[str, Any]:
    """All that a result depends on besides the clip, as JSON holds it: the keys of a record, see docs/evaluation.md."""
    transformers = [transformer for _, transformer in transformers_of(pipe)]
    versions = {package: next((found.version for found in importlib.metadata.distributions(name=package)), None) for package in _PACKAGES}
    return {
        "schema": SCHEMA,
        "model": model or getattr(pipe, "name_or_path", None) or type(pipe).__name__,
        "pipeline": type(pipe).__name__,
        "transformers": [type(transformer).__name__ for transformer in transformers],
        "dtype": str(next(transformers[0].parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"ssta": ssta.__version__, "torch": torch.__version__, **versions},
        "call": {name: plain(call[name]) for name in sorted(call)},
        "reference": configurations[0].name,
        "configurations": {configuration.name: plain(configuration) for configuration in configurations},
    }


class Folder:
    """A comparison's folder: ``run.json`` with its settings, for every clip a file in ``references/`` and one JSON for each configuration
    in ``clips/``, and ``videos/``. Every file but the videos is whole or not there; all but run.json belong to one clip, so that processes
    with different clips can share a folder."""

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool) -> None:
        """Makes the folder, or resumes the comparison in it.

        Raises:
            ValueError: it holds another comparison, or this one and ``resume`` is not asked for; names both sides.
            OSError: it cannot be written.
        """
        self.path, self.settings = path, settings
        file = path / "run.json"
        if path.exists() and not path.is_dir():
            raise ValueError(f"output must be a folder, got the file {path}")
        if file.exists():
            if not resume:
                raise ValueError(f"output must be a folder without a comparison, got {path} with one; resume it, or choose another folder")
            before = _written("run.json", file, _read_json, "choose another folder")
            for where, old, new in _conflicts(before, settings):
                raise ValueError(f"resume must go on with the comparison of {file}, got another: {where} is {old} there and {new} here")
            settings = settings | {"configurations": before["configurations"] | settings["configurations"]}
        write_json(file, settings)

    def file(self, clip: Clip, configuration: str) -> Path:
        """The file of a measurement, which exists once the clip is finished."""
        return self.path / "clips" / clip.name / f"{_slug(configuration)}.json"

    def reference_file(self, clip: Clip) -> Path:
        """The file of the first configuration's video."""
        return self.path / "references" / f"{clip.name}.pt"

    def video(self, clip: Clip, configuration: str) -> Path:
        """The MP4 of a clip, the reference on the left and the configuration on the right."""
        folder = self.path / "videos"
        folder.mkdir(exist_ok=True)
        return folder / f"{clip.name}__{_slug(self.settings['reference'])}__{_slug(configuration)}.mp4"

    def keep(self, clip: Clip, reference: Mapping[str, Tensor]) -> None:
        with _whole(self.reference_file(clip)) as part:
            torch.save(reference, part)

    def reference(self, clip: Clip) -> dict[str, Tensor]:
        """The tensors that ``keep`` wrote."""
        return _written("a reference", self.reference_file(clip), lambda file: torch.load(file, map_location="cpu", weights_only=True))

    def finish(self, clip: Clip, configuration: str, measured: Measurement) -> None:
        """Writes the measurement, last of all that a clip and a configuration leave."""
        write_json(self.file(clip, configuration), {"configuration": configuration, "clip": plain(clip), "measured": plain(measured)})

    def measurement(self, clip: Clip, configuration: str) -> Measurement:
        """The measurement that ``finish`` wrote."""
        return _written("a finished clip", self.file(clip, configuration), lambda file: Measurement.of(_read_json(file)["measured"]))


def _written(name: str, file: Path, read: Callable[[Path], T], remedy: str = "delete it and resume") -> T:
    """``read(file)``, with one ValueError for all errors, because torch's own message recommends unsafe ways to read."""
    try:
        return read(file)
    except Exception as error:
        raise ValueError(f"{name} must be as it was written, got {file} ({type(error).__name__}); {remedy}") from None


def _conflicts(before: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(where, before, now) of each setting that is not the same; a configuration that one of them lacks is none."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _conflicts(old, new, f"{within}{key}.")
        elif old != new and not (within == "configurations." and (old is None or new is None)):
            yield f"{within}{key}", old, new


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def write_json(file: Path, value: Any) -> None:
    with _whole(file) as part:
        part.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """A path whose file takes the place of ``file`` at the end: all of it or nothing, whenever it is interrupted."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    yield part
    part.replace(file)


def _slug(name: str) -> str:
    """A configuration's name as one of a file, which no other configuration has."""
    short = re.sub(r"[^A-Za-z0-9.=@-]+", "_", name)[:80].strip("_")
    return short if short == name else f"{short}-{_digest(name.encode())[:6]}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
