"""Hopper kernel of what is known of blocks in two units: which tokens are of which half, means, and the keys' covariances, keys read once.

A program goes from block to block. One warp brings in keys by TMA, of the next block too, while two warpgroups have 64 rows of a block's
matrices each: its keys' covariance, from that their first principal direction, from that the lower half and its matrix; the upper half's is
what is left. Values are only summed.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..device import multiprocessors
from ..lowering.primitives import LN2
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_tiles
from .gluon_compat import aggregate, barrier, copy_in
from .inline_asm import round_pairs
from .primitives import barrier_ring, matrix, one_word, product_layout, ring_arrive, ring_at, ring_free, ring_init, ring_wait, zero_rows
from .tail_statistics import _block, _store_upper

WARPGROUPS = 2
STEP = 64          # tokens that are multiplied at once, and rows of a warpgroup, the height of one wgmma
STAGES = 11        # steps of keys that are held: a block's, and what has come of the next
# Tokens of a block at most, and a power of two that holds them.
LONGEST, PLACES = 384, 512
BITS = 23          # of a projection, where it is compared with others: those of float32
# 4 + 4 + 1 warps, which count as twelve: 168 at entry, then warp_specialize gives the loading warp 24 and the multiplying ones 240.
OPTIONS = dict(num_warps=4, maxnreg=168)


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    k: gl.shared_memory_descriptor         # [STAGES, 1, 1, STEP, D]
    lower: gl.shared_memory_descriptor     # [2, 1, 1, STEP, D]: a step's keys, zeros where they are of the upper half
    places: gl.shared_memory_descriptor    # [PLACES], float32: projections of the block's tokens
    members: gl.shared_memory_descriptor   # [WARPGROUPS, PLACES]: 1 for tokens of the lower half
    vectors: gl.shared_memory_descriptor   # [2, D], float32: what the warpgroups tell each other of the direction, in turn
    sums: gl.shared_memory_descriptor      # [16, D], float32: sums of keys and values, of two blocks in turn
    full: gl.shared_memory_descriptor      # one barrier a stage: TMA has written it
    done: gl.shared_memory_descriptor      # both warpgroups are through with it
    met: gl.shared_memory_descriptor       # both have come to the same point
    offsets: gl.tensor                     # pointer to where blocks begin
    heads: gl.tensor
    blocks: gl.tensor
    items: gl.tensor                       # blocks of all heads
    program: gl.tensor                     # takes one of every ``programs`` of them
    programs: gl.tensor


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _meet(work, meetings):
    """Waits for the other warpgroup; what either stored before, the other sees. Returns the number of the next meeting."""
    # One thread speaks for all warps.
    barrier()
    mbarrier.arrive(work.met.index(0), count=1)
    mbarrier.wait(work.met.index(0), meetings & 1)
    return meetings + 1


@gluon.jit
def _load(work, k_desc):
    """The loading partition."""
    STEP: gl.constexpr = work.k.shape[3]
    step = gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        first, _, steps = _block(work, item)
        at_head = item // work.blocks
        for i in range(steps):
            ring_free(work.done, step)
            mbarrier.expect(ring_at(work.full, step), k_desc.block_type.nbytes)
            copy_in(k_desc, [at_head // work.heads, at_head % work.heads, first + i * STEP, 0], ring_at(work.full, step),
                    ring_at(work.k, step))
            step += 1


@gluon.jit
def _before(x):
    """The sums of all numbers that come before each."""
    return gl.associative_scan(x, 0, _add) - x


@gluon.jit
def _halve(work, group: gl.constexpr, size, first, order, BITS: gl.constexpr):
    """Which tokens are of the lower half; group 0 writes the order. Projections are compared in steps of 2^-BITS of a block's range, hardly
    more than what sums in another order change; of equal ones the first are lower, and all are equal where one is not finite."""
    PLACES: gl.constexpr = work.places.shape[0]
    # Each warp has all of them, so that none waits for another.
    line: gl.constexpr = gl.BlockedLayout([PLACES // 32], [32], [4], [0])
    place = gl.arange(0, PLACES, layout=line)
    inside = place < size
    x = work.places.load(line)
    lowest = gl.min(gl.where(inside, x, float("inf")), axis=0)
    x = (x - lowest) * (((1 << BITS) - 1) / (gl.max(gl.where(inside, x, float("-inf")), axis=0) - lowest))
    keys = gl.where(x == x, gl.minimum(x, ((1 << BITS) - 1) * 1.0), 0.0).to(gl.int32)
    keys = gl.where(inside, keys, 1 << BITS)
    lower_size = size // 2
    # The middle one in order: the largest number that no more than the lower half's are below of, found bit by bit. Of those that equal it
    # the first fill the lower half.
    middle = gl.to_tensor(0)
    wanted = lower_size
    bit = gl.to_tensor(1 << (BITS - 1))
    for _ in range(BITS):
        below = gl.sum((keys < middle + bit).to(gl.int32), axis=0)
        if below <= lower_size:
            middle = middle + bit
            wanted = lower_size - below
        bit = bit >> 1
    equal = inside & (keys == middle)
    lower = inside & ((keys < middle) | (equal & (_before(equal.to(gl.int32)) < wanted)))
    work.members.index(group).store(lower.to(work.k.dtype))
    if group == 0:
        before = _before(lower.to(gl.int32))
        gl.store(order + gl.where(lower, before, lower_size + place - before), (first + place).to(gl.int32), mask=inside)
    barrier()


@gluon.jit
def _partial_sums(work, group: gl.constexpr, at, kind: gl.constexpr, x):
    """Keeps the sum of some tokens [*, D] for ``_summed``."""
    work.sums.index(at + 2 * kind + group).store(gl.sum(x, axis=0))


@gluon.jit
def _summed(work, at, kind: gl.constexpr, layout: gl.constexpr):
    return work.sums.index(at + 2 * kind).load(layout) + work.sums.index(at + 2 * kind + 1).load(layout)


@gluon.jit
def _of_rows(work, group: gl.constexpr, at, kind: gl.constexpr, layout: gl.constexpr):
    """Of the warpgroup's rows."""
    ROWS: gl.constexpr = work.k.shape[3]
    one = work.sums.index(at + 2 * kind).slice(group * ROWS, ROWS).load(layout)
    return one + work.sums.index(at + 2 * kind + 1).slice(group * ROWS, ROWS).load(layout)


@gluon.jit
def _multiply(work, group: gl.constexpr, v, order, k_mean, v_mean, log_count, moments, v_batch, v_head, v_row, tokens, size_of_moments,
              LONGEST: gl.constexpr, ITERATIONS: gl.constexpr, BITS: gl.constexpr, SLAB: gl.constexpr):
    """A multiplying partition: 64 rows of every block's matrices, and of each step's tokens half. v's strides are given in eighths."""
    STEP: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    ROWS: gl.constexpr = STEP
    HALF: gl.constexpr = STEP // 2
    STEPS: gl.constexpr = LONGEST // STEP
    layout: gl.constexpr = product_layout(D)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    token: gl.constexpr = gl.SliceLayout(1, by_rows)
    channel: gl.constexpr = gl.SliceLayout(0, by_rows)
    # Rows of 16 bytes: what threads load at once.
    v_batch, v_head, v_row = v_batch.to(gl.int64) * 8, v_head.to(gl.int64) * 8, v_row * 8
    rows = group * ROWS + gl.arange(0, ROWS, layout=of_rows)
    columns = gl.arange(0, D, layout=of_columns)
    line = group * HALF + gl.arange(0, HALF, layout=token)
    channels = gl.arange(0, D, layout=channel)
    tile, step, meetings = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        first, size, steps = _block(work, item)
        at_head = item // work.blocks
        at = (tile & 1) * 8
        tile += 1
        whole = gl.zeros([ROWS, D], gl.float32, layout)
        total = gl.zeros([HALF, D], gl.float32, by_rows)
        for i in range(steps):
            ring_wait(work.full, step + i)
            k = matrix(ring_at(work.k, step + i))
            if size - i * STEP < STEP:
                zero_rows(k, size - i * STEP, group, 2, False)
                # The tensor core reads shared memory past the ordinary cache: what was just stored must be there, from both warpgroups.
                fence_async_shared()
                meetings = _meet(work, meetings)
            product = warpgroup_mma(k.slice(group * ROWS, ROWS, dim=1).permute((1, 0)), k, whole, is_async=True)
            total += k.slice(group * HALF, HALF).load(by_rows).to(gl.float32)
            whole = warpgroup_mma_wait(0, deps=[product])
        _partial_sums(work, group, at, 0, total)
        meetings = _meet(work, meetings)
        inverse = 1.0 / gl.maximum(size, 1).to(gl.float32)

        # From the diagonal, so that nothing is drawn; 1 keeps blocks of one key apart from 0 / 0. Divided by its trace the matrix lengthens
        # nothing, and shortens the first principal direction by no more than D a time.
        spread = whole * inverse - (_of_rows(work, group, at, 0, of_rows) * inverse)[:, None] * (_summed(work, at, 0, of_columns)
                                                                                                * inverse)[None, :]
        across = gl.sum(gl.where(rows[:, None] == columns[None, :], spread, 0.0), axis=1)
        work.vectors.index(meetings & 1).slice(group * ROWS, ROWS).store(across)
        meetings = _meet(work, meetings)
        direction = work.vectors.index((meetings - 1) & 1).load(of_columns)
        trace = gl.sum(direction, axis=0)
        direction = (direction + 1.0) * (1.0 / (trace + D))
        # NaN where it is one.
        spread = spread / gl.where(trace <= 1e-20, 1.0, trace)
        for _ in range(ITERATIONS):
            across = gl.sum(spread * direction[None, :], axis=1)
            work.vectors.index(meetings & 1).slice(group * ROWS, ROWS).store(across)
            meetings = _meet(work, meetings)
            direction = work.vectors.index((meetings - 1) & 1).load(of_columns)
        axis = work.vectors.index((meetings - 1) & 1).load(channel)
        for i in gl.static_range(STEPS):
            if i < steps:
                keys = matrix(ring_at(work.k, step + i)).slice(group * HALF, HALF).load(by_rows).to(gl.float32)
                work.places.slice(i * STEP + group * HALF, HALF).store(gl.sum(keys * axis[None, :], axis=1))
        meetings = _meet(work, meetings)
        # The first of them are on their way meanwhile.
        values = v + (at_head // work.heads) * v_batch + (at_head % work.heads) * v_head
        values += first.to(gl.int64) * v_row
        pointers = values + (line[:, None] * v_row + channels[None, :])
        ahead = gl.load(pointers, mask=(line < size)[:, None], other=0.0)
        _halve(work, group, size, first, order + at_head.to(gl.int64) * tokens + first, BITS)
        lower_values = gl.zeros([HALF, D], gl.float32, by_rows)
        all_values = gl.zeros([HALF, D], gl.float32, by_rows)
        for i in gl.static_range(STEPS):
            if i < steps:
                value = ahead.to(gl.float32)
                pointers += STEP * v_row
                ahead = gl.load(pointers, mask=(line < size - (i + 1) * STEP)[:, None], other=0.0)
                lower_values += value * work.members.index(group).slice(i * STEP + group * HALF, HALF).load(token).to(gl.float32)[:, None]
                all_values += value
        _partial_sums(work, group, at, 2, lower_values)
        _partial_sums(work, group, at, 3, all_values)

        below = gl.zeros([ROWS, D], gl.float32, layout)
        total = gl.zeros([HALF, D], gl.float32, by_rows)
        for i in gl.static_range(STEPS):
            if i < steps:
                k, lower = matrix(ring_at(work.k, step + i)), matrix(work.lower.index(i & 1))
                keys = k.slice(group * HALF, HALF).load(by_rows).to(gl.float32)
                keys *= work.members.index(group).slice(i * STEP + group * HALF, HALF).load(token).to(gl.float32)[:, None]
                # Both were through with what stood here before they met last.
                lower.slice(group * HALF, HALF).store(round_pairs(keys, k.dtype))
                total += keys
                fence_async_shared()
                meetings = _meet(work, meetings)
                product = warpgroup_mma(k.slice(group * ROWS, ROWS, dim=1).permute((1, 0)), lower, below, is_async=True)
                below = warpgroup_mma_wait(0, deps=[product])
        _partial_sums(work, group, at, 1, total)
        meetings = _meet(work, meetings)
        for i in range(steps):
            ring_arrive(work.done, step + i)
        step += steps

        unit = gl.to_tensor(item).to(gl.int64) * 2
        # A NaN stays one, and infinity times zero is one.
        sound = gl.sum((_summed(work, at, 0, of_columns) + _summed(work, at, 3, of_columns)) * 0.0, axis=0) == 0.0
        whole -= below
        _store_unit(work, group, at, below, _of_rows(work, group, at, 1, of_rows), _summed(work, at, 1, of_columns),
                    _summed(work, at, 2, of_columns), size // 2, sound, unit, k_mean, v_mean, log_count, moments, size_of_moments, SLAB)
        _store_unit(work, group, at, whole, _of_rows(work, group, at, 0, of_rows) - _of_rows(work, group, at, 1, of_rows),
                    _summed(work, at, 0, of_columns) - _summed(work, at, 1, of_columns),
                    _summed(work, at, 3, of_columns) - _summed(work, at, 2, of_columns), size - size // 2, sound, unit + 1, k_mean, v_mean,
                    log_count, moments, size_of_moments, SLAB)


@gluon.jit
def _store_unit(work, group: gl.constexpr, at, squares, key_rows, key, value, size, sound, unit, k_mean, v_mean, log_count, moments,
                size_of_moments, SLAB: gl.constexpr):
    """What is known of a unit, from the sums of its k k^T, k and v."""
    ROWS: gl.constexpr = squares.shape[0]
    D: gl.constexpr = squares.shape[1]
    inverse = 1.0 / gl.maximum(size, 1).to(gl.float32)
    squares = squares * inverse - (key_rows * inverse)[:, None] * (key * inverse)[None, :]
    _store_upper(moments + unit * size_of_moments, gl.where(sound, squares, 0.0), group * ROWS, SLAB)
    if group == 0:
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, product_layout(D)))
        gl.store(k_mean + unit * D + columns, gl.where(sound, key * inverse, 0.0).to(gl.bfloat16), mask=columns < D)
        gl.store(v_mean + unit * D + columns, gl.where(sound, value * inverse, 0.0).to(gl.bfloat16), mask=columns < D)
        one = gl.arange(0, 32, layout=one_word(4))
        count = gl.maximum(size, 1).to(gl.float32) + gl.zeros([32], gl.float32, one_word(4))
        gl.store(log_count + unit + one, gl.where(sound & (size > 0), gl.log2(count) * LN2, float("-inf")), mask=one < 1)


_NUMBERS = ["heads", "blocks", "items", "programs", "size_of_moments", "v_batch", "v_head", "v_row", "tokens"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _halves_kernel(k_desc, v, offsets, order, k_mean, v_mean, log_count, moments,
                   heads, blocks, items, programs, size_of_moments, v_batch, v_head, v_row, tokens,
                   STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LONGEST: gl.constexpr, PLACES: gl.constexpr,
                   WARPGROUPS: gl.constexpr, ITERATIONS: gl.constexpr, BITS: gl.constexpr, SLAB: gl.constexpr):
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, STEP, D], k_desc.layout)
    lower = gl.allocate_shared_memory(dtype, [2, 1, 1, STEP, D], k_desc.layout)
    places = gl.allocate_shared_memory(gl.float32, [PLACES], plain)
    members = gl.allocate_shared_memory(dtype, [WARPGROUPS, PLACES], plain)
    vectors = gl.allocate_shared_memory(gl.float32, [2, D], plain)
    sums = gl.allocate_shared_memory(gl.float32, [16, D], plain)
    full, done, met = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(1)
    ring_init(full, 1)
    ring_init(done, WARPGROUPS)
    ring_init(met, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = Work(k, lower, places, members, vectors, sums, full, done, met, offsets, heads, blocks, items, gl.program_id(0), programs)
    gl.warp_specialize([
        (_multiply, (work, 0, v, order, k_mean, v_mean, log_count, moments, v_batch, v_head, v_row, tokens, size_of_moments, LONGEST,
                     ITERATIONS, BITS, SLAB)),
        (_multiply, (work, 1, v, order, k_mean, v_mean, log_count, moments, v_batch, v_head, v_row, tokens, size_of_moments, LONGEST,
                     ITERATIONS, BITS, SLAB)),
        (_load, (work, k_desc)),
    ], [4, 1], [240, 24])


def hopper_key_halves(k: Tensor, v: Tensor, offsets: Tensor, order: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor,
                      moments: Tensor, iterations: int, slab: int) -> None:
    """Writes ``order`` as ``principal_order`` of the portable kernels, k_mean, v_mean, log_count and ``moments`` as their
    ``key_statistics``; of bfloat16, head_dim 128, k and v ``readable``, blocks of up to LONGEST tokens in two units."""
    batch, heads, tokens, dim = k.shape
    blocks = k_mean.shape[2] // 2
    items = batch * heads * blocks
    programs = min(items, multiprocessors(k.device))
    numbers = (heads, blocks, items, programs, moments.shape[3], *[stride // 8 for stride in v.stride()[:3]], tokens)
    fixed = constants(dim, iterations, slab)
    key = (k.get_device(), fit(numbers), *fixed.values())
    _launch(key, (programs, 1, 1), (tma_tiles(k, STEP),), (v, offsets, order, k_mean, v_mean, log_count, moments), numbers, fixed, OPTIONS)


def constants(dim: int, iterations: int, slab: int) -> dict[str, int]:
    """Those of the kernel, in its order."""
    return dict(STEP=STEP, D=dim, STAGES=STAGES, LONGEST=LONGEST, PLACES=PLACES, WARPGROUPS=WARPGROUPS, ITERATIONS=iterations, BITS=BITS,
                SLAB=slab)


_launch = QuickLaunch(_halves_kernel)
