"""The partitions of the Hopper backward kernel: a warp that loads, two warpgroups for dK and dV, one for dQ, three warps for its order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..lowering.dq_schedule import BATCH, HEAD, ITERATIONS, NEXT, ROW, ROWS
from ..lowering.tma import FAR
from .backward_iterator import before_first_iteration, next_iteration, tile_field
from .gluon_compat import aggregate, barrier, copy_in, copy_out
from .inline_asm import add_words, multiply_pairs, put_words, release_fence, round_pairs
from .primitives import (
    axis_of,
    by_thread,
    by_thread_layout,
    matrix,
    one_word,
    product_layout,
    read_word,
    ring_arrive,
    ring_at,
    ring_free,
    ring_wait,
    select_keys,
)

# Spins, of about a microsecond, on a lock that never opens, as where a list names a block twice: from then on the program adds to dQ
# without waiting, and counts that.
SPIN_LIMIT = gl.constexpr(1 << 20)


@aggregate
class Rows:
    """Rows of a tensor, as many at a time as a tile or chunk has, or those of shorter ones and no others: then as tma_chunks says."""

    desc: tma.tensor_descriptor
    batch: gl.tensor       # tokens from a batch element to the next


@gluon.jit
def _copy_rows(rows, batch, head, start, size, full, buffer):
    """Brings in ``size`` rows from ``start`` on, zeros behind them."""
    # Coordinates of whole tiles alone are one fewer: the loading partition has few registers.
    if len(rows.desc.block_type.shape) == 4:
        copy_in(rows.desc, [batch, head, start, 0], full, buffer)
    else:
        copy_in(rows.desc, [FAR, head, batch * rows.batch + start + size, FAR - size, 0], full, buffer)


@gluon.jit
def load(work, lists, k, v, q, do, lse_dpsum_desc, RAGGED: gl.constexpr):
    """The loading partition: q, dO and lse_dpsum of every chunk, and the numbers that go with it; before a tile's first q its K, and behind
    that q its V, which comes when the dK and dV of the tile before have left its memory."""
    QUERIES: gl.constexpr = axis_of(work.q.shape, -2)
    tile = work.first
    number, done = gl.to_tensor(0), gl.to_tensor(0)
    while tile >= 0:
        row, batch, kv_head = (tile_field(work, tile, ROW), tile_field(work, tile, BATCH), tile_field(work, tile, HEAD))
        iterations = tile_field(work, tile, ITERATIONS)
        rows = axis_of(work.k.shape, -2)
        if RAGGED:
            rows = gl.minimum(tile_field(work, tile, ROWS), rows)
        # Read before the tile before is done with, for one number leads to the next.
        at = next_iteration(lists, before_first_iteration(lists, work, tile), QUERIES)
        ring_free(work.k_empty, number)
        mbarrier.expect(work.k_full.index(0), k.desc.block_type.nbytes)
        _copy_rows(k, batch, kv_head, row, rows, work.k_full.index(0), work.k)
        if iterations == 0:
            _load_v(work, v, number, batch, kv_head, row, rows)
        for i in range(done, done + iterations):
            head = lists.group * kv_head + at.q_head
            start = at.start + at.chunk * QUERIES
            size = QUERIES
            if RAGGED:
                size = gl.minimum(at.size - at.chunk * QUERIES, QUERIES)
            ring_free(work.q_empty, i)
            store_number(work.slots, i, at.slot + at.chunk)
            if lists.deterministic:
                store_number(work.lock_values, i, at.lock_value)
            if lists.causal:
                store_number(work.limits, i, start + lists.shift - row)
            # Those who wait for q must find the numbers that go with it too.
            barrier()
            if lists.deterministic:
                ring_arrive(work.told, i)
            q_full = ring_at(work.q_full, i)
            mbarrier.expect(q_full, q.desc.block_type.nbytes + lse_dpsum_desc.block_type.nbytes)
            _copy_rows(q, batch, head, start, size, q_full, ring_at(work.q, i))
            copy_in(lse_dpsum_desc, [at.slot + at.chunk, 0, 0], q_full, ring_at(work.lse_dpsum, i))
            if i == done:
                _load_v(work, v, number, batch, kv_head, row, rows)
            mbarrier.expect(ring_at(work.do_full, i), do.desc.block_type.nbytes)
            _copy_rows(do, batch, head, start, size, ring_at(work.do_full, i), ring_at(work.do, i))
            at = next_iteration(lists, at, QUERIES)
        done += iterations
        number += 1
        tile = tile_field(work, tile, NEXT)


@gluon.jit
def _load_v(work, v, number, batch, kv_head, row, rows):
    ring_free(work.v_empty, number)
    mbarrier.expect(work.v_full.index(0), v.desc.block_type.nbytes)
    _copy_rows(v, batch, kv_head, row, rows, work.v_full.index(0), work.v)


@gluon.jit
def store_number(ring, i, number):
    """For iteration ``i``, by a partition of one warp; tests/tools/sanitize.py knows what this stores by this function's name."""
    ring_at(ring, i).store(gl.full([1], number, gl.int32, one_word(1)))


@gluon.jit
def _read_number(ring, i, WARPS: gl.constexpr):
    """The number that ``store_number`` left, in a partition of so many warps."""
    return read_word(ring_at(ring, i), WARPS)


@gluon.jit
def _store(to, buffer, group: gl.constexpr, result, batch, head, row, size):
    """Writes the first ``size`` rows of a warpgroup's result, through its share of ``buffer``."""
    ROWS: gl.constexpr = result.shape[0]
    matrix(buffer).slice(group * ROWS, ROWS).store(result)
    # TMA sees what every warp stored, now or when it brings in the next tile.
    fence_async_shared()
    barrier()
    if len(to.desc.block_type.shape) == 4:
        copy_out(to.desc, [batch, head, row, 0], buffer.slice(group * ROWS, ROWS, 2))
    else:
        copy_out(to.desc, [FAR, head, batch * to.batch + row + size, FAR - size, 0], buffer.slice(group * ROWS, ROWS, 3))
    tma.store_wait(0)


@gluon.jit
def _product(work, a, ring, i, half: gl.constexpr, group: gl.constexpr, zero):
    """Begins a b^T, b being iteration ``i``'s in ``ring``, less lse / scale (half 0) or dPsum (half 1) of each query: one more step of 16,
    and neither loads nor registers. 0 for keys that are not selected."""
    lse_dpsum = ring_at(work.lse_dpsum, i)
    lse_dpsum = lse_dpsum.reshape([lse_dpsum.shape[1], lse_dpsum.shape[2]]).permute((1, 0))
    # One for all warpgroups, or one for each.
    selector = work.selector.index(half + 2 * group if work.selector.shape[0] > 2 else half)
    token = warpgroup_mma(selector, lse_dpsum, zero, use_acc=False, is_async=True)
    return warpgroup_mma(a, matrix(ring_at(ring, i)).permute((1, 0)), token, is_async=True)


@gluon.jit
def _p_and_ds(work, v, i, group: gl.constexpr, scores, dv_sum, scale_log2, zero, CAUSAL: gl.constexpr):
    """P and dS of iteration ``i``: (dV with P^T dO added, dS in 16 bits)."""
    s_layout: gl.constexpr = product_layout(zero.shape[1])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(dv_sum.shape[1]), 2)
    if CAUSAL:
        KEYS: gl.constexpr = zero.shape[0]
        limit = _read_number(work.limits, i, 4) - group * KEYS
        if limit < KEYS - 1:
            keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
            queries = gl.arange(0, zero.shape[1], layout=gl.SliceLayout(0, s_layout))
            scores = gl.where(keys[:, None] <= queries[None, :] + limit, scores, float("-inf"))
    # Kept in 16 bits: the registers of the float32 weights are those of dP.
    p = round_pairs(gl.exp2(scores * scale_log2), work.q.dtype)
    ring_wait(work.do_full, i)
    dv_token = warpgroup_mma(gl.convert_layout(p, p_layout), matrix(ring_at(work.do, i)), dv_sum, is_async=True)
    token = _product(work, v, work.do, i, 1, group, zero)
    dv_sum, dp = warpgroup_mma_wait(0, deps=[dv_token, token])
    return dv_sum, multiply_pairs(p, dp)


@gluon.jit
def _store_ds(work, group: gl.constexpr, i, ds):
    """Leaves dS of iteration ``i`` to the dQ partition."""
    ring_free(work.ds_empty, i)
    ring_at(work.ds, i).slice(group * ds.shape[0], ds.shape[0]).store(ds)
    # The tensor core reads shared memory past the ordinary cache, and what every warp of the warpgroup stored.
    fence_async_shared()
    barrier()
    ring_arrive(work.ds_full, i)


@gluon.jit
def compute_dk_dv(work, group: gl.constexpr, dk, dv, scale_log2, scale, D: gl.constexpr, RAGGED: gl.constexpr, CAUSAL: gl.constexpr):
    """A multiplying partition: dK and dV of 64 keys of every tile; ``dk`` and ``dv``: where to, each ``Rows``."""
    QUERIES: gl.constexpr = axis_of(work.q.shape, -2)
    WARPGROUPS: gl.constexpr = 2
    KEYS: gl.constexpr = axis_of(work.v.shape, -2) // WARPGROUPS
    s_layout: gl.constexpr = product_layout(QUERIES)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = work.q.dtype
    k = matrix(work.k).slice(group * KEYS, KEYS)
    v = matrix(work.v).slice(group * KEYS, KEYS)
    zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    tile = work.first
    number, done = gl.to_tensor(0), gl.to_tensor(0)
    while tile >= 0:
        first, done = done, done + tile_field(work, tile, ITERATIONS)
        if RAGGED:
            # No product of the tile before still reads it.
            select_keys(work.selector, group, tile_field(work, tile, ROWS) - group * KEYS)
            fence_async_shared()
            barrier()
        dk_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
        dv_sum = gl.zeros([KEYS, D], gl.float32, o_layout)
        ring_wait(work.k_full, number)
        if first < done:
            last = done - 1
            ring_wait(work.q_full, first)
            scores = warpgroup_mma_wait(0, deps=[_product(work, k, work.q, first, 0, group, zero)])
            ring_wait(work.v_full, number)
            for i in range(first, last):
                dv_sum, ds = _p_and_ds(work, v, i, group, scores, dv_sum, scale_log2, zero, CAUSAL)
                dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(ring_at(work.q, i)), dk_sum, is_async=True)
                _store_ds(work, group, i, ds)
                # The next scores begin before this dK is complete, and end in this iteration.
                ring_wait(work.q_full, i + 1)
                s_token = _product(work, k, work.q, i + 1, 0, group, zero)
                dk_sum, scores = warpgroup_mma_wait(0, deps=[dk_token, s_token])
                ring_arrive(work.q_empty, i)
            dv_sum, ds = _p_and_ds(work, v, last, group, scores, dv_sum, scale_log2, zero, CAUSAL)
            dk_token = warpgroup_mma(gl.convert_layout(ds, p_layout), matrix(ring_at(work.q, last)), dk_sum, is_async=True)
            _store_ds(work, group, last, ds)
            dk_sum = warpgroup_mma_wait(0, deps=[dk_token])
            ring_arrive(work.q_empty, last)
        else:
            ring_wait(work.v_full, number)

        # Both leave through V's memory: this warpgroup alone reads its part of it, so that is free when all its warps are here.
        barrier()
        ring_arrive(work.k_empty, number)
        row, rows = tile_field(work, tile, ROW) + group * KEYS, KEYS
        if RAGGED:
            rows = gl.minimum(gl.maximum(tile_field(work, tile, ROWS) - group * KEYS, 0), KEYS)
        batch, head = tile_field(work, tile, BATCH), tile_field(work, tile, HEAD)
        _store(dv, work.v, group, dv_sum.to(dtype), batch, head, row, rows)
        # TMA has read what the warpgroup stored.
        barrier()
        _store(dk, work.v, group, (dk_sum * scale).to(dtype), batch, head, row, rows)
        barrier()
        ring_arrive(work.v_empty, number)
        number += 1
        tile = tile_field(work, tile, NEXT)


@gluon.jit
def compute_dq(work, dq_accum, D: gl.constexpr, DETERMINISTIC: gl.constexpr):
    """The dQ partition: dS^T K of every iteration, 64 columns at a time, added from registers to the chunk's slot, in the order in which
    dq_accum.Accum has it. Deterministic, when it is the tile's turn, which these columns have for themselves: so the next tile need not
    wait until the others are computed too."""
    QUERIES: gl.constexpr = axis_of(work.q.shape, -2)
    COLUMNS: gl.constexpr = 64
    PIECES: gl.constexpr = D // COLUMNS
    words: gl.constexpr = by_thread_layout(COLUMNS)
    zero = gl.zeros([QUERIES, COLUMNS], gl.float32, product_layout(COLUMNS))
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, gl.SliceLayout(2, words)))
    four = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, words)))
    place = (thread[:, None] * 4 + four[None, :] * 512)[:, :, None] + gl.zeros([128, COLUMNS // 8, 4], gl.int32, words)
    k = matrix(work.k)
    tile = work.first
    number, done = gl.to_tensor(0), gl.to_tensor(0)
    while tile >= 0:
        iterations = tile_field(work, tile, ITERATIONS)
        # dS says that K is there, but a tile may have no iterations, and must not be done with before it has begun.
        ring_wait(work.k_full, number)
        for i in range(done, done + iterations):
            ring_wait(work.ds_full, i)
            slot = _read_number(work.slots, i, 4)
            if DETERMINISTIC:
                lock_value = _read_number(work.lock_values, i, 4)
            ds = ring_at(work.ds, i).permute((1, 0))
            pointer = dq_accum + slot.to(gl.int64) * (QUERIES * D) + place
            for piece in gl.static_range(PIECES):
                token = warpgroup_mma(ds, k.slice(piece * COLUMNS, COLUMNS, 1), zero, use_acc=False, is_async=True)
                if DETERMINISTIC and PIECES > 1:
                    # While the product is computed.
                    ring_wait(work.turn, i * PIECES + piece)
                part = warpgroup_mma_wait(0, deps=[token])
                if piece == PIECES - 1:
                    ring_arrive(work.ds_empty, i)
                if DETERMINISTIC:
                    if PIECES == 1:
                        ring_wait(work.turn, i * PIECES + piece)
                    # Nothing stands there before the first.
                    put_words(pointer + piece * (QUERIES * COLUMNS), by_thread(part), lock_value)
                    barrier()
                    ring_arrive(work.dq_full, i * PIECES + piece)
                else:
                    add_words(pointer + piece * (QUERIES * COLUMNS), by_thread(part))
                    if piece < PIECES - 1:
                        # Else the compiler wants the next product's registers beside this one's.
                        barrier()
        ring_arrive(work.k_empty, number)
        done += iterations
        number += 1
        tile = tile_field(work, tile, NEXT)


@gluon.jit
def wait_turn(work, dq_semaphore, spin_timeouts, PIECES: gl.constexpr):
    """The waiting partition: tells the dQ partition when a semaphore of an iteration's slot has the tile's lock value, ahead of need.

    ``spin_timeouts``: pointer to the number of partitions that gave up waiting for that, see the module spin_timeouts.
    """
    tile = work.first
    done = gl.to_tensor(0)
    spins_left = gl.to_tensor(SPIN_LIMIT)
    while tile >= 0:
        iterations = tile_field(work, tile, ITERATIONS)
        for i in range(done, done + iterations):
            ring_wait(work.told, i)
            slot, lock_value = _read_number(work.slots, i, 1), _read_number(work.lock_values, i, 1)
            for piece in gl.static_range(PIECES):
                semaphore = dq_semaphore + slot * PIECES + piece
                added = gl.load(semaphore, volatile=True)
                # For the first, which stores, all wait, however long: it waits for nobody.
                while (added < lock_value) & ((spins_left > 0) | (added == 0)):
                    added = gl.load(semaphore, volatile=True)
                    spins_left -= 1
                spins_left = gl.where(spins_left > 0, SPIN_LIMIT, 0)
                # Not more than a round ahead of those who wait for it.
                ring_free(work.dq_empty, i * PIECES + piece)
                ring_arrive(work.turn, i * PIECES + piece)
        done += iterations
        tile = tile_field(work, tile, NEXT)
    if spins_left <= 0:
        gl.atomic_add(spin_timeouts, 1, sem="relaxed")


@gluon.jit
def announce_dq(work, dq_semaphore, share: gl.constexpr, PIECES: gl.constexpr):
    """One of two announcing partitions: moves every other semaphore on when what was added under it is written.

    Two, because that at times takes longer than an iteration.
    """
    SHARES: gl.constexpr = 2
    tile = work.first
    done = gl.to_tensor(0)
    while tile >= 0:
        iterations = tile_field(work, tile, ITERATIONS) * PIECES
        for j in range(done + ((done + share) & 1), done + iterations, SHARES):
            ring_wait(work.dq_full, j)
            slot = _read_number(work.slots, j // PIECES, 1)
            release_fence()
            barrier()
            gl.atomic_add(dq_semaphore + slot * PIECES + j % PIECES, 1, sem="relaxed")
            ring_arrive(work.dq_empty, j)
        done += iterations
        tile = tile_field(work, tile, NEXT)
