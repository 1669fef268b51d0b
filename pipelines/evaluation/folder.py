"""Folder: where a comparison keeps what is finished, so that it can be interrupted; and the settings by which it knows itself again."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ssta

from ..patch.apply import transformers_of
from .configurations import Configuration
from .measurement import Clip, Measurement, digest, measurement_of, plain, read_json, write_json

# The version of run.json and record.json; it changes when a field changes its meaning or goes.
SCHEMA = "ssta.compare/2"
_PACKAGES = ("diffusers", "transformers", "triton", "lpips")


@dataclass(frozen=True)
class Reference:
    """What the first configuration generated for a clip.

    Attributes:
        latents: as the VAE got them, flat; or what the pipeline returned where nothing is decoded. None where nobody saw them.
        frames: float16 ``[F, 3, H, W]`` in [0, 1]: half the size of float32, finer than a screen's 8 bits. None where nothing is decoded.
    """

    latents: Tensor | None
    frames: Tensor | None


def settings_of(
    pipe: Any, model: str | None, call: Mapping[str, Any], configurations: Sequence[Configuration],
) -> dict[str, Any]:
    """Whatever a result depends on besides the clip, as JSON holds it: the keys of a record, see docs/evaluation.md."""
    transformers = transformers_of(pipe)
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions: dict[str, str | None] = {"ssta": ssta.__version__, "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "schema": SCHEMA,
        "model": model or getattr(pipe, "name_or_path", None) or type(pipe).__name__,
        "pipeline": type(pipe).__name__,
        "transformers": [type(transformer).__name__ for _, transformer in transformers],
        "dtype": str(next(transformers[0][1].parameters()).dtype).removeprefix("torch."),
        "device": device,
        "versions": versions,
        "call": {name: plain(call[name]) for name in sorted(call)},
        "reference": configurations[0].name,
        "configurations": {configuration.name: plain(configuration) for configuration in configurations},
    }


class Folder:
    """A comparison's folder: ``run.json`` with its settings, for every clip a file in ``references/`` and one JSON for each configuration
    in ``clips/``, and ``videos/``. Every file but the videos is whole or not there; all but run.json belong to one clip, so that processes
    with different clips can share a folder."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self._known: dict[Path, Measurement] = {}

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], resume: bool) -> Folder:
        """Makes the folder, or takes up one that holds a part of the comparison.

        Raises:
            ValueError: it holds another comparison, or this one and ``resume`` is not asked for; names both sides.
            OSError: it cannot be written.
        """
        file = path / "run.json"
        if path.exists() and not path.is_dir():
            raise ValueError(f"output must be a folder, got the file {path}")
        kept = settings
        if file.exists():
            if not resume:
                raise ValueError(f"output must be a folder without a comparison, got {path} with one; resume it, or choose another folder")
            before = read_json(file, "run.json")
            for where, old, new in _conflicts(before, settings):
                raise ValueError(f"resume must go on with the comparison of {file}, got another: {where} is {old} there and {new} here")
            kept = settings | {"configurations": {**before["configurations"], **settings["configurations"]}}
        write_json(file, kept)
        return cls(path, settings)

    def _file(self, clip: Clip, configuration: str) -> Path:
        return self.path / "clips" / clip.name / f"{_slug(configuration)}.json"

    def _reference(self, clip: Clip) -> Path:
        return self.path / "references" / f"{clip.name}.pt"

    def finished(self, clip: Clip, configuration: str) -> bool:
        return self._file(clip, configuration).exists()

    def measurement(self, clip: Clip, configuration: str) -> Measurement:
        """
        Raises:
            ValueError: a file that is not what ``finish`` wrote.
        """
        file = self._file(clip, configuration)
        if file not in self._known:
            found = read_json(file, "a finished clip")
            try:
                if found["configuration"] != configuration or Clip(**found["clip"]) != clip:
                    raise ValueError(f"it is of {found['configuration']!r} and {found['clip']}, not of {configuration!r} and {clip}")
                self._known[file] = measurement_of(found["measured"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"a finished clip must be as it was written, got {file}: {error!r}; delete it to do it again") from error
        return self._known[file]

    def finish(self, clip: Clip, configuration: str, measured: Measurement) -> None:
        """The last that is written of a configuration's clip."""
        write_json(self._file(clip, configuration), {"configuration": configuration, "clip": plain(clip), "measured": plain(measured)})

    def has_reference(self, clip: Clip) -> bool:
        return self._reference(clip).exists()

    def reference(self, clip: Clip) -> Reference:
        """
        Raises:
            ValueError: a file that is not what ``keep`` wrote.
        """
        file = self._reference(clip)
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
            return Reference(found["latents"], found["frames"])
        except Exception as error:
            # torch's own message recommends unsafe ways to read the file.
            raise ValueError(f"a reference must be as it was written, got {file} ({type(error).__name__}); delete it and resume") from None

    def keep(self, clip: Clip, reference: Reference) -> None:
        file = self._reference(clip)
        file.parent.mkdir(exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        torch.save({"latents": reference.latents, "frames": reference.frames}, part)
        part.replace(file)

    def video(self, clip: Clip, configuration: str) -> Path:
        """The MP4 of a clip, the reference on the left and the configuration on the right."""
        folder = self.path / "videos"
        folder.mkdir(exist_ok=True)
        return folder / f"{clip.name}__{_slug(self.settings['reference'])}__{_slug(configuration)}.mp4"


def _slug(name: str) -> str:
    """A configuration's name as one of a file, which no other configuration has."""
    short = re.sub(r"[^A-Za-z0-9.=@-]+", "_", name)[:80].strip("_")
    return short if short == name else f"{short}-{digest(name.encode())[:6]}"


def _conflicts(before: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(where, before, now) of each setting that is not the same; a configuration that one of them lacks is none."""
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _conflicts(old, new, f"{within}{key}.")
        elif old != new and not (within == "configurations." and (old is None or new is None)):
            yield f"{within}{key}", old, new
