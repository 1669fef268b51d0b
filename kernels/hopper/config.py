"""Launch configurations of the Hopper kernels as data: how many rows and keys a program takes, and why."""

from dataclasses import dataclass
from functools import lru_cache

# Times below: one H200, Triton 3.6, bfloat16, head_dim 128, 16 heads, 46,080 tokens in blocks of 384, 48 of 120 kept, interleaved runs.


@dataclass(frozen=True)
class HopperForwardConfig:
    """Launch configuration of the Hopper forward. A program has ``warpgroups`` of 64 query rows, ``chunk`` keys per
    step, and ``stages`` of these chunks in flight.

    ``overlap``: a warpgroup takes exponentials while its own last product runs, instead of leaving that to the others. ``programs`` share a
    multiprocessor; where there are several, each has room for the queries of one tile, else for the next one's as well. ``q_registers``: a
    warpgroup multiplies by queries from registers. ``pieces``: into so many equal parts a chunk is divided where blocks end within one,
    each for keys of another block.
    """

    warpgroups: int
    chunk: int
    stages: int
    overlap: bool
    programs: int = 1
    q_registers: bool = False
    pieces: int = 1


# (head_dim, optimistic) -> time of two warpgroups over time of three, for as many rows; from the times below.
_TWO_OVER_THREE = {(64, False): 1.25, (64, True): 1.10, (128, False): 1.03, (128, True): 1.01}
# A difference in rounds below this may vanish in lists of different lengths.
_ROUNDS_MATTER = 1.05


@lru_cache
def hopper_forward_config(
    head_dim: int, q_block: int, kv_block: int, causal: bool, optimistic: bool = False, blocks: int = 0, processors: int = 1,
    ragged: bool = False,
) -> HopperForwardConfig:
    """The Hopper forward's configuration. ``q_block`` and ``kv_block`` are the longest blocks in tokens. ``optimistic``: a loop
    without maxima, as in bfloat16. ``blocks``: query blocks of all heads and batch elements, on so many multiprocessors.

    Three warpgroups where they leave no more rows without work than two do. head_dim 128: three with 64 keys take 9.8 ms, two with 128 keys
    10.8 and with overlap 10.1. Optimistic, three 9.1 and without overlap 9.2, two with 128 keys 9.0, but at 138,240 tokens, 56 of 360
    kept, 2 % more than three. head_dim 64: three with 128 keys take 6.1 ms with overlap and 6.5 without, with 64 keys 6.9 and 7.0; two with
    128 keys 7.6. Optimistic, three with 128 keys 5.5 and without overlap 5.8, with 64 keys 5.9; two with 128 keys 6.1. Three have 160
    registers a thread, too few for 128 keys at head_dim 128. They were not measured under a causal mask, where they spill some.

    ``ragged``: key blocks differ in length, so that many chunks would hold less than 128 keys: tiles of 4 x 4 x 8 tokens at 720p, 0.15 of
    them kept, took 28.3 ms with 128 keys and 27.5 with 64.

    Blocks of up to 64 queries: programs of one warpgroup, several of which share a multiprocessor, so that one takes exponentials,
    begins or ends a tile while the others multiply. At 30,720 tokens in blocks of 64, 48 of 480 kept, head_dim 128, two programs take
    1.47 ms and two warpgroups, one of which has no rows, 1.72; where neighbours attend to much the same, 1.36. That is 8.2 and 8.9 TB/s
    of keys and values; copies out of L2 that do nothing else reach 9.0, with which 64 rows would do 578 TFLOP/s. At head_dim 64 three
    programs with 64 keys take 0.81 ms, with overlap 0.82, two with 128 keys 0.93 and two warpgroups 1.37.

    Where such blocks are ``ragged``, the keys of short ones are packed in pieces of 16: VSA's tiles of Wan 2.1 14B at 720p take 19.8 ms,
    each in a chunk of its own 31.8; at 480p 2.53 and 3.57, in pieces of 32 2.72.

    Two warpgroups of head_dim 128 multiply by queries from registers, so that shared memory is read for keys and values alone: 1.13 ms
    against 1.17 in blocks of 128 of those 30,720 tokens, 24 of 240 kept. Three have no registers for that, nor have loops with maxima.

    Where programs are few, the last round of multiprocessors, partly idle, weighs more than that. Then two are taken where counting rounds
    says that they win by more than _ROUNDS_MATTER: a count from the ratios above, which were measured where programs are many. Lists are
    split in the last round (see ``split``), so that this is rare: at 11,520 tokens, 12 of 30 blocks kept, three took 0.0563 ms of one head
    and two 0.0579; of 16 heads, 18 of 30 kept, 0.820 and 0.834.
    """
    def rounds(rows: int) -> float:
        """Rows that a multiprocessor takes, one tile after another, the last ones of which may be split."""
        whole, rest = divmod(blocks * -(-q_block // rows), processors)
        return (whole + (1 / (processors // rest) if rest else 0)) * rows

    if q_block <= 64 and not causal:
        # 96 KiB of K and V and 16 of q, or 48 and 8.
        wide = head_dim == 128
        return HopperForwardConfig(1, 64, 3, wide, 2 if wide else 3, wide, 4 if ragged else 1)
    three = not causal and 3 * -(-q_block // 192) <= 2 * -(-q_block // 128)
    three = three and rounds(192) <= _ROUNDS_MATTER * _TWO_OVER_THREE[head_dim, optimistic] * rounds(128)
    chunk = 64 if kv_block <= (128 if ragged and head_dim == 128 else 64) or (three and head_dim == 128) else 128
    overlap = optimistic or (three if head_dim == 64 else not three)
    q_registers = not three and not causal and optimistic and head_dim == 128
    # 128 KiB of K and V.
    return HopperForwardConfig(3 if three else 2, chunk, 2 * (128 // head_dim) * (128 // chunk), overlap, q_registers=q_registers)


# Chunks that a part of a list has at least, and rounds after which a last one that is partly idle is no loss.
_SHORTEST_PART, _MANY_ROUNDS = 6, 40


def split(tiles: int, chunks: int, processors: int, causal: bool) -> tuple[int, int]:
    """(how many tiles, the last of a launch, are split; into how many parts of their lists), so that no multiprocessor is idle while others
    take the last ones. ``chunks``: of the longest list. (0, 1) where nothing is gained; causal ones are not split."""
    rest = tiles % processors
    parts = min(processors // rest, chunks // _SHORTEST_PART) if rest and not causal and tiles < _MANY_ROUNDS * processors else 1
    return (rest, parts) if parts > 1 else (0, 1)
