"""What the hosts and the devices of several ranks do while a layer runs: who waits for whom."""

from __future__ import annotations

from itertools import pairwise

import torch
from measure import NO_TIMES
from shapes import LayerShape
from shared_layer import SharedLayer
from torch.profiler import ProfilerActivity, profile, record_function
from world import World

# Layers one after the other, as in a model: a host that waits for the device shows at the latest in the second.
LAYERS = 3
# Among the events of a host, what begins with one of these is a call to the device's driver or runtime.
RUNTIME = ("cuda", "cu", "hip")


def record(world: World, shape: LayerShape, ranks: int) -> list[dict]:
    """Rows of all events of the first ``ranks``; microseconds from when the devices had met."""
    call = world.attempt(lambda: SharedLayer(world, shape, "none").call(ranks), ranks)
    world.attempt(lambda: _profiled(world, call, ranks), ranks)  # where kernels compile, and the profiler starts up
    events = world.attempt(lambda: _profiled(world, call, ranks), ranks)
    return [dict(rank=rank, lane=lane, name=name, start_us=start, end_us=end) for rank, of in enumerate(world.gather(events)) if of
            for lane, name, start, end in of]


def _profiled(world: World, call, ranks: int) -> list[tuple[str, str, float, float]]:
    gpu = world.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as run:
        world.meet(ranks)
        with record_function("layers"):
            for _ in range(LAYERS):
                call()
        if gpu:
            torch.cuda.synchronize()
    events = sorted(run.events(), key=lambda event: event.time_range.start)
    on_device = [event for event in events if is_device(event)]
    # Meeting is the first collective, which ends everywhere at the same time.
    met = next((event for event in (on_device or events) if "allreduce" in event.name.lower().replace("_", "")), None)
    origin = met.time_range.end if met else events[0].time_range.start
    on_host = [event for event in events if str(event.device_type).endswith("CPU")]
    inside = next(event for event in on_host if event.name == "layers").time_range
    host = [event for event in on_host if event.name != "layers" and inside.start <= event.time_range.start <= inside.end
            and (event.name.startswith(RUNTIME) if gpu else event.cpu_parent is None or event.cpu_parent.name == "layers")]
    device = [event for event in on_device if event.time_range.start >= origin]
    return [(lane, event.name[:80], event.time_range.start - origin, event.time_range.end - origin)
            for lane, of in (("device", device), ("host", host)) for event in of]


def is_device(event) -> bool:
    """Whether it is a kernel or a copy, not what somebody calls a stretch of them."""
    named = getattr(event, "is_user_annotation", False) or event.name.startswith("nccl:")
    return not named and not str(event.device_type).endswith("CPU")


def summary(events: list[dict]) -> dict[str, object]:
    """The longest that a device is idle between its first and its last kernel, and how often hosts wait."""
    idle, ahead = [], []
    for rank in sorted({event["rank"] for event in events}):
        lanes = {lane: sorted((event["start_us"], event["end_us"]) for event in events if (event["rank"], event["lane"]) == (rank, lane))
                 for lane in ("device", "host")}
        if lanes["device"] and lanes["host"]:
            idle.append(sum(gaps(lanes["device"])))
            ahead.append(lanes["device"][-1][1] - lanes["host"][-1][1])
    waits = [event["name"] for event in events if event["lane"] == "host" and is_wait(event["name"])]
    note = f"{LAYERS} layers; hosts wait for the device {len(waits)} times{' in ' + ', '.join(sorted({*waits})) if waits else ''}"
    if ahead:
        note += f", and have started all work {min(ahead) / 1e3:.2f} ms or more before it is done"
    return {**NO_TIMES, "median_ms": max(idle) / 1e3 if idle else "", "note": note}


def gaps(spans: list[tuple[float, float]]) -> list[float]:
    """How long nothing runs, of (start, end) in the order of their starts."""
    ends = [max(end for _, end in spans[:i + 1]) for i in range(len(spans))]
    return [max(0.0, following[0] - end) for end, (_, following) in zip(ends, pairwise(spans))]


def is_wait(name: str) -> bool:
    """Whether a call of the runtime keeps the host until the device is done."""
    return "Synchronize" in name or name in ("cudaMemcpy", "cudaMemset", "cudaFree", "cudaMalloc")
