"""Portable kernels that spread a number of blocks over the rows of a head: how many of each row's best are among the best of all rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lowering.primitives import ordered
from ..lowering.quick_launch import QuickLaunch, power_of_2

# The lowest score that is taken is found eight bits at a time. Its 256 counts are added up over the rows in memory, one addition for each
# bin and program, so a program takes several rows.
BINS = 256
PASSES = 4
ROWS = 8
# A histogram wants every thread of its four warps to hold something.
LEAST_WIDTH = 128


@triton.jit(do_not_specialize=("number", "least", "known"))
def _count_kernel(scores, forced, totals, sure, alike, rows, blocks, number, least, known,
                  LAST: tl.constexpr, BINS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """One of the passes over all scores, of which ``known`` came before.

    A row that takes every score from some lowest one on gets ``max(scores there, what least still asks for)`` blocks. ``totals`` holds, for
    each pass, the sum of that over a head's rows for each value of the pass's eight bits, under the bits that are known: it falls as they
    rise, and the largest value at which it reaches ``number`` is theirs. With all bits known: the blocks that each row gets for sure, and
    those at the lowest score itself, which it may get.
    """
    head = tl.program_id(1).to(tl.int64)
    bins, column = tl.arange(0, BINS), tl.arange(0, WIDTH)
    totals += head * PASSES * BINS
    lowest = tl.full([], 0, tl.int64)
    for i in range(known):
        lowest = lowest * BINS + tl.sum((tl.load(totals + i * BINS + bins) >= number).to(tl.int32), 0) - 1
    here = tl.zeros([BINS], tl.int32)
    for i in range(ROWS):
        row = tl.program_id(0) * ROWS + i
        if row < rows:
            free = tl.load(forced + row * blocks + column, mask=column < rows, other=1) == 0
            asked = tl.maximum(least - rows + tl.sum(free.to(tl.int32), 0), 0)
            line = head * rows + row
            # Without a sign, because the bits are taken from the top.
            keys = ordered(tl.load(scores + line * rows + column, mask=free, other=0.0)).to(tl.int64) + 0x80000000
            leading = keys >> (32 - 8 * known)
            above = tl.sum((free & (leading > lowest)).to(tl.int32), 0)
            same = free & (leading == lowest)
            if LAST:
                certain = tl.maximum(above, asked)
                tl.store(sure + line, certain)
                tl.store(alike + line, tl.maximum(above + tl.sum(same.to(tl.int32), 0), asked) - certain)
            else:
                found = tl.histogram(((keys >> (24 - 8 * known)) & (BINS - 1)).to(tl.int32), BINS, mask=same)
                here += tl.maximum(above + tl.sum(found, 0) - tl.cumsum(found, 0) + found, asked)
    if not LAST:
        tl.atomic_add(totals + known * BINS + bins, here, sem="relaxed")


@triton.jit(do_not_specialize=("number",))
def _share_kernel(sure, alike, counts, rows, number, WIDTH: tl.constexpr):
    """What is left after the sure blocks goes to the first rows that have blocks at the lowest score."""
    row = tl.arange(0, WIDTH)
    line = tl.program_id(0).to(tl.int64) * rows + row
    certain = tl.load(sure + line, mask=row < rows, other=0)
    equal = tl.load(alike + line, mask=row < rows, other=0)
    left = number - tl.sum(certain, 0) - (tl.cumsum(equal, 0) - equal)
    tl.store(counts + line, certain + tl.minimum(equal, tl.maximum(left, 0)), mask=row < rows)


def spread(forced: Tensor, scores: Tensor, number: int, least: int) -> Tensor:
    """What ``kernels.prologue.select.spread_blocks`` returns."""
    batch, heads, rows, _ = scores.shape
    lists, blocks, device = batch * heads, len(forced), forced.get_device()
    totals = torch.zeros(lists, PASSES, BINS, dtype=torch.int32, device=scores.device)
    sure, alike, counts = (torch.empty(batch, heads, rows, dtype=torch.int32, device=scores.device) for _ in range(3))
    width = max(LEAST_WIDTH, power_of_2(rows))
    for known in range(PASSES + 1):
        constants = dict(LAST=known == PASSES, BINS=BINS, PASSES=PASSES, ROWS=ROWS, WIDTH=width)
        # The density, of which number and least follow, may be another at every call: so they are in no key.
        _launch_count((device, width, known == PASSES, rows, blocks), (-(-rows // ROWS), lists, 1), (),
                      (scores, forced, totals, sure, alike), (rows, blocks, number, least, known), constants, {})
    _launch_share((device, width, rows), (lists, 1, 1), (), (sure, alike, counts), (rows, number), dict(WIDTH=width), {})
    return counts


_launch_count, _launch_share = map(QuickLaunch, (_count_kernel, _share_kernel))
