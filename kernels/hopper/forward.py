"""Hopper forward kernel: one warp brings tiles in through the copy engine, warpgroups of 64 query rows each multiply and take softmax.

A program owns the query rows of two or three warpgroups, all of one block, the blocks with the longest lists first, and walks the chunks of
keys that the block attends to: first those that a ragged tail or the causal diagonal cuts, one at a time, then the whole ones, where the
scores of the next chunk are computed while the values of this one are added up.
"""

from functools import lru_cache
from typing import NamedTuple

from torch import Size, Tensor, bfloat16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..blocks import BlockLists
from ..device import multiprocessors
from ..lowering.chunks import ENTRY, HEADER, kv_partition, q_partition, work_queue
from ..lowering.outputs import empty_outputs
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_descriptor, tma_ready
from .config import HopperForwardConfig, hopper_forward_config
from .forward_load import Work, load
from .gluon_compat import barrier, copy_out
from .primitives import (
    by_lane,
    by_row,
    clean,
    held,
    largest_norm,
    matrix,
    not_finite,
    product_layout,
    raised,
    row_lanes,
    scaled,
    to_lanes,
)

ROWS = 64          # of a warpgroup: the height of one wgmma
# Registers at entry: the file holds 168 for 4 + 4 + 1 warps and 128 for 4 + 4 + 4 + 1, as warps are dealt out in fours. Then
# warp_specialize gives the loading warp 24, and the multiplying ones 240 or 160.
REGISTERS = {2: 168, 3: 128}
# Where no score in base 2 is larger, weights need no origin: float32 and bfloat16 hold 2 ** 64 as well as 1, and weights of 2 ** -30 of a
# row's largest, which is at least 2 ** -64. Sums over 2 ** 18 keys are finite for values of up to 2 ** 45. Errors are up to 1.1 times those
# with origins, where the largest weight of many rows would be exactly 1.
BOUND = gl.constexpr(64.0)
LOWEST = gl.constexpr(-3.4028234663852886e38)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634
# Reading all keys for their norms (0.06 ms at head_dim 128, where they then save 0.9) takes as long as the norms save in this many visits
# of a query block to a key block.
NORM_VISITS = 4


@gluon.jit
def _softmax(scores, origin, total, scale_log2, BOUNDED: gl.constexpr):
    """One online-softmax step in base 2: (weights, factor on what was summed so far, origin, total).

    Weights are measured from their row's origin, its largest score or one that was the largest until lately; BOUNDED: from 0, and the
    factor stays 1. Origin, total and factor are [ROWS, 4]: the four lanes that share a row agree on the origin, but each has a total of its
    own until the end.
    """
    split = by_lane(scores)
    if BOUNDED:
        factor = 1.0
        weights = gl.exp2(split * scale_log2)
    else:
        origin, factor = raised(origin, gl.max(gl.max(split, axis=3), axis=1) * scale_log2)
        weights = gl.exp2(split * scale_log2 - to_lanes(origin, scores.shape[1]))
        total = total * factor
    return by_row(weights), factor, origin, total + gl.sum(gl.sum(weights, axis=3), axis=1)


@gluon.jit
def _first_not_finite(buffer, size, column_layout: gl.constexpr):
    """For each column of a [CHUNK, D] matrix the first of ``size`` rows that is not finite, CHUNK if there is none: int32 [D]."""
    CHUNK: gl.constexpr = buffer.shape[0]
    STEP: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    first = gl.full([buffer.shape[1]], CHUNK, gl.int32, gl.SliceLayout(0, layout))
    for step in gl.static_range(CHUNK // STEP):
        rows = step * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(1, layout))
        bad = not_finite(buffer.slice(step * STEP, STEP).load(layout)) & (rows < size)[:, None]
        first = gl.minimum(first, gl.min(gl.where(bad, rows[:, None], CHUNK), axis=0))
    return gl.convert_layout(first, column_layout)


@gluon.jit
def _walk(work, group: gl.constexpr, shift, scale_log2, D: gl.constexpr, CAUSAL: gl.constexpr, OVERLAP: gl.constexpr,
          BOUNDED: gl.constexpr):
    """A warpgroup's 64 rows through all chunks: (sums of weighted values, origins, sums of weights); BOUNDED as for ``_softmax``."""
    CHUNK: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    STAGES: gl.constexpr = work.k.shape[0]
    s_layout: gl.constexpr = product_layout(CHUNK)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = work.q.dtype

    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    zero = gl.zeros([ROWS, CHUNK], gl.float32, s_layout)
    # Not minus infinity, from which nothing can be measured: a row that has seen nothing yet has weights of 0.
    origin = gl.full([ROWS, 4], 0.0 if BOUNDED else LOWEST, gl.float32, row_lanes(CHUNK))
    total = gl.zeros([ROWS, 4], gl.float32, row_lanes(CHUNK))
    q = matrix(work.q.index(group))

    for i in range(work.cut):
        keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, s_layout))
        stage = i & (STAGES - 1)
        phase = (i // STAGES) & 1
        size = gl.load(work.cut_sizes - 1 - i)
        mbarrier.wait(work.k_full.index(stage), phase)
        token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        visible = (keys < size)[None, :]
        if CAUSAL:
            # The last key of the chunk that the first row sees.
            last = work.row + group * ROWS + shift - gl.load(work.cut_starts - 1 - i)
            visible = visible & (keys[None, :] <= (last + gl.arange(0, ROWS, layout=s_rows))[:, None])
        weights, factor, origin, total = _softmax(gl.where(visible, scores, float("-inf")), origin, total, scale_log2, BOUNDED)
        mbarrier.wait(work.v_full.index(stage), phase)
        v = matrix(work.v.index(stage))
        acc = acc if BOUNDED else scaled(acc, factor)
        if CAUSAL:
            # What is not finite must reach the rows that see it and no others: so by hand, and not through the matrix unit.
            bad = _first_not_finite(v, size, gl.SliceLayout(0, o_layout))
            limit = gl.minimum(last + gl.arange(0, ROWS, layout=o_rows), CHUNK - 1)
            acc = gl.where(bad[None, :] <= limit[:, None], float("nan"), acc)
            barrier()
            mbarrier.arrive(work.v_clean, count=1)
            mbarrier.wait(work.v_clean, 0)
        # Two of them, because three have no equal parts.
        if group < 2:
            clean(v, size, group, 2, CAUSAL)
        # The matrix unit reads shared memory past the ordinary cache: what was just stored must be there, from all warpgroups.
        fence_async_shared()
        barrier()
        mbarrier.arrive(work.v_clean, count=1)
        # Under a causal mask this is the second step of two.
        mbarrier.wait(work.v_clean, 1 if CAUSAL else i & 1)
        token = warpgroup_mma(gl.convert_layout(weights.to(dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.done.index(stage), count=1)

    if work.whole > 0:
        stage = work.cut & (STAGES - 1)
        mbarrier.wait(work.k_full.index(stage), (work.cut // STAGES) & 1)
        token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.done.index(stage), count=1)
        weights, factor, origin, total = _softmax(scores, origin, total, scale_log2, BOUNDED)
        acc = acc if BOUNDED else scaled(acc, factor)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(work.cut + 1, work.cut + work.whole):
            stage = i & (STAGES - 1)
            before = (i - 1) & (STAGES - 1)
            mbarrier.wait(work.k_full.index(stage), (i // STAGES) & 1)
            # Turns between the warpgroups measured 1 to 5 % slower on an H200.
            s_token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(work.v_full.index(before), ((i - 1) // STAGES) & 1)
            o_token = warpgroup_mma(p, matrix(work.v.index(before)), acc, is_async=True)
            if OVERLAP:
                scores = warpgroup_mma_wait(1, deps=[s_token])
                weights, factor, origin, total = _softmax(scores, origin, total, scale_log2, BOUNDED)
                # Or the compiler would wait for both products before the exponentials.
                total = held(total)
                acc = warpgroup_mma_wait(0, deps=[o_token])
                mbarrier.arrive(work.done.index(stage), count=1)
            else:
                scores, acc = warpgroup_mma_wait(0, deps=[s_token, o_token])
                mbarrier.arrive(work.done.index(stage), count=1)
                weights, factor, origin, total = _softmax(scores, origin, total, scale_log2, BOUNDED)
            acc = acc if BOUNDED else scaled(acc, factor)
            p = gl.convert_layout(weights.to(dtype), p_layout)
        before = work.cut + work.whole - 1
        mbarrier.wait(work.v_full.index(before & (STAGES - 1)), (before // STAGES) & 1)
        token = warpgroup_mma(p, matrix(work.v.index(before & (STAGES - 1))), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    return acc, origin, total


@gluon.jit
def _attend(work, group: gl.constexpr, out, lse, out_tiles, out_row, shift, scale_log2, D: gl.constexpr, CAUSAL: gl.constexpr,
            OVERLAP: gl.constexpr, NORMS: gl.constexpr):
    """A multiplying partition: 64 query rows from the first chunk to the stored result."""
    CHUNK: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    s_rows: gl.constexpr = gl.SliceLayout(1, product_layout(CHUNK))
    o_layout: gl.constexpr = product_layout(D)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = work.q.dtype
    q = matrix(work.q.index(group))
    mbarrier.wait(work.q_full.index(group), 0)
    rows = work.rows - group * ROWS
    if NORMS:
        # A product of two vectors is no larger than that of their norms, and NaN is not known to be small. Without maxima and scaling a
        # forward takes 0.91 to 0.94 of the time on an H200.
        if largest_norm(q, rows) * work.key_norm * (scale_log2 * scale_log2) <= BOUND * BOUND:
            acc, origin, total = _walk(work, group, shift, scale_log2, D, CAUSAL, OVERLAP, True)
        else:
            acc, origin, total = _walk(work, group, shift, scale_log2, D, CAUSAL, OVERLAP, False)
    else:
        acc, origin, total = _walk(work, group, shift, scale_log2, D, CAUSAL, OVERLAP, False)

    origin = gl.convert_layout(gl.max(origin, axis=1), s_rows)
    total = gl.convert_layout(gl.sum(total, axis=1), s_rows)
    empty = total == 0
    inverse = 1.0 / gl.where(empty, 1.0, total)
    row_lse = gl.where(empty, float("-inf"), (origin + gl.log2(gl.where(empty, 1.0, total))) * LN2)
    result = (acc * gl.convert_layout(inverse, o_rows)[:, None]).to(dtype)
    offsets = gl.arange(0, ROWS, layout=s_rows)
    gl.store(lse + offsets + group * ROWS, row_lse, mask=offsets < rows)
    if rows >= ROWS:
        # The result goes out through q's memory, which no warp may still be reading.
        barrier()
        q.store(result)
        fence_async_shared()
        barrier()
        copy_out(out_tiles, [work.batch, work.head, work.row + group * ROWS, 0], work.q.index(group))
        tma.store_wait(0)
    else:
        lines = gl.arange(0, ROWS, layout=o_rows)
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
        gl.store(out + ((lines + group * ROWS)[:, None] * out_row + columns[None, :]), result, mask=(lines < rows)[:, None])


@gluon.jit
def _place(place, number, heads):
    """(batch * heads + head, rank) of the ``place``-th block of the launch, of ``number`` in each of ``heads``.

    The sixteenth of every head's blocks with the longest lists goes first, for all heads, because a long list that starts late ends late.
    Then head follows head, so that the keys in use fit in L2.
    """
    early = number // 16
    late = place - early * heads
    rest = number - early
    return gl.where(late < 0, place % heads, late // rest), gl.where(late < 0, place // heads, early + late % rest)


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker.
_NUMBERS = ["out_batch", "out_head", "out_row", "width", "number", "lists", "list_batch", "list_group", "batches", "heads", "group",
            "q_len", "shift", "norms_at", "norm_heads", "norm_group"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _forward_kernel(q_tiles, k_tiles, v_tiles, out_tiles, out, lse, queue, out_batch, out_head, out_row,
                    width, number, lists, list_batch, list_group, batches, heads, group, q_len, shift, norms_at, norm_heads, norm_group,
                    scale_log2,
                    CAUSAL: gl.constexpr, PARTS: gl.constexpr, NORMS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr,
                    D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr):
    # The parts of a block are neighbours: they read the same keys.
    at_head, rank = _place(gl.program_id(0) // PARTS, number, batches * heads)
    head, batch = at_head % heads, at_head // heads
    part = gl.program_id(0) % PARTS
    first_row = (batch.to(gl.int64) * list_batch + head // list_group) * number
    entry = queue + HEADER + (first_row + rank) * ENTRY
    row, rows = gl.load(entry) + part * ROWS * WARPGROUPS, gl.load(entry + 1) - part * ROWS * WARPGROUPS
    if rows <= 0:
        return
    key_norm = 0.0
    if NORMS:
        norms = queue + norms_at + (batch.to(gl.int64) * norm_heads + head // norm_group) * number
        key_norm = gl.cast(gl.load(norms + rank), gl.float32, bitcast=True)
    starts = queue + HEADER + lists.to(gl.int64) * number * ENTRY
    starts += (first_row + gl.load(entry + 4)) * width
    cut_starts = starts + width
    out += batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row
    lse += at_head.to(gl.int64) * q_len + row

    dtype: gl.constexpr = q_tiles.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_tiles.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], v_tiles.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_clean = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(done.index(i), count=WARPGROUPS)
    mbarrier.init(v_clean, count=WARPGROUPS)
    # The copy engine must see the barriers before it signals them.
    fence_async_shared()

    work = Work(q, k, v, q_full, k_full, v_full, done, v_clean,
                starts, cut_starts, cut_starts + lists.to(gl.int64) * number * width,
                gl.load(entry + 2), gl.load(entry + 3), batch, head, head // group, row, rows, key_norm)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend, (work, 0, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL, OVERLAP, NORMS)),
            (_attend, (work, 1, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL, OVERLAP, NORMS)),
            (load, (work, q_tiles, k_tiles, v_tiles)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_attend, (work, 0, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL, OVERLAP, NORMS)),
            (_attend, (work, 1, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL, OVERLAP, NORMS)),
            (_attend, (work, 2, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL, OVERLAP, NORMS)),
            (load, (work, q_tiles, k_tiles, v_tiles)),
        ], [4, 4, 1], [160, 160, 24])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, in_place: bool = False,
                   config: HopperForwardConfig | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; head_dim 64 or 128. benchmark/tune.py tries other configs.

    ``in_place``: out may take q's memory. A warpgroup has its 64 rows in shared memory before it multiplies, and writes at its end the
    ones that belong to the block; rows of the next block that it loads with them, perhaps overwritten, only reach results that it drops.
    """
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    rows, items = q_partition(blocks, q_len), kv_partition(blocks, kv_len)
    if q.numel() == 0 or k.numel() == 0:
        out, lse = empty_outputs(q, rows, in_place)
        return out.zero_(), lse.fill_(float("-inf"))
    visits = heads // kv_heads * rows.number * blocks.capacity
    # Weights of up to 2 ** BOUND are beyond float16. Under a causal mask not all listed keys are seen, and the others must change nothing.
    norms = not causal and q.dtype == bfloat16 and visits >= NORM_VISITS * items.number
    config = config or hopper_forward_config(dim, rows.length, blocks.max_kv_length, causal, norms, batch * heads * rows.number,
                                             multiprocessors(q.device))
    # First of all, so that the GPU cuts the lists while the rest is prepared here.
    queue = work_queue(blocks, rows, items, config.chunk, kv_len - q_len if causal else None, k if norms else None)
    out, lse = empty_outputs(q, rows, in_place)
    plan = _plan(q.shape, k.shape, out.stride(), queue[1:], rows.number, rows.length, config, causal)
    _launch((q.get_device(), q.dtype, plan.key), plan.grid,
            (tma_descriptor(q, ROWS), tma_descriptor(k, config.chunk), tma_descriptor(v, config.chunk), tma_descriptor(out, ROWS)),
            (out, lse, queue.data),
            (*plan.numbers, scale * LOG2E), plan.constants, plan.options)
    return out, lse


_launch = QuickLaunch(_forward_kernel)


class _Plan(NamedTuple):
    """What a launch takes beside tensors and the scale."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict
    options: dict
    key: tuple


# Kept, because it depends on shapes alone and takes longer to work out than the launch.
@lru_cache(maxsize=256)
def _plan(q: Size, k: Size, out_strides: tuple[int, ...], queue: tuple[int, ...], number: int, length: int,
          config: HopperForwardConfig, causal: bool) -> _Plan:
    batch, heads, q_len, dim = q
    kv_heads, kv_len = k[1:3]
    list_batch, list_heads, width, norms_at, norm_heads = queue
    # One program a tile. As many programs as multiprocessors, which take tile after tile, measured 1 % slower on an H200 at 72 chunks a
    # tile and 3 % slower at 144.
    parts = -(-length // (ROWS * config.warpgroups))
    numbers = (*out_strides[:3], width, number, list_batch * list_heads, list_heads if list_batch > 1 else 0, heads // list_heads, batch,
               heads, heads // kv_heads, q_len, kv_len - q_len, norms_at, norm_heads, heads // max(norm_heads, 1))
    fixed = dict(CAUSAL=causal, PARTS=parts, NORMS=norm_heads > 0) | constants(dim, config)
    return _Plan((batch * heads * number * parts, 1, 1), numbers, fixed, options(config), (fit(numbers), *fixed.values()))


def constants(dim: int, config: HopperForwardConfig) -> dict[str, int]:
    """Those of the kernel that follow from a configuration, in the kernel's order."""
    return dict(ROWS=ROWS, CHUNK=config.chunk, D=dim, STAGES=config.stages, WARPGROUPS=config.warpgroups, OVERLAP=config.overlap)


def options(config: HopperForwardConfig) -> dict[str, int]:
    return dict(num_warps=4, maxnreg=REGISTERS[config.warpgroups])
