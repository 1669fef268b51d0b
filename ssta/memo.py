"""A bounded memory for tensors that follow from plain values alone, so that they are made once and not at every attention call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps

import torch


def remember(capacity: int) -> Callable:
    """Decorates ``make(*key)``, a pure function from hashable values to tensors or an object that holds them.

    The ``capacity`` results used last are kept; nobody may write to them. Nothing is kept of a call that torch.compile traces (it becomes
    part of the graph) or that a CUDA graph captures (its memory is the graph's). A kept result that a capture reads stays for good,
    because the captured graph goes on reading its memory.
    """

    def decorate(make: Callable) -> Callable:
        kept: OrderedDict = OrderedDict()
        held_by_graphs: dict = {}
        lock = threading.Lock()

        @wraps(make)
        def remembered(*key):
            if torch.compiler.is_compiling() or _is_fake():
                return make(*key)
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            with lock:
                result = held_by_graphs[key] if key in held_by_graphs else kept.get(key)
                if result is not None:
                    if capturing:
                        held_by_graphs[key] = result
                    elif key in kept:
                        kept.move_to_end(key)
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

        remembered.kept = kept
        return remembered

    return decorate


def _is_fake() -> bool:
    """Whether tensors made now would be of a dispatch mode's own kind (FakeTensor, say) instead of plain ones."""
    return type(torch.empty(0)) is not torch.Tensor
