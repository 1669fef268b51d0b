"""Launch configurations measured on one kind of GPU, read from a file of its name in configs/; they stand in for those of config.py."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent / "configs"
# A file may hold what benchmark/tune.py measures. Short blocks are not among it: config.py has rules of its own for them.
KERNELS = ("forward", "dq", "dkv")
HEAD_DIMS = (64, 128, 256)
ALLOWED = {"block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4, 5)}


# The fields of a LaunchConfig, which mean what they mean there: of dkv ``block_n`` keys stay and ``block_m`` queries are streamed.
Measured = dict[str, int]


def measured(kernel: str, head_dim: int, gpu: str) -> Measured | None:
    """The configuration measured for ``kernel`` on a GPU of that name, at the next larger of ``HEAD_DIMS``; None where there is none.

    Raises:
        ValueError: the file, what is wrong in it and what was required.
    """
    if not gpu:
        return None
    table = _read(gpu)
    return next((table.get((kernel, dim)) for dim in HEAD_DIMS if head_dim <= dim), None)


def file_name(gpu: str) -> str:
    """Name of the file for a GPU, from its name in torch.cuda.get_device_name."""
    return "".join(character if character.isalnum() or character in "-." else "_" for character in gpu) + ".json"


@lru_cache
def _read(gpu: str) -> dict[tuple[str, int], Measured]:
    """``{"gpu": its name, "measured": with what, "kernels": {kernel: {head_dim: {block_m, block_n, num_warps, num_stages}}}}``, checked
    whole: a configuration that nobody asks for today is one that somebody relies on."""
    path = FOLDER / file_name(gpu)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(content, dict) or content.keys() != {"gpu", "measured", "kernels"}:
        raise ValueError(f"{path} must hold gpu, measured and kernels, got {sorted(content) if isinstance(content, dict) else content!r}")
    if content["gpu"] != gpu:
        raise ValueError(f"{path}: gpu must be {gpu!r}, whose file it is, got {content['gpu']!r}")
    table = {}
    for kernel, by_head_dim in _items(content["kernels"], "kernels", path):
        if kernel not in KERNELS:
            raise ValueError(f"{path}: kernels must be among {', '.join(KERNELS)}, got {kernel!r}")
        for head_dim, values in _items(by_head_dim, kernel, path):
            if head_dim not in map(str, HEAD_DIMS):
                raise ValueError(f"{path}: {kernel}'s head_dims must be among {', '.join(map(str, HEAD_DIMS))}, got {head_dim!r}")
            given = dict(_items(values, f"{kernel} at {head_dim}", path))
            if given.keys() != ALLOWED.keys():
                raise ValueError(f"{path}: {kernel} at {head_dim} must have {', '.join(ALLOWED)}, got {', '.join(given)}")
            numbers = {name: value for name, value in given.items() if type(value) is int and value in ALLOWED[name]}
            for name in given.keys() - numbers.keys():
                raise ValueError(f"{path}: {kernel} at {head_dim}: {name} must be among {ALLOWED[name]}, got {given[name]!r}")
            table[kernel, int(head_dim)] = numbers
    return table


def _items(value: object, name: str, path: Path) -> list[tuple[str, object]]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be an object, got {value!r}")
    return list(value.items())
