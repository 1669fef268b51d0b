"""Hopper kernel of the merge: attention to a head's units by their means, a query block's matrix and the exact part, in one pass.

A program is one warpgroup with 64 query rows of a block, and a warp that brings in what it multiplies, 64 units at a time, then the matrix
and the exact part; the scores of the next units are computed while the values of these are added up. Biases, too, are added by the matrix
unit, from three numbers of 16 bits each. Weights are measured from the largest score of the first units, or from 2 ** -64 of what the exact
part weighs if that is more; rows in which they overflow follow their maxima in a second walk over the units, as in the forward.

Two programs share a multiprocessor, so that one begins and ends while the other multiplies. On an H200, of 111,600 tokens and 16 heads of
128, 360 units take 1.17 ms, 640 1.65 and 960 2.2: 0.45 for what is read and written once, the rest 7.6 TB/s of means out of L2. Programs of
two and three warpgroups took 1.32, 1.7 (three, of tiles of 192 tokens; two 2.25) and 2.2 to 2.4, whatever their stages and order; two with
maxima and with biases added in registers, 279 instructions for 64 units in place of 198, 1.24, 2.2 and 2.4.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..launch import launch
from ..lowering.primitives import LN2, LOG2E
from ..lowering.tma import tma_descriptor
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .inline_asm import round_pairs, scheduling_fence
from .primitives import (
    BIASES,
    NEVER,
    barrier_ring,
    biases_layout,
    fill_selector,
    matrix,
    one_word,
    product_layout,
    read_word,
    rescale,
    ring_arrive,
    ring_at,
    ring_free,
    ring_init,
    ring_wait,
    row_lanes,
    three_parts,
)
from .softmax import overflown, softmax_step

ROWS = 64          # of a program: the height of one wgmma
UNITS = 64         # multiplied at once; the matrix and the exact part go through the same memory in as many rows
K_STAGES, V_STAGES = 3, 2
# 4 + 1 warps, which count as eight, of two programs: 128 at entry, then warp_specialize gives the loading warp 40 and the multiplying ones
# 216.
OPTIONS = dict(num_warps=4, maxnreg=128)
# Counts as the exact part of a row that has none.
_NOTHING = gl.constexpr(-1e20)


@aggregate
class MergeWork:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor           # [1, 1, 1, ROWS, D]
    k: gl.shared_memory_descriptor           # [K_STAGES, 1, 1, UNITS, D]: mean keys, then the matrix and the exact part
    v: gl.shared_memory_descriptor           # [V_STAGES, 1, 1, UNITS, D]: mean values
    bias: gl.shared_memory_descriptor        # [K_STAGES, UNITS, 16]: in three columns the parts of their biases, in scores before scale
    selector: gl.shared_memory_descriptor    # [1, ROWS, 16]: ones in those columns
    again: gl.shared_memory_descriptor       # [1]: whether weights overflowed
    q_full: gl.shared_memory_descriptor      # [1]: TMA has written it
    k_full: gl.shared_memory_descriptor      # one a stage: TMA has written it, and the loading warp the biases
    v_full: gl.shared_memory_descriptor
    k_done: gl.shared_memory_descriptor      # the warpgroup has multiplied by it
    v_done: gl.shared_memory_descriptor
    walked: gl.shared_memory_descriptor      # [1]: it knows whether weights overflowed
    left: gl.tensor                          # how many units are estimated
    steps: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    block: gl.tensor
    row: gl.tensor                           # first row of the program
    rows: gl.tensor                          # rows from there to the end of the block


@gluon.jit
def _write_biases(buffer, biases, LAYOUT: gl.constexpr):
    """Leaves UNITS numbers as three of 16 bits each, which the matrix unit adds up again."""
    UNITS: gl.constexpr = buffer.shape[0]
    high, middle, rest = three_parts(biases)
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([UNITS, 16], gl.int32, LAYOUT)
    parts = gl.where(columns == 0, high[:, None], gl.where(columns == 1, middle[:, None], rest[:, None]))
    buffer.store(gl.where(columns < 3, parts, 0.0).to(gl.bfloat16))


@gluon.jit
def _load_k(work, i, desc, head, row):
    ring_free(work.k_done, i, True)
    mbarrier.expect(ring_at(work.k_full, i, True), desc.block_type.nbytes)
    # Beyond the last unit TMA writes zeros.
    copy_in(desc, [work.batch, head, row, 0], ring_at(work.k_full, i, True), ring_at(work.k, i, True))


@gluon.jit
def _load_units(work, first_k, first_v, k_desc, v_desc, bias, units, inverse):
    """All units, which use the rings from ``first_k`` and ``first_v`` on."""
    UNITS: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = biases_layout()
    lines = gl.arange(0, UNITS, layout=gl.SliceLayout(1, layout))
    values = gl.load(bias + lines, mask=lines < units, other=float("-inf"))
    for step in range(work.steps):
        k, v, unit = first_k + step, first_v + step, step * UNITS
        ring_free(work.k_done, k, True)
        _write_biases(ring_at(work.bias, k, True), gl.maximum(values * inverse, NEVER), layout)
        # The matrix unit reads them past the ordinary cache.
        fence_async_shared()
        # One thread speaks for all lanes.
        barrier()
        _load_k(work, k, k_desc, work.kv_head, unit)
        # A step ahead.
        values = gl.load(bias + unit + UNITS + lines, mask=unit + UNITS + lines < units, other=float("-inf"))
        ring_free(work.v_done, v, True)
        mbarrier.expect(ring_at(work.v_full, v, True), v_desc.block_type.nbytes)
        copy_in(v_desc, [work.batch, work.kv_head, unit, 0], ring_at(work.v_full, v, True), ring_at(work.v, v, True))


@gluon.jit
def _load_rest(work, i, matrix_desc, out_desc):
    """The matrix and the exact part, from the ``i``-th use of the ring on."""
    UNITS: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    for piece in gl.static_range(D // UNITS):
        _load_k(work, i + piece, matrix_desc, work.head, work.block * D + piece * UNITS)
    _load_k(work, i + D // UNITS, out_desc, work.head, work.row)


@gluon.jit
def _load(work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias, units, inverse, REST: gl.constexpr):
    """The loading partition; nothing where nothing is estimated. ``inverse``: 1 over the factor on scores in base 2. REST: how many uses of
    their ring the matrix and the exact part are."""
    if work.left > 0:
        mbarrier.expect(work.q_full.index(0), q_desc.block_type.nbytes)
        copy_in(q_desc, [work.batch, work.head, work.row, 0], work.q_full.index(0), work.q.index(0))
        _load_units(work, 0, 0, k_desc, v_desc, bias, units, inverse)
        _load_rest(work, work.steps, matrix_desc, out_desc)
        mbarrier.wait(work.walked.index(0), 0)
        if read_word(work.again, 1) != 0:
            _load_units(work, work.steps + REST, work.steps, k_desc, v_desc, bias, units, inverse)
            _load_rest(work, 2 * work.steps + REST, matrix_desc, out_desc)


@gluon.jit
def _product(work, q, i, zero):
    """Begins the scores of the ``i``-th use of the ring, with biases: one more step of 16."""
    biases = ring_at(work.bias, i, True).permute((1, 0))
    token = warpgroup_mma(work.selector.index(0), biases, zero, use_acc=False, is_async=True)
    return warpgroup_mma(q, matrix(ring_at(work.k, i, True)).permute((1, 0)), token, is_async=True)


@gluon.jit
def _walk(work, q, first_k, first_v, start, follows, scale_log2, FOLLOW: gl.constexpr):
    """All rows over all units, which use the rings from ``first_k`` and ``first_v`` on: (sums of weighted values, row_max,
    row_sum).

    Weights are measured from ``start`` or, if it is more, the largest score of the first 64 units. From then on ``follows`` and FOLLOW
    count, as for ``softmax_step``.
    """
    ROWS: gl.constexpr = work.q.shape[3]
    UNITS: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(D), 2)
    dtype: gl.constexpr = work.q.dtype
    acc = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    zero = gl.zeros([ROWS, UNITS], gl.float32, product_layout(UNITS))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(UNITS))
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(UNITS))
    ring_wait(work.k_full, first_k, True)
    scores = warpgroup_mma_wait(0, deps=[_product(work, q, first_k, zero)])
    ring_arrive(work.k_done, first_k, True)
    weights, alpha, row_max, row_sum = softmax_step(scores, start, row_sum, scale_log2, every, True)
    p = gl.convert_layout(round_pairs(weights, dtype), p_layout)
    for step in range(1, work.steps):
        k, v = first_k + step, first_v + step - 1
        ring_wait(work.k_full, k, True)
        s_token = _product(work, q, k, zero)
        ring_wait(work.v_full, v, True)
        o_token = warpgroup_mma(p, matrix(ring_at(work.v, v, True)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW)
        # Or the compiler would wait for both products before the exponentials.
        row_sum = scheduling_fence(row_sum)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        ring_arrive(work.k_done, k, True)
        ring_arrive(work.v_done, v, True)
        acc = rescale(acc, alpha) if FOLLOW else acc
        p = gl.convert_layout(round_pairs(weights, dtype), p_layout)
    last = first_v + work.steps - 1
    ring_wait(work.v_full, last, True)
    token = warpgroup_mma(p, matrix(ring_at(work.v, last, True)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    ring_arrive(work.v_done, last, True)
    return acc, row_max, row_sum


@gluon.jit
def _merge(work, out, lse, estimate_lse, share, out_desc, out_row, size, scale, scale_log2, REST: gl.constexpr):
    """The multiplying partition."""
    ROWS: gl.constexpr = work.q.shape[3]
    UNITS: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    # Pieces of the matrix; the exact part is the one more that REST counts.
    PIECES: gl.constexpr = REST - 1
    layout: gl.constexpr = product_layout(D)
    by_rows: gl.constexpr = gl.SliceLayout(1, layout)
    rows = work.rows
    lines = gl.arange(0, ROWS, layout=by_rows)
    if work.left == 0:
        # Rows that leave nothing out keep their bits.
        gl.store(estimate_lse + lines, gl.full([ROWS], float("-inf"), gl.float32, by_rows), mask=lines < rows)
        gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (gl.minimum(rows, ROWS) / size),
                 mask=lines < 1)
    else:
        own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_lanes(UNITS)))
        start = gl.maximum(gl.load(lse + own, mask=own < rows, other=0.0) * (1 / LN2) - 64.0, _NOTHING)[:, None]
        start = start + gl.zeros([ROWS, 4], gl.float32, row_lanes(UNITS))
        mbarrier.wait(work.q_full.index(0), 0)
        q = matrix(work.q.index(0))
        every = gl.full([ROWS, 1], True, gl.int1, row_lanes(UNITS))
        acc, row_max, row_sum = _walk(work, q, 0, 0, start, every, scale_log2, False)
        rest = work.steps
        failed = overflown(acc, row_sum, UNITS) & (own < rows)[:, None]
        fails = gl.max(gl.max(failed.to(gl.int32), axis=1), axis=0)
        work.again.store(gl.full([1], 1, gl.int32, one_word(4)) * fails)
        barrier()
        mbarrier.arrive(work.walked.index(0), count=1)
        if fails > 0:
            for i in range(rest, rest + REST):
                # Units that were loaded ahead go unused.
                ring_wait(work.k_full, i, True)
                ring_arrive(work.k_done, i, True)
            acc, row_max, row_sum = _walk(work, q, rest + REST, rest, start, failed, scale_log2, True)
            rest = 2 * rest + REST

        row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), by_rows)
        row_max = gl.convert_layout(gl.max(row_max, axis=1), by_rows)
        some = row_sum != 0
        divisor = gl.where(some, row_sum, 1.0)
        row_estimate = gl.where(some, row_max + gl.log2(divisor), float("-inf"))
        factor = 1.0 / divisor
        # scale q M is added before all is multiplied by scale.
        acc = acc * (factor / scale)[:, None]
        factor = gl.full([ROWS], 1.0, gl.float32, by_rows) * scale
        for piece in gl.static_range(PIECES):
            ring_wait(work.k_full, rest + piece, True)
            token = warpgroup_mma(q.slice(piece * UNITS, UNITS, 1), matrix(ring_at(work.k, rest + piece, True)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[token])
            ring_arrive(work.k_done, rest + piece, True)
        row_lse = gl.load(lse + lines, mask=lines < rows, other=0.0) * (1 / LN2)
        larger = gl.maximum(row_lse, row_estimate)
        exact, estimated = gl.exp2(row_lse - larger), gl.exp2(row_estimate - larger)
        whole = exact + estimated
        exact = exact / whole
        ring_wait(work.k_full, rest + PIECES, True)
        tile = ring_at(work.k, rest + PIECES, True)
        buffer = matrix(tile)
        before = buffer.load(layout).to(gl.float32)
        merged = exact[:, None] * before + (estimated / whole * factor)[:, None] * acc
        # A query of which no weight is left, as none is of some that are infinite, has no estimate.
        merged = gl.where(some[:, None], merged, before).to(work.q.dtype)
        gl.store(lse + lines, (larger + gl.log2(whole)) * LN2, mask=(lines < rows) & some)
        gl.store(estimate_lse + lines, row_estimate * LN2, mask=lines < rows)
        of_rows = gl.sum(gl.where(lines < rows, gl.where(some, exact, 1.0), 0.0), axis=0)
        gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (of_rows / size), mask=lines < 1)
        buffer.store(merged)
        if rows >= ROWS:
            fence_async_shared()
            barrier()
            copy_out(out_desc, [work.batch, work.head, work.row, 0], tile)
            tma.store_wait(0)
        else:
            whole_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            barrier()
            places = gl.arange(0, ROWS, layout=gl.SliceLayout(1, whole_rows))[:, None]
            columns = gl.arange(0, D, layout=gl.SliceLayout(0, whole_rows))[None, :]
            # TMA takes only strides of whole 16 bytes; told so, the compiler stores so many at once.
            stride = out_row // 8 * 8
            first = gl.multiple_of(out + work.row.to(gl.int64) * stride, 16)
            gl.store(first + (places * stride + columns), buffer.load(whole_rows), mask=places < rows)


_NUMBERS = ["out_batch", "out_head", "out_row", "blocks", "units", "heads", "group", "tokens", "parts"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _merge_kernel(q_desc, out_desc, k_desc, v_desc, matrix_desc, out, lse, estimate_lse, share, bias, left, offsets,
                       out_batch, out_head, out_row, blocks, units, heads, group, tokens, parts, scale, scale_log2, inverse,
                       ROWS: gl.constexpr, D: gl.constexpr, UNITS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    at_block, part = gl.program_id(0) // parts, gl.program_id(0) % parts
    at_head, block = at_block // blocks, at_block % blocks
    batch, head = at_head // heads, at_head % heads
    first = gl.load(offsets + block)
    size = gl.load(offsets + block + 1) - first
    row, rows = first + part * ROWS, size - part * ROWS
    share += at_block.to(gl.int64) * parts + part
    if rows <= 0:
        gl.store(share, gl.to_tensor(0.0))
        return
    out += batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head
    lse += at_head.to(gl.int64) * tokens + row
    estimate_lse += at_head.to(gl.int64) * tokens + row

    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, UNITS, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, UNITS, D], v_desc.layout)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    biases = gl.allocate_shared_memory(dtype, [K_STAGES, UNITS, 16], BIASES)
    selector = gl.allocate_shared_memory(dtype, [1, ROWS, 16], BIASES)
    again = gl.allocate_shared_memory(gl.int32, [1], word)
    fill_selector(selector)
    q_full, walked = barrier_ring(1), barrier_ring(1)
    k_full, v_full, k_done, v_done = barrier_ring(K_STAGES), barrier_ring(V_STAGES), barrier_ring(K_STAGES), barrier_ring(V_STAGES)
    ring_init(q_full, 1)
    ring_init(walked, 1)
    ring_init(k_full, 1)
    ring_init(v_full, 1)
    ring_init(k_done, 1)
    ring_init(v_done, 1)
    # TMA must see the barriers before it signals them, and the matrix unit the selector.
    fence_async_shared()
    work = MergeWork(q, k, v, biases, selector, again, q_full, k_full, v_full, k_done, v_done, walked, gl.load(left + at_block),
                     (units + UNITS - 1) // UNITS, batch, head, head // group, block, row, rows)
    REST: gl.constexpr = 1 + D // UNITS
    gl.warp_specialize([
        (_merge, (work, out, lse, estimate_lse, share, out_desc, out_row, size, scale, scale_log2, REST)),
        (_load, (work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias + at_block.to(gl.int64) * units, units, inverse, REST)),
    ], [1], [40])


def hopper_merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor,
                      matrix: Tensor, estimate_lse: Tensor, offsets: Tensor, scale: float, shares: Tensor) -> None:
    """``merge`` of the portable kernels, of bfloat16, head_dim 64 or 128, for ROWS rows a program. TMA must be able to follow q and out,
    see ``loaded``."""
    batch, heads, tokens, dim = q.shape
    blocks, units = bias.shape[2:]
    parts = shares.shape[3]
    numbers = (*out.stride()[:3], blocks, units, heads, heads // k_mean.shape[1], tokens, parts)
    descriptors = (tma_descriptor(q, ROWS), tma_descriptor(out, ROWS), tma_descriptor(k_mean, UNITS), tma_descriptor(v_mean, UNITS),
                   tma_descriptor(matrix.view(batch, heads, blocks * dim, dim), UNITS))
    launch(_merge_kernel, (batch * heads * blocks * parts, 1, 1), (out, lse, estimate_lse, shares, bias, left, offsets),
           (*numbers, scale, scale * LOG2E, 1 / (scale * LOG2E)),
           dict(ROWS=ROWS, D=dim, UNITS=UNITS, K_STAGES=K_STAGES, V_STAGES=V_STAGES), OPTIONS, descriptors)
