"""Launch configurations of the kernels for single tokens and short key blocks, as data: sizes of a program, and why."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.device import DeviceLimits
from ....kernels.portable.config import LaunchConfig, fit, padded, step


def gathered_config(head_dim: int, q_block: int, limited: bool, limits: DeviceLimits, ordered: bool = False) -> LaunchConfig:
    """The one of the forward that gathers keys; ``limited`` where it masks scores.

    With ``ordered``, a causal order among the listed keys, there is one stage. With two or three, kernels that Triton 3.6 compiled for an
    H200 leave out keys that a row should see, where blocks of one key make tiles of 32; the compiled code does not show why. The test
    test_a_causal_order_needs_one_stage in tests/interfaces/test_flashinfer.py fails once a version of Triton does not.

    A tile holds keys of any blocks, so the blocks' length plays no part. The numbers are not measured: they are what compiles for sm_90a
    without spilling registers and without a serialised wgmma: at head_dim 128, 128 keys spill 140 bytes a thread, and with masks 64 keys
    spill 900 and 128 keys 8,900. At head_dim 256 with masks only 32 rows escape the serialised wgmma, and spill 500.
    """
    if head_dim > 128:
        best = LaunchConfig(32, 32, 4, 2) if limited else LaunchConfig(128, 32, 8, 3)
    else:
        best = LaunchConfig(128, 32 if limited else 64, 8, 3)
    if ordered:
        best = replace(best, num_stages=1)
    elif not limited and not limits.asynchronous:
        # Fewer leave one copy of a tile, because ids and bounds are looked up one after the other before keys are loaded.
        best = replace(best, num_stages=5)
    # Masks and the search for NaN pass through some shared memory of their own.
    return fit(best, head_dim, q_block, best.block_n, limits, stationary=1, ahead=False, spare=8192 * limited)


# Times of the next two: one H200, Triton 3.6, bfloat16, head_dim 128, 65,536 tokens, 64 query heads on 4, blocks of 64, 16 for a token.


def token_config(group: int, head_dim: int, v_head_dim: int, limits: DeviceLimits, tiles: bool) -> LaunchConfig:
    """The one of the kernels for lists of one query token: ``block_m`` holds the query heads of a key/value head. ``tiles``: blocks come
    as tiles of keys, not key by key.

    Tiles through TMA: 32 keys, 2 warps and two copies take 16.3 ms forward; 64 keys 16.9 with 2 warps and 17.0 with 4; 32 keys with 4
    warps 22. Two copies are those of three stages: a quarter of the tokens takes 1.99 ms, in four stages 2.14, in five 2.70. Key by key: in
    a step of decoding (batch 16, 32,768 keys, every tenth block, 32 heads on 8) 64 keys with 4 warps in three stages take 0.062 ms, in five
    0.080; 32 keys 0.063. Fewer than 16 rows cannot be multiplied by the tensor cores.
    """
    m = max(16, 1 << (group - 1).bit_length())
    wide = padded(head_dim) + padded(v_head_dim) > 256
    if tiles and limits.tma and m <= 32 and not wide:
        return LaunchConfig(m, 32, 2, 3)
    return LaunchConfig(m, 32 if wide else 64, 8 if m >= 128 else 4, 3)


def token_dkv_config(head_dim: int, v_head_dim: int, block_size: int) -> LaunchConfig:
    """The one of their dK and dV, which hold ``block_n`` keys and stream ``block_m`` rows of queries.

    Of the whole backward's 54 ms with 64 rows by 64 keys, 8 warps and two stages, 32 rows with 4 warps and three stages save 12.4, 64 rows
    with 4 warps 6.6; 128 rows cost 20. The addresses of gathered rows take registers: 32 by 32 is what fits beyond a head_dim of 128.
    """
    keys = 64 if padded(head_dim) + padded(v_head_dim) <= 256 and block_size > 32 else min(step(block_size, 64), 32)
    return LaunchConfig(32, keys, 4, 3 if keys == 64 else 2)


def token_splits(programs: int, steps: int, multiprocessors: int) -> int:
    """How many programs share one list of at most ``steps`` steps, given how many ``programs`` there are without sharing.

    Four programs a multiprocessor are in flight; a program keeps at least two steps, and a power of two keeps the kernels few.
    """
    wanted = min(4 * multiprocessors // max(programs, 1), steps // 2, 64)
    return 1 << (max(wanted, 1).bit_length() - 1)
