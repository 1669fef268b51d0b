"""Steps one after another as one launch of a CUDA graph, in calls whose tensors lie where those of earlier ones lay.

So they may where a model runs the same layers step after step, because torch gives memory that was given back. A graph runs what it was
made of, with the same arguments, so that nothing depends on whether there is one.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..memo import Kept

# Sights of the same addresses before a graph is made of them, how many plans have, and how many addresses are remembered.
SIGHTS, MOST, REMEMBERED = 3, 16, 64
# Fewer steps are no slower by themselves.
LEAST = 3
# Constants of CUDA's driver: how a stream is made, the mode of a capture, and what functions take.
NON_BLOCKING, RELAXED = 1, 2
_HANDLE = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple] = {
    "cuStreamCreate": (_HANDLE, ctypes.c_uint), "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
    "cuStreamEndCapture": (_HANDLE, _HANDLE),
    "cuGraphInstantiateWithFlags": (_HANDLE, _HANDLE, ctypes.c_ulonglong), "cuGraphDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE), "cuGraphExecDestroy": (_HANDLE,)}

_recording = threading.Lock()


class Graph:
    """What ``run`` puts onto the stream that it is called with, to be put onto ``stream`` again and again."""

    def __init__(self, device: torch.device, stream: int, run: Callable[[int], object]) -> None:
        graph, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        with _recording:
            # Its memory is held as long as the graph may be launched.
            self._recorder = recorder = _recorder(device, stream)
            own = recorder.stream.cuda_stream
            with torch.cuda.stream(recorder.stream), torch.cuda.use_mem_pool(recorder.memory, device):
                # Other threads may do what they like meanwhile.
                _driver("cuStreamBeginCapture_v2")(own, RELAXED)
                try:
                    run(own)
                finally:
                    _driver("cuStreamEndCapture")(own, ctypes.byref(graph))
        _driver("cuGraphInstantiateWithFlags")(ctypes.byref(self._handle), graph, 0)
        _driver("cuGraphDestroy")(graph)
        self._launch = _driver("cuGraphLaunch")
        weakref.finalize(self, _driver("cuGraphExecDestroy"), self._handle).atexit = False

    def __call__(self, stream: int, *_: object) -> None:
        self._launch(self._handle, stream)


class Replays:
    """By a call's stream and the addresses of its tensors its steps with graphs in them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = Kept(REMEMBERED)
        self._known: dict[tuple[int, ...], list[Any]] = {}
        self._most = MOST

    def of(self, where: tuple[int, ...], make: Callable[[], list[Any]]) -> list[Any] | None:
        """Those of ``where``, which ``make`` makes; None where they were not seen often enough, or too many others were."""
        found = self._known.get(where)
        if found is None and len(self._known) < self._most:
            self._seen[where] = seen = self._seen.get(where, 0) + 1
            if seen >= SIGHTS:
                try:
                    found = self._known[where] = make()
                except RuntimeError:
                    # A driver that takes no such steps into a graph, or memory that knows no pools: they stay as they are.
                    self._most = 0
        return found


class _Recorder(NamedTuple):
    """What graphs are recorded with that are launched on one stream.

    Attributes:
        stream: on which they are recorded; nothing runs there, and nobody else has it.
        memory: of what functions of torch work in beside their arguments, as cuBLAS does. Graphs share it, because they run one after
            another.
    """

    stream: torch.cuda.Stream
    memory: torch.cuda.MemPool


@lru_cache
def _recorder(device: torch.device, stream: int) -> _Recorder:
    """The recorder of graphs that are launched on ``stream`` of the device, which is the current one."""
    own = ctypes.c_void_p()
    _driver("cuStreamCreate")(ctypes.byref(own), NON_BLOCKING)
    return _Recorder(torch.cuda.ExternalStream(own.value or 0, device), torch.cuda.MemPool())


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
