"""Hopper forward kernel: one warp brings tiles in by TMA, warpgroups of 64 query rows each multiply and take softmax.

A program owns the query rows of two or three warpgroups, all of one block, the blocks with the longest lists first, and iterates over the
chunks of keys that the block attends to: first the partial ones, which a ragged tail or the causal diagonal cuts, one at a time, then the
full ones, where the scores of the next chunk are computed while the values of this one are added up.
"""

from functools import lru_cache
from typing import NamedTuple

from torch import Size, Tensor, bfloat16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..blocks import BlockLists
from ..device import multiprocessors
from ..lowering.chunks import ENTRY, HEADER, kv_partition, q_partition, work_queue
from ..lowering.outputs import empty_outputs
from ..lowering.primitives import LOG2E
from ..lowering.quick_launch import QuickLaunch, fit
from ..lowering.tma import tma_descriptor, tma_ready
from .config import HopperForwardConfig, hopper_forward_config
from .forward_load import Work, load
from .forward_mainloop import attend
from .primitives import barrier_ring, one_word, ring_init

ROWS = 64          # of a warpgroup: the height of one wgmma
# Registers at entry: the file holds 168 for 4 + 4 + 1 warps and 128 for 4 + 4 + 4 + 1, as warps are counted in fours. Then
# warp_specialize gives the loading warp 24, and the multiplying ones 240 or 160.
REGISTERS = {2: 168, 3: 128}


@gluon.jit
def _tile_scheduler(place, number, heads):
    """(batch * heads + head, rank) of the ``place``-th block of the launch, of ``number`` in each of ``heads``.

    The sixteenth of every head's blocks with the longest lists goes first, for all heads, because a long list that starts late ends late.
    Then head follows head, so that the keys in use fit in L2.
    """
    early = number // 16
    late = place - early * heads
    rest = number - early
    return gl.where(late < 0, place % heads, late // rest), gl.where(late < 0, place // heads, early + late % rest)


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker. Numbers stand one by one because
# Triton (3.6 to 3.9) specialises the members of a tuple whatever ``do_not_specialize`` says.
_NUMBERS = ["out_batch", "out_head", "out_row", "width", "number", "lists", "list_batch", "list_group", "batches", "heads", "group",
            "q_len", "shift"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _forward_kernel(q_desc, k_desc, v_desc, out_desc, out, lse, queue, out_batch, out_head, out_row,
                    width, number, lists, list_batch, list_group, batches, heads, group, q_len, shift, scale_log2,
                    CAUSAL: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr,
                    D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr):
    # The parts of a block are neighbours: they read the same keys.
    at_head, rank = _tile_scheduler(gl.program_id(0) // PARTS, number, batches * heads)
    head, batch = at_head % heads, at_head // heads
    part = gl.program_id(0) % PARTS
    first_row = (batch.to(gl.int64) * list_batch + head // list_group) * number
    entry = queue + HEADER + (first_row + rank) * ENTRY
    row, rows = gl.load(entry) + part * ROWS * WARPGROUPS, gl.load(entry + 1) - part * ROWS * WARPGROUPS
    if rows <= 0:
        return
    starts = queue + HEADER + lists.to(gl.int64) * number * ENTRY
    starts += (first_row + gl.load(entry + 4)) * width
    partial_starts = starts + width
    out += batch.to(gl.int64) * out_batch + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row
    lse += at_head.to(gl.int64) * q_len + row

    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, D], v_desc.layout)
    again = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.zeros([1], gl.int32, one_word(4)))
    q_full, v_zeroed, walked = barrier_ring(WARPGROUPS), barrier_ring(1), barrier_ring(1)
    k_full, v_full, done = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES)
    # What TMA announces, and what all warpgroups do.
    ring_init(q_full, 1)
    ring_init(k_full, 1)
    ring_init(v_full, 1)
    ring_init(done, WARPGROUPS)
    ring_init(v_zeroed, WARPGROUPS)
    ring_init(walked, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()

    work = Work(q, k, v, q_full, k_full, v_full, done, v_zeroed,
                starts, partial_starts, partial_starts + lists.to(gl.int64) * number * width,
                gl.load(entry + 2), gl.load(entry + 3), batch, head, head // group, row, rows, walked, again)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (attend, (work, 0, out, lse, out_desc, out_row, shift, scale_log2, D, CAUSAL, OVERLAP)),
            (attend, (work, 1, out, lse, out_desc, out_row, shift, scale_log2, D, CAUSAL, OVERLAP)),
            (load, (work, q_desc, k_desc, v_desc)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (attend, (work, 0, out, lse, out_desc, out_row, shift, scale_log2, D, CAUSAL, OVERLAP)),
            (attend, (work, 1, out, lse, out_desc, out_row, shift, scale_log2, D, CAUSAL, OVERLAP)),
            (attend, (work, 2, out, lse, out_desc, out_row, shift, scale_log2, D, CAUSAL, OVERLAP)),
            (load, (work, q_desc, k_desc, v_desc)),
        ], [4, 4, 1], [160, 160, 24])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, in_place: bool = False,
                   config: HopperForwardConfig | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; head_dim 64 or 128. benchmark/tune.py tries other configs.

    ``in_place``: out may take q's memory. A warpgroup has its 64 rows in shared memory before it multiplies, and writes at its end the
    ones that belong to the block; rows of the next block that it loads with them, perhaps overwritten, only reach results that it drops.
    """
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    rows, items = q_partition(blocks, q_len), kv_partition(blocks, kv_len)
    if q.numel() == 0 or k.numel() == 0:
        out, lse = empty_outputs(q, rows, in_place)
        return out.zero_(), lse.fill_(float("-inf"))
    config = config or hopper_forward_config(dim, rows.length, blocks.max_kv_length, causal, q.dtype == bfloat16,
                                             batch * heads * rows.number, multiprocessors(q.device))
    # First of all, so that the GPU lowers the lists while the rest is prepared here.
    queue = work_queue(blocks, rows, items, config.chunk, kv_len - q_len if causal else None)
    out, lse = empty_outputs(q, rows, in_place)
    plan = _plan(q.shape, k.shape, out.stride(), queue[1:], rows.number, rows.length, config, causal)
    _launch((q.get_device(), q.dtype, plan.key), plan.grid,
            (tma_descriptor(q, ROWS), tma_descriptor(k, config.chunk), tma_descriptor(v, config.chunk), tma_descriptor(out, ROWS)),
            (out, lse, queue.data),
            (*plan.numbers, scale * LOG2E), plan.constants, plan.options)
    return out, lse


_launch = QuickLaunch(_forward_kernel)


class _Plan(NamedTuple):
    """What a launch takes beside tensors and the scale."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict
    options: dict
    key: tuple


# Kept, because it depends on shapes alone and takes longer to work out than the launch.
@lru_cache(maxsize=256)
def _plan(q: Size, k: Size, out_strides: tuple[int, ...], queue: tuple[int, ...], number: int, length: int,
          config: HopperForwardConfig, causal: bool) -> _Plan:
    batch, heads, q_len, dim = q
    kv_heads, kv_len = k[1:3]
    list_batch, list_heads, width = queue
    # One program a tile. As many programs as multiprocessors, which take tile after tile (persistent ones), measured 1 % slower on an H200
    # at 72 chunks a tile and 3 % slower at 144.
    parts = -(-length // (ROWS * config.warpgroups))
    numbers = (*out_strides[:3], width, number, list_batch * list_heads, list_heads if list_batch > 1 else 0, heads // list_heads, batch,
               heads, heads // kv_heads, q_len, kv_len - q_len)
    fixed = dict(CAUSAL=causal, PARTS=parts) | constants(dim, config)
    return _Plan((batch * heads * number * parts, 1, 1), numbers, fixed, options(config), (fit(numbers), *fixed.values()))


def constants(dim: int, config: HopperForwardConfig) -> dict[str, int]:
    """Those of the kernel that follow from a configuration, in the kernel's order."""
    return dict(ROWS=ROWS, CHUNK=config.chunk, D=dim, STAGES=config.stages, WARPGROUPS=config.warpgroups, OVERLAP=config.overlap)


def options(config: HopperForwardConfig) -> dict[str, int]:
    return dict(num_warps=4, maxnreg=REGISTERS[config.warpgroups])
