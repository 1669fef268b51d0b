"""Limits of a GPU: shared memory, multiprocessors, tile loads through descriptors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TypeVar

import torch

Key = TypeVar("Key")
Answer = TypeVar("Answer")
HOPPER_SHARED_MEMORY = 227 * 1024
# By major compute capability, matrix units that read shared memory by themselves while their warps go on. All others multiply what warps
# have in registers (mma.sync), consumer Blackwell (12) among them, which has TMA nevertheless.
_PRODUCTS = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}


@dataclass(frozen=True)
class DeviceLimits:
    """What a GPU has: for one program, and of programs side by side."""

    shared_memory: int        # bytes
    tma: bool                 # loads tiles through descriptors: Hopper and later
    products: str = "mma"     # how it multiplies matrices: "wgmma", "tcgen05", or "mma" for all others
    multiprocessors: int = 1  # one where there is no GPU to ask (Triton's interpreter), so that it runs few programs

    @property
    def asynchronous(self) -> bool:
        """Whether warps go on while a product is computed."""
        return self.products != "mma"


def asked_once(function: Callable[[Key], Answer]) -> Callable[[Key], Answer]:
    """``function`` of a plain value, such as a GPU's number, whose answers are kept, and are constants to a compiler, which does not look
    behind ``lru_cache``."""
    kept = lru_cache(function)

    @wraps(function)
    def answer(key: Key) -> Answer:
        return kept(key)

    # torch.compiler.assume_constant_result does the same, but loads the whole compiler.
    answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return answer


def device_limits(device: torch.device) -> DeviceLimits:
    """Those of ``device``; where there is no GPU to ask (Triton's interpreter) Hopper's."""
    if device.type != "cuda":
        return DeviceLimits(HOPPER_SHARED_MEMORY, tma=True, products="wgmma")
    return _device_limits(torch.cuda.current_device() if device.index is None else device.index)


@asked_once
def _device_limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    if torch.version.hip is not None:
        return DeviceLimits(shared, False, multiprocessors=properties.multi_processor_count)
    return DeviceLimits(shared, properties.major >= 9, _PRODUCTS.get(properties.major, "mma"), properties.multi_processor_count)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU by NVIDIA, such as (9, 0); None for others."""
    if torch.version.hip is not None:
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@asked_once
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def multiprocessors(device: torch.device) -> int:
    """Those of ``device``."""
    return device_limits(device).multiprocessors
