"""The ranks that share a sequence: which group they form."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        if not isinstance(group, dist.DeviceMesh):
            raise TypeError(f"group must be a torch.distributed ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}")
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, such as mesh['ulysses'], got {group.ndim} dimensions")
        if group.get_coordinate() is None:
            raise ValueError(f"group must hold this process, got a DeviceMesh of the processes {group.mesh.tolist()}")
        group = group.get_group(0)
    if dist.get_rank(group) < 0:
        raise ValueError("group must hold this process, got a group of other processes")
    return group
