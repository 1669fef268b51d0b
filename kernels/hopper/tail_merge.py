"""Hopper kernel of the tail's merge: attention to a head's units by their means, a query block's matrix and the exact part, in one pass.

A program owns 128 query rows of a block, two warpgroups' 64 each. One warp brings in what they multiply, the scores of the next units are
computed while the values of these are added up. Biases, too, are added by the matrix unit, from three numbers of 16 bits each. Weights are
measured from the largest score of the first units, or from 2 ** -64 of what the exact part weighs if that is more; rows in which they
overflow follow their maxima in a second walk over the units, as in the forward.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..lowering.inputs import strided, tma_ok
from ..lowering.primitives import LN2, LOG2E
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_tiles
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .inline_asm import round_pairs, scheduling_fence
from .primitives import (
    barrier_ring,
    matrix,
    one_word,
    product_layout,
    rescale,
    ring_arrive,
    ring_at,
    ring_free,
    ring_init,
    ring_wait,
    row_lanes,
)
from .softmax import overflown, softmax_step

ROWS = 64          # of a warpgroup: the height of one wgmma
WARPGROUPS = 2
STAGES = 2         # a power of two: means in flight
# 4 + 4 + 1 warps, which count as twelve: 168 at entry, then warp_specialize gives the loading warp 72 and the multiplying ones 216.
OPTIONS = dict(num_warps=4, maxnreg=168)
BIASES = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
# Stands for minus infinity, which has no parts; and what counts as the exact part of a row that has none.
_NEVER = gl.constexpr(-1e30)
_NOTHING = gl.constexpr(-1e20)


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor           # [WARPGROUPS, 1, 1, ROWS, D]
    exact: gl.shared_memory_descriptor       # likewise: the exact part, then what is merged
    k: gl.shared_memory_descriptor           # [STAGES, 1, 1, D, D]: mean keys of D units, after the last of them the matrix
    v: gl.shared_memory_descriptor           # their mean values
    bias: gl.shared_memory_descriptor        # [STAGES, D, 16]: in three columns the parts of their biases, in scores before scale
    selector: gl.shared_memory_descriptor    # [ROWS, 16]: ones in those columns
    again: gl.shared_memory_descriptor       # [1]: whether weights overflowed
    q_full: gl.shared_memory_descriptor      # one barrier a warpgroup: TMA has written it
    exact_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor      # one a stage: TMA has written it, and the loading warp the biases
    v_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor        # both warpgroups are through with the step that multiplied by its K, and by the V before
    walked: gl.shared_memory_descriptor      # [1]: they know whether weights overflowed
    left: gl.tensor                          # how many units are estimated
    steps: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    block: gl.tensor
    row: gl.tensor                           # first row of the program
    rows: gl.tensor                          # rows from there to the end of the block


@gluon.constexpr_function
def _biases_layout():
    """[D, 16] in one warp: a lane has whole rows, two stores each."""
    return gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])


@gluon.jit
def _write_biases(buffer, biases, LAYOUT: gl.constexpr):
    """Leaves [D] numbers as three of 16 bits each, which the matrix unit adds up again."""
    D: gl.constexpr = buffer.shape[0]
    high = biases.to(gl.bfloat16).to(gl.float32)
    middle = (biases - high).to(gl.bfloat16).to(gl.float32)
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([D, 16], gl.int32, LAYOUT)
    parts = gl.where(columns == 0, high[:, None], gl.where(columns == 1, middle[:, None], (biases - high - middle)[:, None]))
    buffer.store(gl.where(columns < 3, parts, 0.0).to(gl.bfloat16))


@gluon.jit
def _load_units(work, first, k_desc, v_desc, bias, units, inverse):
    """All units, the first D of which are the ``first`` use of the rings."""
    D: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = _biases_layout()
    lines = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    values = gl.load(bias + lines, mask=lines < units, other=float("-inf"))
    for step in range(work.steps):
        i, at = first + step, [work.batch, work.kv_head, step * D, 0]
        ring_free(work.done, i, True)
        _write_biases(ring_at(work.bias, i, True), gl.maximum(values * inverse, _NEVER), layout)
        fence_async_shared()
        # One thread speaks for all lanes.
        barrier()
        mbarrier.expect(ring_at(work.k_full, i, True), k_desc.block_type.nbytes)
        # Beyond the last unit TMA writes zeros.
        copy_in(k_desc, at, ring_at(work.k_full, i, True), ring_at(work.k, i, True))
        # A step ahead.
        unit = (step + 1) * D + lines
        values = gl.load(bias + unit, mask=unit < units, other=float("-inf"))
        ring_free(work.done, i + 1, True)
        _load_v(work, i, v_desc, at)


@gluon.jit
def _load_v(work, i, v_desc, at):
    mbarrier.expect(ring_at(work.v_full, i, True), v_desc.block_type.nbytes)
    copy_in(v_desc, at, ring_at(work.v_full, i, True), ring_at(work.v, i, True))


@gluon.jit
def _load_matrix(work, i, matrix_desc):
    D: gl.constexpr = work.k.shape[3]
    ring_free(work.done, i, True)
    mbarrier.expect(ring_at(work.k_full, i, True), matrix_desc.block_type.nbytes)
    copy_in(matrix_desc, [work.batch, work.head, work.block * D, 0], ring_at(work.k_full, i, True), ring_at(work.k, i, True))


@gluon.jit
def _load(work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias, units, inverse):
    """The loading partition; nothing where nothing is estimated. ``inverse``: 1 over the factor on scores in base 2."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    if work.left > 0:
        for group in gl.static_range(WARPGROUPS):
            mbarrier.expect(work.q_full.index(group), q_desc.block_type.nbytes)
            copy_in(q_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
        _load_units(work, 0, k_desc, v_desc, bias, units, inverse)
        if matrix_desc is not None:
            _load_matrix(work, work.steps, matrix_desc)
        for group in gl.static_range(WARPGROUPS):
            mbarrier.expect(work.exact_full.index(group), out_desc.block_type.nbytes)
            copy_in(out_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.exact_full.index(group), work.exact.index(group))
        if _walk_again(work, 1):
            if matrix_desc is not None:
                # The matrix went before its turn, and K and V use their rings alike.
                ring_free(work.done, work.steps + 1, True)
                _load_v(work, work.steps, v_desc, [work.batch, work.kv_head, 0, 0])
                _load_units(work, work.steps + 1, k_desc, v_desc, bias, units, inverse)
                _load_matrix(work, 2 * work.steps + 1, matrix_desc)
            else:
                _load_units(work, work.steps, k_desc, v_desc, bias, units, inverse)


@gluon.jit
def _walk_again(work, WARPS: gl.constexpr):
    """Whether the units are walked over a second time, once both warpgroups know; for a partition of WARPS warps."""
    mbarrier.wait(work.walked.index(0), 0)
    return gl.max(work.again.load(one_word(WARPS)), axis=0) != 0


@gluon.jit
def _product(work, q, i, zero):
    """Begins the scores of the ``i``-th use of the rings, with biases: one more step of 16."""
    biases = ring_at(work.bias, i, True).permute((1, 0))
    token = warpgroup_mma(work.selector, biases, zero, use_acc=False, is_async=True)
    return warpgroup_mma(q, matrix(ring_at(work.k, i, True)).permute((1, 0)), token, is_async=True)


@gluon.jit
def _walk(work, q, first, start, follows, scale_log2, FOLLOW: gl.constexpr):
    """A warpgroup's 64 rows over all units, which are the ``first`` use of the rings and on: (sums of weighted values, row_max, row_sum).

    Weights are measured from ``start`` or, if it is more, the largest score of the first D units. From then on ``follows`` and FOLLOW
    count, as for ``softmax_step``.
    """
    ROWS: gl.constexpr = work.q.shape[3]
    D: gl.constexpr = work.k.shape[3]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(D), 2)
    dtype: gl.constexpr = work.q.dtype
    acc = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    zero = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(D))
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(D))
    ring_wait(work.k_full, first, True)
    scores = warpgroup_mma_wait(0, deps=[_product(work, q, first, zero)])
    ring_arrive(work.done, first, True)
    weights, alpha, row_max, row_sum = softmax_step(scores, start, row_sum, scale_log2, every, True)
    p = gl.convert_layout(round_pairs(weights, dtype), p_layout)
    last = first + work.steps - 1
    for i in range(first + 1, last + 1):
        ring_wait(work.k_full, i, True)
        s_token = _product(work, q, i, zero)
        ring_wait(work.v_full, i - 1, True)
        o_token = warpgroup_mma(p, matrix(ring_at(work.v, i - 1, True)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW)
        # Or the compiler would wait for both products before the exponentials.
        row_sum = scheduling_fence(row_sum)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        ring_arrive(work.done, i, True)
        acc = rescale(acc, alpha) if FOLLOW else acc
        p = gl.convert_layout(round_pairs(weights, dtype), p_layout)
    ring_wait(work.v_full, last, True)
    token = warpgroup_mma(p, matrix(ring_at(work.v, last, True)), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[token]), row_max, row_sum


@gluon.jit
def _merge(work, group: gl.constexpr, out, lse, tail_lse, share, out_desc, out_row, size, scale, scale_log2, LINEAR: gl.constexpr):
    """A multiplying partition: 64 query rows."""
    ROWS: gl.constexpr = work.q.shape[3]
    D: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = product_layout(D)
    by_rows: gl.constexpr = gl.SliceLayout(1, layout)
    rows = work.rows - group * ROWS
    lines = gl.arange(0, ROWS, layout=by_rows)
    lse += group * ROWS
    tail_lse += group * ROWS
    if work.left == 0:
        # Rows that leave nothing out keep their bits.
        gl.store(tail_lse + lines, gl.full([ROWS], float("-inf"), gl.float32, by_rows), mask=lines < rows)
        gl.store(share + group + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (gl.maximum(gl.minimum(rows, ROWS), 0) / size),
                 mask=lines < 1)
    else:
        of_lanes: gl.constexpr = gl.SliceLayout(1, row_lanes(D))
        own = gl.arange(0, ROWS, layout=of_lanes)
        start = gl.maximum(gl.load(lse + own, mask=own < rows, other=0.0) * (1 / LN2) - 64.0, _NOTHING)[:, None]
        start = start + gl.zeros([ROWS, 4], gl.float32, row_lanes(D))
        mbarrier.wait(work.q_full.index(group), 0)
        q = matrix(work.q.index(group))
        every = gl.full([ROWS, 1], True, gl.int1, row_lanes(D))
        last = work.steps
        acc, row_max, row_sum = _walk(work, q, 0, start, every, scale_log2, False)
        failed = overflown(acc, row_sum, D) & (own < rows)[:, None]
        if gl.max(gl.max(failed.to(gl.int32), axis=1), axis=0) > 0:
            work.again.store(gl.full([1], 1, gl.int32, one_word(4)))
        barrier()
        mbarrier.arrive(work.walked.index(0), count=1)
        if _walk_again(work, 4):
            again = work.steps
            if LINEAR:
                # What was loaded ahead goes unused.
                ring_wait(work.k_full, work.steps, True)
                ring_wait(work.v_full, work.steps, True)
                ring_arrive(work.done, work.steps, True)
                again = again + 1
            acc, row_max, row_sum = _walk(work, q, again, start, failed, scale_log2, True)
            last = again + work.steps

        row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), by_rows)
        row_max = gl.convert_layout(gl.max(row_max, axis=1), by_rows)
        some = row_sum != 0
        divisor = gl.where(some, row_sum, 1.0)
        row_tail = gl.where(some, row_max + gl.log2(divisor), float("-inf"))
        factor = 1.0 / divisor
        if LINEAR:
            # scale q M is added before all is multiplied by scale.
            acc = acc * (factor / scale)[:, None]
            factor = gl.full([ROWS], 1.0, gl.float32, by_rows) * scale
            ring_wait(work.k_full, last, True)
            token = warpgroup_mma(q, matrix(ring_at(work.k, last, True)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[token])
        row_lse = gl.load(lse + lines, mask=lines < rows, other=0.0) * (1 / LN2)
        larger = gl.maximum(row_lse, row_tail)
        exact, tail = gl.exp2(row_lse - larger), gl.exp2(row_tail - larger)
        whole = exact + tail
        exact = exact / whole
        mbarrier.wait(work.exact_full.index(group), 0)
        buffer = matrix(work.exact.index(group))
        before = buffer.load(layout).to(gl.float32)
        merged = exact[:, None] * before + (tail / whole * factor)[:, None] * acc
        # A query of which no weight is left, as none is of some that are infinite, has no estimate.
        merged = gl.where(some[:, None], merged, before).to(work.q.dtype)
        gl.store(lse + lines, (larger + gl.log2(whole)) * LN2, mask=(lines < rows) & some)
        gl.store(tail_lse + lines, row_tail * LN2, mask=lines < rows)
        of_rows = gl.sum(gl.where(lines < rows, gl.where(some, exact, 1.0), 0.0), axis=0)
        gl.store(share + group + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (of_rows / size), mask=lines < 1)
        if rows >= ROWS:
            buffer.store(merged)
            fence_async_shared()
            barrier()
            copy_out(out_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.exact.index(group))
            tma.store_wait(0)
        else:
            columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
            gl.store(out + ((lines + group * ROWS)[:, None] * out_row + columns[None, :]), merged, mask=(lines < rows)[:, None])


_NUMBERS = ["out_batch", "out_head", "out_row", "blocks", "units", "heads", "group", "tokens", "parts"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _tail_merge_kernel(q_desc, out_desc, k_desc, v_desc, matrix_desc, out, lse, tail_lse, share, bias, left, offsets,
                       out_batch, out_head, out_row, blocks, units, heads, group, tokens, parts, scale, scale_log2, inverse,
                       ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    at_block, part = gl.program_id(0) // parts, gl.program_id(0) % parts
    at_head, block = at_block // blocks, at_block % blocks
    batch, head = at_head // heads, at_head % heads
    first = gl.load(offsets + block)
    size = gl.load(offsets + block + 1) - first
    row, rows = first + part * ROWS * WARPGROUPS, size - part * ROWS * WARPGROUPS
    share += (at_block.to(gl.int64) * parts + part) * WARPGROUPS
    if rows <= 0:
        group_of = gl.arange(0, 32, layout=one_word(4))
        gl.store(share + group_of, gl.zeros([32], gl.float32, one_word(4)), mask=group_of < WARPGROUPS)
        return
    out += batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row
    lse += at_head.to(gl.int64) * tokens + row
    tail_lse += at_head.to(gl.int64) * tokens + row

    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    exact = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], out_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, D, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, D, D], v_desc.layout)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    biases, selector = gl.allocate_shared_memory(dtype, [STAGES, D, 16], BIASES), gl.allocate_shared_memory(dtype, [ROWS, 16], BIASES)
    again = gl.allocate_shared_memory(gl.int32, [1], word)
    again.store(gl.zeros([1], gl.int32, one_word(4)))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :] + gl.zeros([ROWS, 16], gl.int32, layout)
    selector.store(gl.where(columns < 3, 1.0, 0.0).to(dtype))
    q_full, exact_full, walked = barrier_ring(WARPGROUPS), barrier_ring(WARPGROUPS), barrier_ring(1)
    k_full, v_full, done = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES)
    # What TMA announces, and what both warpgroups do.
    ring_init(q_full, 1)
    ring_init(exact_full, 1)
    ring_init(k_full, 1)
    ring_init(v_full, 1)
    ring_init(done, WARPGROUPS)
    ring_init(walked, WARPGROUPS)
    # TMA must see the barriers before it signals them, and the matrix unit the selector.
    fence_async_shared()
    work = Work(q, exact, k, v, biases, selector, again, q_full, exact_full, k_full, v_full, done, walked, gl.load(left + at_block),
                (units + D - 1) // D, batch, head, head // group, block, row, rows)
    LINEAR: gl.constexpr = matrix_desc is not None
    gl.warp_specialize([
        (_merge, (work, 0, out, lse, tail_lse, share, out_desc, out_row, size, scale, scale_log2, LINEAR)),
        (_merge, (work, 1, out, lse, tail_lse, share, out_desc, out_row, size, scale, scale_log2, LINEAR)),
        (_load, (work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias + at_block.to(gl.int64) * units, units, inverse)),
    ], [4, 1], [216, 72])


def hopper_tail_merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor,
                      matrix: Tensor | None, tail_lse: Tensor, offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """``combine`` of the portable kernels, of bfloat16, head_dim 64 or 128, q and out ``mergeable``."""
    batch, heads, tokens, dim = q.shape
    blocks, units = bias.shape[2:]
    parts = -(-longest // (ROWS * WARPGROUPS))
    shares = torch.empty(batch, heads, blocks, parts * WARPGROUPS, dtype=torch.float32, device=q.device)
    numbers = (*out.stride()[:3], blocks, units, heads, heads // k_mean.shape[1], tokens, parts)
    fixed = constants(dim)
    key = (q.get_device(), q.dtype, matrix is None, fit(numbers), *fixed.values())
    _launch(key, (batch * heads * blocks * parts, 1, 1),
            (tma_tiles(q, ROWS), tma_tiles(out, ROWS), tma_tiles(k_mean, dim), tma_tiles(v_mean, dim),
             None if matrix is None else tma_tiles(matrix.view(batch, heads, blocks * dim, dim), dim)),
            (out, lse, tail_lse, shares, bias, left, offsets), (*numbers, scale, scale * LOG2E, 1 / (scale * LOG2E)), fixed, OPTIONS)
    torch.sum(shares, -1, out=share)


def mergeable(q: Tensor, out: Tensor) -> bool:
    """Whether TMA can load q and out as they lie in memory."""
    return all([tma_ok(x) and strided(x) is x for x in (q, out)])


def constants(dim: int) -> dict[str, int]:
    """Those of the kernel, in its order."""
    return dict(ROWS=ROWS, D=dim, STAGES=STAGES, WARPGROUPS=WARPGROUPS)


_launch = QuickLaunch(_tail_merge_kernel)
