"""Which kernels run."""

from __future__ import annotations

from .blocks import BlockLists

# Shorter key blocks are gathered: the matrix unit multiplies by at least 16 keys, so as tiles of their own they would be mostly padding.
GATHERED_BELOW = 16
# Where this many query rows share a list of such blocks, its keys are first copied behind one another, for the backward always.
COMPACTED_ROWS = 512


def brings_together(blocks: BlockLists, heads: int, kv_heads: int, causal: bool, backward: bool = False) -> bool:
    """Whether listed keys are brought together in memory before they are attended to, with ``heads`` query heads.

    Copies know no positions, and parts of equal size need blocks of equal length.
    """
    # Asked at every call, and nearly always answered here.
    if causal or blocks.max_kv_length >= GATHERED_BELOW:
        return False
    uniform = all(isinstance(x, int) for x in (blocks.q_offsets, blocks.kv_offsets)) and blocks.q_lengths is blocks.kv_lengths is None
    rows = blocks.max_q_length * (heads // max(kv_heads, blocks.counts.shape[1]))
    return uniform and blocks.capacity > 0 and (backward or rows >= COMPACTED_ROWS)
