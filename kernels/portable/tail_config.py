"""Launch configurations of the tail's kernels as data: the tiles that they multiply, warps and stages, and why."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..device import DeviceLimits
from .config import LaunchConfig

# For head_dims up to 64 and up to 128, float16 and bfloat16: block_m of the result's rows, block_n of what is streamed past them. Moments:
# block_m columns of the result, block_n tokens at once.
# The products of tail_lse and tail_combine have block_m queries and block_n units, those of mean_weights block_m units and block_n queries.
_TABLE = {
    # At head_dim 128 measured on an H200 at 360 blocks of up to 384 tokens; few warps with much to do each, and room for several programs.
    "moments": (LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 64, 4, 2)),
    "covariances": (LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 3)),
    "order": (LaunchConfig(64, 64, 4, 2), LaunchConfig(128, 64, 8, 2)),
    "lse": (LaunchConfig(128, 64, 4, 3), LaunchConfig(128, 64, 4, 2)),
    "weights": (LaunchConfig(128, 64, 4, 2), LaunchConfig(128, 64, 4, 2)),
    "combine": (LaunchConfig(128, 32, 4, 3), LaunchConfig(128, 32, 4, 3)),
}
# What any GPU takes: head_dims above 128, and float32, which is multiplied without tensor cores.
_WIDE = LaunchConfig(32, 32, 8, 1)


def tail_config(kernel: str, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> LaunchConfig:
    """The one of ``kernel``, a key of the table."""
    if head_dim > 128 or dtype == torch.float32:
        return _WIDE
    config = _TABLE[kernel][head_dim > 64]
    # Beside 128 x 128 and two stages of 64 x 128 there is no room for a third in 99 KiB.
    if limits.shared_memory < 160 << 10 and head_dim > 64:
        config = replace(config, num_stages=min(config.num_stages, 2))
    return config
