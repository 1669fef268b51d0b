"""Hopper kernel of the tail's weights: every query's log-sum-exp over a head's units, and every query block's mean weights, in one pass.

A program keeps one head's mean keys in shared memory. Each of its two warpgroups goes through blocks of its own, 64 queries at a time, and
has all logits of these in registers; two loading warps, one a warpgroup, bring in queries and biases.
"""

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..device import multiprocessors
from ..lowering.inputs import strided, tma_ok
from ..lowering.primitives import LN2, LOG2E
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_descriptor
from .gluon_compat import aggregate, barrier, copy_in
from .inline_asm import clear_rows, rematerialise, sum_lanes
from .primitives import (
    barrier_ring,
    by_lane,
    matrix,
    product_layout,
    ring_arrive,
    ring_at,
    ring_free,
    ring_init,
    ring_wait,
    row_lanes,
)

ROWS = 64          # of a warpgroup: the height of one wgmma
COLUMNS = 128      # units of one product
STAGES = 2         # a power of two: tiles of queries, and rows of biases, in flight to a warpgroup
WARPGROUPS = 2
# 4 + 4 + 1 + 1 warps, which count as twelve: 168 at entry, then warp_specialize gives the loading warps 24 and the multiplying ones 240.
OPTIONS = dict(num_warps=4, maxnreg=168)


@aggregate
class Work:
    """What one warpgroup goes through, and the shared memory and barriers through which it gets it."""

    k: gl.shared_memory_descriptor          # [PIECES, 1, 1, COLUMNS, D]: the head's mean keys, for both warpgroups
    k_full: gl.shared_memory_descriptor     # TMA has written them
    q: gl.shared_memory_descriptor          # [STAGES, 1, 1, ROWS, D]
    q_full: gl.shared_memory_descriptor     # one a stage: TMA has written it
    q_done: gl.shared_memory_descriptor     # the warpgroup has multiplied by it
    bias: gl.shared_memory_descriptor       # [STAGES * PIECES, COLUMNS], float32
    bias_full: gl.shared_memory_descriptor  # one a stage: the loading warp has written it
    bias_done: gl.shared_memory_descriptor  # the warpgroup has read it
    offsets: gl.tensor                      # pointer to where blocks begin
    batch: gl.tensor
    head: gl.tensor
    at_head: gl.tensor                      # batch * heads + head
    blocks: gl.tensor
    units: gl.tensor
    stream: gl.tensor                       # which of the head's warpgroups this is, and of how many
    streams: gl.tensor
    count: gl.tensor                        # blocks that are its own


@gluon.jit
def _block(work, n):
    """(block, its first row, its rows) of the ``n``-th of a warpgroup's blocks; past its last one, some block's.

    One of every ``streams`` blocks, but not the same one each time: or one warpgroup might get all the short ones at an edge of the canvas.
    """
    block = gl.minimum(n * work.streams + (work.stream + n) % work.streams, work.blocks - 1)
    first = gl.load(work.offsets + block)
    return block, first, gl.load(work.offsets + block + 1) - first


@gluon.constexpr_function
def _line(warps):
    """A row of COLUMNS numbers in each of ``warps`` warps."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0]))


@gluon.constexpr_function
def _sums_layout():
    """Sums over a warp's rows, [4 warps, 8, 4, 4]: a lane has four of a product's columns."""
    return gl.DistributedLinearLayout([[0, 0, 1, 0], [0, 0, 2, 0]], [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
                                      [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 8, 4, 4])


@gluon.jit
def _biases(work, n, piece):
    """Of the ``n``-th block those of one product."""
    PIECES: gl.constexpr = work.k.shape[0]
    STAGES: gl.constexpr = work.bias.shape[0] // PIECES
    return work.bias.index((n & (STAGES - 1)) * PIECES + piece)


@gluon.jit
def _load(work, group: gl.constexpr, q_desc, k_desc, kv_head, bias):
    """A loading partition: for every block its biases, and unless these say that nothing is estimated, its queries."""
    PIECES: gl.constexpr = work.k.shape[0]
    COLUMNS: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    if group == 0:
        mbarrier.expect(work.k_full.index(0), PIECES * k_desc.block_type.nbytes)
        for piece in gl.static_range(PIECES):
            # Beyond the last unit TMA writes zeros.
            copy_in(k_desc, [work.batch, kv_head, piece * COLUMNS, 0], work.k_full.index(0), work.k.index(piece))
    tile = gl.to_tensor(0)
    for n in range(work.count):
        block, first, size = _block(work, n)
        row_of_bias = bias + (work.at_head * work.blocks + block).to(gl.int64) * work.units
        ring_free(work.bias_done, n, True)
        most = gl.full([COLUMNS], float("-inf"), gl.float32, _line(1))
        for piece in gl.static_range(PIECES):
            unit = piece * COLUMNS + gl.arange(0, COLUMNS, layout=_line(1))
            values = gl.load(row_of_bias + unit, mask=unit < work.units, other=float("-inf"))
            _biases(work, n, piece).store(values)
            most = gl.maximum(most, values)
        # One thread speaks for all lanes.
        barrier()
        ring_arrive(work.bias_full, n, True)
        if gl.max(most, axis=0) > float("-inf"):
            for row in range(0, size, ROWS):
                ring_free(work.q_done, tile, True)
                mbarrier.expect(ring_at(work.q_full, tile, True), q_desc.block_type.nbytes)
                copy_in(q_desc, [work.batch, work.head, first + row, 0], ring_at(work.q_full, tile, True), ring_at(work.q, tile, True))
                tile += 1


@gluon.jit
def _estimated(work, n):
    """Whether any unit is, for the ``n``-th block."""
    PIECES: gl.constexpr = work.k.shape[0]
    most = _biases(work, n, 0).load(_line(4))
    for piece in gl.static_range(1, PIECES):
        most = gl.maximum(most, _biases(work, n, piece).load(_line(4)))
    return gl.max(most, axis=0) > float("-inf")


@gluon.jit
def _nothing():
    """A tuple to add to."""
    return ()


@gluon.jit
def _sum_rows(x):
    """Of [64, COLUMNS] as ``by_lane`` lays it out the sum over each warp's 16 rows, in ``_sums_layout``: [warp, c0 c3 c4, c5 c6, c1 c2] in
    bits of the column, lowest first."""
    C: gl.constexpr = x.shape[1] // 4
    # [warp, row, column] of the sum over the two rows that a lane has.
    x = gl.sum(x.reshape([4, 2, 8, C, 2, 2, 4, 2]), axis=1)
    even, odd = gl.split(x)
    x0, x2 = gl.split(even.permute((0, 1, 2, 3, 5, 4)))
    x1, x3 = gl.split(odd.permute((0, 1, 2, 3, 5, 4)))
    x0, x4 = gl.split(x0.permute((0, 1, 2, 4, 3)))
    x1, x5 = gl.split(x1.permute((0, 1, 2, 4, 3)))
    x2, x6 = gl.split(x2.permute((0, 1, 2, 4, 3)))
    x3, x7 = gl.split(x3.permute((0, 1, 2, 4, 3)))
    return gl.convert_layout(sum_lanes(x0, x1, x2, x3, x4, x5, x6, x7), _sums_layout(), assert_trivial=True)


@gluon.jit
def _weigh_tile(work, n, tile, rows, lse, scale_log2):
    """The weights of the ``tile``-th 64 queries, of which ``rows`` belong to the ``n``-th block, summed by each warp: a tuple of
    ``_sum_rows``. Stores their log-sum-exps at ``lse``."""
    PIECES: gl.constexpr = work.k.shape[0]
    COLUMNS: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    layout: gl.constexpr = product_layout(COLUMNS)
    lines_layout: gl.constexpr = gl.SliceLayout(1, row_lanes(COLUMNS))
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout)

    ring_wait(work.q_full, tile, True)
    q = matrix(ring_at(work.q, tile, True))
    # Where keys are is worked out anew: kept, it would take the registers of logits.
    none = rematerialise(gl.to_tensor(0))
    products = _nothing()
    for piece in gl.static_range(PIECES):
        k = matrix(work.k.index(none + piece)).permute((1, 0))
        products = products + (warpgroup_mma(q, k, zero, use_acc=False, is_async=True),)
    logits = _nothing()
    row_max = gl.full([ROWS, 4], float("-inf"), gl.float32, row_lanes(COLUMNS))
    for piece in gl.static_range(PIECES):
        scores = warpgroup_mma_wait(PIECES - 1 - piece, deps=[products[piece]])
        bias = _biases(work, n, piece).load(gl.SliceLayout(0, layout))
        x = by_lane(scores * scale_log2 + bias[None, :])
        row_max = gl.maximum(row_max, gl.max(gl.max(x, axis=3), axis=1))
        logits = logits + (x,)
    ring_arrive(work.q_done, tile, True)

    row_max = gl.max(row_max, axis=1)
    # Weights of logits that are all minus infinity are 0, not NaN.
    row_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(COLUMNS))
    weights = _nothing()
    for piece in gl.static_range(PIECES):
        x = gl.exp2(logits[piece] - row_max[:, None][:, None, :, None])
        row_sum += gl.sum(gl.sum(x, axis=3), axis=1)
        weights = weights + (x,)
    row_sum = gl.sum(row_sum, axis=1)
    empty = row_sum == 0
    lines = gl.arange(0, ROWS, layout=lines_layout)
    row_lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) * LN2)
    gl.store(lse + lines, row_lse, mask=lines < rows)

    # Nor do rows of other blocks count, nor those whose sum is NaN.
    counts = (lines < rows) & (row_sum > 0)
    inverse = gl.where(counts, 1.0 / gl.where(counts, row_sum, 1.0), 0.0)[:, None][:, None, :, None]
    sums = _nothing()
    for piece in gl.static_range(PIECES):
        sums = sums + (_sum_rows(clear_rows(weights[piece], inverse) * inverse),)
    return sums


@gluon.jit
def _weigh(work, half_variance, lse, weights, tokens, weights_row, scale_log2, CAP: gl.constexpr):
    """A multiplying partition: log-sum-exps and mean weights of every block that is its own."""
    PIECES: gl.constexpr = work.k.shape[0]
    COLUMNS: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    lines_layout: gl.constexpr = gl.SliceLayout(1, row_lanes(COLUMNS))
    sums_layout: gl.constexpr = _sums_layout()
    lse += work.at_head.to(gl.int64) * tokens
    # As ``_sum_rows`` leaves the columns of a product.
    block_layout: gl.constexpr = gl.SliceLayout(0, sums_layout)
    low = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, block_layout)))
    high = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, block_layout)))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, block_layout)))
    column = (low % 2 + low // 2 * 8)[:, None, None] + (high * 32)[None, :, None] + (pair * 2)[None, None, :]

    mbarrier.wait(work.k_full.index(0), 0)
    tile = gl.to_tensor(0)
    block, first, size = _block(work, 0)
    for n in range(work.count):
        sums = (gl.zeros([4, 8, COLUMNS // 32, 4], gl.float32, sums_layout),) * PIECES
        ring_wait(work.bias_full, n, True)
        if _estimated(work, n):
            for row in range(0, size, ROWS):
                more = _weigh_tile(work, n, tile, size - row, lse + first + row, scale_log2)
                total = _nothing()
                for piece in gl.static_range(PIECES):
                    total = total + (sums[piece] + more[piece],)
                sums = total
                tile += 1
        else:
            lines = gl.arange(0, ROWS, layout=lines_layout)
            for row in range(0, size, ROWS):
                gl.store(lse + first + row + lines, gl.full([ROWS], float("-inf"), gl.float32, lines_layout), mask=lines < size - row)
        # One thread speaks for all warps.
        barrier()
        ring_arrive(work.bias_done, n, True)

        at = (work.at_head * work.blocks + block).to(gl.int64)
        # Not kept through the loops above.
        unit = rematerialise(column)
        # What is to be waited for, all at once: also what the next block needs.
        h = _nothing()
        if half_variance is not None:
            for piece in gl.static_range(PIECES):
                here = piece * COLUMNS + unit
                h = h + (gl.load(half_variance + at * work.units + here, mask=here < work.units, other=0.0),)
        rows = gl.maximum(size, 1).to(gl.float32)
        block, first, size = _block(work, n + 1)
        for piece in gl.static_range(PIECES):
            here = piece * COLUMNS + unit
            mean = gl.sum(sums[piece], axis=0) / rows
            if half_variance is not None:
                mean = mean * gl.sqrt(gl.minimum(CAP / gl.maximum(h[piece], 1e-6), 1.0))
            gl.store(weights + at * weights_row + here, mean.to(weights.dtype.element_ty), mask=here < work.units)


_NUMBERS = ["blocks", "units", "heads", "group", "tokens", "programs", "weights_row", "scale_log2"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _tail_weights_kernel(q_desc, k_desc, bias, half_variance, offsets, lse, weights,
                         blocks, units, heads, group, tokens, programs, weights_row, scale_log2,
                         CAP: gl.constexpr, PIECES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, D: gl.constexpr,
                         STAGES: gl.constexpr):
    at_head, program = gl.program_id(0) // programs, gl.program_id(0) % programs
    batch, head = at_head // heads, at_head % heads
    k = gl.allocate_shared_memory(k_desc.dtype, [PIECES, 1, 1, COLUMNS, D], k_desc.layout)
    k_full = barrier_ring(1)
    ring_init(k_full, 1)
    first = _work(k, k_full, q_desc, offsets, batch, head, blocks, units, heads, program * 2, programs * 2, ROWS, STAGES)
    second = _work(k, k_full, q_desc, offsets, batch, head, blocks, units, heads, program * 2 + 1, programs * 2, ROWS, STAGES)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    gl.warp_specialize([
        (_weigh, (first, half_variance, lse, weights, tokens, weights_row, scale_log2, CAP)),
        (_weigh, (second, half_variance, lse, weights, tokens, weights_row, scale_log2, CAP)),
        (_load, (first, 0, q_desc, k_desc, head // group, bias)),
        (_load, (second, 1, q_desc, k_desc, head // group, bias)),
    ], [4, 1, 1], [240, 24, 24])


@gluon.jit
def _work(k, k_full, q_desc, offsets, batch, head, blocks, units, heads, stream, streams, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """One warpgroup's."""
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, k.shape[4]], q_desc.layout)
    bias = gl.allocate_shared_memory(gl.float32, [STAGES * k.shape[0], k.shape[3]], numbers)
    q_full, q_done, bias_full, bias_done = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES)
    # What TMA, one warp or the warpgroup announces.
    ring_init(q_full, 1)
    ring_init(q_done, 1)
    ring_init(bias_full, 1)
    ring_init(bias_done, 1)
    rounds = (blocks + streams - 1) // streams
    # In the last round some have none.
    last = (rounds - 1) * streams + (stream + rounds - 1) % streams
    return Work(k, k_full, q, q_full, q_done, bias, bias_full, bias_done, offsets, batch, head, batch * heads + head, blocks,
                units, stream, streams, rounds - (last >= blocks).to(gl.int32))


def hopper_tail_weights(q: Tensor, k_mean: Tensor, bias: Tensor, half_variance: Tensor | None, offsets: Tensor, scale: float, cap: float,
                        lse: Tensor, weights: Tensor) -> None:
    """Writes each query's log-sum-exp and each block's mean weights: what ``tail_lse`` and ``mean_weights`` of the portable kernels give.

    Args:
        q: ``[B, H, P, D]``, ``readable``; k_mean ``[B, Hkv, U, D]``, contiguous, its dtype. ``hopper_weighs`` (of tail.py) says which.
        bias: float32 ``[B, H, N, U]``, contiguous, in base 2; -inf where nothing is estimated.
        half_variance: like bias; damps the weights, beyond ``cap``; or None.
        offsets: int32 ``[T + 1]``, T >= N.
        lse: float32 ``[B, H, P]``, contiguous: log of the sum over units of exp(scale q . k_mean + bias), written where blocks are.
        weights: ``[B, H, N, U]`` with dense rows: the mean over a block's queries of exp(logit - lse), 0 for those that are not finite.
    """
    batch, heads, tokens, dim = q.shape
    blocks, units = bias.shape[2:]
    programs = programs_per_head(batch * heads, blocks, multiprocessors(q.device))
    numbers = (blocks, units, heads, heads // k_mean.shape[1], tokens, programs, weights.stride(2))
    fixed = dict(CAP=cap) | constants(dim, units)
    key = (q.get_device(), q.dtype, weights.dtype, half_variance is None, fit(numbers), *fixed.values())
    _launch(key, (batch * heads * programs, 1, 1), (tma_descriptor(q, ROWS), tma_descriptor(k_mean, COLUMNS)),
            (bias, half_variance, offsets, lse, weights), (*numbers, scale * LOG2E), fixed, OPTIONS)


def readable(q: Tensor) -> bool:
    """Whether TMA can load from q as it lies in memory."""
    return tma_ok(q) and strided(q) is q


_launch = QuickLaunch(_tail_weights_kernel)


def constants(dim: int, units: int) -> dict[str, int]:
    """Those of the kernel but CAP, in its order."""
    return dict(PIECES=-(-units // COLUMNS), ROWS=ROWS, COLUMNS=COLUMNS, D=dim, STAGES=STAGES)


@lru_cache
def programs_per_head(heads: int, blocks: int, processors: int) -> int:
    """How many share a head's blocks, so that the last is done first; loading the mean keys counts as another block."""
    def time(programs: int) -> int:
        return -(-heads * programs // processors) * (1 - (-blocks // (WARPGROUPS * programs)))

    return min(range(1, -(-blocks // WARPGROUPS) + 1), key=time)
