"""A bounded memory for tensors that follow from plain values alone, so that they are made once and not at every attention call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, wraps

import torch

# How many modes that see every operator are active. Private: where a torch lacks it, a tensor is made and looked at instead.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)


def remember(capacity: int) -> Callable:
    """Decorates ``make(*key)``, a pure function from hashable values to tensors or an object that holds them.

    The ``capacity`` results used last are kept; nobody may write to them. Nothing is kept of a call that torch.compile traces (it becomes
    part of the graph) or that a CUDA graph captures (its memory is the graph's). A kept result that a capture reads stays for good,
    beyond ``capacity``: the captured graph goes on reading its memory, and nothing says when that graph is freed. They are as many as
    there are layouts and configurations that graphs were captured with.
    """

    def decorate(make: Callable) -> Callable:
        kept: OrderedDict = OrderedDict()
        held_by_graphs: dict = {}
        lock = threading.Lock()

        @wraps(make)
        def remembered(*key):
            if traced():
                return make(*key)
            capturing = captured()
            with lock:
                result = kept.get(key)
                if result is not None:
                    kept.move_to_end(key)
                elif held_by_graphs:
                    result = held_by_graphs.get(key)
                if result is not None:
                    if capturing:
                        held_by_graphs[key] = result
                    return result
            # A tensor made in inference mode could not be saved for a later backward pass.
            with torch.inference_mode(False), torch.no_grad():
                result = make(*key)
            if not capturing:
                with lock:
                    kept[key] = result
                    while len(kept) > capacity:
                        kept.popitem(last=False)
            return result

        # For tests, which look at what is kept.
        remembered.kept = kept  # type: ignore[attr-defined]
        return remembered

    return decorate


def remember_plain(make: Callable) -> Callable:
    """Decorates ``make(*key)``, a pure function from plain values to an immutable object without tensors; 64 results are kept.

    Values that are equal but of other types, such as 1 and True, are different keys; what cannot be hashed is made anew.
    """
    kept = lru_cache(maxsize=64, typed=True)(make)

    @wraps(make)
    def remembered(*key):
        if torch.compiler.is_compiling():
            return make(*key)
        try:
            return kept(*key)
        except TypeError:
            return make(*key)

    return remembered


def traced() -> bool:
    """Whether tensors made now belong to a graph that torch.compile traces, or are of a mode's own kind (FakeTensor, say)."""
    if torch.compiler.is_compiling():
        return True
    return (_modes is None or _modes() > 0) and type(torch.empty(0)) is not torch.Tensor


def captured() -> bool:
    """Whether a CUDA graph records what the device does now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
