"""Launch configurations of the portable kernels as data: rows and keys of a program, warps and stages, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import HOPPER_SHARED_MEMORY, DeviceLimits
from ..launch import FUSED


@dataclass(frozen=True)
class LaunchConfig:
    """``block_m`` query rows and ``block_n`` keys per step, powers of two from 16; ``num_stages`` loads in flight; at most so many
    ``registers`` a thread, so that more programs fit on a multiprocessor, None: what the compiler takes."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """The options of Triton's launch."""
        limit = {} if self.registers is None else dict(maxnreg=self.registers)
        return dict(num_warps=self.num_warps, num_stages=self.num_stages) | FUSED | limit


# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.
# Through TMA no registers hold addresses, and small programs, of which two fit on a multiprocessor, win.

# By kernel and kind of GPU, and by head_dim: up to 64, 128 and 256. "asynchronous" was measured on an H200. Nobody has measured the other
# three: "large", 163 KB of shared memory (A100); "small", 99 KB (RTX 30 and 40, L40S); "tma", 99 KB and TMA (RTX 50). They are what the
# compiler makes best: no registers spilled in the loop over full chunks, two copies of a streamed tile, little multiplied twice (as eight
# warps on 64 rows do), and otherwise as large as fits. FlexAttention's table and FlashAttention-2's launches are close to them.
# benchmark/tune.py measures on the GPU at hand and says which line to change.
_TABLE = {
    # Asynchronous: at 128, 128 x 64 with 4 warps takes 12.9 ms in two stages and 13.9 in three, 64 x 64 15.1, 128 x 128 with 8 warps 16.2.
    # With 23,040 tokens: at 64, three stages take 1.69 ms, two 1.87; at 256, where 4 warps spill, 4 take 23.6, 8 take 5.2, 128 x 32 in
    # three stages 6.2, 64 x 64 11.6.
    "forward": dict(
        asynchronous=(LaunchConfig(128, 64, 4, 3), LaunchConfig(128, 64, 4, 2), LaunchConfig(128, 64, 8, 2)),
        large=(LaunchConfig(128, 64, 4, 3), LaunchConfig(128, 64, 8, 3), LaunchConfig(128, 32, 8, 3)),
        small=(LaunchConfig(128, 64, 4, 3), LaunchConfig(128, 32, 8, 3), LaunchConfig(32, 32, 4, 3)),
        tma=(LaunchConfig(128, 64, 4, 3), LaunchConfig(128, 64, 8, 3), LaunchConfig(32, 32, 4, 3)),
    ),
    # dQ holds q and dO and streams K and V. At 128, 64 x 64 with 4 warps is 3.7 ms less than 128 x 128 with 8 warps; two stages, of which
    # there are two copies, since chunks' numbers are read ahead, and three no longer leave room for a second program: 1.07 times as long.
    # At 256, of 23,040 tokens, the backward takes 30.0 ms, with 64 x 64 for dQ 37.8, with 4 warps for all 55.5.
    "dq": dict(
        asynchronous=(LaunchConfig(64, 64, 4, 3), LaunchConfig(64, 64, 4, 2), LaunchConfig(128, 32, 8, 2)),
        large=(LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 3), LaunchConfig(64, 32, 4, 3)),
        small=(LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 3), LaunchConfig(32, 32, 4, 3)),
        tma=(LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 3), LaunchConfig(32, 32, 4, 3)),
    ),
    # dK and dV: keys, which stay, and queries, which are streamed. At 128, 64 keys by 64 queries with 4 warps are 5.8 ms less than 128 by
    # 64 with 8 warps. For key blocks of 64 (query blocks of 512 rows, 49,152 tokens, 64 heads over 8, a tenth kept) 8 warps took 38 ms
    # more, of 55 for the whole backward, and 64 keys by 32 queries 10 more.
    "dkv": dict(
        asynchronous=(LaunchConfig(64, 64, 4, 3), LaunchConfig(64, 64, 4, 2), LaunchConfig(64, 64, 8, 2)),
        large=(LaunchConfig(64, 64, 4, 3), LaunchConfig(64, 64, 8, 3), LaunchConfig(64, 32, 8, 3)),
        small=(LaunchConfig(64, 64, 4, 3), LaunchConfig(128, 32, 8, 3), LaunchConfig(32, 32, 4, 3)),
        tma=(LaunchConfig(64, 32, 4, 3), LaunchConfig(64, 32, 4, 3), LaunchConfig(32, 32, 4, 3)),
    ),
}
LARGE_SHARED_MEMORY = 160 << 10


def forward_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The forward's. ``q_block`` and ``kv_block`` are the longest blocks in tokens.

    Under 64 rows Triton multiplies without the asynchronous unit. 24,576 tokens, 8 heads, a tenth of the key blocks of 64: blocks of 16
    rows in three stages with 2 warps take 1.63 ms, with 4 warps 1.81, in five stages 2.63; of 32 rows with 4 warps 1.24, in five 1.69.
    """
    best = _best("forward", head_dim, limits)
    if q_block <= 32 and limits.asynchronous and head_dim <= 128:
        best = LaunchConfig(32, 64, 2 if q_block <= 16 else 4, 3)
    return fit(best, head_dim, q_block, kv_block, limits, stationary=1, ahead=forward_reads_ahead(head_dim, best.block_m, limits))


def forward_reads_ahead(head_dim: int, block_m: int, limits: DeviceLimits) -> bool:
    """Whether the forward reads chunks' numbers an iteration ahead (see ``next_start``). Where products are asynchronous, which takes 64
    rows, there are two copies of a tile without, and beyond a head_dim of 64, where registers are short, it costs 2 % on an H200."""
    return head_dim <= 64 or block_m < 64 or not limits.asynchronous


def dq_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dQ.

    Key blocks of 64 (query blocks of 512 rows, 49,152 tokens, 64 heads over 8, a tenth kept): 128 x 64 with 8 warps in five stages, 2.7 ms
    less than 64 x 64 with 4 warps in three, of 55 for the whole backward.
    """
    best = _best("dq", head_dim, limits)
    # Five stages of 64 keys fit beside 128 rows.
    if kv_block <= 64 and q_block >= 128 and head_dim <= 128 and limits.tma and limits.shared_memory >= HOPPER_SHARED_MEMORY:
        best = LaunchConfig(128, 64, 8, 5)
    return fit(best, head_dim, q_block, kv_block, limits, stationary=2, transposed=1)


def dkv_config(head_dim: int, q_block: int, kv_block: int, limits: DeviceLimits) -> LaunchConfig:
    """The one of dK and dV."""
    best = _best("dkv", head_dim, limits)
    fitted = fit(best, head_dim, kv_block, q_block, limits, stationary=2, transposed=2)
    return LaunchConfig(fitted.block_n, fitted.block_m, fitted.num_warps, fitted.num_stages)


def _best(kernel: str, head_dim: int, limits: DeviceLimits) -> LaunchConfig:
    """The table's configuration for this kind of GPU, to which shared memory and the rules for short blocks still apply."""
    without = "tma" if limits.tma else "large" if limits.shared_memory >= LARGE_SHARED_MEMORY else "small"
    row = _TABLE[kernel]["asynchronous" if limits.asynchronous else without]
    return row[(head_dim > 64) + (head_dim > 128)]


def padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def fit(config: LaunchConfig, head_dim: int, rows: int, streamed_block: int, limits: DeviceLimits, stationary: int,
         ahead: bool = True, transposed: int = 0, spare: int = 0) -> LaunchConfig:
    """Shrinks a configuration until its tiles are no longer than the pattern's blocks and fit in shared memory, less ``spare`` bytes.

    ``stationary`` tiles of ``block_m`` rows stay for the whole program; two tiles of ``block_n`` rows are streamed, loaded ``ahead`` as
    ``next_start`` says, and of ``transposed`` of them tcgen05 wants another copy, turned round.
    """
    m, n, stages = step(rows, config.block_m), step(streamed_block, config.block_n), config.num_stages
    dim = padded(head_dim)
    turned = transposed if limits.products == "tcgen05" else 0

    def bytes_used() -> int:
        # Copies of a streamed tile that Triton 3.6 keeps; read off the kernels.
        if ahead:
            copies = stages if limits.asynchronous else max(stages - 1, 1)
        else:
            copies = max(stages - 2, 2) if limits.asynchronous else max(stages - 3, 1)
        # Fewer than 128 rows are shared out by columns too, and weights go from warp to warp through shared memory.
        rest = 2048 if limits.asynchronous else 1024 + (2 * m * n if m < 128 else 0)
        return 2 * dim * (stationary * m + (copies * 2 + turned) * n) + rest + spare

    while bytes_used() > limits.shared_memory and stages > 3 and limits.asynchronous:
        stages -= 1
    while bytes_used() > limits.shared_memory and n > 32:
        n //= 2
    while bytes_used() > limits.shared_memory and m > 32:
        m //= 2
    if bytes_used() > limits.shared_memory:
        stages = 1
    # A warp multiplies 16 rows; fewer than 128 rows do not feed eight of them, unless their columns are many.
    return LaunchConfig(m, n, config.num_warps if m >= min(config.block_m, 128) else min(config.num_warps, 4), stages)


def step(block: int, largest: int) -> int:
    """The tokens taken at once from a block: the largest power of two that wastes little of it."""
    if block % largest == 0 or block > 4 * largest:
        return largest
    step = max(16, min(largest, 1 << (block - 1).bit_length()))
    while step > 64 and -(-block // step) * step > 1.15 * block:
        step //= 2
    return step
