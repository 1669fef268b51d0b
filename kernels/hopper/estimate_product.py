"""Hopper kernel of the estimate's two products: mixtures with covariances, and moments of queries with those of keys.

A program goes from tile to tile of the result. One warp brings in what is multiplied, and of the next tile while the warpgroups, of 64 rows
each, store this one. Programs that run at once have the same columns, of what comes from far.

On an H200 mixtures of 75 x 875 tiles of 40 heads take 0.31 ms, by cuBLAS 1.14, and moments 0.29 and 1.23: cuBLAS takes kernels for Ampere
where the number of units is no multiple of 8. Where it is one, mixtures take 1.03 to 1.1 times as long as by cuBLAS' own for Hopper, which
takes more of the host than that is; moments take 1.2 to 2 times as long, so these are left to it.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..device import multiprocessors
from ..launch import launch
from ..lowering.tma import tma_descriptor
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .primitives import barrier_ring, matrix, product_layout, ring_arrive, ring_at, ring_free, ring_init, ring_wait

ROWS = 64          # of a warpgroup: the height of one wgmma
DEPTH = 64         # multiplied at once
# Columns of a tile; few where tiles are too few for all multiprocessors.
COLUMNS, FEW_COLUMNS = 256, 64
# Shared memory for what is multiplied and for a result on its way out; and of stages the most.
ROOM, STAGES = 208 << 10, 8
# 4 + 1 or 4 + 4 + 1 warps, which count as eight and twelve: then warp_specialize gives the loading warp 24 or 40 registers, the multiplying
# ones 240 and more.
OPTIONS = dict(num_warps=4, maxnreg=168)


@aggregate
class ProductWork:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    left: gl.shared_memory_descriptor     # [STAGES, 1, 1, WARPGROUPS * ROWS, DEPTH]
    right: gl.shared_memory_descriptor    # [STAGES, 1, 1, DEPTH, COLUMNS], or these two the other way round
    full: gl.shared_memory_descriptor     # one barrier a stage: TMA has written it
    done: gl.shared_memory_descriptor     # all warpgroups have multiplied by it
    heads: gl.tensor
    group: gl.tensor                      # query heads of a key head
    down: gl.tensor                       # tiles of a result's rows
    across: gl.tensor                     # and of its columns
    steps: gl.tensor
    tiles: gl.tensor                      # of all heads
    program: gl.tensor                    # takes one of every ``programs`` of them
    programs: gl.tensor


@gluon.jit
def _tile(work, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """(batch, query head, key head, first row, first column); the rows of all query heads of a key head one after another."""
    below, beside = tile % (work.down * work.group), tile // (work.down * work.group)
    at_head, kv_heads = beside // work.across, work.heads // work.group
    batch, kv_head = at_head // kv_heads, at_head % kv_heads
    return batch, kv_head * work.group + below // work.down, kv_head, below % work.down * ROWS, beside % work.across * COLUMNS


@gluon.jit
def _load(work, left_desc, right_desc, COLUMNS: gl.constexpr, BY_COLUMN: gl.constexpr):
    """The loading partition."""
    ROWS: gl.constexpr = work.left.shape[3]
    DEPTH: gl.constexpr = work.left.shape[4]
    step = gl.to_tensor(0)
    for tile in range(work.program, work.tiles, work.programs):
        batch, head, kv_head, row, column = _tile(work, tile, ROWS, COLUMNS)
        for i in range(work.steps):
            ring_free(work.done, step)
            full = ring_at(work.full, step)
            mbarrier.expect(full, left_desc.block_type.nbytes + right_desc.block_type.nbytes)
            copy_in(left_desc, [batch, head, row, i * DEPTH], full, ring_at(work.left, step))
            if BY_COLUMN:
                copy_in(right_desc, [batch, kv_head, column, i * DEPTH], full, ring_at(work.right, step))
            else:
                copy_in(right_desc, [batch, kv_head, i * DEPTH, column], full, ring_at(work.right, step))
            step += 1


@gluon.jit
def _multiply(work, number: gl.constexpr, result, out_desc, out, rows, columns, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
              BY_COLUMN: gl.constexpr):
    """A multiplying partition: ROWS rows of every tile."""
    layout: gl.constexpr = product_layout(COLUMNS)
    step = gl.to_tensor(0)
    for tile in range(work.program, work.tiles, work.programs):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for i in range(work.steps):
            ring_wait(work.full, step)
            left, right = matrix(ring_at(work.left, step)).slice(number * ROWS, ROWS), matrix(ring_at(work.right, step))
            token = warpgroup_mma(left, right.permute((1, 0)) if BY_COLUMN else right, acc, is_async=True)
            # The step before it is done.
            acc = warpgroup_mma_wait(1, deps=[token])
            if i > 0:
                ring_arrive(work.done, step - 1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        ring_arrive(work.done, step - 1)
        batch, head, _, row, column = _tile(work, tile, work.left.shape[3], COLUMNS)
        row += number * ROWS
        if BY_COLUMN:
            lines = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            places = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
            of_head = out + (batch * work.heads + head).to(gl.int64) * rows * columns
            gl.store(of_head + (lines[:, None] * columns + places[None, :]), acc,
                     mask=(lines < rows)[:, None] & (places < columns)[None, :])
        else:
            # The result of the tile before must have left shared memory.
            tma.store_wait(0)
            barrier()
            matrix(result.index(number)).store(acc.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            # Rows behind the last one are not stored.
            copy_out(out_desc, [batch, head, row, column], result.index(number))
    tma.store_wait(0)


_NUMBERS = ["heads", "group", "down", "across", "steps", "tiles", "programs", "rows", "columns"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _product_kernel(left_desc, right_desc, out_desc, out, heads, group, down, across, steps, tiles, programs, rows, columns,
                    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr,
                    BY_COLUMN: gl.constexpr):
    dtype: gl.constexpr = left_desc.dtype
    left = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, WARPGROUPS * ROWS, DEPTH], left_desc.layout)
    if BY_COLUMN:
        right = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, DEPTH], right_desc.layout)
        result = left
    else:
        right = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, DEPTH, COLUMNS], right_desc.layout)
        result = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, COLUMNS], out_desc.layout)
    full, done = barrier_ring(STAGES), barrier_ring(STAGES)
    ring_init(full, 1)
    ring_init(done, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()
    work = ProductWork(left, right, full, done, heads, group, down, across, steps, tiles, gl.program_id(0), programs)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_multiply, (work, 0, result, out_desc, out, rows, columns, ROWS, COLUMNS, BY_COLUMN)),
            (_multiply, (work, 1, result, out_desc, out, rows, columns, ROWS, COLUMNS, BY_COLUMN)),
            (_load, (work, left_desc, right_desc, COLUMNS, BY_COLUMN)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_multiply, (work, 0, result, out_desc, out, rows, columns, ROWS, COLUMNS, BY_COLUMN)),
            (_load, (work, left_desc, right_desc, COLUMNS, BY_COLUMN)),
        ], [1], [40])


def hopper_matrices(mixture: Tensor, covariances: Tensor, matrix: Tensor) -> None:
    """Writes ``matrix``, ``[B, H, N, D * D]``, of ``mixture`` ``[B, H, N, U]``, whose rows begin at multiples of 16 bytes, and
    ``covariances`` ``[B, Hkv, U, D * D]``; all bfloat16."""
    _product(mixture, covariances, matrix, False)


def hopper_half_variances(queries: Tensor, keys: Tensor, half_variance: Tensor) -> None:
    """Writes ``half_variance``, float32 ``[B, H, N, U]``, of moments of queries ``[B, H, N, E]`` and of keys ``[B, Hkv, U, E]``,
    bfloat16."""
    _product(queries, keys, half_variance, True)


def _product(left: Tensor, right: Tensor, out: Tensor, by_column: bool) -> None:
    (batch, heads, rows, columns), kv_heads, depth = out.shape, right.shape[1], left.shape[3]
    warpgroups, processors = 1 if rows <= ROWS else 2, multiprocessors(left.device)
    down = -(-rows // (warpgroups * ROWS))
    width = COLUMNS if batch * heads * down * -(-columns // COLUMNS) >= processors else FEW_COLUMNS
    across = -(-columns // width)
    tiles = batch * heads * down * across
    programs = min(tiles, processors)
    numbers = (heads, heads // kv_heads, down, across, -(-depth // DEPTH), tiles, programs, rows, columns)
    result = 0 if by_column else 2 * warpgroups * ROWS * width
    stages = min(STAGES, (ROOM - result) // (2 * DEPTH * (warpgroups * ROWS + width)))
    fixed = dict(ROWS=ROWS, COLUMNS=width, DEPTH=DEPTH, STAGES=stages, WARPGROUPS=warpgroups, BY_COLUMN=by_column)
    shape = (width, DEPTH) if by_column else (DEPTH, width)
    written = None if by_column else tma_descriptor(out, ROWS, width)
    descriptors = tma_descriptor(left, warpgroups * ROWS, DEPTH), tma_descriptor(right, *shape), written
    launch(_product_kernel, (programs, 1, 1), (out if by_column else None,), numbers, fixed, OPTIONS, descriptors)
