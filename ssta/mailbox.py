"""Memory that GPUs of one host write into on one another: exchanges without a collective, by copy engines or by the kernels themselves."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .memo import captured

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# As many as are on their way at once: v, k and q. What goes back takes one of them.
SLOTS = 3
# Of each group its mailbox, None where its ranks cannot write to one another.
_FOUND: WeakKeyDictionary[ProcessGroup, Mailbox | None] = WeakKeyDictionary()


class Slot:
    """One piece of symmetric memory: every rank of the group has it, and sees everybody's.

    Its users take turns: nobody writes before all have come to ``opened``, that is, before each device is done with what it held, and
    nobody reads before all have left it.
    """

    def __init__(self, group: ProcessGroup, size: int, device: torch.device) -> None:
        memory: Any = import_module("torch.distributed._symmetric_memory")
        self.busy = False
        self._own = memory.empty((size,), dtype=torch.uint8, device=device)
        self._handle = memory.rendezvous(self._own, group)
        self.size = size

    def on(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a rank has there."""
        return self._handle.get_buffer(rank, shape, dtype)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The current stream waits for all ranks at both ends."""
        self._handle.barrier(channel=0)
        yield
        self._handle.barrier(channel=1)


class Mailbox:
    """The slots of a group's ranks; made by ``Mailbox.of``."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Each rank begins with another one, so that no link is everybody's at once.
        self.order = [(self.rank + step) % self.ranks for step in range(self.ranks)]
        self._group, self._device = group, device
        self._slots: list[Slot | None] = [None] * SLOTS
        self._stream: Any = torch.cuda.Stream(device)

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> Mailbox | None:
        """The group's; None where its GPUs cannot write to one another, in a graph, and off GPUs. The first time waits for all ranks."""
        if device.type != "cuda" or torch.compiler.is_compiling():
            return None
        if group not in _FOUND:
            if captured():
                return None
            _FOUND[group] = cls(group, device) if _reachable(group, device) else None
        return _FOUND[group]

    def take(self, size: int) -> Slot | None:
        """A free slot of at least so many bytes, which is busy until its user says otherwise; None where there is none. All ranks ask for
        the same sizes in the same order. Waits for all of them where larger memory is needed than before."""
        for number, slot in enumerate(self._slots):
            if slot is not None and slot.busy:
                continue
            if slot is None or slot.size < size:
                if captured():
                    return None
                self._slots[number] = None
                # Nobody may still be writing there.
                torch.cuda.synchronize(self._device)
                del slot
                slot = self._slots[number] = Slot(self._group, size, self._device)
            slot.busy = True
            return slot
        return None

    def post(self, slot: Slot, send: Callable[[int], object]) -> torch.cuda.Event:
        """Runs ``send(rank)`` for all ranks beside the current stream's work, after what is in it so far; an event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), slot.opened():
            for rank in self.order:
                send(rank)
        with torch.cuda.stream(self._stream):
            event = torch.cuda.Event()
            event.record()
        return event


def _reachable(group: ProcessGroup, device: torch.device) -> bool:
    """Whether each rank's GPU can write to all others', which are on this host; the same answer on all ranks."""
    usable = dist.get_backend(group) == "nccl" and find_spec("torch.distributed._symmetric_memory") is not None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (usable, socket.gethostname(), device.index), group=group)
    hosts, devices = {host for _, host, _ in everyone}, [index for _, _, index in everyone]
    near = all(ok for ok, _, _ in everyone) and len(hosts) == 1 and len({*devices}) == len(devices) > 1
    near = near and all(index == device.index or torch.cuda.can_device_access_peer(device.index, index) for index in devices)
    dist.all_gather_object(everyone, near, group=group)
    return all(everyone)
