"""The partitions of the Hopper backward kernel: one warp that loads, two warpgroups that multiply, and one that adds up dQ."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_names import aggregate, barrier, copies_done, copy_add, copy_in, copy_out
from .hopper_primitives import clean, matrix, product_layout


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    k: gl.shared_memory_descriptor         # [1, 1, KEYS * WARPGROUPS, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor         # [STAGES, 1, 1, QUERIES, D]
    do: gl.shared_memory_descriptor
    side: gl.shared_memory_descriptor      # [STAGES, 1, QUERIES, 16], bfloat16, see hopper_slots.Slots
    ones: gl.shared_memory_descriptor      # [2, KEYS, 16], what picks lse or delta out of it
    ds: gl.shared_memory_descriptor        # [2, KEYS * WARPGROUPS, QUERIES]
    dq: gl.shared_memory_descriptor        # [D / 64, 1, QUERIES, 64]
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor    # one a stage: the copy engine has written q and bias
    do_full: gl.shared_memory_descriptor   # dO and delta
    empty: gl.shared_memory_descriptor     # both multiplying warpgroups have read the stage
    ds_full: gl.shared_memory_descriptor   # both multiplying warpgroups have written dS
    ds_empty: gl.shared_memory_descriptor  # the dQ warpgroup has read it
    clean: gl.shared_memory_descriptor     # both multiplying warpgroups have zeroed what the chunk does not hold
    chunks: gl.tensor                      # pointer to the visits of the key block, see hopper_slots.Visits
    slots: gl.tensor
    ranks: gl.tensor
    number: gl.tensor                      # of visits
    batch: gl.tensor
    head: gl.tensor                        # first query head of the group
    kv_head: gl.tensor
    first_slot: gl.tensor                  # of that head
    row: gl.tensor                         # first key of the program
    rows: gl.tensor                        # keys from there to the end of the block

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, side, ones, ds, dq, k_full, v_full, q_full, do_full, empty, ds_full, ds_empty, clean, chunks, slots,
                 ranks, number, batch, head, kv_head, first_slot, row, rows):
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.side = side
        self.ones = ones
        self.ds = ds
        self.dq = dq
        self.k_full = k_full
        self.v_full = v_full
        self.q_full = q_full
        self.do_full = do_full
        self.empty = empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty
        self.clean = clean
        self.chunks = chunks
        self.slots = slots
        self.ranks = ranks
        self.number = number
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.first_slot = first_slot
        self.row = row
        self.rows = rows


@gluon.jit
def load(work, k_tiles, v_tiles, q_tiles, do_tiles, side_tiles, slots_a_head):
    """The loading partition: K and V once, then q, dO and what stands with them of every chunk."""
    STAGES: gl.constexpr = work.q.shape[0]
    QUERIES: gl.constexpr = work.q.shape[3]
    mbarrier.expect(work.k_full, k_tiles.block_type.nbytes)
    copy_in(k_tiles, [work.batch, work.kv_head, work.row, 0], work.k_full, work.k)
    mbarrier.expect(work.v_full, v_tiles.block_type.nbytes)
    copy_in(v_tiles, [work.batch, work.kv_head, work.row, 0], work.v_full, work.v)
    for i in range(work.number):
        start, slot = gl.load(work.chunks + i) // QUERIES, gl.load(work.slots + i)
        head = work.head + slot // slots_a_head
        at = work.first_slot + slot
        stage = i % STAGES
        # A fresh barrier counts as one whose previous phase is over, so the first round does not wait.
        mbarrier.wait(work.empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(work.q_full.index(stage), q_tiles.block_type.nbytes + side_tiles.block_type.nbytes)
        copy_in(q_tiles, [work.batch, head, start, 0], work.q_full.index(stage), work.q.index(stage))
        copy_in(side_tiles, [at, 0, 0], work.q_full.index(stage), work.side.index(stage))
        mbarrier.expect(work.do_full.index(stage), do_tiles.block_type.nbytes)
        copy_in(do_tiles, [work.batch, head, start, 0], work.do_full.index(stage), work.do.index(stage))


@gluon.jit
def _store(tiles, pointer, stride, buffer, share: gl.constexpr, result, batch, head, row, rows):
    """Writes the first ``rows`` of a warpgroup's result, through its share of ``buffer`` where all of them are the block's."""
    ROWS: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    if rows >= ROWS:
        matrix(buffer).slice(share * ROWS, ROWS).store(result)
        fence_async_shared()
        barrier()
        copy_out(tiles, [batch, head, row, 0], buffer.slice(share * ROWS, ROWS, 2))
        tma.store_wait(0)
    else:
        layout: gl.constexpr = product_layout(D)
        lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
        gl.store(pointer + (lines[:, None] * stride + columns[None, :]), result, mask=(lines < rows)[:, None])


@gluon.jit
def _await_queries(work, i, cut, group: gl.constexpr, CUT_QUERIES: gl.constexpr):
    """Waits for q of visit ``i``, zeroes what the chunk does not hold, and returns the number of chunks so treated."""
    STAGES: gl.constexpr = work.q.shape[0]
    QUERIES: gl.constexpr = work.q.shape[3]
    stage = i % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(work.q_full.index(stage), phase)
    if CUT_QUERIES:
        size = gl.load(work.chunks + i) % QUERIES + 1
        if size < QUERIES:
            mbarrier.wait(work.do_full.index(stage), phase)
            clean(matrix(work.q.index(stage)), size, group, 2, False)
            clean(matrix(work.do.index(stage)), size, group, 2, False)
            fence_async_shared()
            barrier()
            mbarrier.arrive(work.clean, count=1)
            mbarrier.wait(work.clean, cut & 1)
            cut += 1
    return cut


@gluon.jit
def pick_columns(ones):
    """Ones in columns 0 to 2 of the first matrix and 8 to 10 of the second."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :] + gl.zeros([64, 16], gl.int32, layout)
    for half in gl.static_range(2):
        ones.index(half).store(gl.where((columns >= 8 * half) & (columns < 8 * half + 3), 1.0, 0.0).to(gl.bfloat16))


@gluon.jit
def _product(work, a, b, stage, half: gl.constexpr, zero):
    """Begins a b^T less lse / scale (half 0) or delta (half 1) of each query: one more step of 16, and neither loads nor registers."""
    side = work.side.index(stage)
    side = side.reshape([side.shape[1], side.shape[2]]).permute((1, 0))
    token = warpgroup_mma(work.ones.index(half), side, zero, use_acc=False, is_async=True)
    return warpgroup_mma(a, b.permute((1, 0)), token, is_async=True)


@gluon.jit
def _narrow(x, dtype: gl.constexpr):
    """float32 -> dtype two at a time, so that a pair never leaves its register: LLVM takes pairs apart that are used twice."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2)


@gluon.jit
def _weighted(p, dp):
    """p * dp in p's dtype, multiplied in float32, two at a time."""
    if p.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mul.f32 a, a, $2; mul.f32 b, b, $3; "
            "cvt.rn.bf16x2.f32 $0, b, a; }", "=r,r,r,r", [p, dp], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; mul.f32 a, a, $2; mul.f32 b, b, $3; "
            "cvt.rn.f16x2.f32 $0, b, a; }", "=r,r,r,r", [p, dp], gl.float16, True, 2)


@gluon.jit
def _weigh(work, v, i, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS: gl.constexpr):
    """(dV with visit ``i`` added, dS of the visit in 16 bits)."""
    STAGES: gl.constexpr = work.q.shape[0]
    s_layout: gl.constexpr = product_layout(zero.shape[1])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(dv_sum.shape[1]), 2)
    dtype: gl.constexpr = work.q.dtype
    stage = i % STAGES
    do = matrix(work.do.index(stage))
    if CUT_KEYS:
        scores = gl.where((gl.arange(0, zero.shape[0], layout=gl.SliceLayout(1, s_layout)) < rows)[:, None], scores, float("-inf"))
    # Kept in 16 bits: the registers of the float32 weights are those of dP.
    p = _narrow(gl.exp2(scores * scale_log2), dtype)
    mbarrier.wait(work.do_full.index(stage), (i // STAGES) & 1)
    dv_token = warpgroup_mma(gl.convert_layout(p, p_layout), do, dv_sum, is_async=True)
    token = _product(work, v, do, stage, 1, zero)
    dv_sum, dp = warpgroup_mma_wait(0, deps=[dv_token, token])
    return dv_sum, _weighted(p, dp)


@gluon.jit
def _hand_over(work, group: gl.constexpr, i, ds):
    """Leaves dS of visit ``i`` to the dQ partition."""
    buffer = i % 2
    # What stood there two visits ago is read. The first round finds the barriers fresh and does not wait.
    mbarrier.wait(work.ds_empty.index(buffer), ((i // 2) & 1) ^ 1)
    work.ds.index(buffer).slice(group * ds.shape[0], ds.shape[0]).store(ds)
    # The matrix unit reads shared memory past the ordinary cache, and what every warp of the warpgroup stored.
    fence_async_shared()
    barrier()
    mbarrier.arrive(work.ds_full.index(buffer), count=1)


@gluon.jit
def multiply(work, group: gl.constexpr, dk_tiles, dv_tiles, dk, dv, dk_row, dv_row, scale_log2, scale, D: gl.constexpr,
              CUT_QUERIES: gl.constexpr, CUT_KEYS: gl.constexpr):
    """A multiplying partition: dK and dV of 64 keys."""
    STAGES: gl.constexpr = work.q.shape[0]
    QUERIES: gl.constexpr = work.q.shape[3]
    WARPGROUPS: gl.constexpr = 2
    KEYS: gl.constexpr = work.k.shape[2] // WARPGROUPS
    s_layout: gl.constexpr = product_layout(QUERIES)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = work.q.dtype
    k = matrix(work.k).slice(group * KEYS, KEYS)
    v = matrix(work.v).slice(group * KEYS, KEYS)
    rows = work.rows - group * KEYS
    zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    dk_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
    dv_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
    mbarrier.wait(work.k_full, 0)
    mbarrier.wait(work.v_full, 0)
    if CUT_KEYS:
        if rows < KEYS:
            # Keys of other blocks must not reach dQ.
            clean(k, rows, 0, 1, False)
            clean(v, rows, 0, 1, False)
            fence_async_shared()
            barrier()
    if work.number > 0:
        cut = _await_queries(work, 0, gl.to_tensor(0), group, CUT_QUERIES)
        scores = warpgroup_mma_wait(0, deps=[_product(work, k, matrix(work.q.index(0)), 0, 0, zero)])
        for i in range(work.number - 1):
            dv_sum, ds = _weigh(work, v, i, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS)
            dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(work.q.index(i % STAGES)), dk_sum, is_async=True)
            _hand_over(work, group, i, ds)
            # The next scores begin before this dK is complete, and end in this round.
            cut = _await_queries(work, i + 1, cut, group, CUT_QUERIES)
            s_token = _product(work, k, matrix(work.q.index((i + 1) % STAGES)), (i + 1) % STAGES, 0, zero)
            dk_sum, scores = warpgroup_mma_wait(0, deps=[dk_token, s_token])
            mbarrier.arrive(work.empty.index(i % STAGES), count=1)
        last = work.number - 1
        dv_sum, ds = _weigh(work, v, last, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS)
        dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(work.q.index(last % STAGES)), dk_sum, is_async=True)
        _hand_over(work, group, last, ds)
        dk_sum = warpgroup_mma_wait(0, deps=[dk_token])

    # This warpgroup alone reads its part of V, so it is free when all its warps are here; K once the last dQ is computed.
    barrier()
    row = work.row + group * KEYS
    _store(dv_tiles, dv + group * KEYS * dv_row, dv_row, work.v, group, dv_sum.to(dtype), work.batch, work.kv_head, row, rows)
    if work.number > 0:
        last = work.number - 1
        mbarrier.wait(work.ds_empty.index(last % 2), (last // 2) & 1)
    _store(dk_tiles, dk + group * KEYS * dk_row, dk_row, work.k, group, (dk_sum * scale).to(dtype), work.batch, work.kv_head, row, rows)


@gluon.jit
def add_dq(work, dq_tiles, turns, rank, D: gl.constexpr, ORDERED: gl.constexpr):
    """The dQ partition: dS^T K of every chunk, 64 columns at a time, added to the chunk's slot by the copy engine."""
    QUERIES: gl.constexpr = work.q.shape[3]
    HALF: gl.constexpr = 64
    HALVES: gl.constexpr = D // HALF
    layout: gl.constexpr = product_layout(HALF)
    zero = gl.zeros([QUERIES, HALF], gl.float32, layout)
    k = matrix(work.k)
    slot = work.first_slot
    # Rounds of waiting for a turn that never comes, as where a list names a block twice: dQ is then added up in another order.
    patience = gl.to_tensor(1 << 20)
    mbarrier.wait(work.k_full, 0)
    for i in range(work.number):
        before = slot
        slot = work.first_slot + gl.load(work.slots + i)
        turn = gl.load(work.ranks + i) + rank
        buffer = i % 2
        mbarrier.wait(work.ds_full.index(buffer), (i // 2) & 1)
        ds = work.ds.index(buffer).permute((1, 0))
        for half in gl.static_range(HALVES):
            token = warpgroup_mma(ds, k.slice(half * HALF, HALF, 1), zero, use_acc=False, is_async=True)
            if ORDERED and half == 0:
                while (gl.load(turns + slot, volatile=True) != turn) & (patience > 0):
                    patience -= 1
            part = warpgroup_mma_wait(0, deps=[token])
            if half == HALVES - 1:
                # dS is read.
                mbarrier.arrive(work.ds_empty.index(buffer), count=1)
            if half == 0:
                # What was staged for the visit before must be read and, before the next program's turn, added.
                if ORDERED:
                    copies_done()
                else:
                    tma.store_wait(0)
                barrier()
                if ORDERED and i > 0:
                    gl.atomic_add(turns + before, 1, sem="relaxed")
            staging = work.dq.index(half)
            staging.reshape([QUERIES, HALF]).store(part)
            # The copy engine sees what every warp stored.
            fence_async_shared()
            barrier()
            copy_add(dq_tiles, [slot, 0, half * HALF], staging)
    if ORDERED:
        # The last turn ends like the others.
        copies_done()
        barrier()
        if work.number > 0:
            gl.atomic_add(turns + slot, 1, sem="relaxed")
    else:
        tma.store_wait(0)
