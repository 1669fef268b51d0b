"""Team: the processes that generate the clips of one comparison together, of which the first decides, measures and writes."""

from __future__ import annotations

import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ..ranks.parallel import make_whole, share_out, shared_by, stock_shares

_T = TypeVar("_T")
# Between two looks at whether another rank has answered.
_PAUSE = 0.002


class OtherRankError(RuntimeError):
    """What went wrong on another rank than this one."""


class Team:
    """The ranks that share a pipeline's transformers; one process alone where nobody does.

    Ranks tell one another what they found through the process group's store, not through its collectives: that has no time limit, so the
    others can wait while the first one decodes and measures, and a rank that fails can say so to those that wait for it there. One that
    fails in the middle of a forward leaves the others in their exchange, as everywhere: it raises, and whoever started the processes ends
    them, as torchrun does.

    Args:
        models: (name, transformer) of the pipeline, all of them parallel over the same ranks or none.

    Attributes:
        rank, size: of this process, and how many there are.

    Raises:
        ValueError: models that are parallel in another way than by SSTA's plan for context parallelism, or not all over the same ranks.
    """

    def __init__(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        self._models, self._config = models, shared_by(models)
        self.rank, self.size = 0, 1
        self._said = 0
        # What this rank said since all others were known to have heard it.
        self._unheard: list[str] = []
        if self._config is None:
            return
        self.group = self._config.context_parallel_config._flattened_mesh.get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        # A name of its own, so that messages of an earlier comparison are not taken for its.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=self.group, group_src=0)
        self._store: Any = dist.PrefixStore(f"ssta.compare/{name[0]}", dist.distributed_c10d._get_default_store())

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that decides, measures and writes."""
        return self.rank == 0

    def first(self, work: Callable[[], _T]) -> _T:
        """What ``work`` returns on the first rank, which alone does it; on all ranks, through pickle.

        Raises:
            OtherRankError: it raised there, for the others.
        """
        if self.size == 1:
            return work()
        self._said += 1
        key = str(self._said)
        if not self.is_first:
            return self._hear(key)
        value = self._attempt(work)
        self._say(key, value)
        return value

    def together(self, work: Callable[[], _T]) -> list[_T]:
        """What ``work`` returns on every rank, by rank; all do it, and wait for all.

        Raises:
            OtherRankError: it raised on another rank.
        """
        if self.size == 1:
            return [work()]
        self._said += 1
        key = str(self._said)
        value = self._attempt(work)
        earlier, self._unheard = self._unheard, []
        self._say(f"{key}/{self.rank}", value)
        found = [self._hear(f"{key}/{rank}") for rank in range(self.size)]
        # Whoever said this had heard all before it.
        for name in earlier:
            self._store.delete_key(name)
        return found

    def _say(self, key: str, value: object) -> None:
        self._unheard.append(key)
        self._store.set(key, pickle.dumps(value))

    def _attempt(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except BaseException as error:
            if not isinstance(error, OtherRankError):
                self._store.set("failed", f"on rank {self.rank}: {type(error).__name__}: {error}")
            raise

    def _hear(self, key: str) -> Any:
        while not self._store.check([key]):
            if self._store.check(["failed"]):
                raise OtherRankError(self._store.get("failed").decode())
            time.sleep(_PAUSE)
        return pickle.loads(self._store.get(key))

    def ranks(self, stock: bool, backend: str | None) -> int:
        """On how many ranks a forward runs: on one, whole on each of them, where the models' own processors cannot share it.

        Args:
            stock: whether it runs without SSTA.
            backend: diffusers' attention backend; None = the models' own.
        """
        return 1 if stock and not all(stock_shares(model, backend) for _, model in self._models) else self.size

    @contextmanager
    def sharing(self, ranks: int) -> Iterator[None]:
        """The models on that many ranks, as ``ranks()`` has it, until the end of the ``with``."""
        if ranks == self.size:
            yield
            return
        configs = [make_whole(model) for _, model in self._models]
        try:
            yield
        finally:
            for (_, model), config in zip(self._models, configs):
                share_out(model, config)

    @contextmanager
    def starting_together(self) -> Iterator[None]:
        """The first forward of any of the models waits until every rank has come to its own, so that no rank's time holds what others
        did before."""
        met: list[bool] = []

        def meet(model: nn.Module, args: tuple, kwargs: dict) -> None:
            if met:
                return
            met.append(True)
            for device in {x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_cuda}:
                torch.cuda.synchronize(device)
            self.together(lambda: None)

        hooks: list[Any] = []
        if self.size > 1:
            # Before SSTA's, in which ranks already talk to one another.
            hooks += [model.register_forward_pre_hook(meet, with_kwargs=True, prepend=True) for _, model in self._models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# Processes that torchrun started


def world() -> tuple[int, int]:
    """(rank of this process, how many torchrun started); (0, 1) without it."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)


@contextmanager
def process_group() -> Iterator[None]:
    """torchrun's processes as one group, over NCCL with a GPU each, or gloo where there are none; until the end of the ``with``, unless an
    exception ends it, because others may still be in a collective then. Does nothing without torchrun.

    Raises:
        ValueError: more processes than GPUs.
    """
    if world()[1] == 1:
        yield
        return
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"--nproc-per-node must be at most the number of GPUs here, {gpus}, got at least {local + 1}")
        torch.cuda.set_device(local)
    elif os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # A machine's own name need not lead back to it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    began = not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    yield
    if began:
        dist.destroy_process_group()


def share_over_world(models: Sequence[tuple[str, nn.Module]]) -> None:
    """Shares the models out over all of torchrun's processes, any number of tokens and, under SSTA, of heads; does nothing without it.

    Raises:
        ValueError: a model that is not supported, or whose family says nothing of several ranks.
    """
    rank, size = world()
    if size == 1:
        return
    # As `enable_parallelism` does, which fails where there are no GPUs.
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)
    context = ContextParallelConfig(ulysses_degree=size, ulysses_anything=True)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(rank, size, device, mesh=init_device_mesh(kind, context.mesh_shape, mesh_dim_names=context.mesh_dim_names))
    for _, model in models:
        share_out(model, config)


def quit_last(message: str) -> NoReturn:
    """Ends a process that is not the first one. What all ranks found the first one says too, and torchrun then ends the others: so this
    waits a little before it says what may have gone wrong here alone."""
    time.sleep(3)
    print(f"rank {world()[0]}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
