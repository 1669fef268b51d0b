"""Some tensors of a checkpoint, by their names: from a state dict, a file, a folder or the Hub, of which nothing else is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

# A user's weights: a state dict, or where to find it.
Weights = Mapping[str, Tensor] | str | PathLike[str]
_WHOLE, _INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth")
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class FoundTensors:
    """The tensors whose names match, and for a message the names of some others, and from where."""

    tensors: dict[str, Tensor]
    others: list[str]
    source: str

    def __str__(self) -> str:
        listed = ", ".join(map(repr, self.others[:3]))
        number = len(self.tensors) + len(self.others)
        return f"{number} tensors{' such as ' + listed if listed else ''} in {self.source}"


def find_tensors(weights: Weights, component: str, pattern: re.Pattern, own: bool = True) -> FoundTensors:
    """The tensors of ``weights`` in whose names ``pattern`` is found.

    Args:
        weights: a state dict; a file (safetensors, or what ``torch.save`` wrote); a folder of them, that of a transformer or of a
            pipeline; or a pipeline's name on the Hugging Face Hub.
        component: the transformer's name in the pipeline, which is that of its folder; "" for a transformer by itself.
        pattern: of names.
        own: whether ``weights`` may be this transformer's alone; else they are a pipeline's.

    Raises:
        TypeError: none of these.
        ValueError: no such file, folder or name, a folder without weights, or a file that cannot be read.
    """
    if isinstance(weights, Mapping):
        return _of_mapping(weights, pattern, "the state dict")
    if not isinstance(weights, (str, PathLike)):
        raise TypeError(f"weights must be a state dict, a file, a folder or a name on the Hub, got {type(weights).__name__}")
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    path = _local(weights, component)
    if path.is_file() and not own:
        raise ValueError("weights must be a folder or a dict with an entry for each of the pipeline's transformers, got the file "
                         f"{str(path)!r}")
    for file in [path] if path.is_file() else _files(path, component, own):
        found = _of_file(file, pattern)
        tensors |= found.tensors
        others += found.others
    return FoundTensors(tensors, others, str(path))


def _of_mapping(state: Mapping, pattern: re.Pattern, source: str) -> FoundTensors:
    wrong = next((name for name, x in state.items() if not isinstance(name, str) or not isinstance(x, Tensor)), None)
    if wrong is not None:
        raise TypeError(f"weights must map names to tensors, got {wrong!r}: {type(state[wrong]).__name__} in {source}")
    matching = {name: x for name, x in state.items() if pattern.search(name)}
    return FoundTensors(matching, [name for name in state if name not in matching], source)


def _of_file(file: Path, pattern: re.Pattern) -> FoundTensors:
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                return FoundTensors({name: opened.get_tensor(name) for name in names if pattern.search(name)},
                                    [name for name in names if not pattern.search(name)], str(file))
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"weights must be files of tensors, got {str(file)!r}, which cannot be read: {error}") from error
    # Trainers put it beside what else they save.
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping):
        raise ValueError(f"weights must be files of tensors, got {str(file)!r}, which holds {type(state).__name__}")
    return _of_mapping(state, pattern, str(file))


def _local(weights: str | PathLike[str], component: str) -> Path:
    path = Path(weights)
    if path.exists():
        return path
    if not isinstance(weights, str) or not _ON_THE_HUB.fullmatch(weights):
        raise ValueError(f"weights must be a state dict, a file, a folder or a name on the Hub, got {str(weights)!r}, which is no file")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(weights, allow_patterns=f"{component or 'transformer'}/*"))
    except (OSError, ValueError) as error:
        raise ValueError(f"weights must be a state dict, a file, a folder or a name on the Hub, got {weights!r}, which is no file, and "
                         f"from the Hub: {error}") from error


def _files(folder: Path, component: str, own: bool) -> list[Path]:
    places = [folder / (component or "transformer"), *([folder] if own else [])]
    for place in places:
        if (place / _INDEX).is_file():
            return [place / name for name in sorted(set(json.loads((place / _INDEX).read_text())["weight_map"].values()))]
        if (place / _WHOLE).is_file():
            return [place / _WHOLE]
        files = sorted(place.glob("*.safetensors")) or sorted(file for file in place.glob("*") if file.suffix in _PICKLED)
        if files:
            return files
    raise ValueError(f"weights must be a folder with a transformer's weights, got {str(folder)!r} without any in "
                     f"{' or '.join(repr(str(place)) for place in places)}")
