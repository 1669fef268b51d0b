"""The multiplying partition of the Hopper forward: a warpgroup's 64 query rows from the first chunk of keys to the stored result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..lowering.primitives import LARGEST_SUM, LN2, LOWEST
from .forward_load import walk_again
from .gluon_compat import barrier, copy_out
from .inline_asm import lazy_rescale, scheduling_fence
from .primitives import (
    by_lane,
    by_row,
    matrix,
    not_finite,
    one_word,
    product_layout,
    rescale,
    ring_arrive,
    ring_at,
    ring_wait,
    row_lanes,
    to_lanes,
    zero_rows,
)


@gluon.jit
def _softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW: gl.constexpr):
    """One softmax step in base 2: (weights, alpha, row_max, row_sum), alpha being the factor on what was summed so far.

    Weights are measured from row_max. FOLLOW: it is the row's largest score or one that was the largest until lately, see
    ``lazy_rescale``; but in rows without ``follows`` [ROWS, 1], and without FOLLOW in all, it stays where it is, and alpha is 1.
    row_max, row_sum and alpha are [ROWS, 4]: the four lanes that share a row agree on row_max, but each has a sum of its own until the end.
    """
    split = by_lane(scores)
    if FOLLOW:
        own = gl.max(gl.max(split, axis=3), axis=1) * scale_log2
        row_max, alpha = lazy_rescale(row_max, gl.where(follows, own, LOWEST))
        row_sum = row_sum * alpha
    else:
        alpha = gl.full(row_max.shape, 1.0, gl.float32, row_lanes(scores.shape[1]))
    weights = gl.exp2(split * scale_log2 - to_lanes(row_max, scores.shape[1]))
    return by_row(weights), alpha, row_max, row_sum + gl.sum(gl.sum(weights, axis=3), axis=1)


@gluon.jit
def _overflown(acc, row_sum, CHUNK: gl.constexpr):
    """bool [ROWS, 1]: rows in which a weight or a weighted value became too large, or is not finite for another reason.

    What is not finite stays so in every sum that it enters.
    """
    split = by_lane(acc) * 0.0
    zero = gl.convert_layout(gl.sum(gl.sum(split, axis=3), axis=1), row_lanes(CHUNK), assert_trivial=True)
    of_lane = ((row_sum <= LARGEST_SUM) & (zero == 0.0)) == 0
    # The lane whose sums overflow need not be the one whose score was too large.
    return gl.max(of_lane.to(gl.int32), axis=1)[:, None] != 0


@gluon.jit
def _finish_softmax(acc, row_max, row_sum, s_rows: gl.constexpr, o_rows: gl.constexpr):
    """(out, lse in natural logarithm) after the last step; 0 and -inf for rows that attended to nothing."""
    row_max = gl.convert_layout(gl.max(row_max, axis=1), s_rows)
    row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), s_rows)
    empty = row_sum == 0
    inverse = 1.0 / gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) * LN2)
    return acc * gl.convert_layout(inverse, o_rows)[:, None], lse


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
def _walk(work, group: gl.constexpr, shift, scale_log2, follows, WALK: gl.constexpr, FOLLOW: gl.constexpr, D: gl.constexpr,
          CAUSAL: gl.constexpr, OVERLAP: gl.constexpr):
    """A warpgroup's 64 rows through all chunks for the WALK-th time: (sums of weighted values, row_max, row_sum).

    In the partial chunks and the first full one, all of which every row sees, row_max is the row's own. From then on ``follows`` and FOLLOW
    count, as for ``_softmax_step``.
    """
    CHUNK: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    s_layout: gl.constexpr = product_layout(CHUNK)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = work.q.dtype

    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    zero = gl.zeros([ROWS, CHUNK], gl.float32, s_layout)
    # Not minus infinity, from which nothing can be measured: a row that has seen nothing yet has weights of 0.
    row_max = gl.full([ROWS, 4], LOWEST, gl.float32, row_lanes(CHUNK))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(CHUNK))
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(CHUNK))
    q = matrix(work.q.index(group))
    # The uses of the rings go on where those of the walk before ended.
    first = WALK * (work.partial + work.full)
    first_step = WALK * work.partial

    for place in range(work.partial):
        i = first + place
        keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, s_layout))
        size = gl.load(work.partial_sizes - 1 - place)
        ring_wait(work.k_full, i, True)
        token = warpgroup_mma(q, matrix(ring_at(work.k, i, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        visible = (keys < size)[None, :]
        if CAUSAL:
            # The last key of the chunk that the first row sees.
            last = work.row + group * ROWS + shift - gl.load(work.partial_starts - 1 - place)
            visible = visible & (keys[None, :] <= (last + gl.arange(0, ROWS, layout=s_rows))[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        weights, alpha, row_max, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, every, True)
        ring_wait(work.v_full, i, True)
        v = matrix(ring_at(work.v, i, True))
        acc = rescale(acc, alpha)
        # Steps in which all warpgroups keep pace: under a causal mask two of a chunk.
        step = 2 * (first_step + place) if CAUSAL else first_step + place
        if CAUSAL:
            # What is not finite must reach the rows that see it and no others: so by hand, and not through the tensor core.
            bad = _first_not_finite(v, size, gl.SliceLayout(0, o_layout))
            limit = gl.minimum(last + gl.arange(0, ROWS, layout=o_rows), CHUNK - 1)
            acc = gl.where(bad[None, :] <= limit[:, None], float("nan"), acc)
            barrier()
            ring_arrive(work.v_zeroed, step, True)
            ring_wait(work.v_zeroed, step, True)
            step += 1
        # Two of them, because three have no equal parts.
        if group < 2:
            zero_rows(v, size, group, 2, CAUSAL)
        # The tensor core reads shared memory past the ordinary cache: what was just stored must be there, from all warpgroups.
        fence_async_shared()
        barrier()
        ring_arrive(work.v_zeroed, step, True)
        ring_wait(work.v_zeroed, step, True)
        token = warpgroup_mma(gl.convert_layout(weights.to(dtype), p_layout), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, i, True)

    if work.full > 0:
        first_full, end = first + work.partial, first + work.partial + work.full
        ring_wait(work.k_full, first_full, True)
        token = warpgroup_mma(q, matrix(ring_at(work.k, first_full, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, first_full, True)
        weights, alpha, row_max, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, every, True)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(first_full + 1, end):
            ring_wait(work.k_full, i, True)
            # An order between the warpgroups (ping-pong) measured 1 to 5 % slower on an H200.
            s_token = warpgroup_mma(q, matrix(ring_at(work.k, i, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
            ring_wait(work.v_full, i - 1, True)
            o_token = warpgroup_mma(p, matrix(ring_at(work.v, i - 1, True)), acc, is_async=True)
            if OVERLAP:
                scores = warpgroup_mma_wait(1, deps=[s_token])
                weights, alpha, row_max, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW)
                # Or the compiler would wait for both products before the exponentials.
                row_sum = scheduling_fence(row_sum)
                acc = warpgroup_mma_wait(0, deps=[o_token])
                ring_arrive(work.done, i, True)
            else:
                scores, acc = warpgroup_mma_wait(0, deps=[s_token, o_token])
                ring_arrive(work.done, i, True)
                weights, alpha, row_max, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW)
            acc = rescale(acc, alpha) if FOLLOW else acc
            p = gl.convert_layout(weights.to(dtype), p_layout)
        ring_wait(work.v_full, end - 1, True)
        token = warpgroup_mma(p, matrix(ring_at(work.v, end - 1, True)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    return acc, row_max, row_sum


@gluon.jit
def attend(work, group: gl.constexpr, out, lse, out_desc, out_row, shift, scale_log2, D: gl.constexpr, CAUSAL: gl.constexpr,
           OVERLAP: gl.constexpr):
    """A multiplying partition: 64 query rows from the first chunk to the stored result.

    In bfloat16 optimistically: a row's weights are measured from its largest score in the first full chunk and those before. As one of the
    scores is 0 then, the weights that count do not underflow; bfloat16 and float32 hold those of up to 2 ** 127, so that only scores of far
    more than a hundred above it, in base 2, overflow. That is seen at the end, and then the program walks its list again and the rows
    where it happened follow their maxima. Without maxima and rescaling a forward takes 0.88 to 0.94 of the time on an H200. float16 holds
    weights of up to 2 ** 16, and queries and keys of three times the usual length would make nearly every program walk twice.
    """
    OPTIMISTIC: gl.constexpr = work.q.dtype == gl.bfloat16
    CHUNK: gl.constexpr = work.k.shape[3]
    ROWS: gl.constexpr = work.q.shape[3]
    s_rows: gl.constexpr = gl.SliceLayout(1, product_layout(CHUNK))
    o_layout: gl.constexpr = product_layout(D)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q = matrix(work.q.index(group))
    mbarrier.wait(work.q_full.index(group), 0)
    rows = work.rows - group * ROWS
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(CHUNK))
    if OPTIMISTIC:
        acc, row_max, row_sum = _walk(work, group, shift, scale_log2, every, 0, False, D, CAUSAL, OVERLAP)
        own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_lanes(CHUNK)))[:, None] < rows
        failed = _overflown(acc, row_sum, CHUNK) & own
        if gl.max(gl.max(failed.to(gl.int32), axis=1), axis=0) > 0:
            work.again.store(gl.full([1], 1, gl.int32, one_word(4)))
        barrier()
        mbarrier.arrive(work.walked.index(0), count=1)
        if walk_again(work, 4):
            # Rows that did not fail get the same bits again: what a row is does not depend on its neighbours.
            acc, row_max, row_sum = _walk(work, group, shift, scale_log2, failed, 1, True, D, CAUSAL, OVERLAP)
    else:
        acc, row_max, row_sum = _walk(work, group, shift, scale_log2, every, 0, True, D, CAUSAL, OVERLAP)

    result, row_lse = _finish_softmax(acc, row_max, row_sum, s_rows, o_rows)
    result = result.to(work.q.dtype)
    offsets = gl.arange(0, ROWS, layout=s_rows)
    gl.store(lse + offsets + group * ROWS, row_lse, mask=offsets < rows)
    if rows >= ROWS:
        # The result goes out through q's memory, which no warp may still be reading.
        barrier()
        q.store(result)
        fence_async_shared()
        barrier()
        copy_out(out_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.q.index(group))
        tma.store_wait(0)
    else:
        lines = gl.arange(0, ROWS, layout=o_rows)
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
        gl.store(out + ((lines + group * ROWS)[:, None] * out_row + columns[None, :]), result, mask=(lines < rows)[:, None])
