"""The partitions of the Hopper backward kernel: a warp that loads, two warpgroups that multiply, one for dQ, two warps that add it up."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..lowering.dq_schedule import BATCH, HEAD, NEXT, ROW, ROWS, VISITS
from .backward_iterator import tile_number, visit_after, visit_before_first
from .gluon_compat import barrier, copies_done, copy_add, copy_in, copy_out, prefetch
from .primitives import anew, clean, matrix, product_layout

# Rounds of waiting, of about a microsecond, for a turn that never comes, as where a list names a block twice: from then on the program adds
# without waiting.
SPIN_LIMIT = gl.constexpr(1 << 20)


@gluon.jit
def load(work, lists, k_tiles, v_tiles, q_tiles, do_tiles, lse_dpsum_desc, sums, UNIFORM: gl.constexpr, CUT_QUERIES: gl.constexpr):
    """The loading partition: K and V of a tile as soon as those before are done with, then q, dO and lse_dpsum of every chunk.

    Into L2 also what of dQ is summed up so far (``sums``, see dq_accum.Accum; None where turns are not taken): an addition is written
    sooner there, and the next program waits for that.
    """
    STAGES: gl.constexpr = work.q.shape[0]
    QUERIES: gl.constexpr = work.q.shape[3]
    tile = work.first
    number, done = gl.to_tensor(0), gl.to_tensor(0)
    while tile >= 0:
        row, batch, kv_head = (tile_number(work, tile, ROW), tile_number(work, tile, BATCH), tile_number(work, tile, HEAD))
        visits = tile_number(work, tile, VISITS)
        # A fresh barrier counts as one whose previous phase is over, so the first round does not wait; here and for every other one.
        mbarrier.wait(work.v_empty, (number & 1) ^ 1)
        mbarrier.expect(work.v_full, v_tiles.block_type.nbytes)
        copy_in(v_tiles, [batch, kv_head, row, 0], work.v_full, work.v)
        mbarrier.wait(work.k_empty, (number & 1) ^ 1)
        mbarrier.expect(work.k_full, k_tiles.block_type.nbytes)
        copy_in(k_tiles, [batch, kv_head, row, 0], work.k_full, work.k)
        visit = visit_before_first(lists, work, tile, 0, 1)
        for i in range(done, done + visits):
            visit = visit_after(lists, visit, 1, QUERIES, UNIFORM, False)
            head = lists.group * kv_head + visit.member
            start = visit.start + visit.chunk * QUERIES
            stage = i % STAGES
            mbarrier.wait(work.empty.index(stage), ((i // STAGES) & 1) ^ 1)
            if sums is not None:
                words = QUERIES * work.q.shape[4]
                prefetch(sums + (visit.slot + visit.chunk).to(gl.int64) * words, words * 4)
            if CUT_QUERIES or lists.causal:
                layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
                size = gl.minimum(visit.size - visit.chunk * QUERIES, QUERIES)
                work.sizes.index(stage).store(gl.full([1], size, gl.int32, layout))
                if lists.causal:
                    work.limits.index(stage).store(gl.full([1], start + lists.shift - row, gl.int32, layout))
                # Those who wait for q must find the numbers that go with it too.
                barrier()
            mbarrier.expect(work.q_full.index(stage), q_tiles.block_type.nbytes + lse_dpsum_desc.block_type.nbytes)
            copy_in(q_tiles, [batch, head, start, 0], work.q_full.index(stage), work.q.index(stage))
            copy_in(lse_dpsum_desc, [visit.slot + visit.chunk, 0, 0], work.q_full.index(stage), work.lse_dpsum.index(stage))
            mbarrier.expect(work.do_full.index(stage), do_tiles.block_type.nbytes)
            copy_in(do_tiles, [batch, head, start, 0], work.do_full.index(stage), work.do.index(stage))
        done += visits
        number += 1
        tile = tile_number(work, tile, NEXT)


@gluon.jit
def _store(tiles, pointer, batch_stride, head_stride, row_stride, buffer, share: gl.constexpr, result, batch, head, row, rows,
           CUT_KEYS: gl.constexpr):
    """Writes the first ``rows`` of a warpgroup's result, through its share of ``buffer``: by hand where not all of them are the block's."""
    ROWS: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    part = matrix(buffer).slice(share * ROWS, ROWS)
    part.store(result)
    # The copy engine sees what every warp stored, now or when it brings in the next tile.
    fence_async_shared()
    barrier()
    if CUT_KEYS and rows < ROWS:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        lines = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
        # The copy engine walks no strides but whole 16 bytes; told so, the compiler stores so many at once.
        row_stride = anew(row_stride) // 8 * 8
        pointer += batch.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride + row.to(gl.int64) * row_stride
        pointer = gl.multiple_of(pointer, 16)
        gl.store(pointer + (lines[:, None] * row_stride + columns[None, :]), part.load(layout), mask=(lines < rows)[:, None])
    else:
        copy_out(tiles, [batch, head, row, 0], buffer.slice(share * ROWS, ROWS, 2))
        tma.store_wait(0)


@gluon.jit
def _await_queries(work, i, cut, group: gl.constexpr, CUT_QUERIES: gl.constexpr):
    """Waits for q of visit ``i``, zeroes what the chunk does not hold, and returns the number of chunks so treated."""
    STAGES: gl.constexpr = work.q.shape[0]
    QUERIES: gl.constexpr = work.q.shape[3]
    stage = i % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(work.q_full.index(stage), phase)
    if CUT_QUERIES:
        size = gl.max(work.sizes.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
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
    lse_dpsum = work.lse_dpsum.index(stage)
    lse_dpsum = lse_dpsum.reshape([lse_dpsum.shape[1], lse_dpsum.shape[2]]).permute((1, 0))
    token = warpgroup_mma(work.ones.index(half), lse_dpsum, zero, use_acc=False, is_async=True)
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
def _weigh(work, v, i, group: gl.constexpr, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """(dV with visit ``i`` added, dS of the visit in 16 bits)."""
    STAGES: gl.constexpr = work.q.shape[0]
    s_layout: gl.constexpr = product_layout(zero.shape[1])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(dv_sum.shape[1]), 2)
    dtype: gl.constexpr = work.q.dtype
    stage = i % STAGES
    do = matrix(work.do.index(stage))
    if CUT_KEYS:
        scores = gl.where((gl.arange(0, zero.shape[0], layout=gl.SliceLayout(1, s_layout)) < rows)[:, None], scores, float("-inf"))
    if CAUSAL:
        KEYS: gl.constexpr = zero.shape[0]
        limit = gl.max(work.limits.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0) - group * KEYS
        if limit < KEYS - 1:
            keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
            queries = gl.arange(0, zero.shape[1], layout=gl.SliceLayout(0, s_layout))
            scores = gl.where(keys[:, None] <= queries[None, :] + limit, scores, float("-inf"))
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
def multiply(work, group: gl.constexpr, dk_tiles, dv_tiles, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, scale_log2, scale,
             D: gl.constexpr, CUT_QUERIES: gl.constexpr, CUT_KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """A multiplying partition: dK and dV of 64 keys of every tile."""
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
    zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    tile = work.first
    number, done, cut = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while tile >= 0:
        first, done = done, done + tile_number(work, tile, VISITS)
        rows = KEYS
        if CUT_KEYS:
            rows = tile_number(work, tile, ROWS) - group * KEYS
        dk_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
        dv_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
        mbarrier.wait(work.k_full, number & 1)
        mbarrier.wait(work.v_full, number & 1)
        if CUT_KEYS:
            if rows < KEYS:
                # Keys of other blocks must not reach dQ.
                clean(k, rows, 0, 1, False)
                clean(v, rows, 0, 1, False)
                fence_async_shared()
                barrier()
        if first < done:
            last = done - 1
            cut = _await_queries(work, first, cut, group, CUT_QUERIES)
            scores = warpgroup_mma_wait(0, deps=[_product(work, k, matrix(work.q.index(first % STAGES)), first % STAGES, 0, zero)])
            for i in range(first, last):
                dv_sum, ds = _weigh(work, v, i, group, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS, CAUSAL)
                dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(work.q.index(i % STAGES)), dk_sum, is_async=True)
                _hand_over(work, group, i, ds)
                # The next scores begin before this dK is complete, and end in this round.
                cut = _await_queries(work, i + 1, cut, group, CUT_QUERIES)
                s_token = _product(work, k, matrix(work.q.index((i + 1) % STAGES)), (i + 1) % STAGES, 0, zero)
                dk_sum, scores = warpgroup_mma_wait(0, deps=[dk_token, s_token])
                mbarrier.arrive(work.empty.index(i % STAGES), count=1)
            dv_sum, ds = _weigh(work, v, last, group, scores, dv_sum, rows, scale_log2, zero, CUT_KEYS, CAUSAL)
            dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(work.q.index(last % STAGES)), dk_sum, is_async=True)
            _hand_over(work, group, last, ds)
            dk_sum = warpgroup_mma_wait(0, deps=[dk_token])
            mbarrier.arrive(work.empty.index(last % STAGES), count=1)
            # dK leaves through K's memory, which is free once the last dQ is computed.
            mbarrier.wait(work.ds_empty.index(last % 2), (last // 2) & 1)

        # dV through V's: this warpgroup alone reads its part of it, so that is free when all its warps are here.
        barrier()
        row = tile_number(work, tile, ROW) + group * KEYS
        batch, head = tile_number(work, tile, BATCH), tile_number(work, tile, HEAD)
        _store(dv_tiles, dv, dv_batch, dv_head, dv_row, work.v, group, dv_sum.to(dtype), batch, head, row, rows, CUT_KEYS)
        # The copy engine has read what the warpgroup stored, so the next V may come.
        barrier()
        mbarrier.arrive(work.v_empty, count=1)
        _store(dk_tiles, dk, dk_batch, dk_head, dk_row, work.k, group, (dk_sum * scale).to(dtype), batch, head, row, rows, CUT_KEYS)
        barrier()
        mbarrier.arrive(work.k_empty, count=1)
        number += 1
        tile = tile_number(work, tile, NEXT)


@gluon.jit
def multiply_dq(work, lists, dq_tiles, D: gl.constexpr, UNIFORM: gl.constexpr, ADDS: gl.constexpr):
    """The dQ partition: dS^T K of every visit, 64 columns at a time, left in shared memory and with ADDS added up from there at once."""
    QUERIES: gl.constexpr = work.q.shape[3]
    STAGED: gl.constexpr = work.dq.shape[0]
    COLUMNS: gl.constexpr = 64
    layout: gl.constexpr = product_layout(COLUMNS)
    zero = gl.zeros([QUERIES, COLUMNS], gl.float32, layout)
    k = matrix(work.k)
    tile = work.first
    done = gl.to_tensor(0)
    while tile >= 0:
        visits = tile_number(work, tile, VISITS)
        visit = visit_before_first(lists, work, tile, 0, 1)
        for i in range(done, done + visits):
            if ADDS:
                visit = visit_after(lists, visit, 1, QUERIES, UNIFORM, False)
            buffer = i % 2
            # K is there too: dS was made from it.
            mbarrier.wait(work.ds_full.index(buffer), (i // 2) & 1)
            ds = work.ds.index(buffer).permute((1, 0))
            for half in gl.static_range(D // COLUMNS):
                token = warpgroup_mma(ds, k.slice(half * COLUMNS, COLUMNS, 1), zero, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[token])
                if half == D // COLUMNS - 1:
                    mbarrier.arrive(work.ds_empty.index(buffer), count=1)
                piece = i * (D // COLUMNS) + half
                staging = piece % STAGED
                if ADDS:
                    if half == 0:
                        # What was staged for the visit before must be read.
                        tma.store_wait(0)
                        barrier()
                else:
                    mbarrier.wait(work.dq_empty.index(staging), ((piece // STAGED) & 1) ^ 1)
                work.dq.index(staging).reshape([QUERIES, COLUMNS]).store(part)
                # The copy engine sees what every warp stored.
                fence_async_shared()
                barrier()
                if ADDS:
                    copy_add(dq_tiles, [visit.slot + visit.chunk, 0, half * COLUMNS], work.dq.index(staging))
                else:
                    mbarrier.arrive(work.dq_full.index(staging), count=1)
        done += visits
        tile = tile_number(work, tile, NEXT)
    if ADDS:
        tma.store_wait(0)


@gluon.jit
def add_dq(work, lists, dq_tiles, dq_semaphore, share: gl.constexpr, D: gl.constexpr, UNIFORM: gl.constexpr):
    """One of two adding partitions: has the copy engine add every other visit's dQ to its slot when it is the tile's turn.

    Two, because an addition counts only when it is written, which at times takes longer than a visit.
    """
    QUERIES: gl.constexpr = work.q.shape[3]
    STAGED: gl.constexpr = work.dq.shape[0]
    SHARES: gl.constexpr = 2
    COLUMNS: gl.constexpr = 64
    PIECES: gl.constexpr = D // COLUMNS
    tile = work.first
    done = gl.to_tensor(0)
    spins_left = gl.to_tensor(SPIN_LIMIT)
    while tile >= 0:
        visits = tile_number(work, tile, VISITS)
        skipped = (done + share) & 1
        visit = visit_after(lists, visit_before_first(lists, work, tile, skipped, SHARES), SHARES, QUERIES, UNIFORM, True)
        turn = gl.to_tensor(-1)
        for i in range(done + skipped, done + visits, SHARES):
            after = visit_after(lists, visit, SHARES, QUERIES, UNIFORM, True)
            slot = visit.slot + visit.chunk
            for piece in gl.static_range(PIECES):
                staged = i * PIECES + piece
                mbarrier.wait(work.dq_full.index(staged % STAGED), (staged // STAGED) & 1)
                if piece == 0:
                    while (turn < visit.rank) & (spins_left > 0):
                        turn = gl.load(dq_semaphore + slot, volatile=True)
                        spins_left -= 1
                    spins_left = gl.where(spins_left > 0, SPIN_LIMIT, 0)
                copy_add(dq_tiles, [slot, 0, piece * COLUMNS], work.dq.index(staged % STAGED))
            tma.store_wait(0)
            barrier()
            for piece in gl.static_range(PIECES):
                mbarrier.arrive(work.dq_empty.index((i * PIECES + piece) % STAGED), count=1)
            # Whose turn it is at the next slot becomes known while the copy engine writes.
            turn = gl.load(dq_semaphore + after.slot + after.chunk, volatile=True)
            # The next tile's turn begins when this one's addition is written.
            copies_done()
            barrier()
            gl.atomic_add(dq_semaphore + slot, 1, sem="relaxed")
            visit = after
        done += visits
        tile = tile_number(work, tile, NEXT)
