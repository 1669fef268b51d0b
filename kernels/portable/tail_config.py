"""Launch configurations of the tail's kernels as data: the tiles that they multiply, warps and stages, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device import DeviceLimits


@dataclass(frozen=True)
class TailConfig:
    """``block_m`` of the result's rows and ``block_n`` of what is streamed past them, powers of two from 16; ``num_stages`` loads in
    flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


# For head_dims up to 64 and up to 128, float16 and bfloat16. Moments: block_m columns of the result, block_n tokens at once.
# The products of tail_lse and tail_combine have block_m queries and block_n units, those of mean_weights block_m units and block_n queries.
_TABLE = {
    # At head_dim 128 measured on an H200 at 360 blocks of up to 384 tokens; few warps with much to do each, and room for several programs.
    "moments": (TailConfig(64, 64, 4, 3), TailConfig(128, 64, 4, 2)),
    "covariances": (TailConfig(64, 64, 4, 3), TailConfig(128, 32, 8, 3)),
    "order": (TailConfig(64, 64, 4, 2), TailConfig(128, 64, 8, 2)),
    "lse": (TailConfig(128, 64, 4, 3), TailConfig(128, 64, 4, 2)),
    "weights": (TailConfig(128, 64, 4, 2), TailConfig(128, 64, 4, 2)),
    "combine": (TailConfig(128, 32, 4, 3), TailConfig(128, 32, 4, 3)),
}
# What any GPU takes: head_dims above 128, and float32, which is multiplied without tensor cores.
_WIDE = TailConfig(32, 32, 8, 1)


def tail_config(kernel: str, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> TailConfig:
    """The one of ``kernel``, a key of the table."""
    if head_dim > 128 or dtype == torch.float32:
        return _WIDE
    config = _TABLE[kernel][head_dim > 64]
    # Beside 128 x 128 and two stages of 64 x 128 there is no room for a third in 99 KiB.
    if limits.shared_memory < 160 << 10 and head_dim > 64:
        config = TailConfig(config.block_m, config.block_n, config.num_warps, min(config.num_stages, 2))
    return config
