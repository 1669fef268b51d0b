"""What the device does during a call: attention, linear layers, what is between them, and exchanges, by the names of its kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

# The first pattern that a kernel's name has decides; all others attend.
KINDS = {"exchange": r"nccl", "linear": r"gemm|nvjet|cutlass|xmma|splitK|cublas",
         "pointwise": r"^triton_(poi|per|red|for)|at::native|^Mem(cpy|set)|CatArray|elementwise|layer_norm"}
# Within a sparse layer all kernels are attention's, its products too: it begins with the first, and ends with the second.
LAYER = re.compile(r"^_(gather|keys)_"), re.compile(r"^_take_kernel")


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, milliseconds) of each kernel of ``call``, in the order in which they ran; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        call()
        torch.cuda.synchronize()
    events = [event for event in run.events() if not str(event.device_type).endswith("CPU") and not event.name.startswith("nccl:")]
    return [(event.name, event.time_range.elapsed_us() / 1e3) for event in sorted(events, key=lambda event: event.time_range.start)]


def largest(kernels: Iterable[tuple[str, float]], number: int) -> list[tuple[str, float]]:
    """The ``number`` names with the most milliseconds in all."""
    found: Counter[str] = Counter()
    for name, ms in kernels:
        found[name] += ms
    return found.most_common(number)


def summed(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds of each kind, of kernels' names and times in the order in which they ran; nothing of no kernels."""
    found: dict[str, float] = {}
    inside = False
    for name, ms in kernels:
        inside = inside or bool(LAYER[0].match(name))
        found = found or dict.fromkeys(("attention", *KINDS), 0.0)
        found[kind_of(name, inside)] += ms
        inside = inside and not LAYER[1].match(name)
    return found


def kind_of(name: str, inside: bool) -> str:
    """The kind of a kernel, ``inside`` a sparse layer or not."""
    kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "attention")
    return "attention" if inside and kind != "exchange" else kind
