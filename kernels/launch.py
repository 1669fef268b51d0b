"""Launch configurations as data: how many rows and keys a program takes, with how many warps and stages, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

HOPPER_SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class LaunchConfig:
    """``block_m`` query rows and ``block_n`` keys per step, powers of two from 16; ``num_stages`` loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.


def forward_config(head_dim: int, q_block: int, kv_block: int, shared_memory: int) -> LaunchConfig:
    """The forward's. ``q_block`` and ``kv_block`` are the longest blocks in tokens, ``shared_memory`` the bytes a program may use.

    128 x 128 with 8 warps: 14.9 ms, against 18.1 for 128 x 64 and 16.1 for 64 x 64 with 4 warps; two stages instead of three: 15.2.
    """
    return _fit(LaunchConfig(128, 128, 8, 3), head_dim, q_block, kv_block, shared_memory, stationary=1)


def dq_config(head_dim: int, q_block: int, kv_block: int, shared_memory: int) -> LaunchConfig:
    """The one of dQ, which holds q and dO and streams K and V: 16.0 ms; 128 x 64 takes 18.1, 64 x 64 with 4 warps 16.7."""
    return _fit(LaunchConfig(128, 128, 8, 3), head_dim, q_block, kv_block, shared_memory, stationary=2)


def dkv_config(head_dim: int, q_block: int, kv_block: int, shared_memory: int) -> LaunchConfig:
    """The one of dK and dV, which holds K and V and streams q and dO: 64 queries by 128 keys take 24.7 ms, 64 x 64 with 4 warps 26.2,
    32 x 128 34.5."""
    fitted = _fit(LaunchConfig(128, 64, 8, 3), head_dim, kv_block, q_block, shared_memory, stationary=2)
    return LaunchConfig(fitted.block_n, fitted.block_m, fitted.num_warps, fitted.num_stages)


def _fit(config: LaunchConfig, head_dim: int, rows: int, streamed_block: int, limit: int, stationary: int) -> LaunchConfig:
    """Shrinks a configuration until its tiles are no longer than the pattern's blocks and fit in shared memory.

    ``stationary`` tiles of ``block_m`` rows stay for the whole program; two tiles of ``block_n`` rows are streamed.
    """
    m, n, stages = _step(rows, config.block_m), _step(streamed_block, config.block_n), config.num_stages
    dim = max(16, 1 << (head_dim - 1).bit_length())

    def bytes_used() -> int:
        # Triton 3.6 keeps two copies of a streamed tile for up to three stages; read off the compiled kernels.
        copies = max(2, stages - 1) if stages > 1 else 1
        return 2 * dim * (stationary * m + copies * 2 * n) + 2048

    while bytes_used() > limit and n > 32:
        n //= 2
    while bytes_used() > limit and m > 32:
        m //= 2
    if bytes_used() > limit:
        stages = 1
    # A warp multiplies 16 rows; fewer than 128 rows do not feed eight of them.
    return LaunchConfig(m, n, config.num_warps if m >= 128 else 4, stages)


def _step(block: int, largest: int) -> int:
    """The tokens taken at once from a block: the largest power of two that wastes little of it."""
    if block % largest == 0 or block > 4 * largest:
        return largest
    step = max(16, min(largest, 1 << (block - 1).bit_length()))
    while step > 64 and -(-block // step) * step > 1.15 * block:
        step //= 2
    return step


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; Hopper's where there is no GPU to ask (Triton's interpreter)."""
    return _shared_memory(device.index if device.index is not None else torch.cuda.current_device()) if device.type == "cuda" else HOPPER_SHARED_MEMORY


@lru_cache
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
