"""Launch configurations of the portable kernels as data: rows and keys of a program, warps and stages, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..device import DeviceLimits
from .measured import measured

# Bytes for the compacted keys and values.
COMPACTED_BYTES = 512 << 20


@dataclass(frozen=True)
class LaunchConfig:
    """``block_m`` query rows and ``block_n`` keys per step, powers of two from 16; ``num_stages`` loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.
# Through TMA no registers hold addresses, and small programs, of which two fit on a multiprocessor, win.


def forward_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The forward's. ``q_block`` and ``kv_block`` are the longest blocks in tokens.

    TMA: 128 x 64 with 4 warps takes 12.9 ms in two stages and 13.9 in three, 64 x 64 15.1, 128 x 128 with 8 warps 16.2. Without:
    128 x 128 with 8 warps 14.7 ms, 64 x 64 with 4 warps 16.0, 128 x 64 with 8 warps 17.7 and with 4 warps 21.2.
    Under 64 rows Triton multiplies without the asynchronous unit and keeps one copy of a tile for up to four stages. Blocks of 8 rows (one
    token, 8 packed heads), 24,576 tokens, lists of 38 blocks of 64: five stages with 2 warps take 26.8 ms, with 4 warps 28.8, two 31.9.
    """
    best = _measured("forward", head_dim, limits) or (LaunchConfig(128, 64, 4, 2) if limits.tma else LaunchConfig(128, 128, 8, 3))
    if q_block <= 32 and limits.five_stages(head_dim):
        best = LaunchConfig(32, 64, 2 if q_block <= 16 else 4, 5)
    return _fit(best, head_dim, q_block, kv_block, limits.shared_memory, stationary=1)


def dq_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dQ, which holds q and dO and streams K and V.

    TMA: 64 x 64 with 4 warps, 3.7 ms less than 128 x 128 with 8 warps and 3.3 less than in two stages.
    Without: 128 x 128 with 8 warps 16.0 ms, 64 x 64 with 4 warps 16.7, 128 x 64 with 8 warps 18.1.
    Key blocks of 64 (query blocks of 512 rows, 49,152 tokens, 64 heads over 8, a tenth kept): 128 x 64 with 8 warps in five stages, 2.7 ms
    less than 64 x 64 with 4 warps in three, of 55 for the whole backward.
    """
    best = _measured("dq", head_dim, limits) or (LaunchConfig(64, 64, 4, 3) if limits.tma else LaunchConfig(128, 128, 8, 3))
    if kv_block <= 64 and q_block >= 128 and limits.five_stages(head_dim):
        best = LaunchConfig(128, 64, 8, 5)
    return _fit(best, head_dim, q_block, kv_block, limits.shared_memory, stationary=2)


def dkv_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dK and dV, which holds K and V and streams q and dO.

    TMA: 64 queries by 64 keys with 4 warps, 5.8 ms less than 64 by 128 with 8 warps and 2.2 less than in two stages.
    Without: 64 by 128 with 8 warps 24.7 ms, 64 by 64 with 4 warps 26.2, 32 by 128 34.5.
    Key blocks of 64, as for dQ: two stages take 2.2 ms less than three, 8 warps 38 more, 32 queries by 64 keys 10 more.
    """
    best = LaunchConfig(64, 64, 4, 2 if kv_block <= 64 else 3) if limits.tma else LaunchConfig(128, 64, 8, 3)
    own = _measured("dkv", head_dim, limits)
    if own is not None:
        best = LaunchConfig(own.block_n, own.block_m, own.num_warps, own.num_stages)
    fitted = _fit(best, head_dim, kv_block, q_block, limits.shared_memory, stationary=2)
    return LaunchConfig(fitted.block_n, fitted.block_m, fitted.num_warps, fitted.num_stages)


def gathered_config(
    head_dim: int, q_block: int, limited: bool, limits: DeviceLimits, stationary: int, ordered: bool = False,
) -> LaunchConfig:
    """The one of the kernels that gather keys; ``limited`` where they mask scores, ``stationary`` 1 in the forward and 2 in dQ.

    ``ordered``, under a causal order among listed keys, one stage: with two or three, Triton 3.6 on an H200 hides keys that a row should
    see where blocks of one key make tiles of 32 (the 16-1 cases of tests/interfaces/test_flashinfer.py); the compiled code shows no cause.

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


# Times of the next two: one H200, Triton 3.6, bfloat16, head_dim 128, 65,536 tokens, 64 query heads on 4, blocks of 64, 16 for a token.


def token_config(group: int, head_dim: int, v_head_dim: int, limits: DeviceLimits, tiles: bool) -> LaunchConfig:
    """The one of the kernels for lists of one query token: ``block_m`` holds the query heads of a key/value head. ``tiles``: blocks come
    as tiles of keys, not key by key.

    Tiles through TMA: 32 keys, 2 warps and five stages, of which Triton 3.6 makes two copies, take 16.3 ms forward; 64 keys
    16.9 with 2 warps and 17.0 with 4 in three stages, 18.2 and 34 in five; 32 keys with 4 warps 22. Key by key: in a step of decoding
    (batch 16, 32,768 keys, every tenth block, 32 heads on 8) 64 keys with 4 warps in three stages take 0.062 ms, in five 0.080; 32 keys
    0.063. Fewer than 16 rows cannot be multiplied by the tensor cores.
    """
    m = max(16, 1 << (group - 1).bit_length())
    wide = _padded(head_dim) + _padded(v_head_dim) > 256
    if tiles and limits.tma and m <= 32 and not wide:
        return LaunchConfig(m, 32, 2, 5)
    return LaunchConfig(m, 32 if wide else 64, 8 if m >= 128 else 4, 3)


def token_dkv_config(head_dim: int, v_head_dim: int, block_size: int) -> LaunchConfig:
    """The one of their dK and dV, which hold ``block_n`` keys and stream ``block_m`` rows of queries.

    Of the whole backward's 54 ms with 64 rows by 64 keys, 8 warps and two stages, 32 rows with 4 warps and three stages save 12.4, 64 rows
    with 4 warps 6.6; 128 rows cost 20. The addresses of gathered rows take registers: 32 by 32 is what fits beyond a head_dim of 128.
    """
    keys = 64 if _padded(head_dim) + _padded(v_head_dim) <= 256 and block_size > 32 else min(_step(block_size, 64), 32)
    return LaunchConfig(32, keys, 4, 3 if keys == 64 else 2)


def token_splits(programs: int, steps: int, multiprocessors: int) -> int:
    """How many programs share one list of at most ``steps`` steps, given how many ``programs`` there are without sharing.

    Four programs a multiprocessor are in flight; a program keeps at least two steps, and a power of two keeps the kernels few.
    """
    wanted = min(4 * multiprocessors // max(programs, 1), steps // 2, 64)
    return 1 << (max(wanted, 1).bit_length() - 1)


def _measured(kernel: str, head_dim: int, limits: DeviceLimits) -> LaunchConfig | None:
    """What a file says that was measured on this kind of GPU. Shared memory and the rules for short blocks still hold."""
    own = measured(kernel, head_dim, limits.name)
    return None if own is None else LaunchConfig(*own)


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _fit(config: LaunchConfig, head_dim: int, rows: int, streamed_block: int, limit: int, stationary: int) -> LaunchConfig:
    """Shrinks a configuration until its tiles are no longer than the pattern's blocks and fit in shared memory.

    ``stationary`` tiles of ``block_m`` rows stay for the whole program; two tiles of ``block_n`` rows are streamed.
    """
    m, n, stages = _step(rows, config.block_m), _step(streamed_block, config.block_n), config.num_stages
    dim = _padded(head_dim)

    def bytes_used() -> int:
        # Triton 3.6 keeps two copies of a streamed tile for two and three stages, and up to one a stage for more; read off the kernels.
        copies = stages if stages > 3 else min(stages, 2)
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
