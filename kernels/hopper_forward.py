"""Hopper forward kernel: one warp brings tiles in through the copy engine, two warpgroups of 64 query rows multiply and take softmax.

A program owns 128 query rows of one block, the blocks with the longest lists first, and walks the chunks of 128 keys that the block
attends to: first those that a ragged tail or the causal diagonal cuts, one at a time, then the whole ones, where the scores of the next
chunk are computed while the values of this one are added up.
"""

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

from .blocks import BlockLists
from .hopper_names import aggregate, barrier, copy_in, copy_out
from .hopper_primitives import clean, matrix, not_finite, product_layout
from .hopper_tiles import reachable, tiles
from .triton_chunks import ENTRY, HEADER, kv_cut, q_cut, work_queue
from .triton_outputs import empty_outputs

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
    v_clean: gl.shared_memory_descriptor   # both warpgroups are done with a step of cleaning a cut chunk
    starts: gl.tensor                      # pointer to the first tokens of the row's whole chunks, which stand at the front
    cut_starts: gl.tensor                  # pointer behind those of the cut ones, which stand at the back
    cut_sizes: gl.tensor                   # pointer behind their numbers of tokens
    whole: gl.tensor                       # number of whole chunks
    cut: gl.tensor                         # number of cut chunks
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor                         # first query row of the program
    rows: gl.tensor                        # rows from there to the end of the block

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, k_full, k_empty, v_full, v_empty, v_clean, starts, cut_starts, cut_sizes, whole, cut,
                 batch, head, kv_head, row, rows):
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
        self.cut_starts = cut_starts
        self.cut_sizes = cut_sizes
        self.whole = whole
        self.cut = cut
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.rows = rows


@gluon.jit
def _load_chunk(work, i, start, k_tiles, v_tiles):
    """K and V of the ``i``-th chunk that the program walks, as soon as its stage is free."""
    STAGES: gl.constexpr = work.k.shape[0]
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
def _load(work, q_tiles, k_tiles, v_tiles):
    """The loading partition: q once, then K and V of every chunk, cut ones first."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    for group in gl.static_range(WARPGROUPS):
        mbarrier.expect(work.q_full.index(group), q_tiles.block_type.nbytes)
        copy_in(q_tiles, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
    for i in range(work.cut):
        _load_chunk(work, i, gl.load(work.cut_starts - 1 - i), k_tiles, v_tiles)
    for i in range(work.whole):
        _load_chunk(work, work.cut + i, gl.load(work.starts + i), k_tiles, v_tiles)


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
def _attend(work, group: gl.constexpr, out, lse, out_tiles, out_row, shift, scale_log2, D: gl.constexpr, CAUSAL: gl.constexpr):
    """A multiplying partition: 64 query rows from the first chunk to the stored result."""
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
    top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([ROWS], gl.float32, s_rows)
    q = matrix(work.q.index(group))
    mbarrier.wait(work.q_full.index(group), 0)

    for i in range(work.cut):
        keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, s_layout))
        stage = i % STAGES
        phase = (i // STAGES) & 1
        size = gl.load(work.cut_sizes - 1 - i)
        mbarrier.wait(work.k_full.index(stage), phase)
        token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.k_empty.index(stage), count=1)
        visible = (keys < size)[None, :]
        if CAUSAL:
            # The last key of the chunk that the first row sees.
            last = work.row + group * ROWS + shift - gl.load(work.cut_starts - 1 - i)
            visible = visible & (keys[None, :] <= (last + gl.arange(0, ROWS, layout=s_rows))[:, None])
        weights, factor, top, total = _softmax(gl.where(visible, scores, float("-inf")), top, total, scale_log2)
        mbarrier.wait(work.v_full.index(stage), phase)
        v = matrix(work.v.index(stage))
        acc = acc * gl.convert_layout(factor, o_rows)[:, None]
        if CAUSAL:
            # What is not finite must reach the rows that see it and no others: so by hand, and not through the matrix unit.
            bad = _first_not_finite(v, size, gl.SliceLayout(0, o_layout))
            limit = gl.minimum(last + gl.arange(0, ROWS, layout=o_rows), CHUNK - 1)
            acc = gl.where(bad[None, :] <= limit[:, None], float("nan"), acc)
            barrier()
            mbarrier.arrive(work.v_clean, count=1)
            mbarrier.wait(work.v_clean, 0)
        clean(v, size, group, work.q.shape[0], CAUSAL)
        # The matrix unit reads shared memory past the ordinary cache: what was just stored must be there, from both warpgroups.
        fence_async_shared()
        barrier()
        mbarrier.arrive(work.v_clean, count=1)
        # Under a causal mask this is the second step of two.
        mbarrier.wait(work.v_clean, 1 if CAUSAL else i & 1)
        token = warpgroup_mma(gl.convert_layout(weights.to(dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.v_empty.index(stage), count=1)

    if work.whole > 0:
        stage = work.cut % STAGES
        mbarrier.wait(work.k_full.index(stage), (work.cut // STAGES) & 1)
        token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(work.k_empty.index(stage), count=1)
        weights, factor, top, total = _softmax(scores, top, total, scale_log2)
        acc = acc * gl.convert_layout(factor, o_rows)[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(work.cut + 1, work.cut + work.whole):
            stage = i % STAGES
            before = (i - 1) % STAGES
            mbarrier.wait(work.k_full.index(stage), (i // STAGES) & 1)
            # The compiler waits for both products before the exponentials, and the other warpgroup multiplies meanwhile. Exponentials
            # beside the own product measured 5 % slower on an H200, turns between the warpgroups 1 to 5 %.
            s_token = warpgroup_mma(q, matrix(work.k.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(work.v_full.index(before), ((i - 1) // STAGES) & 1)
            o_token = warpgroup_mma(p, matrix(work.v.index(before)), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(work.k_empty.index(stage), count=1)
            weights, factor, top, total = _softmax(scores, top, total, scale_log2)
            acc = warpgroup_mma_wait(0, deps=[o_token])
            mbarrier.arrive(work.v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(factor, o_rows)[:, None]
            p = gl.convert_layout(weights.to(dtype), p_layout)
        before = work.cut + work.whole - 1
        mbarrier.wait(work.v_full.index(before % STAGES), (before // STAGES) & 1)
        token = warpgroup_mma(p, matrix(work.v.index(before % STAGES)), acc, is_async=True)
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
            "q_len", "shift"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _forward_kernel(q_tiles, k_tiles, v_tiles, out_tiles, out, lse, queue, out_batch, out_head, out_row,
                    width, number, lists, list_batch, list_group, batches, heads, group, q_len, shift, scale_log2,
                    CAUSAL: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, D: gl.constexpr,
                    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    # The parts of a block are neighbours: they read the same keys.
    at_head, rank = _place(gl.program_id(0) // PARTS, number, batches * heads)
    head, batch = at_head % heads, at_head // heads
    part = gl.program_id(0) % PARTS
    first_row = (batch.to(gl.int64) * list_batch + head // list_group) * number
    entry = queue + HEADER + (first_row + rank) * ENTRY
    row, rows = gl.load(entry) + part * ROWS * WARPGROUPS, gl.load(entry + 1) - part * ROWS * WARPGROUPS
    if rows <= 0:
        return
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
                starts, cut_starts, cut_starts + lists.to(gl.int64) * number * width,
                gl.load(entry + 2), gl.load(entry + 3), batch, head, head // group, row, rows)
    gl.warp_specialize([
        (_attend, (work, 0, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL)),
        (_attend, (work, 1, out, lse, out_tiles, out_row, shift, scale_log2, D, CAUSAL)),
        (_load, (work, q_tiles, k_tiles, v_tiles)),
    ], [4, 1], [240, 24])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, in_place: bool = False,
                   ) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; head_dim 64 or 128.

    ``in_place``: out may take q's memory. A warpgroup has its 64 rows in shared memory before it multiplies, and writes at its end the
    ones that belong to the block; rows of the next block that it loads with them, perhaps overwritten, only reach results that it drops.
    """
    q, k, v = reachable(q), reachable(k), reachable(v)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    rows = q_cut(blocks, q_len)
    if q.numel() == 0 or k.numel() == 0:
        out, lse = empty_outputs(q, rows, in_place)
        return out.zero_(), lse.fill_(float("-inf"))
    # Blocks of up to 64 keys would fill at most half a chunk.
    chunk = 64 if blocks.max_kv_length <= 64 else CHUNK
    # First of all, so that the GPU cuts the lists while the rest is prepared here.
    queue = work_queue(blocks, rows, kv_cut(blocks, kv_len), chunk, kv_len - q_len if causal else None)
    out, lse = empty_outputs(q, rows, in_place)
    parts = -(-rows.length // (ROWS * WARPGROUPS))
    # One program a tile. As many programs as multiprocessors, which take tile after tile, measured 1 % slower on an H200 at 72 chunks a
    # tile and 3 % slower at 144.
    _forward_kernel[(batch * heads * rows.number * parts,)](
        tiles(q, ROWS), tiles(k, chunk), tiles(v, chunk), tiles(out, ROWS), out, lse, queue.data, *out.stride()[:3],
        queue.width, rows.number, queue.batch * queue.heads, queue.heads if queue.batch > 1 else 0, heads // queue.heads,
        batch, heads, heads // kv_heads, q_len, kv_len - q_len, scale * LOG2E,
        CAUSAL=causal, PARTS=parts, **constants(dim, chunk), **OPTIONS)
    return out, lse


def constants(dim: int, chunk: int) -> dict[str, int]:
    """The kernel's shape for a head_dim and a chunk: 128 KiB of K and V in flight, in two stages of 128 x 128 or more of smaller ones."""
    return dict(ROWS=ROWS, WARPGROUPS=WARPGROUPS, CHUNK=chunk, D=dim, STAGES=2 * (128 // dim) * (128 // chunk))
