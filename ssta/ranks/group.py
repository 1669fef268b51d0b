"""The ranks that share a sequence: which group they form."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def resolve_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """``group`` as a process group that this process belongs to, after all checks; None = the default group."""
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


def group_named(name: str) -> ProcessGroup:
    """The group of this process that torch.distributed knows by ``name``, its ``group_name``."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
