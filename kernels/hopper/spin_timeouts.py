"""How often a deterministic backward gave up waiting for its place in the order of dQ: counted by the kernel, warned of once, never in
silence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..notices import warn_once

_MESSAGE = (
    "a deterministic backward of block_sparse_attention on {} waited too long for its place in the order of additions to q's gradient and "
    "went on without it, {} times so far: the gradient is right, but its last bits may differ from run to run. A list that names a block "
    "twice does that (BlockLists.check_values finds it), or a GPU that is shared with something that stops it for seconds."
)


# An int32 of each device, in pinned memory, so that the kernel adds to it there and the host reads it without a copy or a wait. Made by the
# first backward, which compiles the kernel and so cannot be in the capture of a CUDA graph.
_counters: dict[int, Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """int32 [1] for the kernel to add to; warns, once a process, if earlier backwards have done so already."""
    found = _of(device)
    times = int(found)
    if times:
        warn_once("hopper spin timeouts", _MESSAGE.format(device, times))
    return found


def _of(device: torch.device) -> Tensor:
    index = -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
    found = _counters.get(index)
    if found is None:
        found = _counters.setdefault(index, torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=index >= 0))
    return found


def spin_timeouts(device: torch.device | str | int) -> int:
    """How many times in this process a partition of a deterministic backward on ``device`` gave up waiting. Synchronises the device."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return int(_of(device))
