"""Checks of plain arguments, which say the argument's name, what was required and what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor

from .kernels.checks import device_of, require_int, require_number
from .kernels.memo import traced

# Beyond it no index of a token fits into 32 bits.
LARGEST = 2**31 - 1


def require_triple(name: str, value: Sequence[int]) -> tuple[int, int, int]:
    """``value`` as a tuple of three ints from 1 to 2**31 - 1: (t, h, w). Arrays and integers of numpy's count too."""
    if type(value) is tuple and len(value) == 3:
        t, h, w = value
        if type(t) is type(h) is type(w) is int and 0 < t <= LARGEST and 0 < h <= LARGEST and 0 < w <= LARGEST:
            return value
    entries: Any = value
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        entries = entries.tolist()
    if not isinstance(entries, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of three ints (t, h, w), got {value!r} ({type(value).__name__})")
    if len(entries) != 3:
        raise ValueError(f"{name} must have three entries (t, h, w), got {len(entries)}: {tuple(entries)}")
    t, h, w = (require_int(f"{name}[{axis}]", entry, 1) for axis, entry in enumerate(entries))
    if max(t, h, w) > LARGEST:
        raise ValueError(f"{name} must have entries of at most {LARGEST}, got {(t, h, w)}")
    return t, h, w


def require_tile(name: str, value: Sequence[int]) -> tuple[int, int, int]:
    """``require_triple`` of a tile's sides, together at most 2**31 - 1 tokens."""
    tile = require_triple(name, value)
    if prod(tile) > LARGEST:
        raise ValueError(f"{name} must make tiles of at most {LARGEST} tokens, got {tile}")
    return tile


def require_share(name: str, value: float, interval: str, what: str = "") -> float:
    """``value``, a number between 0 and 1, which count where ``interval`` says so, as "(0, 1]" does of 1; errors say ``what`` it is."""
    value = require_number(name, value)
    if not (0 < value < 1 or value == 0 and interval[0] == "[" or value == 1 and interval[-1] == "]"):
        raise ValueError(f"{name} must lie in {interval}{what and f', {what}'}, got {value}")
    return value


def require_kind(name: str, value: object, wanted: str, right: bool) -> None:
    """Refuses a ``value`` of the wrong kind, unless it is ``right``."""
    if not right:
        raise TypeError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")


def require_choice(name: str, value: str, choices: tuple[str, ...], also: str = "") -> str:
    """``value``, one of ``choices``; ``also`` names what else would have been accepted."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {value!r} ({type(value).__name__})")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {value!r}")
    return value


def require_function(name: str, function: Callable, *arguments: str) -> Callable:
    """``function``, which can be called with as many arguments as ``arguments`` names; what does not tell its own is believed."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(arguments)}), got {function!r}")
    if traced():
        return function
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        return function
    try:
        parameters.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} must be a function of ({', '.join(arguments)}), got one of {parameters}: {error}") from None
    return function


def require_device(name: str, device: torch.device | str) -> torch.device:
    """``device`` as one that exists, a GPU with its number."""
    found = device_of(name, device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name} must be a GPU that torch sees ({torch.cuda.device_count() if torch.cuda.is_available() else 0} of them), "
                         f"got {device!r}")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found
