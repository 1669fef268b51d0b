"""Hopper backward kernel: dQ, dK and dV in one pass, five matrix products for every pair of a query chunk and a key tile.

A program owns 128 keys of one block and walks the chunks of 64 queries that attend to it. One warp brings q and dO in through the copy
engine. Two warpgroups of 64 keys each recompute the weights, transposed, and sum dK and dV in registers; what they leave in shared memory
of dS a third warpgroup multiplies by K and adds to dQ in global memory, float32, while they go on with the next chunk.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .blocks import BlockLists
from .hopper_backward_steps import Work, add_dq, load, multiply, pick_columns
from .hopper_forward import LOG2E
from .hopper_slots import KEYS, QUERIES, fill_slots, finish_dq, list_visits
from .hopper_tiles import reachable, tiles
from .triton_chunks import Cut, kv_cut, q_cut, readable, shared_strides

WARPGROUPS = 2     # of KEYS / 2 keys, the height of one wgmma
# 128 registers at entry for 4 + 4 + 4 + 1 warps, which count as 16; warp_specialize deals them out anew.
OPTIONS = dict(num_warps=4, maxnreg=128)


@gluon.jit
def _backward_kernel(k_tiles, v_tiles, q_tiles, do_tiles, dk_tiles, dv_tiles, dq_tiles, side_tiles, dk, dv, turns,
                     kv_starts, kv_sizes, chunks, slots, ranks, numbers,
                     dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, bound_batch, bound_head, bound_group,
                     list_batch, list_head, list_group, width, places, kv_heads, group, kv_len, block_length, slots_a_head,
                     scale_log2, scale,
                     UNIFORM: gl.constexpr, PARTS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUT_QUERIES: gl.constexpr,
                     CUT_KEYS: gl.constexpr, ORDERED: gl.constexpr, TOGETHER: gl.constexpr,
                     MULTIPLY_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    WARPGROUPS: gl.constexpr = 2
    QUERIES: gl.constexpr = q_tiles.block_type.shape[2]
    KEYS: gl.constexpr = k_tiles.block_type.shape[2]
    # TOGETHER heads at a time, one program of each after another: those of one head, which add to the same dQ, start further apart.
    # Each head from the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    first = gl.program_id(0) // (places * TOGETHER) * TOGETHER
    within = gl.program_id(0) % (places * TOGETHER)
    number = gl.minimum(gl.num_programs(0) // places - first, TOGETHER)
    place = places - 1 - within // number
    kv_head, batch = (first + within % number) % kv_heads, (first + within % number) // kv_heads
    block, part = place // PARTS, place % PARTS
    if UNIFORM:
        row = block * block_length
        rows = gl.minimum(kv_len - row, block_length)
    else:
        bound = batch.to(gl.int64) * bound_batch + (kv_head // bound_group) * bound_head + block
        row, rows = gl.load(kv_starts + bound), gl.load(kv_sizes + bound)
    # Programs of the block that add to a dQ before this one.
    rank = gl.maximum(rows + KEYS - 1, 0) // KEYS - 1 - part
    row, rows = row + part * KEYS, rows - part * KEYS
    if rows <= 0:
        return
    list_row = batch.to(gl.int64) * list_batch + (kv_head // list_group).to(gl.int64) * list_head + block
    dk += batch.to(gl.int64) * dk_batch + kv_head.to(gl.int64) * dk_head + row.to(gl.int64) * dk_row
    dv += batch.to(gl.int64) * dv_batch + kv_head.to(gl.int64) * dv_head + row.to(gl.int64) * dv_row

    dtype: gl.constexpr = q_tiles.dtype
    k = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], k_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], v_tiles.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], q_tiles.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], do_tiles.layout)
    side = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, QUERIES, 16], side_tiles.layout)
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS // WARPGROUPS, 16], gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16))
    pick_columns(ones)
    ds = gl.allocate_shared_memory(dtype, [2, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype))
    dq = gl.allocate_shared_memory(gl.float32, [D // 64, 1, QUERIES, 64], dq_tiles.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    clean = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=WARPGROUPS)
        mbarrier.init(ds_empty.index(i), count=1)
    mbarrier.init(clean, count=WARPGROUPS)
    # The copy engine must see the barriers before it signals them.
    fence_async_shared()

    head = kv_head * group
    work = Work(k, v, q, do, side, ones, ds, dq, k_full, v_full, q_full, do_full, empty, ds_full, ds_empty, clean,
                chunks + list_row * width, slots + list_row * width, ranks + list_row * width, gl.load(numbers + list_row),
                batch, head, kv_head, (batch * kv_heads * group + head) * slots_a_head, row, rows)
    gl.warp_specialize([
        (multiply, (work, 0, dk_tiles, dv_tiles, dk, dv, dk_row, dv_row, scale_log2, scale, D, CUT_QUERIES, CUT_KEYS)),
        (multiply, (work, 1, dk_tiles, dv_tiles, dk, dv, dk_row, dv_row, scale_log2, scale, D, CUT_QUERIES, CUT_KEYS)),
        (add_dq, (work, dq_tiles, turns, rank, D, ORDERED)),
        (load, (work, k_tiles, v_tiles, q_tiles, do_tiles, side_tiles, slots_a_head)),
    ], [4, 4, 1], [MULTIPLY_REGISTERS, DQ_REGISTERS, LOAD_REGISTERS])


def hopper_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists, flipped: BlockLists,
    scale: float, causal: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); head_dim 64 or 128. ``flipped`` is ``blocks.transpose()``.

    With ``deterministic`` the programs take turns in adding to dQ, else they add when they come, and dQ's last bits differ from run to run.
    """
    assert not causal, "the portable backward takes causal attention"
    q, k, v, dout = map(reachable, (q, k, v, dout))
    out = readable(out)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    queries, keys = q_cut(blocks, q_len), kv_cut(blocks, kv_len)
    # Ragged blocks need not cover every row.
    dq = torch.empty_like(q) if queries.uniform else torch.zeros_like(q)
    dk, dv = (torch.empty_like(x) if keys.uniform else torch.zeros_like(x) for x in (k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    slots = fill_slots(dout, dlse, out, lse, scale, queries)
    visits = list_visits(blocks, flipped, queries, keys, heads, kv_heads, slots.number, deterministic)
    # Whose turn it is at each slot: the number of programs that have added. Never read where they do not take turns.
    turns = torch.zeros(batch * heads * slots.number, dtype=torch.int32, device=q.device) if deterministic else visits.numbers
    parts = triton.cdiv(keys.length, KEYS)
    _backward_kernel[(keys.number * parts * batch * kv_heads,)](
        *(tiles(x, KEYS) for x in (k, v)), *(tiles(x, QUERIES) for x in (q, dout)), *(tiles(x, KEYS // WARPGROUPS) for x in (dk, dv)),
        _sums(slots.dq), _sides(slots.side), dk, dv, turns, keys.starts, keys.sizes, *visits,
        *dk.stride()[:3], *dv.stride()[:3], *keys.strides(kv_heads), *shared_strides(visits.numbers, kv_heads), visits.chunks.shape[-1],
        keys.number * parts, kv_heads, heads // kv_heads, kv_len, keys.length, slots.number, scale * LOG2E, scale,
        UNIFORM=keys.uniform, PARTS=parts, CUT_QUERIES=_cut(queries, QUERIES), CUT_KEYS=_cut(keys, KEYS),
        **constants(dim, deterministic), **OPTIONS)
    finish_dq(slots, dq, scale, queries)
    return dq, dk, dv


def constants(dim: int, deterministic: bool) -> dict:
    """The kernel's shape for a head_dim: stages of q and dO, and how the partitions share 4 x 128 registers a thread.

    Times on an H200, bfloat16, 16 heads of 128, 46,080 tokens in blocks of 384, 48 of 120 kept: 27.2 ms where programs add to dQ when they
    come, one head after another; 33.6 with four heads in flight, whose sums and queries leave the L2 cache. Taking turns, programs of one
    head wait for each other: 40.9 ms one head at a time, 38.2 two, 33.6 four, 40.3 eight. At 138,240 tokens, 56 of 360: 113.8 against 137.7
    one at a time, 134.6 four, 152.0 eight.
    """
    multiply_registers, dq_registers, load_registers = (208, 72, 24) if dim == 128 else (184, 104, 40)
    return dict(D=dim, STAGES=2 if dim == 128 else 4, ORDERED=deterministic, TOGETHER=4 if deterministic else 1,
                MULTIPLY_REGISTERS=multiply_registers, DQ_REGISTERS=dq_registers, LOAD_REGISTERS=load_registers)


def _cut(axis: Cut, size: int) -> bool:
    """Whether there are chunks of fewer than ``size`` tokens."""
    return not (axis.uniform and axis.length % size == 0 and axis.tokens % size == 0)


SUM_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)


def _sums(x: Tensor) -> TensorDescriptor:
    """x [B, H, slots, QUERIES, D] as the copy engine sees it: 64 columns of one slot after another."""
    flat = x.flatten(0, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, QUERIES, 64], SUM_LAYOUT)


SIDE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)


def _sides(x: Tensor) -> TensorDescriptor:
    """x [B, H, slots, QUERIES, 16] as the copy engine sees it: one slot after another."""
    flat = x.flatten(0, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, QUERIES, 16], SIDE_LAYOUT)
