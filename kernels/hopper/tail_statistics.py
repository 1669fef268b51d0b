"""Hopper kernel of what is known of blocks' keys and values: means, the keys' covariance and theirs with values, each token read once.

A program goes from block to block. One warp brings tokens in by TMA while two warpgroups multiply them, each into 64 rows of the matrices.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..device import multiprocessors
from ..lowering.plans import Plan
from ..lowering.primitives import LN2
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_tiles
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .primitives import barrier_ring, matrix, one_word, product_layout, ring_arrive, ring_at, ring_free, ring_init, ring_wait, zero_rows

ROWS = 64          # of a warpgroup: the height of one wgmma
WARPGROUPS = 2
STEP = 64          # tokens that are multiplied at once
STAGES = 4         # a power of two: steps in flight
# 4 + 4 + 1 warps, which count as twelve: 168 at entry, then warp_specialize gives the loading warp 24 and the multiplying ones 240.
OPTIONS = dict(num_warps=4, maxnreg=168)


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    k: gl.shared_memory_descriptor        # [STAGES, 1, 1, STEP, D]
    v: gl.shared_memory_descriptor
    result: gl.shared_memory_descriptor   # [WARPGROUPS, 1, 1, ROWS, D]: on its way out
    means: gl.shared_memory_descriptor    # [2 * WARPGROUPS, D], float32: of keys and values, of two blocks in turn
    full: gl.shared_memory_descriptor     # one barrier a stage: TMA has written it
    zeroed: gl.shared_memory_descriptor   # both warpgroups have zeroed what is of other blocks
    done: gl.shared_memory_descriptor     # both have multiplied by it
    meant: gl.shared_memory_descriptor    # both have written their mean
    offsets: gl.tensor                    # pointer to where blocks begin
    heads: gl.tensor
    blocks: gl.tensor
    items: gl.tensor                      # blocks of all heads
    program: gl.tensor                    # takes one of every ``programs`` of them
    programs: gl.tensor


@gluon.jit
def _block(work, item):
    """(first token, tokens, steps)."""
    STEP: gl.constexpr = work.k.shape[3]
    first = gl.load(work.offsets + item % work.blocks)
    size = gl.load(work.offsets + item % work.blocks + 1) - first
    return first, size, (size + STEP - 1) // STEP


@gluon.jit
def _load(work, k_desc, v_desc):
    """The loading partition."""
    STEP: gl.constexpr = work.k.shape[3]
    step = gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        first, _, steps = _block(work, item)
        at_head = item // work.blocks
        for i in range(steps):
            at = [at_head // work.heads, at_head % work.heads, first + i * STEP, 0]
            ring_free(work.done, step, True)
            mbarrier.expect(ring_at(work.full, step, True), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            copy_in(k_desc, at, ring_at(work.full, step, True), ring_at(work.k, step, True))
            copy_in(v_desc, at, ring_at(work.full, step, True), ring_at(work.v, step, True))
            step += 1


@gluon.jit
def _store_upper(out, x, row: gl.constexpr, SLAB: gl.constexpr):
    """Rows from ``row`` on of a symmetric matrix, as much of them as ``_store_symmetric`` of the portable kernels keeps."""
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = product_layout(D)
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    slab = rows // SLAB
    begin = slab * SLAB
    at = slab * (SLAB * D) - slab * (slab - 1) // 2 * (SLAB * SLAB) + (rows - begin) * (D - begin) - begin
    gl.store(out + (at[:, None] + columns[None, :]), x.to(gl.bfloat16), mask=columns[None, :] >= begin[:, None])


@gluon.jit
def _put_mean(buffer, mean):
    """For the other warpgroup, which waits for it."""
    buffer.store(mean)


@gluon.jit
def _multiply(work, group: gl.constexpr, covariance_desc, k_mean, v_mean, log_count, moments, size_of_moments, SLAB: gl.constexpr):
    """A multiplying partition: 64 rows of every block's matrices."""
    ROWS: gl.constexpr = work.result.shape[3]
    STEP: gl.constexpr = work.k.shape[3]
    D: gl.constexpr = work.k.shape[4]
    layout: gl.constexpr = product_layout(D)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    columns = gl.arange(0, D, layout=of_columns)
    tile, step, partial = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for item in range(work.program, work.items, work.programs):
        _, size, steps = _block(work, item)
        of_keys = gl.zeros([ROWS, D], gl.float32, layout)
        of_values = gl.zeros([ROWS, D], gl.float32, layout)
        total = gl.zeros([STEP, D], gl.float32, by_rows)
        for i in range(steps):
            ring_wait(work.full, step, True)
            k, v = matrix(ring_at(work.k, step, True)), matrix(ring_at(work.v, step, True))
            own = k if group == 0 else v
            left = size - i * STEP
            if left < STEP:
                zero_rows(own, left, 0, 1, False)
                # The tensor core reads shared memory past the ordinary cache: what was just stored must be there, from both warpgroups.
                fence_async_shared()
                barrier()
                ring_arrive(work.zeroed, partial, True)
                ring_wait(work.zeroed, partial, True)
                partial += 1
            rows = k.slice(group * ROWS, ROWS, dim=1).permute((1, 0))
            k_token = warpgroup_mma(rows, k, of_keys, is_async=True)
            v_token = warpgroup_mma(rows, v, of_values, is_async=True)
            total += own.load(by_rows).to(gl.float32)
            of_keys, of_values = warpgroup_mma_wait(0, deps=[k_token, v_token])
            # One thread speaks for all warps.
            barrier()
            ring_arrive(work.done, step, True)
            step += 1
        inverse = 1.0 / gl.maximum(size, 1).to(gl.float32)
        slot = (tile & 1) * 2
        _put_mean(work.means.index(slot + group), gl.sum(total, axis=0) * inverse)
        barrier()
        mbarrier.arrive(work.meant.index(0), count=1)
        mbarrier.wait(work.meant.index(0), tile & 1)
        tile += 1
        key, value = work.means.index(slot).load(of_columns), work.means.index(slot + 1).load(of_columns)
        key_rows = work.means.index(slot).slice(group * ROWS, ROWS).load(of_rows)
        # A NaN stays one, and infinity times zero is one.
        sound = gl.sum(key * 0.0 + value * 0.0, axis=0) == 0.0
        of_values = gl.where(sound, of_values * inverse - key_rows[:, None] * value[None, :], 0.0)
        matrix(work.result.index(group)).store(of_values.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        at_head = item // work.blocks
        copy_out(covariance_desc, [at_head // work.heads, at_head % work.heads, item % work.blocks * D + group * ROWS, 0],
                 work.result.index(group))
        at = gl.to_tensor(item).to(gl.int64)
        of_keys = of_keys * inverse - key_rows[:, None] * key[None, :]
        _store_upper(moments + at * size_of_moments, gl.where(sound, of_keys, 0.0), group * ROWS, SLAB)
        if group == 0:
            gl.store(k_mean + at * D + columns, gl.where(sound, key, 0.0).to(gl.bfloat16), mask=columns < D)
            gl.store(v_mean + at * D + columns, gl.where(sound, value, 0.0).to(gl.bfloat16), mask=columns < D)
            one = gl.arange(0, 32, layout=one_word(4))
            count = gl.maximum(size, 1).to(gl.float32) + gl.zeros([32], gl.float32, one_word(4))
            gl.store(log_count + at + one, gl.where(sound & (size > 0), gl.log2(count) * LN2, float("-inf")), mask=one < 1)
        tma.store_wait(0)
        barrier()


_NUMBERS = ["heads", "blocks", "items", "programs", "size_of_moments"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _key_statistics_kernel(k_desc, v_desc, covariance_desc, offsets, k_mean, v_mean, log_count, moments,
                           heads, blocks, items, programs, size_of_moments,
                           ROWS: gl.constexpr, STEP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
                           SLAB: gl.constexpr):
    dtype: gl.constexpr = k_desc.dtype
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, STEP, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, STEP, D], v_desc.layout)
    result = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], k_desc.layout)
    means = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, zeroed, done, meant = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(1)
    ring_init(full, 1)
    ring_init(zeroed, WARPGROUPS)
    ring_init(done, WARPGROUPS)
    ring_init(meant, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = Work(k, v, result, means, full, zeroed, done, meant, offsets, heads, blocks, items, gl.program_id(0), programs)
    gl.warp_specialize([
        (_multiply, (work, 0, covariance_desc, k_mean, v_mean, log_count, moments, size_of_moments, SLAB)),
        (_multiply, (work, 1, covariance_desc, k_mean, v_mean, log_count, moments, size_of_moments, SLAB)),
        (_load, (work, k_desc, v_desc)),
    ], [4, 1], [240, 24])


def hopper_key_statistics(plan: Plan, k: Tensor, v: Tensor, offsets: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor,
                          moments: Tensor, covariances: Tensor, slab: int) -> None:
    """Writes k_mean, v_mean, log_count and ``moments`` as ``key_statistics`` of the portable kernels, and what their ``covariances`` does;
    of bfloat16, head_dim 128, a block one unit. TMA must be able to follow k and v, see ``loaded``."""
    batch, heads, blocks, dim = k_mean.shape
    items = batch * heads * blocks
    programs = min(items, multiprocessors(plan.device))
    numbers = (heads, blocks, items, programs, moments.shape[3])
    fixed = dict(ROWS=ROWS, STEP=STEP, D=dim, STAGES=STAGES, WARPGROUPS=WARPGROUPS, SLAB=slab)
    plan.launch(_launch, (plan.device, fit(numbers), *fixed.values()), (programs, 1, 1),
                (tma_tiles(k, STEP), tma_tiles(v, STEP), tma_tiles(covariances.view(batch, heads, blocks * dim, dim), ROWS)),
                (offsets, k_mean, v_mean, log_count, moments), numbers, fixed, OPTIONS)


_launch = QuickLaunch(_key_statistics_kernel)
