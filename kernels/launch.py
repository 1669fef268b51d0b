"""Launch configurations as data: how many rows and keys a program takes, with how many warps and stages, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .blocks import BlockLists

HOPPER_SHARED_MEMORY = 227 * 1024
# Shorter key blocks are gathered: the matrix unit multiplies by at least 16 keys, so as tiles of their own they would be mostly padding.
GATHERED_BELOW = 16
# Where this many query rows share a list of such blocks, its keys are first copied behind one another, for the backward always.
TOGETHER_ROWS = 512
# Memory for the copies of keys and values.
TOGETHER_BYTES = 512 << 20


@dataclass(frozen=True)
class LaunchConfig:
    """``block_m`` query rows and ``block_n`` keys per step, powers of two from 16; ``num_stages`` loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DeviceLimits:
    """What a GPU offers to one program."""

    shared_memory: int  # bytes
    copy_engine: bool   # loads tiles through descriptors: Hopper and later


# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.
# Through the copy engine no registers hold addresses, and small programs, of which two fit on a multiprocessor, win.


def forward_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The forward's. ``q_block`` and ``kv_block`` are the longest blocks in tokens.

    Copy engine: 128 x 64 with 4 warps takes 12.9 ms in two stages and 13.9 in three, 64 x 64 15.1, 128 x 128 with 8 warps 16.2. Without:
    128 x 128 with 8 warps 14.7 ms, 64 x 64 with 4 warps 16.0, 128 x 64 with 8 warps 17.7 and with 4 warps 21.2.
    """
    best = LaunchConfig(128, 64, 4, 2) if limits.copy_engine else LaunchConfig(128, 128, 8, 3)
    return _fit(best, head_dim, q_block, kv_block, limits.shared_memory, stationary=1)


def dq_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dQ, which holds q and dO and streams K and V.

    Copy engine: 64 x 64 with 4 warps, 3.7 ms less than 128 x 128 with 8 warps and 3.3 less than in two stages.
    Without: 128 x 128 with 8 warps 16.0 ms, 64 x 64 with 4 warps 16.7, 128 x 64 with 8 warps 18.1.
    """
    best = LaunchConfig(64, 64, 4, 3) if limits.copy_engine else LaunchConfig(128, 128, 8, 3)
    return _fit(best, head_dim, q_block, kv_block, limits.shared_memory, stationary=2)


def dkv_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dK and dV, which holds K and V and streams q and dO.

    Copy engine: 64 queries by 64 keys with 4 warps, 5.8 ms less than 64 by 128 with 8 warps and 2.2 less than in two stages.
    Without: 64 by 128 with 8 warps 24.7 ms, 64 by 64 with 4 warps 26.2, 32 by 128 34.5.
    """
    best = LaunchConfig(64, 64, 4, 3) if limits.copy_engine else LaunchConfig(128, 64, 8, 3)
    fitted = _fit(best, head_dim, kv_block, q_block, limits.shared_memory, stationary=2)
    return LaunchConfig(fitted.block_n, fitted.block_m, fitted.num_warps, fitted.num_stages)


def gathered_config(
    head_dim: int, q_block: int, limited: bool, limits: DeviceLimits, stationary: int, ordered: bool = False,
) -> LaunchConfig:
    """The one of the kernels that gather keys; ``limited`` where they mask scores, ``stationary`` 1 in the forward and 2 in dQ.

    ``ordered``, under a causal order among listed keys, one stage: with two or three, Triton 3.6 on an H200 hides keys that a row should
    see where blocks of one key make tiles of 32 (test_interfaces_flashinfer's 16-1 cases); the compiled code shows no cause.

    A tile holds keys of any blocks, so their length plays no part. Not measured, but what compiles for sm_90a without spilling registers
    and without a serialised wgmma: at head_dim 128, 128 keys spill 140 bytes a thread, and with masks 64 keys spill 900 and 128 keys 8,900.
    At head_dim 256 with masks only 32 rows escape the serialised wgmma, and spill 500.
    """
    if head_dim > 128:
        best = LaunchConfig(32, 32, 4, 2) if limited else LaunchConfig(128, 32, 8, 3)
    else:
        best = LaunchConfig(128, 32 if limited else 64, 8, 3)
    if ordered:
        best = replace(best, num_stages=1)
    # Masks and the search for NaN pass through some shared memory of their own.
    return _fit(best, head_dim, q_block, best.block_n, limits.shared_memory - 8192 * limited, stationary)


def brings_together(blocks: BlockLists, heads: int, kv_heads: int, causal: bool, backward: bool = False) -> bool:
    """Whether listed keys are brought together in memory before they are attended to, with ``heads`` query heads.

    Copies know no positions, and parts of equal size need blocks of equal length.
    """
    uniform = all(isinstance(x, int) for x in (blocks.q_offsets, blocks.kv_offsets)) and blocks.q_lengths is blocks.kv_lengths is None
    rows = blocks.max_q_length * (heads // max(kv_heads, blocks.counts.shape[1]))
    return uniform and not causal and blocks.max_kv_length < GATHERED_BELOW and blocks.capacity > 0 and (backward or rows >= TOGETHER_ROWS)


def token_config(group: int, head_dim: int, v_head_dim: int) -> LaunchConfig:
    """The one of the kernels for lists of one query token: ``block_m`` holds the query heads of a key/value head.

    Not chosen by measuring: a tile of 64 keys in flight is 32 KiB at head_dim 128, of which three programs fit on any GPU from Ampere on;
    fewer than 16 rows cannot be multiplied by the matrix unit.
    """
    m = max(16, 1 << (group - 1).bit_length())
    n = 64 if _padded(head_dim) + _padded(v_head_dim) <= 256 else 32
    return LaunchConfig(m, n, 8 if m >= 128 else 4, 3)


def token_dkv_config(head_dim: int, v_head_dim: int, block_size: int) -> LaunchConfig:
    """The one of their dK and dV, which hold ``block_n`` keys and stream ``block_m`` rows of queries.

    Not chosen by measuring but by what the compiler says: the addresses of gathered rows take registers, so that 64 by 64 needs 8 warps to
    spill next to nothing, and 32 by 32 is what fits with 4 and beyond a head_dim of 128.
    """
    if _padded(head_dim) + _padded(v_head_dim) <= 256 and block_size > 32:
        return LaunchConfig(64, 64, 8, 2)
    return LaunchConfig(32, min(_step(block_size, 64), 32), 4, 2)


def token_splits(programs: int, steps: int, multiprocessors: int) -> int:
    """How many programs share one list of at most ``steps`` steps, given how many ``programs`` there are without sharing.

    Four programs a multiprocessor are in flight; a program keeps at least two steps, and a power of two keeps the kernels few.
    """
    wanted = min(4 * multiprocessors // max(programs, 1), steps // 2, 64)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _fit(config: LaunchConfig, head_dim: int, rows: int, streamed_block: int, limit: int, stationary: int) -> LaunchConfig:
    """Shrinks a configuration until its tiles are no longer than the pattern's blocks and fit in shared memory.

    ``stationary`` tiles of ``block_m`` rows stay for the whole program; two tiles of ``block_n`` rows are streamed.
    """
    m, n, stages = _step(rows, config.block_m), _step(streamed_block, config.block_n), config.num_stages
    dim = _padded(head_dim)

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
    return LaunchConfig(m, n, min(config.num_warps, 8 if m >= 128 else 4), stages)


def _step(block: int, largest: int) -> int:
    """The tokens taken at once from a block: the largest power of two that wastes little of it."""
    if block % largest == 0 or block > 4 * largest:
        return largest
    step = max(16, min(largest, 1 << (block - 1).bit_length()))
    while step > 64 and -(-block // step) * step > 1.15 * block:
        step //= 2
    return step


def device_limits(device: torch.device) -> DeviceLimits:
    """Those of ``device``; where there is no GPU to ask (Triton's interpreter) Hopper's."""
    if device.type != "cuda":
        return DeviceLimits(HOPPER_SHARED_MEMORY, copy_engine=True)
    return _device_limits(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _device_limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return DeviceLimits(shared, copy_engine=torch.version.hip is None and properties.major >= 9)


def multiprocessors(device: torch.device) -> int:
    """Those of ``device``; where there is no GPU to ask (Triton's interpreter) one, so that it runs few programs."""
    if device.type != "cuda":
        return 1
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
