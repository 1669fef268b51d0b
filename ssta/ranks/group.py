"""The ranks that share a sequence: which group they form, and that all of them were given the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from .world import may_wait

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# By the first of some groups, and by the names of the others, what their ranks agree on. Nothing in it holds a group.
_AGREED: WeakKeyDictionary[ProcessGroup, dict[tuple[str, ...], Agreement]] = WeakKeyDictionary()
FACTS_KEPT = 1024


def resolve_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """``group`` as a process group that this process belongs to; None = the default group.

    Raises:
        TypeError: neither a ProcessGroup nor a DeviceMesh.
        ValueError: torch.distributed is not initialised, a mesh of more than one dimension, or a group of other processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must come after torch.distributed.init_process_group, as torchrun's programs call it, got no initialised "
                         "torch.distributed")
    if group is None:
        group = dist.group.WORLD
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError("group must hold this process, got a group of other processes")
    if not isinstance(group, dist.ProcessGroup):
        if not is_mesh(group):
            raise TypeError(f"group must be a torch.distributed ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}")
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, such as mesh['ulysses'], got {group.ndim} dimensions")
        group = group_of(group, 0)
    if dist.get_rank(group) < 0:
        raise ValueError("group must hold this process, got a group of other processes")
    return group


def group_of(mesh: DeviceMesh, dimension: int) -> ProcessGroup:
    """The ranks of ``mesh`` along ``dimension`` that this process belongs to; ValueError where it belongs to none."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"group must hold this process, got a DeviceMesh of the processes {mesh.mesh.tolist()}")
    return mesh.get_group(dimension)


def groups_of(group: ProcessGroup | DeviceMesh | None) -> tuple[ProcessGroup, ...]:
    """``group`` as ``settle`` takes it: one group, or those of a mesh's two dimensions, the last one first; raises as ``resolve_group``."""
    if is_mesh(group) and group.ndim == 2:
        return group_of(group, 1), group_of(group, 0)
    return (resolve_group(group),)


def is_mesh(group: object) -> TypeGuard[DeviceMesh]:
    """Whether it is a DeviceMesh, which a torch without distributed does not have."""
    return dist.is_available() and isinstance(group, dist.DeviceMesh)


def check_ranks(group: ProcessGroup | DeviceMesh | None, **facts: object) -> None:
    """That all ranks of ``group`` were given the same facts. A collective that waits for every rank: for the start of a generation or for
    finding a mistake, not for every layer.

    Args:
        group: None = the default group.
        facts: by the name that the error gives them, plain values: numbers, strings, tuples, a TokenLayout, an SSTAConfig. Functions count
            by their names, tensors by shape and dtype.

    Raises:
        ValueError: on all ranks, what differs and how.
    """
    agree((resolve_group(group),), None, facts)


def agree(groups: Sequence[ProcessGroup], error: TypeError | ValueError | None, facts: dict[str, object]) -> None:
    """Raises on every rank what went wrong on one of them: its ``error``, or facts that are not the same.

    Args:
        groups: one, or those of a mesh's dimensions, the last dimension first.
    """
    mine = None if error is None else (isinstance(error, TypeError), str(error)), {name: told(value) for name, value in facts.items()}
    everyone: list[Any] = [mine]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sum(gathered, [])
    for rank, (failed, _) in enumerate(everyone):
        if failed is not None:
            kind = TypeError if failed[0] else ValueError
            raise kind(f"on rank {rank}: {failed[1]}") from error
    for name in dict.fromkeys([name for _, given in everyone for name in given]):
        values = [given.get(name, "nothing") for _, given in everyone]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(f"{name} must be the same on all ranks, got {values[0]} on rank 0 and {value} on rank {rank}")


class Agreement:
    """What the ranks of some groups have found to be the same on all of them. They fill it alike, because they compare together."""

    def __init__(self) -> None:
        # All that a rank knows of a call, by which it finds the call again; and by the facts that were compared, which of these they cover.
        self._calls: set[Hashable] = set()
        self._facts: OrderedDict[tuple, list[Hashable]] = OrderedDict()
        self._sequences: set[Hashable] = set()

    def settle(self, groups: Sequence[ProcessGroup], call: Hashable, sequence: Hashable, check: Callable[[], dict[str, object]]) -> None:
        """As the function ``settle``, which see."""
        if call in self._calls:
            return
        error: TypeError | ValueError | None = None
        facts: dict[str, object] = {}
        try:
            facts = check()
        except (TypeError, ValueError) as found:
            if sequence in self._sequences or sequence is None and self._sequences:
                raise
            error = found
        key = tuple(facts.items())
        if error is not None or key not in self._facts:
            agree(groups, error, facts)
            self._facts[key] = []
            if len(self._facts) > FACTS_KEPT:
                # The oldest, which is the same on all ranks.
                self._calls.difference_update(self._facts.popitem(last=False)[1])
        if call is not None:
            self._calls.add(call)
            self._facts[key].append(call)
        self._sequences.add(sequence)


def settle(groups: Sequence[ProcessGroup], call: Hashable, sequence: Hashable, check: Callable[[], dict[str, object]]) -> None:
    """Sees to it that a call was checked, and that all ranks make it with the same facts. The first time that facts come up, every rank
    says what its check came to, which waits for all of them: a rank that raised alone would leave the others waiting for good. Afterwards,
    in a graph and in its capture, each rank looks for itself; so does one whose check fails for a sequence that was agreed on before.

    Args:
        groups: the ranks: one group, or those of a mesh's dimensions, the last dimension first.
        call: plain values; the same again are neither checked nor compared. None = never the same.
        sequence: what the ranks share out; None = unknown, because it is wrong.
        check: raises what is wrong, and gives what must be the same on all ranks, by name.

    Raises:
        TypeError, ValueError: what check raises, and facts that differ; where ranks compare, on all of them.
    """
    if not may_wait():
        check()
        return
    known = _AGREED.get(groups[0])
    if known is None:
        known = _AGREED[groups[0]] = {}
    others = tuple([group.group_name for group in groups[1:]])
    found = known.get(others)
    if found is None:
        found = known[others] = Agreement()
    found.settle(groups, call, sequence, check)


def told(value: object) -> str:
    """``value`` in words that are the same in every process."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = [f"{field.name}={told(getattr(value, field.name))}" for field in fields(value) if field.repr]
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{told(key)}: {told(of)}' for key, of in value.items())}}}"
    if isinstance(value, partial):
        return f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
