"""Hopper kernel of the mass that query blocks see in units: the softmax of some of a block's queries over all units, summed over these.

Two warpgroups have 64 queries each, of one block or of two; a warp brings in units' means and biases, first for the sums of weights, then
again for the weights over them. Biases are added by the matrix unit, from three numbers of 16 bits each, and so is what weights are
measured from the second time, when units are rows of the product and queries columns: a lane then sums weights of its own. Two programs
share a multiprocessor, so that one takes exponentials while the other multiplies.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..launch import launch
from ..lowering.primitives import LOG2E, sampled_rows
from ..lowering.tma import tma_descriptor
from .gluon_compat import aggregate, barrier, copy_in
from .primitives import (
    BIASES,
    NEVER,
    barrier_ring,
    biases_layout,
    matrix,
    not_finite,
    product_layout,
    ring_arrive,
    ring_at,
    ring_free,
    ring_init,
    ring_wait,
    row_lanes,
    three_parts,
)
from .softmax import softmax_step

ROWS = 64          # queries of a warpgroup: the height of one wgmma
UNITS = 64         # multiplied at once
WARPGROUPS = 2
STAGES = 3
# 4 + 4 + 1 warps, which count as twelve, of two programs: 80 at entry, then warp_specialize gives the loading warp 48 and the multiplying
# ones 96.
OPTIONS = dict(num_warps=4, maxnreg=80)
# Counts as a weight's origin before there is one.
_NOTHING = gl.constexpr(-1e20)


@aggregate
class MassWork:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor           # [WARPGROUPS, ROWS, D]
    k: gl.shared_memory_descriptor           # [STAGES, 1, 1, UNITS, D]: mean keys
    # [STAGES * WARPGROUPS, UNITS, 16]: in columns 0 to 2 and 8 to 10 the parts of biases for a warpgroup's blocks, in scores before scale;
    # in columns 4 to 6 ones.
    bias: gl.shared_memory_descriptor
    # [WARPGROUPS, ROWS, 16]: ones in the columns of a row's block; at last in columns 4 to 6 the parts of what its weights are measured
    # from.
    extra: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor        # one barrier a stage: TMA has written it, and the loading warp the biases
    done: gl.shared_memory_descriptor        # both warpgroups have multiplied by it
    first: gl.tensor                         # block
    blocks: gl.tensor
    units: gl.tensor
    steps: gl.tensor
    sums: gl.constexpr                       # that h comes in, of units for each one behind the other


@gluon.constexpr_function
def _h_layout(blocks):
    """[UNITS, blocks] in one warp: whole rows too."""
    return gl.BlockedLayout([1, blocks], [32, 1], [1, 1], [1, 0])


@gluon.constexpr_function
def _extra_layout():
    return gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])


@gluon.constexpr_function
def _by_block(blocks):
    """The registers of a product of UNITS units by ROWS queries of so many blocks, as [UNITS, blocks, ROWS / blocks]."""
    half = [0, 1, 0] if blocks == 2 else [0, 0, 32]
    return gl.DistributedLinearLayout([[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], half],
                                      [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [],
                                      [64, blocks, 64 // blocks])


@gluon.constexpr_function
def _each_once(blocks):
    """[UNITS, blocks] as the four lanes that share units in ``_by_block`` share what they have of two blocks out."""
    if blocks == 1:
        return gl.SliceLayout(2, _by_block(1))
    return gl.DistributedLinearLayout([], [[0, 1], [8, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2])


@gluon.jit
def _parts(x, columns, FIRST: gl.constexpr, others):
    """[N, 16] of N numbers as three of 16 bits each, from column FIRST on, which the matrix unit adds up again; ``others`` elsewhere."""
    high, middle, rest = three_parts(x)
    last = gl.where(columns == FIRST + 2, rest[:, None], others)
    return gl.where(columns == FIRST, high[:, None], gl.where(columns == FIRST + 1, middle[:, None], last))


@gluon.jit
def _biases(work, i, number: gl.constexpr):
    """A warpgroup's at the ``i``-th use of the ring."""
    STAGES: gl.constexpr = work.k.shape[0]
    return work.bias.index(i % STAGES * work.q.shape[0] + number)


@gluon.jit
def _first_unit(work, step):
    """Of a step: units come twice."""
    return gl.where(step < work.steps, step, step - work.steps) * work.k.shape[3]


@gluon.jit
def _load_h(work, half_variance, step, BLOCKS: gl.constexpr):
    """[UNITS, BLOCKS] of the units that a step has, 0 where there are none."""
    UNITS: gl.constexpr = work.k.shape[3]
    layout: gl.constexpr = _h_layout(BLOCKS)
    unit = _first_unit(work, step) + gl.arange(0, UNITS, layout=gl.SliceLayout(1, layout))
    block = work.first + gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, layout))
    mask = (unit < work.units)[:, None] & (block < work.blocks)[None, :]
    return _h(work, half_variance, block[None, :], unit[:, None], mask)


@gluon.jit
def _h(work, half_variance, block, unit, mask):
    """0 outside of the mask."""
    pointers = half_variance + block * (work.sums * work.units) + unit
    total = gl.load(pointers, mask=mask, other=0.0)
    for number in gl.static_range(1, work.sums):
        total += gl.load(pointers + number * work.units, mask=mask, other=0.0)
    return total


@gluon.jit
def _load_count(work, log_count, step):
    """[UNITS], -inf where there are none."""
    UNITS: gl.constexpr = work.k.shape[3]
    unit = _first_unit(work, step) + gl.arange(0, UNITS, layout=gl.SliceLayout(1, biases_layout()))
    return gl.load(log_count + unit, mask=unit < work.units, other=float("-inf"))


@gluon.jit
def _load(work, k_desc, batch, kv_head, log_count, half_variance, inverse, CAP: gl.constexpr, BLOCKS: gl.constexpr):
    """The loading partition: all units twice. ``inverse``: 1 over the factor on scores. BLOCKS: of a warpgroup."""
    UNITS: gl.constexpr = work.k.shape[3]
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    layout: gl.constexpr = biases_layout()
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :] + gl.zeros([UNITS, 16], gl.int32, layout)
    ones = gl.where((columns >= 4) & (columns < 7), 1.0, 0.0)
    count, h = _load_count(work, log_count, 0), _load_h(work, half_variance, 0, WARPGROUPS * BLOCKS)
    column = gl.arange(0, WARPGROUPS * BLOCKS, layout=gl.SliceLayout(0, _h_layout(WARPGROUPS * BLOCKS)))[None, :]
    for step in range(2 * work.steps):
        h = gl.minimum(h, CAP)
        ring_free(work.done, step, True)
        for number in gl.static_range(WARPGROUPS):
            parts = ones
            for of in gl.static_range(BLOCKS):
                own = gl.sum(gl.where(column == number * BLOCKS + of, h, 0.0), axis=1)
                own = count + gl.convert_layout(own, gl.SliceLayout(1, layout), assert_trivial=True)
                parts = _parts(gl.maximum(own * inverse, NEVER), columns, 8 * of, parts)
            _biases(work, step, number).store(parts.to(gl.bfloat16))
        # The matrix unit reads them past the ordinary cache.
        fence_async_shared()
        # One thread speaks for all lanes.
        barrier()
        mbarrier.expect(ring_at(work.full, step, True), k_desc.block_type.nbytes)
        # Beyond the last unit TMA writes zeros.
        copy_in(k_desc, [batch, kv_head, _first_unit(work, step), 0], ring_at(work.full, step, True), ring_at(work.k, step, True))
        # A step ahead.
        count, h = _load_count(work, log_count, step + 1), _load_h(work, half_variance, step + 1, WARPGROUPS * BLOCKS)


@gluon.jit
def _compare(work, number: gl.constexpr, q, q_row, offsets, mass, half_variance, rounded, error, scale_log2, SAMPLE: gl.constexpr):
    """A multiplying partition."""
    ROWS: gl.constexpr = work.q.shape[1]
    D: gl.constexpr = work.q.shape[2]
    UNITS: gl.constexpr = work.k.shape[3]
    BLOCKS: gl.constexpr = ROWS // SAMPLE
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    first = work.first + number * BLOCKS
    lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_rows))
    row, there = sampled_rows(offsets, first + lines // SAMPLE, work.blocks, lines % SAMPLE, SAMPLE)
    pointers = q + row.to(gl.int64)[:, None] * q_row + gl.arange(0, D, layout=gl.SliceLayout(0, by_rows))[None, :]
    queries = gl.load(pointers, mask=there[:, None], other=0.0)
    # Neither a query that is not finite nor one that is not there has weights.
    counts = there & (gl.max(not_finite(queries).to(gl.int32), axis=1) == 0)
    own = work.q.index(number)
    own.store(gl.where(counts[:, None], queries, 0.0).to(gl.bfloat16))
    extra = work.extra.index(number)
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, _extra_layout()))[None, :]
    columns = columns + gl.zeros([ROWS, 16], gl.int32, _extra_layout())
    own_columns = 8 * (gl.arange(0, ROWS, layout=gl.SliceLayout(1, _extra_layout())) // SAMPLE)[:, None]
    ones = gl.where((columns >= own_columns) & (columns < own_columns + 3), 1.0, 0.0)
    extra.store(ones.to(gl.bfloat16))
    fence_async_shared()
    barrier()

    row_max = gl.full([ROWS, 4], _NOTHING, gl.float32, row_lanes(UNITS))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(UNITS))
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(UNITS))
    zero = gl.zeros([ROWS, UNITS], gl.float32, product_layout(UNITS))
    for step in range(work.steps):
        ring_wait(work.full, step, True)
        bias = _biases(work, step, number)
        token = warpgroup_mma(extra, bias.permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(own, matrix(ring_at(work.k, step, True)).permute((1, 0)), token, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, step, True)
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, every, True)
    largest = gl.max(row_max, axis=1)
    total = gl.sum(row_sum, axis=1)
    some = total > 0
    origin = gl.convert_layout(gl.where(some, largest + gl.log2(gl.where(some, total, 1.0)), 0.0), gl.SliceLayout(1, _extra_layout()))
    counted = gl.convert_layout(counts.to(gl.int32), gl.SliceLayout(1, _extra_layout())) != 0
    extra.store(_parts(gl.where(counted, -origin / scale_log2, NEVER), columns, 4, ones).to(gl.bfloat16))
    fence_async_shared()
    barrier()

    layout: gl.constexpr = _by_block(BLOCKS)
    found_layout: gl.constexpr = _each_once(BLOCKS)
    of_units: gl.constexpr = gl.SliceLayout(1, found_layout)
    of_blocks: gl.constexpr = gl.SliceLayout(0, found_layout)
    block = first + gl.arange(0, BLOCKS, layout=of_blocks)
    exists = block < work.blocks
    sizes = gl.load(offsets + block + 1, mask=exists, other=0) - gl.load(offsets + block, mask=exists, other=0)
    share = (1.0 / gl.minimum(gl.maximum(sizes, 1), SAMPLE).to(gl.float32))[None, :]
    unit = gl.arange(0, UNITS, layout=of_units)
    places = block[None, :] * work.units + unit[:, None]
    errors = gl.zeros([UNITS, BLOCKS], gl.float32, found_layout)
    for step in range(work.steps):
        inside = (step * UNITS + unit < work.units)[:, None] & exists[None, :]
        h = _h(work, half_variance, block[None, :], (step * UNITS + unit)[:, None], inside)
        gl.store(rounded + places + step * UNITS, h.to(gl.bfloat16), mask=inside)
        i = work.steps + step
        ring_wait(work.full, i, True)
        bias = _biases(work, i, number)
        token = warpgroup_mma(bias, extra.permute((1, 0)), zero, use_acc=False, is_async=True)
        token = warpgroup_mma(matrix(ring_at(work.k, i, True)), own.permute((1, 0)), token, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, i, True)
        split = gl.convert_layout(scores.reshape([UNITS, BLOCKS, SAMPLE]), layout, assert_trivial=True)
        found = gl.convert_layout(gl.sum(gl.exp2(split * scale_log2), axis=2), found_layout) * share
        errors += found * h
        gl.store(mass + places + step * UNITS, found.to(gl.bfloat16), mask=inside)
    gl.store(error + block, gl.sum(errors, axis=0), mask=exists)


_NUMBERS = ["q_batch", "q_head", "q_row", "heads", "group", "blocks", "units", "parts"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _mass_kernel(k_desc, q, log_count, half_variance, offsets, mass, rounded, error, q_batch, q_head, q_row, heads, group, blocks, units,
                 parts, scale_log2, inverse, SAMPLE: gl.constexpr, CAP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
                 UNITS: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, SUMS: gl.constexpr):
    at_head, first = gl.program_id(0) // parts, gl.program_id(0) % parts * (WARPGROUPS * ROWS // SAMPLE)
    head, batch = at_head % heads, at_head // heads
    kv_head, at = head // group, at_head.to(gl.int64)
    q += batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    log_count += (batch * (heads // group) + kv_head) * units
    half_variance += at * blocks * units * SUMS
    mass += at * blocks * units
    rounded += at * blocks * units
    error += at * blocks
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, D], rows_layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, UNITS, D], k_desc.layout)
    biases = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, UNITS, 16], BIASES)
    extra = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, 16], BIASES)
    full, done = barrier_ring(STAGES), barrier_ring(STAGES)
    ring_init(full, 1)
    ring_init(done, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = MassWork(queries, k, biases, extra, full, done, first, blocks, units, (units + UNITS - 1) // UNITS, SUMS)
    gl.warp_specialize([
        (_compare, (work, 0, q, q_row, offsets, mass, half_variance, rounded, error, scale_log2, SAMPLE)),
        (_compare, (work, 1, q, q_row, offsets, mass, half_variance, rounded, error, scale_log2, SAMPLE)),
        (_load, (work, k_desc, batch, kv_head, log_count, half_variance, inverse, CAP, ROWS // SAMPLE)),
    ], [4, 1], [96, 48])


def hopper_mass(q: Tensor, k_mean: Tensor, log_count: Tensor, half_variance: Tensor, offsets: Tensor, scale: float, sample: int,
                cap: float, mass: Tensor, rounded: Tensor, error: Tensor) -> None:
    """``sampled_mass`` of the portable kernels, of bfloat16, head_dim 64 or 128."""
    (batch, heads, blocks, units), dim = mass.shape, q.shape[3]
    parts = -(-blocks * sample // (WARPGROUPS * ROWS))
    numbers = (*q.stride()[:3], heads, heads // k_mean.shape[1], blocks, units, parts)
    fixed = dict(SAMPLE=sample, CAP=cap, ROWS=ROWS, D=dim, UNITS=UNITS, STAGES=STAGES, WARPGROUPS=WARPGROUPS,
                 SUMS=half_variance.shape[3] // units)
    launch(_mass_kernel, (batch * heads * parts, 1, 1), (q, log_count, half_variance, offsets, mass, rounded, error),
           (*numbers, scale * LOG2E, 1 / scale), fixed, OPTIONS, (tma_descriptor(k_mean, UNITS),))
