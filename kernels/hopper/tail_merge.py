"""Hopper kernel of the tail's merge: attention to a head's units by their means, a query block's matrix and the exact part, in one pass.

A program goes through parts of blocks of 128 query rows, two warpgroups' 64 each. One warp brings in what they multiply by TMA, and biases
by ordinary loads; the scores of the next units are computed while the values of these are added up.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..device import multiprocessors
from ..lowering.inputs import strided, tma_ok
from ..lowering.primitives import LN2, LOG2E, LOWEST
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_tiles
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .inline_asm import lazy_rescale, scheduling_fence
from .primitives import (
    barrier_ring,
    by_lane,
    by_row,
    matrix,
    product_layout,
    rescale,
    ring_arrive,
    ring_at,
    ring_free,
    ring_init,
    ring_wait,
    row_lanes,
    to_lanes,
)

ROWS = 64          # of a warpgroup: the height of one wgmma
WARPGROUPS = 2
STAGES = 2         # a power of two: means in flight
# 4 + 4 + 1 warps, which count as twelve: 168 at entry, then warp_specialize gives the loading warp 24 and the multiplying ones 240.
OPTIONS = dict(num_warps=4, maxnreg=168)


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor           # [WARPGROUPS, 1, 1, ROWS, D]
    exact: gl.shared_memory_descriptor       # likewise: the exact part, then what is merged
    k: gl.shared_memory_descriptor           # [STAGES, 1, 1, D, D]: mean keys of D units, after the last of them the matrix
    v: gl.shared_memory_descriptor           # their mean values
    bias: gl.shared_memory_descriptor        # [2 * STAGES, D], float32: theirs
    q_full: gl.shared_memory_descriptor      # one barrier a warpgroup: TMA has written it
    q_done: gl.shared_memory_descriptor      # the warpgroup has multiplied by it
    exact_full: gl.shared_memory_descriptor
    exact_done: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor      # one a stage
    k_done: gl.shared_memory_descriptor      # both warpgroups have
    v_full: gl.shared_memory_descriptor
    v_done: gl.shared_memory_descriptor
    bias_full: gl.shared_memory_descriptor   # the loading warp has written it
    offsets: gl.tensor                       # pointer to where blocks begin
    left: gl.tensor                          # pointer to how many units a block estimates
    heads: gl.tensor
    blocks: gl.tensor
    parts: gl.tensor                         # of a block, 128 rows each
    items: gl.tensor                         # parts of all blocks of all heads
    steps: gl.tensor
    program: gl.tensor                       # takes one of every ``programs`` items
    programs: gl.tensor


@gluon.constexpr_function
def _line():
    """A row of biases in one warp."""
    return gl.BlockedLayout([4], [32], [1], [0])


@gluon.jit
def _item(work, item):
    """(block among those of all heads, part, its first row, its rows, rows of the block, units that it estimates); past the last item the
    last one."""
    item = gl.minimum(item, work.items - 1)
    at_block, part = item // work.parts, item % work.parts
    block = at_block % work.blocks
    first = gl.load(work.offsets + block)
    size = gl.load(work.offsets + block + 1) - first
    before = part * (work.q.shape[0] * work.q.shape[3])
    return at_block, part, first + before, size - before, size, gl.load(work.left + at_block)


@gluon.jit
def _load(work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias, group_of_heads, units):
    """The loading partition; of blocks that estimate nothing it loads nothing."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    D: gl.constexpr = work.k.shape[3]
    tile, of_k, of_v = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        at_block, _, row, rows, _, left = _item(work, item)
        if (rows > 0) & (left > 0):
            at_head, block = at_block // work.blocks, at_block % work.blocks
            batch, head = at_head // work.heads, at_head % work.heads
            biases = bias + at_block.to(gl.int64) * units
            for i in range(work.steps):
                unit = i * D + gl.arange(0, D, layout=_line())
                values = gl.load(biases + unit, mask=unit < units, other=float("-inf"))
                at = [batch, head // group_of_heads, i * D, 0]
                ring_free(work.k_done, of_k, True)
                mbarrier.expect(ring_at(work.k_full, of_k, True), k_desc.block_type.nbytes)
                # Beyond the last unit TMA writes zeros.
                copy_in(k_desc, at, ring_at(work.k_full, of_k, True), ring_at(work.k, of_k, True))
                of_k += 1
                if i == 0:
                    for group in gl.static_range(WARPGROUPS):
                        mbarrier.wait(work.q_done.index(group), (tile & 1) ^ 1)
                        mbarrier.expect(work.q_full.index(group), q_desc.block_type.nbytes)
                        copy_in(q_desc, [batch, head, row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
                # There are twice as many stages as of K: before both warpgroups were through with the K that was waited for, all their
                # warps had read what stands here.
                ring_at(work.bias, of_v, True).store(values)
                # One thread speaks for all lanes.
                barrier()
                ring_arrive(work.bias_full, of_v, True)
                ring_free(work.v_done, of_v, True)
                mbarrier.expect(ring_at(work.v_full, of_v, True), v_desc.block_type.nbytes)
                copy_in(v_desc, at, ring_at(work.v_full, of_v, True), ring_at(work.v, of_v, True))
                of_v += 1
            for group in gl.static_range(WARPGROUPS):
                mbarrier.wait(work.exact_done.index(group), (tile & 1) ^ 1)
                mbarrier.expect(work.exact_full.index(group), out_desc.block_type.nbytes)
                copy_in(out_desc, [batch, head, row + group * ROWS, 0], work.exact_full.index(group), work.exact.index(group))
            if matrix_desc is not None:
                ring_free(work.k_done, of_k, True)
                mbarrier.expect(ring_at(work.k_full, of_k, True), matrix_desc.block_type.nbytes)
                copy_in(matrix_desc, [batch, head, block * D, 0], ring_at(work.k_full, of_k, True), ring_at(work.k, of_k, True))
                of_k += 1
            tile += 1


@gluon.jit
def _softmax_step(work, i, scores, row_max, row_sum, scale_log2):
    """One step of the online softmax in base 2: (weights, alpha, row_max, row_sum), as in the forward, of scores with biases."""
    D: gl.constexpr = work.k.shape[3]
    ring_wait(work.bias_full, i, True)
    bias = ring_at(work.bias, i, True).load(gl.SliceLayout(0, product_layout(D)))
    split = by_lane(scores * scale_log2 + bias[None, :])
    row_max, alpha = lazy_rescale(row_max, gl.max(gl.max(split, axis=3), axis=1))
    weights = gl.exp2(split - to_lanes(row_max, D))
    return by_row(weights), alpha, row_max, row_sum * alpha + gl.sum(gl.sum(weights, axis=3), axis=1)


@gluon.jit
def _tail(work, group: gl.constexpr, of_k, of_v, scale_log2):
    """(sums of weighted values, row_max, row_sum) of a warpgroup's 64 rows over all units."""
    ROWS: gl.constexpr = work.q.shape[3]
    D: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = work.q.dtype
    q = matrix(work.q.index(group))
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    zero = gl.zeros([ROWS, D], gl.float32, layout)
    # Not minus infinity, from which nothing can be measured: a row that has seen nothing yet has weights of 0.
    row_max = gl.full([ROWS, 4], LOWEST, gl.float32, row_lanes(D))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(D))
    ring_wait(work.k_full, of_k, True)
    token = warpgroup_mma(q, matrix(ring_at(work.k, of_k, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[token])
    ring_arrive(work.k_done, of_k, True)
    weights, alpha, row_max, row_sum = _softmax_step(work, of_v, scores, row_max, row_sum, scale_log2)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for i in range(1, work.steps):
        ring_wait(work.k_full, of_k + i, True)
        s_token = warpgroup_mma(q, matrix(ring_at(work.k, of_k + i, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
        ring_wait(work.v_full, of_v + i - 1, True)
        o_token = warpgroup_mma(p, matrix(ring_at(work.v, of_v + i - 1, True)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        ring_arrive(work.k_done, of_k + i, True)
        weights, alpha, row_max, row_sum = _softmax_step(work, of_v + i, scores, row_max, row_sum, scale_log2)
        # Or the compiler would wait for both products before the exponentials.
        row_sum = scheduling_fence(row_sum)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        ring_arrive(work.v_done, of_v + i - 1, True)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(weights.to(dtype), p_layout)
    last = of_v + work.steps - 1
    ring_wait(work.v_full, last, True)
    token = warpgroup_mma(p, matrix(ring_at(work.v, last, True)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    ring_arrive(work.v_done, last, True)
    return acc, row_max, row_sum


@gluon.jit
def _merge(work, group: gl.constexpr, out, lse, tail_lse, shares, out_desc, out_batch, out_head, out_row, tokens, scale, scale_log2,
           LINEAR: gl.constexpr):
    """A multiplying partition: 64 query rows of every item."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    D: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = product_layout(D)
    by_rows: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = work.q.dtype
    lines = gl.arange(0, ROWS, layout=by_rows)
    tile, of_k, of_v = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    at_block, part, row, rows, size, left = _item(work, work.program)
    for item in range(work.program, work.items, work.programs):
        live = (rows > 0) & (left > 0)
        row, rows = row + group * ROWS, rows - group * ROWS
        at_head = at_block // work.blocks
        at_row = at_head.to(gl.int64) * tokens + row
        share = shares + (at_block.to(gl.int64) * work.parts + part) * WARPGROUPS + group
        if live:
            mbarrier.wait(work.q_full.index(group), tile & 1)
            acc, row_max, row_sum = _tail(work, group, of_k, of_v, scale_log2)
            of_k, of_v = of_k + work.steps, of_v + work.steps
            row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), by_rows)
            row_max = gl.convert_layout(gl.max(row_max, axis=1), by_rows)
            some = row_sum != 0
            divisor = gl.where(some, row_sum, 1.0)
            row_tail = gl.where(some, row_max + gl.log2(divisor), float("-inf"))
            factor = 1.0 / divisor
            if LINEAR:
                # q M is added before all is multiplied by scale.
                acc = acc * (factor / scale)[:, None]
                factor = gl.full([ROWS], 1.0, gl.float32, by_rows) * scale
                ring_wait(work.k_full, of_k, True)
                token = warpgroup_mma(matrix(work.q.index(group)), matrix(ring_at(work.k, of_k, True)), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[token])
                ring_arrive(work.k_done, of_k, True)
                of_k += 1
            mbarrier.arrive(work.q_done.index(group), count=1)
            row_lse = gl.load(lse + at_row + lines, mask=lines < rows, other=0.0) * (1 / LN2)
            larger = gl.maximum(row_lse, row_tail)
            exact, tail = gl.exp2(row_lse - larger), gl.exp2(row_tail - larger)
            whole = exact + tail
            exact = exact / whole
            mbarrier.wait(work.exact_full.index(group), tile & 1)
            buffer = matrix(work.exact.index(group))
            before = buffer.load(layout).to(gl.float32)
            merged = exact[:, None] * before + (tail / whole * factor)[:, None] * acc
            # A query of which no weight is left, as none is of some that are infinite, has no estimate.
            merged = gl.where(some[:, None], merged, before).to(dtype)
            gl.store(lse + at_row + lines, (larger + gl.log2(whole)) * LN2, mask=(lines < rows) & some)
            gl.store(tail_lse + at_row + lines, row_tail * LN2, mask=lines < rows)
            of_rows = gl.sum(gl.where(lines < rows, gl.where(some, exact, 1.0), 0.0), axis=0)
            gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (of_rows / size), mask=lines < 1)
            batch, head = at_head // work.heads, at_head % work.heads
            if rows >= ROWS:
                buffer.store(merged)
                fence_async_shared()
                barrier()
                copy_out(out_desc, [batch, head, row, 0], work.exact.index(group))
                tma.store_wait(0)
            else:
                columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
                at = out + batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row
                gl.store(at + (lines[:, None] * out_row + columns[None, :]), merged, mask=(lines < rows)[:, None])
            # One thread speaks for all warps.
            barrier()
            mbarrier.arrive(work.exact_done.index(group), count=1)
            tile += 1
        else:
            # Rows that leave nothing out keep their bits.
            gl.store(tail_lse + at_row + lines, gl.full([ROWS], float("-inf"), gl.float32, by_rows), mask=lines < rows)
            of_rows = gl.maximum(gl.minimum(rows, ROWS), 0) / gl.maximum(size, 1)
            gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * of_rows, mask=lines < 1)
        at_block, part, row, rows, size, left = _item(work, item + work.programs)


_NUMBERS = ["out_batch", "out_head", "out_row", "blocks", "units", "heads", "group", "tokens", "parts", "items", "programs"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _tail_merge_kernel(q_desc, out_desc, k_desc, v_desc, matrix_desc, out, lse, tail_lse, shares, bias, left, offsets,
                       out_batch, out_head, out_row, blocks, units, heads, group, tokens, parts, items, programs, scale, scale_log2,
                       ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    exact = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], out_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, D, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, D, D], v_desc.layout)
    biases = gl.allocate_shared_memory(gl.float32, [2 * STAGES, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_done, exact_full, exact_done = (barrier_ring(WARPGROUPS), barrier_ring(WARPGROUPS), barrier_ring(WARPGROUPS),
                                              barrier_ring(WARPGROUPS))
    k_full, k_done, v_full, v_done, bias_full = (barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES),
                                                 barrier_ring(2 * STAGES))
    # What TMA, the loading warp or one warpgroup announces, and what both do.
    ring_init(q_full, 1)
    ring_init(q_done, 1)
    ring_init(exact_full, 1)
    ring_init(exact_done, 1)
    ring_init(k_full, 1)
    ring_init(k_done, WARPGROUPS)
    ring_init(v_full, 1)
    ring_init(v_done, WARPGROUPS)
    ring_init(bias_full, 1)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = Work(q, exact, k, v, biases, q_full, q_done, exact_full, exact_done, k_full, k_done, v_full, v_done, bias_full, offsets, left,
                heads, blocks, parts, items, (units + D - 1) // D, gl.program_id(0), programs)
    LINEAR: gl.constexpr = matrix_desc is not None
    gl.warp_specialize([
        (_merge, (work, 0, out, lse, tail_lse, shares, out_desc, out_batch, out_head, out_row, tokens, scale, scale_log2, LINEAR)),
        (_merge, (work, 1, out, lse, tail_lse, shares, out_desc, out_batch, out_head, out_row, tokens, scale, scale_log2, LINEAR)),
        (_load, (work, q_desc, out_desc, k_desc, v_desc, matrix_desc, bias, group, units)),
    ], [4, 1], [240, 24])


def hopper_tail_merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor,
                      matrix: Tensor | None, tail_lse: Tensor, offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """``combine`` of the portable kernels, of bfloat16, head_dim 64 or 128, q and out ``mergeable``."""
    batch, heads, tokens, dim = q.shape
    blocks, units = bias.shape[2:]
    parts = -(-longest // (ROWS * WARPGROUPS))
    shares = torch.empty(batch, heads, blocks, parts * WARPGROUPS, dtype=torch.float32, device=q.device)
    items = batch * heads * blocks * parts
    # As many as multiprocessors, so that what the next rows need is on its way while these are merged.
    programs = min(items, multiprocessors(q.device))
    numbers = (*out.stride()[:3], blocks, units, heads, heads // k_mean.shape[1], tokens, parts, items, programs)
    fixed = constants(dim)
    key = (q.get_device(), q.dtype, matrix is None, fit(numbers), *fixed.values())
    _launch(key, (programs, 1, 1),
            (tma_tiles(q, ROWS), tma_tiles(out, ROWS), tma_tiles(k_mean, dim), tma_tiles(v_mean, dim),
             None if matrix is None else tma_tiles(matrix.view(batch, heads, blocks * dim, dim), dim)),
            (out, lse, tail_lse, shares, bias, left, offsets), (*numbers, scale, scale * LOG2E), fixed, OPTIONS)
    torch.sum(shares, -1, out=share)


def mergeable(q: Tensor, out: Tensor) -> bool:
    """Whether TMA can load q and out as they lie in memory."""
    return all([tma_ok(x) and strided(x) is x for x in (q, out)])


def constants(dim: int) -> dict[str, int]:
    """Those of the kernel, in its order."""
    return dict(ROWS=ROWS, D=dim, STAGES=STAGES, WARPGROUPS=WARPGROUPS)


_launch = QuickLaunch(_tail_merge_kernel)
