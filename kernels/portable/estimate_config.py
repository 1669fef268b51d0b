"""How the estimate's kernels are launched: the tiles that they multiply, warps and stages as data, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..device import DeviceLimits
from .config import LaunchConfig

# For head_dims up to 64 and up to 128, float16 and bfloat16. Keys, moments: block_m columns of the result, block_n tokens at once.
# The products of masses and merge have block_m queries and block_n units.
_TABLE = {
    # At head_dim 128 measured on an H200 at 360 blocks of up to 384 tokens; few warps with much to do each, and room for several programs.
    # One stage in "keys" and "order": with loads in flight Triton 3.6 overwrites what a wgmma still reads, of keys that are summed in
    # registers too; sums then differ from run to run. "keys": 0.35 ms, 32 tokens 0.38, 8 warps 0.50, of 128 registers 0.38.
    "keys": (LaunchConfig(64, 64, 4, 1), LaunchConfig(128, 64, 4, 1)),
    "moments": (LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 64, 4, 2)),
    "covariances": (LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 4)),
    # As many tokens as registers hold beside the matrix: each time the program waits for them.
    "order": (LaunchConfig(64, 128, 4, 1), LaunchConfig(128, 128, 4, 1)),
    # 16 heads of 960 blocks of 116 tokens: 0.77 ms, with more registers 1.20, with 4 warps 0.79; of 360 of 310 0.27, 0.41 and 0.26.
    "mass": (LaunchConfig(128, 64, 8, 2, registers=128), LaunchConfig(128, 64, 8, 2, registers=128)),
    # The same: 128 x 32 with 4 warps 3.96 ms, but without covariances they spill; 64 x 64 4.36, 128 x 64 with 8 warps 4.55.
    "merge": (LaunchConfig(128, 32, 8, 2), LaunchConfig(128, 32, 8, 2)),
}
# Tiles that fit any GPU, for head_dims above 128, and for float32, which is multiplied without tensor cores.
_WIDE = LaunchConfig(32, 32, 8, 1)


@lru_cache
def estimate_config(kernel: str, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> LaunchConfig:
    """The one of ``kernel``, a key of the table."""
    if head_dim > 128 or dtype == torch.float32:
        return _WIDE
    config = _TABLE[kernel][head_dim > 64]
    # Before Hopper what is multiplied goes through registers, of which four warps, and any where they are limited, have too few.
    if limits.shared_memory < 200 << 10:
        config = replace(config, num_warps=8 if head_dim > 64 and kernel in ("keys", "order") else config.num_warps, registers=None)
    # Beside 128 x 128 and two stages of 64 x 128 there is no room for a third in 99 KiB.
    if limits.shared_memory < 160 << 10 and head_dim > 64:
        config = replace(config, num_stages=min(config.num_stages, 2))
    return config


def strides(*views: Tensor) -> tuple[int, ...]:
    """Those of ``[B, H, P, D]`` in elements, but for the last ones, which are 1."""
    return tuple(stride for x in views for stride in x.stride()[:3])
