"""Checks of plain arguments, which say the argument's name, what was required and what came."""

from __future__ import annotations

from collections.abc import Iterable


def require_int(name: str, value: int, least: int) -> int:
    """``value``, an int of at least ``least``. A bool is not an int.

    Raises:
        TypeError: not an int.
        ValueError: too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def require_triple(name: str, value: Iterable[int]) -> tuple[int, int, int]:
    """``value`` as a tuple of three ints of at least 1: (t, h, w).

    Raises:
        TypeError: not a tuple or list, or an entry that is not an int.
        ValueError: not three entries, or one below 1.
    """
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of three ints (t, h, w), got {value!r} ({type(value).__name__})")
    if len(value) != 3:
        raise ValueError(f"{name} must have three entries (t, h, w), got {len(value)}: {tuple(value)}")
    return tuple(require_int(f"{name}[{axis}]", entry, 1) for axis, entry in enumerate(value))


def require_number(name: str, value: float) -> float:
    """``value``, an int or a float.

    Raises:
        TypeError: neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return value


def require_choice(name: str, value: str, choices: tuple[str, ...], also: str = "") -> str:
    """``value``, one of ``choices``; ``also`` names what else would have been accepted.

    Raises:
        TypeError: not a string.
        ValueError: not one of them.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {value!r} ({type(value).__name__})")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {value!r}")
    return value
