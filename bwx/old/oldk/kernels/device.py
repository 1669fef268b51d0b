"""What a GPU offers: shared memory, multiprocessors, tile loads through descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

HOPPER_SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class DeviceLimits:
    """What a GPU offers to one program."""

    shared_memory: int  # bytes
    tma: bool           # loads tiles through descriptors: Hopper and later
    name: str = ""      # what torch calls the GPU, "" where there is none

    def five_stages(self, head_dim: int) -> bool:
        """Whether five stages of 64 keys fit beside 128 rows, through TMA."""
        return self.tma and self.shared_memory >= HOPPER_SHARED_MEMORY and head_dim <= 128


def device_limits(device: torch.device) -> DeviceLimits:
    """Those of ``device``; where there is no GPU to ask (Triton's interpreter) Hopper's."""
    if device.type != "cuda":
        return DeviceLimits(HOPPER_SHARED_MEMORY, tma=True)
    return _device_limits(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _device_limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return DeviceLimits(shared, torch.version.hip is None and properties.major >= 9, properties.name)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU by NVIDIA, such as (9, 0); None for others."""
    if torch.version.hip is not None:
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def multiprocessors(device: torch.device) -> int:
    """Those of ``device``; where there is no GPU to ask (Triton's interpreter) one, so that it runs few programs."""
    if device.type != "cuda":
        return 1
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
