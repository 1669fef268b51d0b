"""Hopper backward kernel: dQ, dK and dV in one pass, five matrix products for every pair of a query chunk and a key tile.

A program takes tiles of 128 keys of one block and walks the chunks of 64 queries that attend to each. One warp brings q and dO in through
the copy engine. Two warpgroups of 64 keys each recompute the weights, transposed, and sum dK and dV in registers; what they leave in shared
memory of dS a third warpgroup multiplies by K, while they go on with the next chunk, and has the copy engine add it to dQ in global memory,
float32. Where the same bits are wanted every time, two more warps do that, in the order that dq_schedule gives.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..blocks import BlockLists
from ..device import multiprocessors
from ..lowering.chunks import Partition, kv_partition, q_partition, shared_strides
from ..lowering.dq_accum import KEYS, QUERIES, backward_postprocess, backward_preprocess
from ..lowering.dq_schedule import FIELDS, NEXT, ROWS, schedule
from ..lowering.inputs import strided
from ..lowering.tma import tma_descriptor, tma_ready
from .backward_iterator import Lists
from .backward_partitions import add_dq, load, multiply, multiply_dq, pick_columns
from .backward_smem import Work
from .forward import LOG2E

WARPGROUPS = 2     # of KEYS / 2 keys, the height of one wgmma
# 128 registers at entry for 4 + 4 + 4 + 3 warps, which count as 16; warp_specialize deals them out anew.
OPTIONS = dict(num_warps=4, maxnreg=128)


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker.
_NUMBERS = ["dk_batch", "dk_head", "dk_row", "dv_batch", "dv_head", "dv_row", "list_batch", "list_head", "list_group", "q_batch", "q_head",
            "q_group", "width", "group", "heads", "blocks", "parts", "q_len", "q_length", "slots", "shift", "number"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _backward_kernel(k_tiles, v_tiles, q_tiles, do_tiles, dk_tiles, dv_tiles, dq_tiles, lse_dpsum_desc, dk, dv, dq_semaphore, tile_numbers,
                     counts, indices, lock_values, passed, q_starts, q_sizes,
                     dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, list_batch, list_head, list_group, q_batch, q_head, q_group,
                     width, group, heads, blocks, parts, q_len, q_length, slots, shift, number, sums, scale_log2, scale,
                     UNIFORM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr, CUT_QUERIES: gl.constexpr,
                     CUT_KEYS: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
                     MULTIPLY_REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr):
    WARPGROUPS: gl.constexpr = 2
    QUERIES: gl.constexpr = q_tiles.block_type.shape[2]
    KEYS: gl.constexpr = k_tiles.block_type.shape[2]
    first = gl.program_id(0)
    if ORDERED:
        first = gl.load(tile_numbers + (number + first) * FIELDS + NEXT)
    elif CUT_KEYS:
        if gl.load(tile_numbers + first * FIELDS + ROWS) <= 0:
            return

    dtype: gl.constexpr = q_tiles.dtype
    k = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], k_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], v_tiles.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], q_tiles.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], do_tiles.layout)
    lse_dpsum = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, QUERIES, 16], lse_dpsum_desc.layout)
    sizes = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    limits = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS // WARPGROUPS, 16], gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16))
    pick_columns(ones)
    ds = gl.allocate_shared_memory(dtype, [2, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype))
    dq = gl.allocate_shared_memory(gl.float32, [STAGED, 1, QUERIES, 64], dq_tiles.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    dq_full = gl.allocate_shared_memory(gl.int64, [STAGED, 1], barriers)
    dq_empty = gl.allocate_shared_memory(gl.int64, [STAGED, 1], barriers)
    clean = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=WARPGROUPS)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=WARPGROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=WARPGROUPS)
        mbarrier.init(ds_empty.index(i), count=1)
    for i in gl.static_range(STAGED):
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    mbarrier.init(clean, count=WARPGROUPS)
    # The copy engine must see the barriers before it signals them.
    fence_async_shared()

    work = Work(k, v, q, do, lse_dpsum, sizes, limits, ones, ds, dq, k_full, k_empty, v_full, v_empty, q_full, do_full, empty,
                ds_full, ds_empty, dq_full, dq_empty, clean, tile_numbers, first)
    lists = Lists(counts, indices, lock_values, passed, q_starts, q_sizes, list_batch, list_head, list_group, q_batch, q_head, q_group,
                  width, group, heads, blocks, parts, q_len, q_length, slots, shift, CAUSAL, ORDERED)
    if ORDERED:
        gl.warp_specialize([
            (multiply, (work, 0, dk_tiles, dv_tiles, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, scale_log2, scale, D,
                        CUT_QUERIES, CUT_KEYS, CAUSAL)),
            (multiply, (work, 1, dk_tiles, dv_tiles, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, scale_log2, scale, D,
                        CUT_QUERIES, CUT_KEYS, CAUSAL)),
            (multiply_dq, (work, lists, dq_tiles, D, UNIFORM, False)),
            (load, (work, lists, k_tiles, v_tiles, q_tiles, do_tiles, lse_dpsum_desc, sums, UNIFORM, CUT_QUERIES)),
            (add_dq, (work, lists, dq_tiles, dq_semaphore, 0, D, UNIFORM)),
            (add_dq, (work, lists, dq_tiles, dq_semaphore, 1, D, UNIFORM)),
        ], [4, 4, 1, 1, 1], [MULTIPLY_REGISTERS, DQ_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])
    else:
        gl.warp_specialize([
            (multiply, (work, 0, dk_tiles, dv_tiles, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, scale_log2, scale, D,
                        CUT_QUERIES, CUT_KEYS, CAUSAL)),
            (multiply, (work, 1, dk_tiles, dv_tiles, dk, dv, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, scale_log2, scale, D,
                        CUT_QUERIES, CUT_KEYS, CAUSAL)),
            (multiply_dq, (work, lists, dq_tiles, D, UNIFORM, True)),
            (load, (work, lists, k_tiles, v_tiles, q_tiles, do_tiles, lse_dpsum_desc, None, UNIFORM, CUT_QUERIES)),
        ], [4, 4, 1], [MULTIPLY_REGISTERS, DQ_REGISTERS, OTHER_REGISTERS])


def hopper_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists, flipped: BlockLists,
    scale: float, causal: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); head_dim 64 or 128. ``flipped`` is ``blocks.transpose()``.

    With ``deterministic`` the programs take turns in adding to dQ, else they add when they come, and dQ's last bits differ from run to run.
    """
    q, k, v, dout = map(tma_ready, (q, k, v, dout))
    out = strided(out)
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    queries, keys = q_partition(blocks, q_len), kv_partition(blocks, kv_len)
    # Ragged blocks need not cover every row.
    dq = torch.empty_like(q) if queries.uniform else torch.zeros_like(q)
    dk, dv = (torch.empty_like(x) if keys.uniform else torch.zeros_like(x) for x in (k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    programs = multiprocessors(q.device) if deterministic else 0
    shape = constants(dim, deterministic)
    plan = schedule(blocks, flipped, queries, keys, batch, heads, kv_heads, programs, kv_len - q_len if causal else None)
    number = len(plan.tiles) - programs
    accum = backward_preprocess(dout, dlse, out, lse, scale, queries)
    # Whose turn it is at each slot: the number of programs that have added. Never read where they do not take turns.
    dq_semaphore = torch.zeros(batch * heads * accum.number, dtype=torch.int32, device=q.device) if deterministic else plan.tiles
    counts, indices = flipped.counts.contiguous(), flipped.indices.contiguous()
    _backward_kernel[(programs or number,)](
        *(tma_descriptor(x, KEYS) for x in (k, v)), *(tma_descriptor(x, QUERIES) for x in (q, dout)),
        *(tma_descriptor(x, KEYS // WARPGROUPS) for x in (dk, dv)), _sums(accum.dq_accum), _lse_dpsum_desc(accum.lse_dpsum), dk, dv,
        dq_semaphore, plan.tiles, counts, indices, plan.lock_values if deterministic else plan.tiles,
        plan.passed if causal else plan.tiles, queries.starts, queries.sizes,
        *dk.stride()[:3], *dv.stride()[:3], *shared_strides(counts, heads), *queries.strides(heads),
        plan.width, heads // kv_heads, heads, keys.number, triton.cdiv(keys.length, KEYS), q_len, queries.length, accum.number,
        kv_len - q_len, number, accum.dq_accum, scale * LOG2E, scale,
        UNIFORM=queries.uniform, CUT_QUERIES=_cut(queries, QUERIES), CUT_KEYS=_cut(keys, KEYS), CAUSAL=causal,
        # Programs that wait for one another must all be there.
        **shape, **OPTIONS, launch_cooperative_grid=deterministic)
    backward_postprocess(accum, dq, scale, queries)
    return dq, dk, dv


def constants(dim: int, deterministic: bool) -> dict:
    """The kernel's shape for a head_dim: stages of q and dO, stagings of dQ, and the partitions' registers.

    Times on an H200, bfloat16, 16 heads of 128, 46,080 tokens in blocks of 384, 48 of 120 kept, in ms. Taking turns, beside 29.6 in any
    order: one adding warp 32.4, two 30.8, because a warp waits until each addition is written (before tiles began by the clock, see
    dq_schedule). With two: sums of dQ brought into L2 ahead 30.8, not ahead 33.6. In any order the latter changes nothing.
    """
    multiply_registers, dq_registers, other_registers = (208, 72, 24) if dim == 128 else (184, 104, 40)
    # Where turns are taken, as many stagings as fit beside the rest; else those of one visit, which the dQ warpgroup itself fills again.
    staged = (3 if dim == 128 else 4) if deterministic else dim // 64
    return dict(D=dim, STAGES=2 if dim == 128 else 4, STAGED=staged, ORDERED=deterministic,
                MULTIPLY_REGISTERS=multiply_registers, DQ_REGISTERS=dq_registers, OTHER_REGISTERS=other_registers)


def _cut(axis: Partition, size: int) -> bool:
    """Whether there are chunks of fewer than ``size`` tokens."""
    return not (axis.uniform and axis.length % size == 0 and axis.tokens % size == 0)


SUM_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)


def _sums(x: Tensor) -> TensorDescriptor:
    """x [B, H, slots, QUERIES, D] as the copy engine sees it: 64 columns of one slot after another."""
    flat = x.flatten(0, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, QUERIES, 64], SUM_LAYOUT)


LSE_DPSUM_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)


def _lse_dpsum_desc(x: Tensor) -> TensorDescriptor:
    """x [B, H, slots, QUERIES, 16] as the copy engine sees it: one slot after another."""
    flat = x.flatten(0, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, QUERIES, 16], LSE_DPSUM_LAYOUT)
