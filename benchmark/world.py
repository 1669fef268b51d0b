"""The processes that a benchmark of several ranks consists of: who they are, how they agree, and how a call of the first few is timed."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from measure import failure, milliseconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A collective whose other ranks do not come ends so soon; what ranks tell one another waits for the longest piece of work of one of them.
COLLECTIVE, AGREEMENT = timedelta(seconds=60), timedelta(seconds=150)


class Elsewhere(Exception):
    """What went wrong on one of the ranks, raised on all of them."""


@dataclass(frozen=True)
class OnRanks:
    """A call that the first ``ranks`` ranks make together while the others wait."""

    ranks: int
    call: Callable[[], object]

    def __call__(self) -> object:
        return self.call()


class World:
    """All ranks of a program that torchrun started.

    Ranks tell one another what they found through torchrun's store, not through the devices: that works where a device does not, and no
    rank can take such words for another collective.

    Attributes:
        rank, size: of this process, and how many there are.
        device: this process' own.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store, self._section, self._said = store, 0, 0
        self._start = time.monotonic()
        self._meshes: dict[int, DeviceMesh] = {}
        self._zero = torch.zeros(1, device=device)

    @classmethod
    def start(cls) -> World:
        """Ends the program where torchrun did not start it, or started more processes than there are GPUs."""
        if "RANK" not in os.environ:
            raise SystemExit("bench_parallel.py must be started by torchrun: torchrun --nproc-per-node=2 benchmark/bench_parallel.py")
        local, gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
        if gpu and local >= torch.cuda.device_count():
            raise SystemExit(f"--nproc-per-node must be at most the {torch.cuda.device_count()} GPUs here, got at least {local + 1}")
        device = torch.device("cuda", local) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(device)
        elif os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # A machine's own name need not lead back to it.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=AGREEMENT)))
        store.set_timeout(AGREEMENT)
        # With a device the communicator is made here and now, and others are split off from it.
        dist.init_process_group("nccl" if gpu else "gloo", store=dist.PrefixStore("groups", store), rank=rank, world_size=size,
                                timeout=COLLECTIVE, device_id=device if gpu else None)
        return cls(dist.PrefixStore("benchmark", store), rank, size, device)

    def end(self) -> None:
        """Waits for all, and takes the process group down."""
        self.section(torch.cuda.synchronize if self.device.type == "cuda" else lambda: None)
        dist.destroy_process_group()

    # What ranks tell one another

    def gather(self, value: Any) -> list:
        """``value`` of every rank, within a section. The host waits for all of them, the device for none.

        Raises:
            Elsewhere: a rank has left the section.
        """
        self._said += 1
        return self._gather(f"{self._section}/{self._said}", value, f"{self._section}/failed")

    def _gather(self, key: str, value: Any, failed: str | None = None) -> list:
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        found = []
        for rank in range(self.size):
            name, end = f"{key}/{rank}", time.monotonic() + AGREEMENT.total_seconds()
            while failed and not self._store.check([name]) and time.monotonic() < end:
                if self._store.check([failed]):
                    raise Elsewhere(self._store.get(failed).decode())
                time.sleep(0.0005)
            found.append(pickle.loads(self._store.get(name)))
        return found

    def section(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, which all ranks do together.

        Raises:
            Elsewhere: on every rank, what the first to fail raised. They can go on with another section.
        """
        self._section, self._said = self._section + 1, 0
        result, error = None, ""
        try:
            result = work()
        except (Exception, SystemExit) as found:
            error = self._told(found)
            self._store.set(f"{self._section}/failed", error)
        self._raise_first(self._gather(f"{self._section}/end", error))
        return result

    def attempt(self, work: Callable[[], Any], ranks: int | None = None) -> Any:
        """What ``work`` returns; the first ``ranks`` do it together, the others get None.

        Raises:
            Elsewhere: on every rank, what one of them raised.
        """
        result, error = None, ""
        try:
            if self.rank < (ranks or self.size):
                result = work()
        except (Exception, SystemExit) as found:
            error = self._told(found)
        self._raise_first(self.gather(error))
        return result

    def _told(self, error: BaseException) -> str:
        if isinstance(error, Elsewhere):
            return str(error)
        return f"rank {self.rank}: {failure(error).removeprefix('failed: ')}"

    def _raise_first(self, errors: list[str]) -> None:
        for error in errors:
            if error:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                raise Elsewhere(error)

    def seconds(self) -> float:
        """Since the start, by the clock of rank 0."""
        return self.gather(self.own_seconds())[0]

    def own_seconds(self) -> float:
        return time.monotonic() - self._start

    # Groups

    def counted(self) -> AbstractContextManager:
        """Within it diffusers can divide ranks by the number of accelerators, of which a CPU has none."""
        return nullcontext() if self.device.type == "cuda" else patch.object(torch.accelerator, "device_count", lambda: 1)

    def mesh(self, ranks: int) -> DeviceMesh:
        """Dimensions "other", "ring" and "ulysses", as diffusers names them, the last of ``ranks``; all ranks must ask for it in the same
        order.

        Raises:
            ValueError: ranks do not divide the world.
        """
        if ranks not in self._meshes:
            if self.size % ranks:
                raise ValueError(f"a mesh of {ranks} ranks must divide the {self.size} there are")
            self._meshes[ranks] = init_device_mesh(self.device.type, (self.size // ranks, 1, ranks),
                                                   mesh_dim_names=("other", "ring", "ulysses"))
        return self._meshes[ranks]

    def group(self, ranks: int) -> dist.ProcessGroup:
        """Of the first ``ranks``; on the others a group of their own."""
        return self.mesh(ranks).get_group("ulysses")

    def meet(self, ranks: int) -> None:
        """The devices of the first ``ranks`` wait for one another, not the hosts."""
        if ranks > 1:
            dist.all_reduce(self._zero, group=self.group(ranks))

    # Times

    def milliseconds(self, call: OnRanks, wait: float) -> tuple[float, float]:
        """As ``measure.milliseconds``, of the slowest rank; the devices begin together. For ``measure.interleaved(timed=)``."""
        times = self.attempt(lambda: milliseconds(call, wait, lambda: self.meet(call.ranks)), call.ranks)
        device, host = zip(*[of for of in self.gather(times) if of])
        return max(device), max(host)
