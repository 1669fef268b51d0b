"""Hopper forward kernel: one warp brings tiles in through the copy engine, two warpgroups of 64 query rows multiply and take softmax.

A program owns 128 query rows of one block and walks the chunks of 128 keys that the block attends to: first those that a ragged tail
cuts, one at a time, then the whole ones, where the scores of the next chunk are computed while the values of this one are added up.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .blocks import BlockLists
from .hopper_names import aggregate, barrier, copy_in, copy_out
from .triton_chunks import aligned, chunk_lists, empty_outputs, kv_cut, q_cut, readable, shared_strides

ROWS = 64          # of a warpgroup: the height of one wgmma
WARPGROUPS = 2
CHUNK = 128        # keys of a step, where blocks are long enough
# 168 registers at entry for 4 + 4 + 1 warps; warp_specialize then gives the multiplying ones 240 and the loading one 24.
OPTIONS = dict(num_warps=4, maxnreg=168)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = 1.4426950408889634


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor         # [WARPGROUPS, 1, 1, ROWS, D]
    k: gl.shared_memory_descriptor         # [STAGES, 1, 1, CHUNK, D]
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor    # one barrier a warpgroup
    k_full: gl.shared_memory_descriptor    # one a stage: the copy engine has written it
    k_empty: gl.shared_memory_descriptor   # both warpgroups have read it
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    v_clean: gl.shared_memory_descriptor   # both warpgroups have zeroed what the chunk does not hold
    starts: gl.tensor                      # pointer to the row's chunks
    sizes: gl.tensor
    width: gl.tensor
    whole: gl.tensor                       # number of whole chunks
    cut: gl.tensor                         # number of cut chunks
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor                         # first query row of the program
    rows: gl.tensor                        # rows from there to the end of the block

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, k_full, k_empty, v_full, v_empty, v_clean, starts, sizes, width, whole, cut, batch, head, kv_head,
                 row, rows):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.v_clean = v_clean
        self.starts = starts
        self.sizes = sizes
        self.width = width
        self.whole = whole
        self.cut = cut
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.rows = rows


@gluon.jit
def _matrix(buffer):
    """A [1, 1, rows, D] tile as the matrix it is."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def _load(work, q_tiles, k_tiles, v_tiles):
    """The loading partition: q once, then K and V of every chunk, cut ones first."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    STAGES: gl.constexpr = work.k.shape[0]
    for group in gl.static_range(WARPGROUPS):
        mbarrier.expect(work.q_full.index(group), q_tiles.block_type.nbytes)
        copy_in(q_tiles, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
    for i in range(work.cut + work.whole):
        # Cut chunks stand at the end of the list, whole ones at its start.
        at = gl.where(i < work.cut, work.width - 1 - i, i - work.cut)
        start = gl.load(work.starts + at)
        stage = i % STAGES
        # A fresh barrier counts as one whose previous phase is over, so the first round does not wait.
        phase = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(work.k_empty.index(stage), phase)
        mbarrier.expect(work.k_full.index(stage), k_tiles.block_type.nbytes)
        copy_in(k_tiles, [work.batch, work.kv_head, start, 0], work.k_full.index(stage), work.k.index(stage))
        mbarrier.wait(work.v_empty.index(stage), phase)
        mbarrier.expect(work.v_full.index(stage), v_tiles.block_type.nbytes)
        copy_in(v_tiles, [work.batch, work.kv_head, start, 0], work.v_full.index(stage), work.v.index(stage))


@gluon.jit
def _softmax(scores, top, total, scale_log2):
    """One online-softmax step in base 2: (weights, factor on what was summed so far, top, total)."""
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale_log2)
    # A row that has seen nothing yet is measured from 0, which keeps its weights at 0 instead of NaN.
    origin = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale_log2 - origin[:, None])
    factor = gl.exp2(top - origin)
    return weights, factor, new_top, total * factor + gl.sum(weights, axis=1)


@gluon.jit
def _zero_rows(buffer, size, share: gl.constexpr, SHARES: gl.constexpr):
    """Zeroes the rows from ``size`` on in one of SHARES equal parts of a [CHUNK, D] matrix: a weight of zero times a NaN is NaN."""
    ROWS: gl.constexpr = buffer.shape[0] // SHARES
    part = buffer.slice(share * ROWS, ROWS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = part.load(layout)
    rows = share * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    part.store(gl.where((rows < size)[:, None], values, 0.0))


@gluon.jit
def _attend(work, group: gl.constexpr, out, lse, out_tiles, out_row, scale_log2, D: gl.constexpr):
    """A multiplying partition: 64 query rows from the first chunk to the stored result."""
    CHUNK: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    STAGES: gl.constexpr = work.k.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = work.q.dtype

    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    zero = gl.zeros([ROWS, CHUNK], gl.float32, s_layout)
    top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([ROWS], gl.float32, s_rows)
    q = _matrix(work.q.index(group))
    mbarrier.wait(work.q_full.index(group), 0)

    keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, s_layout))
    for i in range(work.cut):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        size = gl.load(work.sizes + work.width - 1 - i)
        mbarrier.wait(work.k_full.index(stage), phase)
        token = warpgroup_mma(q, _matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.k_empty.index(stage), count=1)
        scores = gl.where((keys < size)[None, :], scores, float("-inf"))
        weights, factor, top, total = _softmax(scores, top, total, scale_log2)
        mbarrier.wait(work.v_full.index(stage), phase)
        v = _matrix(work.v.index(stage))
        _zero_rows(v, size, group, work.q.shape[0])
        # The matrix unit reads shared memory past the ordinary cache: what was just stored must be there, from both warpgroups.
        fence_async_shared()
        barrier()
        mbarrier.arrive(work.v_clean, count=1)
        mbarrier.wait(work.v_clean, i & 1)
        acc = acc * gl.convert_layout(factor, o_rows)[:, None]
        token = warpgroup_mma(gl.convert_layout(weights.to(dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.v_empty.index(stage), count=1)

    if work.whole > 0:
        stage = work.cut % STAGES
        mbarrier.wait(work.k_full.index(stage), (work.cut // STAGES) & 1)
        token = warpgroup_mma(q, _matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.k_empty.index(stage), count=1)
        weights, factor, top, total = _softmax(scores, top, total, scale_log2)
        acc = acc * gl.convert_layout(factor, o_rows)[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(work.cut + 1, work.cut + work.whole):
            stage = i % STAGES
            before = (i - 1) % STAGES
            mbarrier.wait(work.k_full.index(stage), (i // STAGES) & 1)
            s_token = warpgroup_mma(q, _matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(work.v_full.index(before), ((i - 1) // STAGES) & 1)
            o_token = warpgroup_mma(p, _matrix(work.v.index(before)), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(work.k_empty.index(stage), count=1)
            weights, factor, top, total = _softmax(scores, top, total, scale_log2)
            acc = warpgroup_mma_wait(0, deps=[o_token])
            mbarrier.arrive(work.v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(factor, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
        before = work.cut + work.whole - 1
        mbarrier.wait(work.v_full.index(before % STAGES), (before // STAGES) & 1)
        token = warpgroup_mma(p, _matrix(work.v.index(before % STAGES)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])

    empty = total == 0
    inverse = 1.0 / gl.where(empty, 1.0, total)
    row_lse = gl.where(empty, float("-inf"), (top + gl.log2(gl.where(empty, 1.0, total))) * LN2)
    result = (acc * gl.convert_layout(inverse, o_rows)[:, None]).to(dtype)
    rows = work.rows - group * ROWS
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
def _forward_kernel(q_tiles, k_tiles, v_tiles, out_tiles, out, lse, q_starts, q_sizes, chunk_starts, chunk_sizes, chunks_whole, chunks_cut,
                    out_batch, out_head, out_row, bound_batch, bound_head, bound_group, list_batch, list_head, list_group, width,
                    heads, group, q_len, block_length, scale_log2,
                    UNIFORM: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, D: gl.constexpr,
                    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    # From the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    place = gl.num_programs(0) - 1 - gl.program_id(0)
    block, part = place // PARTS, place % PARTS
    head, batch = gl.program_id(1) % heads, gl.program_id(1) // heads
    if UNIFORM:
        row = block * block_length
        rows = gl.minimum(q_len - row, block_length)
    else:
        bound = batch.to(gl.int64) * bound_batch + (head // bound_group) * bound_head + block
        row, rows = gl.load(q_starts + bound), gl.load(q_sizes + bound)
    row, rows = row + part * ROWS * WARPGROUPS, rows - part * ROWS * WARPGROUPS
    if rows <= 0:
        return
    chunk_row = batch.to(gl.int64) * list_batch + (head // list_group).to(gl.int64) * list_head + block
    out += batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row
    lse += (batch.to(gl.int64) * heads + head) * q_len + row

    dtype: gl.constexpr = q_tiles.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_tiles.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], v_tiles.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_clean = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_clean, count=WARPGROUPS)
    # The copy engine must see the barriers before it signals them.
    fence_async_shared()

    work = Work(q, k, v, q_full, k_full, k_empty, v_full, v_empty, v_clean,
                chunk_starts + chunk_row * width, chunk_sizes + chunk_row * width, gl.to_tensor(width),
                gl.load(chunks_whole + chunk_row), gl.load(chunks_cut + chunk_row), batch, head, head // group, row, rows)
    gl.warp_specialize([
        (_attend, (work, 0, out, lse, out_tiles, out_row, scale_log2, D)),
        (_attend, (work, 1, out, lse, out_tiles, out_row, scale_log2, D)),
        (_load, (work, q_tiles, k_tiles, v_tiles)),
    ], [4, 1], [240, 24])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; head_dim 64 or 128, no causal mask."""
    assert not causal, "resolve_impl keeps causal attention away"
    q, k, v = map(_reachable, (q, k, v))
    batch, heads, q_len, dim = q.shape
    rows = q_cut(blocks, q_len)
    out, lse = empty_outputs(q, rows.uniform)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    # Blocks of up to 64 keys would fill at most half a chunk.
    chunk = 64 if blocks.max_kv_length <= 64 else CHUNK
    chunks = chunk_lists(blocks, rows, kv_cut(blocks, k.shape[2]), chunk)
    parts = triton.cdiv(rows.length, ROWS * WARPGROUPS)
    _forward_kernel[(rows.number * parts, batch * heads)](
        _tiles(q, ROWS), _tiles(k, chunk), _tiles(v, chunk), _tiles(out, ROWS), out, lse, rows.starts, rows.sizes, *chunks,
        *out.stride()[:3], *rows.strides(heads), *shared_strides(chunks.whole, heads), chunks.starts.shape[-1],
        heads, heads // k.shape[1], q_len, rows.length, scale * LOG2E,
        UNIFORM=rows.uniform, PARTS=parts, **constants(dim, chunk), **OPTIONS)
    return out, lse


def constants(dim: int, chunk: int) -> dict[str, int]:
    """The kernel's shape for a head_dim and a chunk: 128 KiB of K and V in flight, in two stages of 128 x 128 or more of smaller ones."""
    return dict(ROWS=ROWS, WARPGROUPS=WARPGROUPS, CHUNK=chunk, D=dim, STAGES=2 * (128 // dim) * (128 // chunk))


def _reachable(x: Tensor) -> Tensor:
    """x, or a copy where the kernel or the copy engine cannot walk it."""
    x = readable(x)
    return x if aligned(x) else x.contiguous()


def _tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D] as the copy engine sees it: tiles of ``rows`` tokens of one head."""
    shape = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, layout)
