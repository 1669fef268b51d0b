"""Launches one after another as one launch of a CUDA graph, in calls whose tensors lie where those of earlier ones lay.

So they may where a model runs the same layers step after step, because torch gives memory that was given back. A graph launches what it
was made of, with the same arguments, so that nothing depends on whether there is one.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from ..memo import Kept

# Sights of the same addresses before a graph is made of them, how many plans have, and how many addresses are remembered.
SIGHTS, MOST, REMEMBERED = 3, 16, 64
# Fewer launches one after another are no slower by themselves.
LEAST = 3
# Of CUDA's driver: how a stream is made, the mode of a capture, and what functions take.
NON_BLOCKING, RELAXED = 1, 2
_HANDLE = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple] = {
    "cuStreamCreate": (_HANDLE, ctypes.c_uint), "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
    "cuStreamEndCapture": (_HANDLE, _HANDLE),
    "cuGraphInstantiateWithFlags": (_HANDLE, _HANDLE, ctypes.c_ulonglong), "cuGraphDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE), "cuGraphExecDestroy": (_HANDLE,)}

_recording = threading.Lock()


class Graph:
    """What ``launch`` puts onto a stream, to be put onto others of the device."""

    def __init__(self, device: torch.device, launch: Callable[[int], object]) -> None:
        graph, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        with _recording:
            stream = _stream(device)
            # Other threads may do what they like meanwhile.
            _driver("cuStreamBeginCapture_v2")(stream, RELAXED)
            try:
                launch(stream.value or 0)
            finally:
                _driver("cuStreamEndCapture")(stream, ctypes.byref(graph))
        _driver("cuGraphInstantiateWithFlags")(ctypes.byref(self._handle), graph, 0)
        _driver("cuGraphDestroy")(graph)
        self._launch = _driver("cuGraphLaunch")
        weakref.finalize(self, _driver("cuGraphExecDestroy"), self._handle).atexit = False

    def __call__(self, stream: int, *_: object) -> None:
        self._launch(self._handle, stream)


class Replays:
    """By the addresses of a call's tensors its steps with graphs in them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = Kept(REMEMBERED)
        self._known: dict[tuple[int, ...], list[Any]] = {}
        self._most = MOST

    def of(self, begins: tuple[int, ...], make: Callable[[], list[Any]]) -> list[Any] | None:
        """Those of ``begins``, which ``make`` makes; None where they were not seen often enough, or too many others were."""
        found = self._known.get(begins)
        if found is None and len(self._known) < self._most:
            self._seen[begins] = seen = self._seen.get(begins, 0) + 1
            if seen >= SIGHTS:
                try:
                    found = self._known[begins] = make()
                except RuntimeError:
                    # A driver that takes no such launches into a graph: they stay as they are.
                    self._most = 0
        return found


def joined(steps: Sequence[Any], launches: Sequence[bool], join: Callable[[list[Any]], Any]) -> list[Any]:
    """``steps`` with one, which ``join`` makes, in place of those that are launches and follow one another."""
    found: list[Any] = []
    for is_launch, run in groupby(zip(steps, launches), itemgetter(1)):
        of_run = [step for step, _ in run]
        found += [join(of_run)] if is_launch else of_run
    return found


@lru_cache
def _stream(device: torch.device) -> ctypes.c_void_p:
    """On which graphs are recorded; nothing runs there, and nobody else has it."""
    stream = ctypes.c_void_p()
    _driver("cuStreamCreate")(ctypes.byref(stream), NON_BLOCKING)
    return stream


@lru_cache
def _driver(name: str) -> Callable[..., int]:
    """A function of CUDA's driver, which raises what it finds wrong."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = _ARGUMENTS[name]
    function.errcheck = _check
    return function


def _check(error: int, function: Any, arguments: tuple) -> int:
    if error:
        raise RuntimeError(f"{function.__name__} failed with CUDA's error {error}")
    return error
