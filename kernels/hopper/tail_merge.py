"""Hopper kernel of the tail's merge: attention to a head's units by their means, a query block's matrix and the exact part, in one pass.

A program goes through a head's query rows 192 at a time, three warpgroups' 64 each, which may be of different blocks; it asks what is
estimated of them as it goes. One warp brings in by TMA what they all multiply by, and biases by ordinary loads; each warpgroup asks for its
own rows, as soon as it is through with those before. The scores of the next units are computed while the values of these are added up.
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
from .inline_asm import lazy_rescale, rematerialise, scheduling_fence
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
WARPGROUPS = 3
STEP = 64          # units, and rows of a matrix, that are multiplied at once
# Of mean keys, and of mean values and matrices, in flight.
K_STAGES, V_STAGES = 3, 4
# 4 + 4 + 4 + 1 warps, which count as sixteen: 128 at entry, then warp_specialize gives the loading warp 32 and the multiplying ones 160.
OPTIONS = dict(num_warps=4, maxnreg=128)


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor           # [WARPGROUPS, 1, 1, ROWS, D]
    exact: gl.shared_memory_descriptor       # likewise: the exact part, then what is merged
    k: gl.shared_memory_descriptor           # [K_STAGES, 1, 1, STEP, D]: units' mean keys
    v: gl.shared_memory_descriptor           # [V_STAGES, 1, 1, STEP, D]: their mean values, after the last of them matrices
    bias: gl.shared_memory_descriptor        # [2 * K_STAGES * WARPGROUPS, STEP], float32: theirs, of each warpgroup's block
    q_full: gl.shared_memory_descriptor      # one barrier a warpgroup: TMA has written it
    exact_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor      # one a stage
    k_done: gl.shared_memory_descriptor      # all warpgroups have multiplied by it
    v_full: gl.shared_memory_descriptor
    v_done: gl.shared_memory_descriptor
    bias_full: gl.shared_memory_descriptor   # the loading warp has written it
    offsets: gl.tensor                       # pointer to where blocks begin
    left: gl.tensor                          # pointer to how many units a block estimates
    heads: gl.tensor
    blocks: gl.tensor
    parts: gl.tensor                         # of a block, 64 rows each
    of_head: gl.tensor                       # items of a head
    items: gl.tensor                         # of all heads: three parts each
    steps: gl.tensor
    program: gl.tensor                       # takes one of every ``programs`` items
    programs: gl.tensor


@gluon.constexpr_function
def _line():
    """A row of biases in one warp."""
    return gl.BlockedLayout([2], [32], [1], [0])


@gluon.jit
def _part(work, item, group: gl.constexpr):
    """(block among those of all heads, part of the block, its first row, its rows, rows of the block, whether anything is estimated of
    them): what ``group`` does of an item; no rows past a head's last block."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    there = item < work.items
    item = gl.minimum(item, work.items - 1)
    place = (item % work.of_head) * WARPGROUPS + group
    block, part = place // work.parts, place % work.parts
    there = there & (block < work.blocks)
    block = gl.minimum(block, work.blocks - 1)
    at_block = item // work.of_head * work.blocks + block
    first = gl.load(work.offsets + block)
    size = gl.load(work.offsets + block + 1) - first
    rows = gl.where(there, size - part * ROWS, 0)
    return at_block, part, first + part * ROWS, rows, size, (rows > 0) & (gl.load(work.left + at_block) > 0)


@gluon.jit
def _matrices(work, item, group: gl.constexpr):
    """(which of an item's matrices ``group`` multiplies by, how many there are, whether anything is estimated of any group's rows): one
    of each block, of whose groups the first has the first ones of its rows."""
    first, _, _, _, _, first_live = _part(work, item, 0)
    second, _, _, _, _, second_live = _part(work, item, 1)
    third, _, _, _, _, third_live = _part(work, item, 2)
    one = first_live.to(gl.int32)
    two = one + (second_live & ((second != first) | (first_live == 0))).to(gl.int32)
    three = two + (third_live & ((third != second) | (second_live == 0))).to(gl.int32)
    if group == 0:
        mine = one
    elif group == 1:
        mine = two
    else:
        mine = three
    return mine - 1, three, first_live | second_live | third_live


@gluon.jit
def _bias_at(work, i, group: gl.constexpr):
    """The biases of the ``i``-th step for a warpgroup."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    return work.bias.index(i % work.bias_full.shape[0] * WARPGROUPS + group)


@gluon.jit
def _load_step(work, i, desc, at, V: gl.constexpr):
    """The ``i``-th use of the ring of V or K, as soon as its stage is free."""
    ring, full, done = (work.v, work.v_full, work.v_done) if V else (work.k, work.k_full, work.k_done)
    ring_free(done, i)
    mbarrier.expect(ring_at(full, i), desc.block_type.nbytes)
    # Beyond the last unit TMA writes zeros.
    copy_in(desc, at, ring_at(full, i), ring_at(ring, i))


@gluon.jit
def _load_matrix(work, i, matrix_desc, at_block, wanted):
    """Uses of the ring of V from the ``i``-th on: (the next one)."""
    STEP: gl.constexpr = work.v.shape[3]
    D: gl.constexpr = work.v.shape[4]
    if wanted:
        at_head = at_block // work.blocks
        for part in gl.static_range(D // STEP):
            _load_step(work, i + part, matrix_desc, [at_head // work.heads, at_head % work.heads, at_block % work.blocks * D + part * STEP, 0],
                       True)
        i += D // STEP
    return i


@gluon.jit
def _load(work, k_desc, v_desc, matrix_desc, bias, group_of_heads, units):
    """The loading partition; of items of which nothing is estimated it loads nothing."""
    STEP: gl.constexpr = work.k.shape[3]
    line = gl.arange(0, STEP, layout=_line())
    of_k, of_v = gl.to_tensor(0), gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        block0, _, _, _, _, live0 = _part(work, item, 0)
        block1, _, _, _, _, live1 = _part(work, item, 1)
        block2, _, _, _, _, live2 = _part(work, item, 2)
        if live0 | live1 | live2:
            at_head = block0 // work.blocks
            batch, kv_head = at_head // work.heads, at_head % work.heads // group_of_heads
            bias0, bias1, bias2 = (bias + block0.to(gl.int64) * units, bias + block1.to(gl.int64) * units,
                                   bias + block2.to(gl.int64) * units)
            next0 = gl.load(bias0 + line, mask=line < units, other=float("-inf"))
            next1 = gl.load(bias1 + line, mask=line < units, other=float("-inf"))
            next2 = gl.load(bias2 + line, mask=line < units, other=float("-inf"))
            for i in range(work.steps):
                _load_step(work, of_k, k_desc, [batch, kv_head, i * STEP, 0], False)
                # There are twice as many stages as of K: before all warpgroups were through with the K that was waited for, all their
                # warps had read what stands here.
                _bias_at(work, of_k, 0).store(next0)
                _bias_at(work, of_k, 1).store(next1)
                _bias_at(work, of_k, 2).store(next2)
                # One thread speaks for all lanes.
                barrier()
                ring_arrive(work.bias_full, of_k)
                # On their way while stages are waited for.
                unit = (i + 1) * STEP + line
                next0 = gl.load(bias0 + unit, mask=unit < units, other=float("-inf"))
                next1 = gl.load(bias1 + unit, mask=unit < units, other=float("-inf"))
                next2 = gl.load(bias2 + unit, mask=unit < units, other=float("-inf"))
                _load_step(work, of_v, v_desc, [batch, kv_head, i * STEP, 0], True)
                of_k += 1
                of_v += 1
            if matrix_desc is not None:
                of_v = _load_matrix(work, of_v, matrix_desc, block0, live0)
                of_v = _load_matrix(work, of_v, matrix_desc, block1, live1 & ((block1 != block0) | (live0 == 0)))
                of_v = _load_matrix(work, of_v, matrix_desc, block2, live2 & ((block2 != block1) | (live1 == 0)))


@gluon.jit
def _scores(work, group: gl.constexpr, of_k):
    """The product with the ``of_k``-th mean keys, under way."""
    ROWS: gl.constexpr = work.q.shape[3]
    STEP: gl.constexpr = work.k.shape[3]
    ring_wait(work.k_full, of_k)
    zero = gl.zeros([ROWS, STEP], gl.float32, product_layout(STEP))
    return warpgroup_mma(matrix(work.q.index(group)), matrix(ring_at(work.k, of_k)).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _biases(work, group: gl.constexpr, of_k):
    STEP: gl.constexpr = work.k.shape[3]
    ring_wait(work.bias_full, of_k)
    return _bias_at(work, of_k, group).load(gl.SliceLayout(0, product_layout(STEP)))


@gluon.jit
def _softmax_step(scores, bias, row_max, row_sum, scale_log2):
    """One step of the online softmax in base 2: (weights, alpha, row_max, row_sum), as in the forward, of scores with biases."""
    STEP: gl.constexpr = scores.shape[1]
    split = by_lane(scores * scale_log2 + bias[None, :])
    row_max, alpha = lazy_rescale(row_max, gl.max(gl.max(split, axis=3), axis=1))
    weights = gl.exp2(split - to_lanes(row_max, STEP))
    return by_row(weights), alpha, row_max, row_sum * alpha + gl.sum(gl.sum(weights, axis=3), axis=1)


@gluon.jit
def _tail(work, group: gl.constexpr, of_k, of_v, scale_log2):
    """(sums of weighted values, row_max, row_sum) of a warpgroup's 64 rows over all units."""
    ROWS: gl.constexpr = work.q.shape[3]
    STEP: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = work.q.dtype
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    # Not minus infinity, from which nothing can be measured: a row that has seen nothing yet has weights of 0.
    row_max = gl.full([ROWS, 4], LOWEST, gl.float32, row_lanes(STEP))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(STEP))
    token = _scores(work, group, of_k)
    bias = _biases(work, group, of_k)
    scores = warpgroup_mma_wait(0, deps=[token])
    ring_arrive(work.k_done, of_k)
    weights, alpha, row_max, row_sum = _softmax_step(scores, bias, row_max, row_sum, scale_log2)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for i in range(1, work.steps):
        s_token = _scores(work, group, of_k + i)
        ring_wait(work.v_full, of_v + i - 1)
        o_token = warpgroup_mma(p, matrix(ring_at(work.v, of_v + i - 1)), acc, is_async=True)
        bias = _biases(work, group, of_k + i)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        ring_arrive(work.k_done, of_k + i)
        weights, alpha, row_max, row_sum = _softmax_step(scores, bias, row_max, row_sum, scale_log2)
        # Or the compiler would wait for both products before the exponentials.
        row_sum = scheduling_fence(row_sum)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        ring_arrive(work.v_done, of_v + i - 1)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(weights.to(dtype), p_layout)
    last = of_v + work.steps - 1
    ring_wait(work.v_full, last)
    token = warpgroup_mma(p, matrix(ring_at(work.v, last)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    ring_arrive(work.v_done, last)
    return acc, row_max, row_sum


@gluon.jit
def _times_matrix(work, group: gl.constexpr, of_v, acc):
    """acc + q M, M being the ``of_v``-th uses of the ring of V."""
    STEP: gl.constexpr = work.v.shape[3]
    D: gl.constexpr = work.v.shape[4]
    q = matrix(work.q.index(group))
    for part in gl.static_range(D // STEP):
        ring_wait(work.v_full, of_v + part)
        token = warpgroup_mma(q.slice(part * STEP, STEP, dim=1), matrix(ring_at(work.v, of_v + part)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.v_done, of_v + part)
    return acc


@gluon.jit
def _pass_by(full, done, first, number):
    """Uses of a ring that others multiply by."""
    for i in range(first, first + number):
        ring_wait(full, i)
        ring_arrive(done, i)


@gluon.jit
def _ask(work, desc, full, buffer, group: gl.constexpr, at_block, row):
    """Brings in a warpgroup's rows; all of its warps must be through with what stands there."""
    at_head = at_block // work.blocks
    mbarrier.expect(full.index(group), desc.block_type.nbytes)
    copy_in(desc, [at_head // work.heads, at_head % work.heads, row, 0], full.index(group), buffer.index(group))


@gluon.jit
def _merge(work, group: gl.constexpr, q_desc, out_desc, out, lse, tail_lse, shares, out_batch, out_head, out_row, tokens, scale, scale_log2,
           LINEAR: gl.constexpr):
    """A multiplying partition: 64 query rows of every item."""
    ROWS: gl.constexpr = work.q.shape[3]
    STEP: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    layout: gl.constexpr = product_layout(D)
    by_rows: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = work.q.dtype
    lines = gl.arange(0, ROWS, layout=by_rows)
    tile, of_k, of_v = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    first_block, _, first_row, _, _, live = _part(work, work.program, group)
    if live:
        _ask(work, q_desc, work.q_full, work.q, group, first_block, first_row)
        _ask(work, out_desc, work.exact_full, work.exact, group, first_block, first_row)
    for item in range(work.program, work.items, work.programs):
        if live:
            mbarrier.wait(work.q_full.index(group), tile & 1)
            acc, row_max, row_sum = _tail(work, group, of_k, of_v, scale_log2)
            # What is computed here takes no registers while units are gone through.
            again = rematerialise(item)
            at_block, part, row, rows, size, _ = _part(work, again, group)
            mine, matrices, _ = _matrices(work, again, group)
            next_block, _, next_row, _, _, next_live = _part(work, again + work.programs, group)
            at_row = (at_block // work.blocks).to(gl.int64) * tokens + row
            row_lse = gl.load(lse + at_row + lines, mask=lines < rows, other=0.0) * (1 / LN2)
            of_k += work.steps
            of_v += work.steps
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
                _pass_by(work.v_full, work.v_done, of_v, mine * (D // STEP))
                acc = _times_matrix(work, group, of_v + mine * (D // STEP), acc)
                _pass_by(work.v_full, work.v_done, of_v + (mine + 1) * (D // STEP), (matrices - 1 - mine) * (D // STEP))
                of_v += matrices * (D // STEP)
            if next_live:
                # One thread asks for all warps.
                barrier()
                _ask(work, q_desc, work.q_full, work.q, group, next_block, next_row)
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
            share = shares + (at_block.to(gl.int64) * work.parts + part)
            gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * (of_rows / size), mask=lines < 1)
            at_head = at_block // work.blocks
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
                fence_async_shared()
            if next_live:
                barrier()
                _ask(work, out_desc, work.exact_full, work.exact, group, next_block, next_row)
            tile += 1
        else:
            # Rows that leave nothing out keep their bits.
            at_block, part, row, rows, size, _ = _part(work, item, group)
            at_row = (at_block // work.blocks).to(gl.int64) * tokens + row
            gl.store(tail_lse + at_row + lines, gl.full([ROWS], float("-inf"), gl.float32, by_rows), mask=lines < rows)
            share = shares + (at_block.to(gl.int64) * work.parts + part)
            of_rows = gl.minimum(rows, ROWS) / gl.maximum(size, 1)
            gl.store(share + lines, gl.full([ROWS], 1.0, gl.float32, by_rows) * of_rows, mask=(lines < 1) & (rows > 0))
            next_block, _, next_row, _, _, next_live = _part(work, item + work.programs, group)
            if next_live:
                barrier()
                _ask(work, q_desc, work.q_full, work.q, group, next_block, next_row)
                _ask(work, out_desc, work.exact_full, work.exact, group, next_block, next_row)
            _, matrices, some_live = _matrices(work, item, group)
            if some_live:
                # As they come.
                for i in range(work.steps):
                    _pass_by(work.k_full, work.k_done, of_k + i, 1)
                    _pass_by(work.v_full, work.v_done, of_v + i, 1)
                of_k += work.steps
                of_v += work.steps
                if LINEAR:
                    _pass_by(work.v_full, work.v_done, of_v, matrices * (D // STEP))
                    of_v += matrices * (D // STEP)
        live = next_live


_NUMBERS = ["out_batch", "out_head", "out_row", "blocks", "units", "heads", "group", "tokens", "parts", "of_head", "items", "programs"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _tail_merge_kernel(q_desc, out_desc, k_desc, v_desc, matrix_desc, out, lse, tail_lse, shares, bias, left, offsets,
                       out_batch, out_head, out_row, blocks, units, heads, group, tokens, parts, of_head, items, programs, scale, scale_log2,
                       ROWS: gl.constexpr, STEP: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
                       WARPGROUPS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    exact = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], out_desc.layout)
    k = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, STEP, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, STEP, D], v_desc.layout)
    biases = gl.allocate_shared_memory(gl.float32, [2 * K_STAGES * WARPGROUPS, STEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, exact_full, bias_full = barrier_ring(WARPGROUPS), barrier_ring(WARPGROUPS), barrier_ring(2 * K_STAGES)
    k_full, k_done, v_full, v_done = barrier_ring(K_STAGES), barrier_ring(K_STAGES), barrier_ring(V_STAGES), barrier_ring(V_STAGES)
    # What TMA or the loading warp announces, and what all warpgroups do.
    ring_init(q_full, 1)
    ring_init(exact_full, 1)
    ring_init(bias_full, 1)
    ring_init(k_full, 1)
    ring_init(k_done, WARPGROUPS)
    ring_init(v_full, 1)
    ring_init(v_done, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = Work(q, exact, k, v, biases, q_full, exact_full, k_full, k_done, v_full, v_done, bias_full, offsets, left,
                heads, blocks, parts, of_head, items, (units + STEP - 1) // STEP, gl.program_id(0), programs)
    LINEAR: gl.constexpr = matrix_desc is not None
    gl.warp_specialize([
        (_merge, (work, 0, q_desc, out_desc, out, lse, tail_lse, shares, out_batch, out_head, out_row, tokens, scale, scale_log2, LINEAR)),
        (_merge, (work, 1, q_desc, out_desc, out, lse, tail_lse, shares, out_batch, out_head, out_row, tokens, scale, scale_log2, LINEAR)),
        (_merge, (work, 2, q_desc, out_desc, out, lse, tail_lse, shares, out_batch, out_head, out_row, tokens, scale, scale_log2, LINEAR)),
        (_load, (work, k_desc, v_desc, matrix_desc, bias, group, units)),
    ], [4, 4, 1], [160, 160, 32])


def hopper_tail_merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor,
                      matrix: Tensor | None, tail_lse: Tensor, offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """``combine`` of the portable kernels, of bfloat16, head_dim 64 or 128, q and out ``mergeable``."""
    batch, heads, tokens, dim = q.shape
    blocks, units = bias.shape[2:]
    parts = -(-longest // ROWS)
    shares = torch.zeros(batch, heads, blocks, parts, dtype=torch.float32, device=q.device)
    of_head = -(-blocks * parts // WARPGROUPS)
    items = batch * heads * of_head
    # As many as multiprocessors, so that what the next rows need is on its way while these are merged.
    programs = min(items, multiprocessors(q.device))
    numbers = (*out.stride()[:3], blocks, units, heads, heads // k_mean.shape[1], tokens, parts, of_head, items, programs)
    fixed = constants(dim)
    key = (q.get_device(), q.dtype, matrix is None, fit(numbers), *fixed.values())
    _launch(key, (programs, 1, 1),
            (tma_tiles(q, ROWS), tma_tiles(out, ROWS), tma_tiles(k_mean, STEP), tma_tiles(v_mean, STEP),
             None if matrix is None else tma_tiles(matrix.view(batch, heads, blocks * dim, dim), STEP)),
            (out, lse, tail_lse, shares, bias, left, offsets), (*numbers, scale, scale * LOG2E), fixed, OPTIONS)
    torch.sum(shares, -1, out=share)


def mergeable(q: Tensor, out: Tensor) -> bool:
    """Whether TMA can load q and out as they lie in memory."""
    return all([tma_ok(x) and strided(x) is x for x in (q, out)])


def constants(dim: int) -> dict[str, int]:
    """Those of the kernel, in its order."""
    return dict(ROWS=ROWS, STEP=STEP, D=dim, K_STAGES=K_STAGES, V_STAGES=V_STAGES, WARPGROUPS=WARPGROUPS)


_launch = QuickLaunch(_tail_merge_kernel)
