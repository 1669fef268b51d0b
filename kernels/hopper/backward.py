"""Hopper backward kernel: dQ, dK and dV in one pass, five matrix products for every pair of a query chunk and a key tile.

A program takes tiles of 128 keys of one block and iterates over the chunks of 64 queries that attend to each. One warp brings q and dO in
by TMA. Two warpgroups of 64 keys each recompute P, transposed, and sum dK and dV in registers; what they leave in shared memory of dS a
third warpgroup multiplies by K, while they go on with the next chunk, and adds from registers to dQ in global memory, float32. Where dQ
must be deterministic, it adds in the order that dq_schedule gives, held by a semaphore for every 64 columns of a chunk of dQ: one more
warp waits for the turns to come, and two move the semaphores on when additions are written. The first stores what others add to.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..blocks import BlockLists
from ..device import multiprocessors
from ..launch import launch
from ..lowering.chunks import Listed, shared_strides
from ..lowering.dq_accum import KEYS, QUERIES, backward_postprocess, backward_preprocess
from ..lowering.dq_schedule import FIELDS, NEXT, ROWS, lock_values, schedule
from ..lowering.inputs import strided
from ..lowering.primitives import LOG2E
from ..lowering.tma import batch_tokens, chunks_ready, tma_chunks, tma_descriptor
from ..lowering.transposed import transposed
from .backward_iterator import BackwardLists
from .backward_partitions import Rows, announce_dq, compute_dk_dv, compute_dq, load, wait_turn
from .backward_smem import BackwardWork
from .primitives import axis_of, barrier_ring, fill_selector, in_stages, ring_init
from .spin_timeouts import counter, spin_timeouts

__all__ = ["constants", "hopper_backward", "spin_timeouts"]

WARPGROUPS = 2     # each multiplies by KEYS / 2 keys, the height of one wgmma
# 128 registers at entry for 4 + 4 + 4 + 3 warps, which count as 16; warp_specialize reassigns them.
OPTIONS = dict(num_warps=4, maxnreg=128)


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker. Numbers stand one by one because
# Triton (3.6 to 3.9) specialises the members of a tuple whatever ``do_not_specialize`` says.
_NUMBERS = ["k_tokens", "v_tokens", "q_tokens", "do_tokens", "dk_tokens", "dv_tokens", "list_batch", "list_head", "list_group", "q_batch",
            "q_head", "q_group", "width", "group", "heads", "blocks", "parts", "q_len", "q_length", "slots", "shift", "number", "tail"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _backward_kernel(k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc, lse_dpsum_desc, dq_semaphore, spin_timeouts, tiles, counts,
                     indices, lock_values, skipped, q_starts, q_sizes, dq_accum,
                     k_tokens, v_tokens, q_tokens, do_tokens, dk_tokens, dv_tokens, list_batch, list_head, list_group, q_batch, q_head,
                     q_group, width, group, heads, blocks, parts, q_len, q_length, slots, shift, number, tail, scale_log2, scale,
                     UNIFORM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, RAGGED: gl.constexpr,
                     CAUSAL: gl.constexpr, DETERMINISTIC: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
                     OTHER_REGISTERS: gl.constexpr):
    WARPGROUPS: gl.constexpr = 2
    # More than the iterations for which a number is kept: STAGES and DS_STAGES, and the dQ partition's and ANNOUNCED behind them.
    NUMBERS: gl.constexpr = 16
    PIECES: gl.constexpr = D // 64
    ANNOUNCED: gl.constexpr = 4 * PIECES
    QUERIES: gl.constexpr = axis_of(q_desc.block_type.shape, -2)
    KEYS: gl.constexpr = axis_of(k_desc.block_type.shape, -2)
    first = gl.program_id(0)
    if DETERMINISTIC:
        first = gl.load(tiles + (number + tail + first) * FIELDS + NEXT)
    elif first >= number - tail:
        first = gl.load(tiles + (tail + first) * FIELDS + NEXT)
    if RAGGED and not DETERMINISTIC:
        if gl.load(tiles + first * FIELDS + ROWS) <= 0:
            return

    dtype: gl.constexpr = q_desc.dtype
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout)
    q = gl.allocate_shared_memory(dtype, in_stages(STAGES, q_desc.block_type.shape), q_desc.layout)
    do = gl.allocate_shared_memory(dtype, in_stages(STAGES, do_desc.block_type.shape), do_desc.layout)
    lse_dpsum = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, QUERIES, 16], lse_dpsum_desc.layout)
    slot_ring = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], numbers)
    lock_ring = gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], numbers)
    limits = gl.allocate_shared_memory(gl.int32, [STAGES, 1], numbers)
    # Where tiles have fewer keys each warpgroup has its own, see select_keys.
    selector = gl.allocate_shared_memory(gl.bfloat16, [2 * WARPGROUPS if RAGGED else 2, KEYS // WARPGROUPS, 16],
                                         gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16))
    if not RAGGED:
        fill_selector(selector)
    ds = gl.allocate_shared_memory(dtype, [DS_STAGES, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype))
    k_full, k_empty, v_full, v_empty = barrier_ring(1), barrier_ring(1), barrier_ring(1), barrier_ring(1)
    q_full, do_full, q_empty = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES)
    ds_full, ds_empty = barrier_ring(DS_STAGES), barrier_ring(DS_STAGES)
    # One arrival: TMA, one warp or the dQ warpgroup announces these.
    ring_init(k_full, 1)
    ring_init(v_full, 1)
    ring_init(q_full, 1)
    ring_init(do_full, 1)
    ring_init(ds_empty, 1)
    # Both multiplying warpgroups must be done with these, and with K the dQ warpgroup too.
    ring_init(v_empty, WARPGROUPS)
    ring_init(k_empty, WARPGROUPS + 1)
    ring_init(q_empty, WARPGROUPS)
    ring_init(ds_full, WARPGROUPS)
    # Rings that nobody would use are no rings, see ring_init.
    told, turn, dq_full, dq_empty = k_full, k_full, k_full, k_full
    if DETERMINISTIC:
        told, turn, dq_full, dq_empty = barrier_ring(NUMBERS), barrier_ring(ANNOUNCED), barrier_ring(ANNOUNCED), barrier_ring(ANNOUNCED)
        ring_init(told, 1)
        ring_init(turn, 1)
        ring_init(dq_full, 1)
        ring_init(dq_empty, 1)
    # TMA must see the barriers before it signals them.
    fence_async_shared()

    work = BackwardWork(k, v, q, do, lse_dpsum, slot_ring, lock_ring, limits, selector, ds, k_full, k_empty, v_full, v_empty, q_full,
                        do_full, q_empty, ds_full, ds_empty, told, turn, dq_full, dq_empty, tiles, first)
    lists = BackwardLists(counts, indices, lock_values, skipped, q_starts, q_sizes, list_batch, list_head, list_group, q_batch, q_head,
                          q_group, width, group, heads, blocks, parts, q_len, q_length, slots, shift, UNIFORM, CAUSAL, DETERMINISTIC)
    to_dk, to_dv = Rows(dk_desc, dk_tokens), Rows(dv_desc, dv_tokens)
    of_k, of_v, of_q, of_do = Rows(k_desc, k_tokens), Rows(v_desc, v_tokens), Rows(q_desc, q_tokens), Rows(do_desc, do_tokens)
    if DETERMINISTIC:
        gl.warp_specialize([
            (compute_dk_dv, (work, 0, to_dk, to_dv, scale_log2, scale, D, RAGGED, CAUSAL)),
            (compute_dk_dv, (work, 1, to_dk, to_dv, scale_log2, scale, D, RAGGED, CAUSAL)),
            (compute_dq, (work, dq_accum, D, True)),
            (load, (work, lists, of_k, of_v, of_q, of_do, lse_dpsum_desc, RAGGED)),
            (wait_turn, (work, dq_semaphore, spin_timeouts, PIECES)),
            (announce_dq, (work, dq_semaphore, 0, PIECES)),
            (announce_dq, (work, dq_semaphore, 1, PIECES)),
        ], [4, 4, 1, 1, 1, 1], [MULTIPLY_REGISTERS, DQ_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])
    else:
        gl.warp_specialize([
            (compute_dk_dv, (work, 0, to_dk, to_dv, scale_log2, scale, D, RAGGED, CAUSAL)),
            (compute_dk_dv, (work, 1, to_dk, to_dv, scale_log2, scale, D, RAGGED, CAUSAL)),
            (compute_dq, (work, dq_accum, D, False)),
            (load, (work, lists, of_k, of_v, of_q, of_do, lse_dpsum_desc, RAGGED)),
        ], [4, 4, 1], [MULTIPLY_REGISTERS, DQ_REGISTERS, OTHER_REGISTERS])


def hopper_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    scale: float, causal: bool, deterministic: bool, processors: int | None = None, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); head_dim 64 or 128. ``processors`` are the device's own.

    With ``deterministic`` the programs add to dQ in one order (a semaphore), else when they come (non-deterministic dQ), and dQ's last bits
    differ from run to run, over key blocks of up to KEYS tokens those of dK and dV too. So dQ's may where a deterministic backward waited
    too long; ``spin_timeouts`` counts that. ``in_place``: dq may take dout's memory, which is read before dq is written.
    """
    listed = Listed.of(blocks, q.shape[2], k.shape[2])
    q, k, v, dout, out = *map(chunks_ready, (q, k, v, dout)), strided(out)
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    queries, keys = listed.rows, listed.items
    (batch, heads, q_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    programs, shape, shift = processors or multiprocessors(q.device), constants(dim, deterministic), kv_len - q_len
    flipped = transposed(listed)
    work = schedule(flipped, batch, heads, kv_heads, programs, deterministic, shift if causal else None, dim)
    accum = backward_preprocess(dout, dlse, out, lse, scale, queries, deterministic)
    # Where there is no order, anything else stands for what only an order needs.
    locks = timeouts = work.tiles
    if deterministic:
        # The counter says in every call whether an earlier one waited too long.
        locks, timeouts = lock_values(work, listed, flipped, batch, heads, kv_heads), counter(q.device)
    # Ragged blocks need not cover every row. From here on there are gradients, when all is gone that orders need.
    dk, dv = (torch.empty_like(x) if keys.covers else torch.zeros_like(x) for x in (k, v))
    numbers = (*[batch_tokens(x) or 0 for x in (k, v, q, dout, dk, dv)], *shared_strides(flipped.counts, heads), *queries.strides(heads),
               work.width, heads // kv_heads, heads, keys.number, -(-keys.length // KEYS), q_len, queries.length, accum.number,
               shift, work.number, work.tail)
    # Whether there are tiles or chunks of fewer tokens than the others.
    ragged = not all([axis.uniform and axis.length % size == axis.tokens % size == 0 for axis, size in ((queries, QUERIES), (keys, KEYS))])
    kinds = dict(UNIFORM=queries.uniform, RAGGED=ragged, CAUSAL=causal) | shape
    descriptors = [tma_chunks(x, size) if ragged else tma_descriptor(x, size) for x, size in (
        (k, KEYS), (v, KEYS), (q, QUERIES), (dout, QUERIES), (dk, KEYS // WARPGROUPS), (dv, KEYS // WARPGROUPS))]
    # Programs that wait for one another must all be there.
    launch(_backward_kernel, (programs if deterministic else work.number, 1, 1),
           (accum.dq_semaphore if deterministic else work.tiles, timeouts, work.tiles, flipped.counts, flipped.indices, locks,
            work.skipped if causal else work.tiles, *[flipped.counts if x is None else x for x in queries.tensors], accum.dq_accum),
           (*numbers, scale * LOG2E, scale), kinds, dict(**OPTIONS, launch_cooperative_grid=deterministic),
           (*descriptors, _lse_dpsum_desc(accum.lse_dpsum)))
    # Only the sums are left when their own gradient comes.
    dq_accum, dq_semaphore = accum.dq_accum, accum.dq_semaphore
    del accum, descriptors, locks, flipped, work
    dq = dout if in_place and dout.stride() == q.stride() else torch.empty_like(q)
    if not queries.covers:
        dq.zero_()
    backward_postprocess(dq_accum, dq_semaphore, dq, scale, queries)
    return dq, dk, dv


def constants(dim: int, deterministic: bool) -> dict:
    """The kernel's shape for a head_dim: stages of q and dO, of dS, and the partitions' registers.

    Times on an H200, bfloat16, 16 heads of 128, 46,080 tokens in blocks of 384, 48 of 120 kept, in ms. dQ added from registers: 28.1
    without an order, 30.2 deterministic; left in shared memory and added from there by TMA, 29.8 and 30.5; at 11,520 tokens, 12 of 30
    kept, 1.71 and 1.84 against 1.76 and 1.97. Three stages of q and dO are no faster, nor are four of dS. lse and dPsum subtracted in
    registers, not by the matrix unit, 1.24 times as long. dK begun only when dS is in shared memory, so that the next exponentials are
    taken meanwhile, needs three stages: 0.96 of the time there, but 1.2 deterministic, and 1.03 at 11,520 tokens. K of the next tile
    loaded while one is computed 1.01 to 1.03; the first columns of dQ left in shared memory, so that the turn is taken when both products
    are there, 1.06 to 1.2: the dQ warpgroup has no time to spare. One program a multiprocessor without an order 1.01 to 1.05.
    """
    multiply_registers, dq_registers, other_registers = (208, 72, 24) if dim == 128 else (192, 96, 32)
    return dict(D=dim, STAGES=2 if dim == 128 else 4, DS_STAGES=2, DETERMINISTIC=deterministic,
                MULTIPLY_REGISTERS=multiply_registers, DQ_REGISTERS=dq_registers, OTHER_REGISTERS=other_registers)


LSE_DPSUM_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)


def _lse_dpsum_desc(x: Tensor) -> TensorDescriptor:
    """x [B, H, slots, QUERIES, 16] as TMA sees it: one slot after another."""
    flat = x.flatten(0, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, QUERIES, 16], LSE_DPSUM_LAYOUT)
