"""Launch configurations of the Hopper kernels as data: how many rows and keys a program takes, and why."""

from dataclasses import dataclass
from functools import lru_cache

# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.


@dataclass(frozen=True)
class HopperForwardConfig:
    """Of a program of the Hopper forward: ``warpgroups`` of 64 query rows, ``chunk`` keys per step, of which ``stages`` are in flight.

    ``overlap``: a warpgroup takes exponentials while its own last product runs, instead of leaving that to the others.
    """

    warpgroups: int
    chunk: int
    stages: int
    overlap: bool


# What two warpgroups take for as many rows, over what three take: (head_dim, optimistic) -> ratio of the times below.
_TWO_OVER_THREE = {(64, False): 1.25, (64, True): 1.10, (128, False): 1.03, (128, True): 1.01}
# A difference in rounds below this may vanish in lists of different lengths.
_ROUNDS_MATTER = 1.05


@lru_cache
def hopper_forward_config(
    head_dim: int, q_block: int, kv_block: int, causal: bool, optimistic: bool = False, blocks: int = 0, processors: int = 1,
) -> HopperForwardConfig:
    """The one of the Hopper forward. ``q_block`` and ``kv_block`` are the longest blocks in tokens. ``optimistic``: a loop
    without maxima, as in bfloat16. ``blocks``: query blocks of all heads and batch elements, on so many multiprocessors.

    Three warpgroups where they leave no more rows without work than two do. head_dim 128: three with 64 keys take 9.8 ms, two with 128 keys
    10.8 and with overlap 10.1. Optimistic, three 9.1 and without overlap 9.2, two with 128 keys 9.0, but at 138,240 tokens, 56 of 360
    kept, 2 % more than three. head_dim 64: three with 128 keys take 6.1 ms with overlap and 6.5 without, with 64 keys 6.9 and 7.0; two with
    128 keys 7.6. Optimistic, three with 128 keys 5.5 and without overlap 5.8, with 64 keys 5.9; two with 128 keys 6.1. Three have 160
    registers a thread, too few for 128 keys at head_dim 128. They were not measured under a causal mask, where they spill some.

    Where programs are few, the last round of multiprocessors, partly idle, weighs more than that: at 11,520 tokens of one head three
    warpgroups made 60 programs for 132 multiprocessors and took 0.18 ms, flash-attn-4, with 90, 0.13; of 16 heads 1.45 and 1.42. Then two
    are taken where counting rounds says that they win by more than _ROUNDS_MATTER: a count from the ratios above, which were measured where
    programs are many.
    """
    def rounds(rows: int) -> int:
        """Rows that a multiprocessor takes, one program after another."""
        return -(-blocks * -(-q_block // rows) // processors) * rows

    three = not causal and 3 * -(-q_block // 192) <= 2 * -(-q_block // 128)
    three = three and rounds(192) <= _ROUNDS_MATTER * _TWO_OVER_THREE[head_dim, optimistic] * rounds(128)
    chunk = 64 if kv_block <= 64 or (three and head_dim == 128) else 128
    overlap = optimistic or (three if head_dim == 64 else not three)
    # 128 KiB of K and V.
    return HopperForwardConfig(3 if three else 2, chunk, 2 * (128 // head_dim) * (128 // chunk), overlap)
