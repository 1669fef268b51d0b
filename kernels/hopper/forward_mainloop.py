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

from ..lowering.primitives import LN2, LOWEST
from ..lowering.tma import FAR
from .forward_load import loaded_ahead, pieces_of, q_place, read_tile, starts_of, walk_again
from .gluon_compat import barrier, copy_out
from .inline_asm import round_pairs, scheduling_fence
from .primitives import (
    eighths,
    hide_columns,
    matrix,
    not_finite,
    one_word,
    product_layout,
    rescale,
    ring_arrive,
    ring_at,
    ring_wait,
    row_lanes,
    zero_rows,
)
from .softmax import overflown, softmax_step


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
def _causal_chunks(work, tile, first, group: gl.constexpr, q, zero, acc, row_max, row_sum, shift, scale_log2, every):
    """The partial chunks under a causal mask, one at a time: (acc, row_max, row_sum), row_max being the largest score of those seen."""
    CHUNK: gl.constexpr = zero.shape[1]
    ROWS: gl.constexpr = zero.shape[0]
    s_layout: gl.constexpr = product_layout(CHUNK)
    o_layout: gl.constexpr = product_layout(acc.shape[1])
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    keys = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, s_layout))
    _, starts, sizes = starts_of(work, tile)
    for place in range(tile.partial):
        i = first + place
        size = gl.load(sizes - 1 - place)
        # The last key of the chunk that the first row sees.
        last = tile.row + group * ROWS + shift - gl.load(starts - 1 - place)
        ring_wait(work.k_full, i, True)
        # q from registers: if this loop and the one over full chunks both took it from shared memory, ptxas 12.8 would work out its place
        # once, in front of this loop, and not at all for tiles without partial chunks.
        rows_of_q = q.load(gl.DotOperandLayout(0, s_layout, 2))
        token = warpgroup_mma(rows_of_q, matrix(ring_at(work.k, i, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        visible = (keys < size)[None, :] & (keys[None, :] <= (last + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)))[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, every, True)
        ring_wait(work.v_full, i, True)
        v = matrix(ring_at(work.v, i, True))
        acc = rescale(acc, alpha)
        # NaN and inf must reach the rows that see them and no others. The tensor core would spread them, so they are added by hand.
        bad = _first_not_finite(v, size, gl.SliceLayout(0, o_layout))
        limit = gl.minimum(last + gl.arange(0, ROWS, layout=o_rows), CHUNK - 1)
        acc = gl.where(bad[None, :] <= limit[:, None], float("nan"), acc)
        # All warpgroups keep pace, two steps a chunk.
        barrier()
        ring_arrive(work.v_zeroed, 0, True)
        ring_wait(work.v_zeroed, 0, True)
        # Two of them, because three have no equal parts.
        if group < 2:
            zero_rows(v, size, group, 2)
        # The tensor core reads shared memory past the ordinary cache: what was just stored must be there, from all warpgroups.
        fence_async_shared()
        barrier()
        ring_arrive(work.v_zeroed, 1, True)
        ring_wait(work.v_zeroed, 1, True)
        p = gl.convert_layout(round_pairs(weights, work.q.dtype), gl.DotOperandLayout(0, o_layout, 2))
        token = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, i, True)
    return acc, row_max, row_sum


@gluon.jit
def _piece_sizes(work, tile, packed):
    """How many keys each piece of the ``packed``-th packed chunk has, for every eight columns; a full chunk's where it is below 0."""
    PIECE: gl.constexpr = work.k.shape[4] // work.pieces
    eighth = eighths(work.k.shape[4])
    _, found = pieces_of(work, tile, packed)
    sizes = eighth * 0
    for i in gl.static_range(work.pieces):
        sizes = gl.where(eighth // (PIECE // 8) == i, gl.where(packed < 0, gl.minimum(work.full - i * PIECE, PIECE), found[i]), sizes)
    return sizes


@gluon.jit
def _step(work, tile, q, zero, p, acc, row_max, row_sum, i, size, scale_log2, follows, PARTIAL: gl.constexpr,
          FOLLOW: gl.constexpr, OVERLAP: gl.constexpr):
    """The scores of the ``i``-th chunk, of ``size`` keys, while the values of the one before are added up with its weights p: (p of this
    chunk, acc, row_max, row_sum). Of a chunk with several pieces ``size`` is its number among the packed ones."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(acc.shape[1]), 2)
    ring_wait(work.k_full, i, True)
    # An order between the warpgroups (ping-pong) measured 1 to 5 % slower on an H200.
    s_token = warpgroup_mma(q, matrix(ring_at(work.k, i, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
    ring_wait(work.v_full, i - 1, True)
    o_token = warpgroup_mma(p, matrix(ring_at(work.v, i - 1, True)), acc, is_async=True)
    if OVERLAP:
        scores = warpgroup_mma_wait(1, deps=[s_token])
    else:
        scores, acc = warpgroup_mma_wait(0, deps=[s_token, o_token])
        ring_arrive(work.done, i, True)
    if PARTIAL:
        if work.pieces > 1:
            size = _piece_sizes(work, tile, size)
        scores = hide_columns(scores, size, work.pieces)
    elif work.full < work.k.shape[4]:
        # Numbers of the compiler, which leave no more of this than the last few columns need.
        scores = hide_columns(scores, work.full, 1)
    weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW)
    if OVERLAP:
        # Or the compiler would wait for both products before the exponentials.
        row_sum = scheduling_fence(row_sum)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        ring_arrive(work.done, i, True)
    acc = rescale(acc, alpha) if FOLLOW else acc
    return gl.convert_layout(round_pairs(weights, work.q.dtype), p_layout), acc, row_max, row_sum


@gluon.jit
def _walk(work, tile, first, q, group: gl.constexpr, shift, scale_log2, follows, FOLLOW: gl.constexpr, CAUSAL: gl.constexpr,
          OVERLAP: gl.constexpr):
    """A warpgroup's 64 rows through all chunks of a tile, the first of which is the ``first`` use of their rings: (sums of weighted values,
    row_max, row_sum).

    In the first chunk, and in the partial ones under a causal mask, row_max is the row's own. From then on ``follows`` and FOLLOW count, as
    for ``softmax_step``.
    """
    CHUNK: gl.constexpr = work.k.shape[4]
    ROWS: gl.constexpr = work.q.shape[4]
    D: gl.constexpr = work.q.shape[5]
    s_layout: gl.constexpr = product_layout(CHUNK)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = work.q.dtype

    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    zero = gl.zeros([ROWS, CHUNK], gl.float32, s_layout)
    # Not minus infinity, from which nothing can be measured: a row that has seen nothing yet has weights of 0.
    row_max = gl.full([ROWS, 4], LOWEST, gl.float32, row_lanes(CHUNK))
    row_sum = gl.zeros([ROWS, 4], gl.float32, row_lanes(CHUNK))
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(CHUNK))
    if CAUSAL:
        acc, row_max, row_sum = _causal_chunks(work, tile, first, group, q, zero, acc, row_max, row_sum, shift, scale_log2, every)
    # Overlapped from here on: under a causal mask the full chunks, else all of them, packed ones last.
    if CAUSAL:
        begin = first + tile.partial
    else:
        begin = first
    _, _, sizes = starts_of(work, tile)
    full_end = begin + tile.full
    end = first + tile.partial + tile.full
    if begin < end:
        ring_wait(work.k_full, begin, True)
        token = warpgroup_mma(q, matrix(ring_at(work.k, begin, True)).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[token])
        ring_arrive(work.done, begin, True)
        if not CAUSAL:
            if work.pieces > 1:
                scores = hide_columns(scores, _piece_sizes(work, tile, 0 - tile.full), work.pieces)
            else:
                size = work.full
                if tile.full == 0:
                    size = gl.load(sizes - 1)
                scores = hide_columns(scores, size, work.pieces)
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, every, True)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(round_pairs(weights, dtype), p_layout)
        for i in range(begin + 1, full_end):
            p, acc, row_max, row_sum = _step(work, tile, q, zero, p, acc, row_max, row_sum, i, work.full, scale_log2, follows, False,
                                           FOLLOW, OVERLAP)
        if not CAUSAL:
            for i in range(gl.maximum(full_end, begin + 1), end):
                if work.pieces > 1:
                    size = i - full_end
                else:
                    size = gl.load(sizes - 1 - (i - full_end))
                p, acc, row_max, row_sum = _step(work, tile, q, zero, p, acc, row_max, row_sum, i, size, scale_log2, follows, True,
                                               FOLLOW, OVERLAP)
        ring_wait(work.v_full, end - 1, True)
        token = warpgroup_mma(p, matrix(ring_at(work.v, end - 1, True)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    return acc, row_max, row_sum


@gluon.jit
def _let_go(work, first, end):
    """Lets the chunks from the ``first`` use of the rings on go unused, so that the other warpgroups and the loading warp need not know."""
    for i in range(first, end):
        ring_wait(work.k_full, i, True)
        # Nobody else may wait for it, and its stage may be filled again afterwards.
        ring_wait(work.v_full, i, True)
        ring_arrive(work.done, i, True)


@gluon.jit
def _begin_again(work, n, used):
    """Where in the rings the second walk over the ``n``-th tile's list begins, if ``used`` of their uses went before the next tile's."""
    first = used + loaded_ahead(work, read_tile(work, n + 1))
    _let_go(work, used, first)
    return first


@gluon.jit
def attend(work, group: gl.constexpr, lse, out_desc, q_len, shift, scale_log2, CAUSAL: gl.constexpr, OVERLAP: gl.constexpr):
    """A multiplying partition: of tile after tile 64 query rows, from the first chunk to the stored result."""
    OPTIMISTIC: gl.constexpr = work.q.dtype == gl.bfloat16
    n, uses = gl.to_tensor(0), gl.to_tensor(0)
    tile = read_tile(work, n)
    while tile.rows > 0:
        at, before = q_place(work, n, group)
        mbarrier.wait(work.q_full.index(at), before & 1)
        if CAUSAL or tile.rows > group * work.q.shape[4]:
            uses = _attend(work, tile, n, uses, group, work.q.index(at), lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)
        else:
            # It has no rows of this tile.
            chunks = tile.full + tile.partial
            _let_go(work, uses, uses + chunks)
            uses = uses + chunks
            if OPTIMISTIC:
                ring_arrive(work.walked, n, True)
                if walk_again(work, n, 4):
                    again = _begin_again(work, n, uses)
                    _let_go(work, again, again + chunks)
                    uses = again + chunks
        # All of its warps.
        barrier()
        ring_arrive(work.tile_free, n, True)
        n += 1
        tile = read_tile(work, n)


@gluon.jit
def _attend(work, tile, n, first, group: gl.constexpr, q_buffer, lse, out_desc, q_len, shift, scale_log2, CAUSAL: gl.constexpr,
            OVERLAP: gl.constexpr):
    """A warpgroup's 64 rows of its program's ``n``-th tile: how many uses of the rings there were then, ``first`` of them before.

    In bfloat16 optimistically: a row's weights are measured from its largest score in the first chunk. As one of the scores is 0 then, the
    weights that count do not underflow; bfloat16 and float32 hold those of up to 2 ** 127, so that only scores of far more than a hundred
    above it, in base 2, overflow. That is seen at the end, and then the program walks the list again and the rows where it happened follow
    their maxima. Without maxima and rescaling a forward takes 0.88 to 0.94 of the time on an H200. float16 holds
    weights of up to 2 ** 16, and queries and keys of three times the usual length would make nearly every program walk twice.
    """
    OPTIMISTIC: gl.constexpr = work.q.dtype == gl.bfloat16
    CHUNK: gl.constexpr = work.k.shape[4]
    ROWS: gl.constexpr = work.q.shape[4]
    s_rows: gl.constexpr = gl.SliceLayout(1, product_layout(CHUNK))
    D: gl.constexpr = work.q.shape[5]
    o_layout: gl.constexpr = product_layout(D)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q = matrix(q_buffer)
    if work.q_registers:
        # Beside so few rows as a warpgroup's, products of 64 keys read shared memory as fast as it goes if they read both factors there.
        q = q.load(gl.DotOperandLayout(0, product_layout(CHUNK), 2))
    row, rows = tile.row + group * ROWS, tile.rows - group * ROWS
    chunks = tile.full + tile.partial
    uses = first + chunks
    every = gl.full([ROWS, 1], True, gl.int1, row_lanes(CHUNK))
    if OPTIMISTIC:
        acc, row_max, row_sum = _walk(work, tile, first, q, group, shift, scale_log2, every, False, CAUSAL, OVERLAP)
        own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_lanes(CHUNK)))[:, None] < rows
        failed = overflown(acc, row_sum, CHUNK) & own
        if gl.max(gl.max(failed.to(gl.int32), axis=1), axis=0) > 0:
            work.again.index(n & 1).store(gl.full([1], 1, gl.int32, one_word(4)))
        barrier()
        ring_arrive(work.walked, n, True)
        if walk_again(work, n, 4):
            # Rows that did not fail get the same bits again: what a row is does not depend on its neighbours.
            again = _begin_again(work, n, uses)
            acc, row_max, row_sum = _walk(work, tile, again, q, group, shift, scale_log2, failed, True, CAUSAL, OVERLAP)
            uses = again + chunks
    else:
        acc, row_max, row_sum = _walk(work, tile, first, q, group, shift, scale_log2, every, True, CAUSAL, OVERLAP)

    result, row_lse = _finish_softmax(acc, row_max, row_sum, s_rows, o_rows)
    offsets = gl.arange(0, ROWS, layout=s_rows)
    if tile.part < 0:
        gl.store(lse + tile.at_head.to(gl.int64) * q_len + row + offsets, row_lse, mask=offsets < rows)
        # The result goes out through q's memory, which no warp may still be reading.
        barrier()
        matrix(q_buffer).store(result.to(work.q.dtype))
        fence_async_shared()
        barrier()
        batch, head, size = tile.at_head // work.heads, tile.at_head % work.heads, gl.minimum(gl.maximum(rows, 0), ROWS)
        copy_out(out_desc, [FAR, head, batch * work.out_batch + row + size, FAR - size, 0], q_buffer)
        tma.store_wait(0)
    else:
        first_row = (tile.part * work.warpgroups + group) * ROWS
        gl.store(work.partial_lse + first_row + offsets, row_lse)
        places = gl.arange(0, ROWS, layout=o_rows)[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))[None, :]
        gl.store(work.partial_out + first_row.to(gl.int64) * D + places, result)
    return uses
