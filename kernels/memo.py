"""What is remembered: a bounded dict, and two decorators of pure functions.

The rule: what is kept can be found again, so every memory is bounded and drops one entry where another comes. Nothing keeps a process
group, a model or a tensor of a caller's. Tensors that a torch.compile trace or a CUDA graph's capture makes belong to the graph and are not
kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, wraps

import torch

# How many modes that see every operator are active. Private: where a torch lacks it, a tensor is made and looked at instead.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)


class Kept(OrderedDict):
    """A dict of at most ``most`` entries: another one takes the place of the one that was used least recently.

    ``get`` and ``[]`` are uses. They are noted from the time on that it is half full; before, a lookup costs little more than a dict's.
    Threads may share one. An entry that a thread has found may be gone at its next lookup.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self._half, self._lock = most, most // 2, threading.Lock()

    def get(self, key, default=None):
        found = dict.get(self, key, default)
        if len(self) > self._half and found is not default:
            self._use(key)
        return found

    def __getitem__(self, key):
        found = dict.__getitem__(self, key)
        if len(self) > self._half:
            self._use(key)
        return found

    def __setitem__(self, key, value) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self.move_to_end(key)
            while len(self) > self.most:
                # Not popitem, which looks its entry up by ``[]``.
                del self[next(iter(self))]

    def _use(self, key) -> None:
        with self._lock:
            try:
                self.move_to_end(key)
            except KeyError:
                pass  # another thread has put something else in its place


def remember(capacity: int) -> Callable:
    """Decorates ``make(*key)``, a pure function from hashable values to tensors or an object that holds them.

    The ``capacity`` results used last are kept; nobody may write to them. Nothing is kept of a call that torch.compile traces (it becomes
    part of the graph) or that a CUDA graph captures (its memory is the graph's). A kept result that a capture reads stays for good, because
    the captured graph goes on reading its memory and does not say when it is gone: a process that captures ever new sequences keeps the
    index tensors of all of them.
    """

    def decorate(make: Callable) -> Callable:
        kept: Kept = Kept(capacity)
        held_by_graphs: dict = {}

        @wraps(make)
        def remembered(*key):
            if traced():
                return make(*key)
            capturing = captured()
            result = kept.get(key)
            if result is None:
                result = held_by_graphs.get(key)
            if result is None:
                # A tensor made in inference mode could not be saved for a later backward pass.
                with torch.inference_mode(False), torch.no_grad():
                    result = make(*key)
                if not capturing:
                    kept[key] = result
            elif capturing:
                held_by_graphs[key] = result
            return result

        # For tests, which look at what is kept.
        remembered.kept = kept  # type: ignore[attr-defined]
        return remembered

    return decorate


def remember_plain(make: Callable) -> Callable:
    """Decorates ``make(*key)``, a pure function from plain values to an immutable object without tensors; 64 results are kept.

    Values that are equal but of other types, such as 1 and True, are different keys; what cannot be hashed is made anew.
    """
    kept = lru_cache(64, typed=True)(make)

    @wraps(make)
    def remembered(*key):
        try:
            return make(*key) if traced() else kept(*key)
        except TypeError:
            return make(*key)

    return remembered


def traced() -> bool:
    """Whether tensors made now belong to a graph that torch.compile traces, or are of a mode's own kind (FakeTensor, say)."""
    if torch.compiler.is_compiling():
        return True
    return (_modes is None or _modes() > 0) and type(torch.empty(0, device="cpu")) is not torch.Tensor


def captured() -> bool:
    """Whether a CUDA graph records what the device does now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
