"""Hopper forward kernel: one warp brings tiles in by TMA, warpgroups of 64 query rows each multiply and take softmax.

As many programs as multiprocessors take tile after tile: the query rows of two or three warpgroups, all of one block, the blocks with the
longest lists first; of blocks of up to 64 rows two or three times as many programs, of one warpgroup. What a tile begins with is brought in
while the one before ends. A tile iterates over the chunks of keys that its block attends to: first the full ones, then the packed ones,
where pieces of what a ragged tail leaves lie behind one another; the scores of the next chunk are computed while the values of this one are
added up. Of a causal mask the chunks that the diagonal cuts come first, one at a time.
"""

from collections.abc import Callable

from torch import Tensor, bfloat16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..blocks import BlockLists
from ..device import multiprocessors
from ..launch import launch
from ..lowering.chunks import Listed, extent, full_chunk, work_queue
from ..lowering.outputs import empty_outputs, nothing_attended
from ..lowering.primitives import LOG2E
from ..lowering.tma import batch_tokens, chunks_ready, tma_chunks
from .config import HopperForwardConfig, hopper_forward_config, split
from .forward_load import FIELDS, ForwardWork, load
from .forward_mainloop import attend
from .forward_merge import merge_parts, partial_results
from .primitives import barrier_ring, ring_init

ROWS = 64          # query rows of a warpgroup, the height of one wgmma
# Registers at entry are what the file holds for all programs of a multiprocessor: 168 for 4 + 4 + 1 warps, 128 for 4 + 4 + 4 + 1 or for two
# programs of 4 + 1, 80 for three, as warps are counted in fours. Then warp_specialize gives the loading warp 40 or 32, and the multiplying
# ones 232, 160, 216 or 120.
REGISTER_FILE = 65_536


# Not specialised on any number: a new sequence length must not compile anew, and launches are quicker. Numbers stand one by one because
# Triton (3.6 to 3.9) specialises the members of a tuple whatever ``do_not_specialize`` says.
_NUMBERS = ["width", "number", "lists", "list_batch", "list_group", "batches", "heads", "group", "q_len", "shift", "whole", "splits",
            "q_batch", "k_batch", "v_batch", "out_batch"]


@gluon.jit(do_not_specialize=_NUMBERS)
def _forward_kernel(q_desc, k_desc, v_desc, k_pieces, v_pieces, out_desc, lse, queue, partial_rows, partial_out, partial_lse,
                    width, number, lists, list_batch, list_group, batches, heads, group, q_len, shift, whole, splits, q_batch, k_batch,
                    v_batch, out_batch, scale_log2,
                    CAUSAL: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr, FULL: gl.constexpr,
                    D: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, OVERLAP: gl.constexpr, Q_TILES: gl.constexpr,
                    Q_REGISTERS: gl.constexpr, PIECES: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [Q_TILES * WARPGROUPS, 1, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, CHUNK, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, CHUNK, D], v_desc.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [2 * FIELDS + (2 if PIECES > 1 else 0), 1], word)
    again = gl.allocate_shared_memory(gl.int32, [2, 1], word)
    tile_full, tile_free, q_full = barrier_ring(2), barrier_ring(2), barrier_ring(Q_TILES * WARPGROUPS)
    k_full, v_full, done = barrier_ring(STAGES), barrier_ring(STAGES), barrier_ring(STAGES)
    # One arrival where the loading warp or TMA announces; one of each warpgroup where all of them must be done.
    ring_init(tile_full, 1)
    ring_init(q_full, 1)
    ring_init(k_full, 1)
    ring_init(v_full, 1)
    ring_init(tile_free, WARPGROUPS)
    ring_init(done, WARPGROUPS)
    # Rings that nobody would use are no rings, see ring_init.
    v_zeroed, walked = k_full, k_full
    if CAUSAL:
        v_zeroed = barrier_ring(1)
        ring_init(v_zeroed, WARPGROUPS)
    if dtype == gl.bfloat16:
        walked = barrier_ring(2)
        ring_init(walked, WARPGROUPS)
    # TMA must see the barriers before it signals them.
    fence_async_shared()

    work = ForwardWork(q, k, v, tiles, again, tile_full, tile_free, q_full, k_full, v_full, done, v_zeroed, walked,
                       queue, width, number, lists, list_batch, list_group, batches, heads, group, gl.num_programs(0), whole, splits,
                       q_batch, k_batch, v_batch, out_batch, partial_rows, partial_out, partial_lse, PARTS, FULL, PIECES,
                       WARPGROUPS, Q_REGISTERS)
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (attend, (work, 0, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (load, (work, gl.program_id(0), q_desc, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)),
        ], [1], [40])
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (attend, (work, 0, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (attend, (work, 1, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (load, (work, gl.program_id(0), q_desc, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (attend, (work, 0, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (attend, (work, 1, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (attend, (work, 2, lse, out_desc, q_len, shift, scale_log2, CAUSAL, OVERLAP)),
            (load, (work, gl.program_id(0), q_desc, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)),
        ], [4, 4, 1], [160, 160, 32])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, in_place: bool = False,
                   config: HopperForwardConfig | None = None, processors: int | None = None,
                   split: Callable[[int, int, int, bool], tuple[int, int]] = split) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; head_dim 64 or 128. benchmark/tune.py tries other configs. ``processors``,
    the device's own, and ``split`` say how many programs there are and which lists are in parts.

    ``in_place``: out may take q's memory. A warpgroup has its rows in shared memory before it multiplies, and writes the same ones at its
    end, or, of a list in parts, when all of them are done.
    """
    q, k, v = chunks_ready(q), chunks_ready(k), chunks_ready(v)
    listed = Listed.of(blocks, q.shape[2], k.shape[2])
    (batch, heads, q_len, dim), (kv_heads, kv_len), rows = q.shape, k.shape[1:3], listed.rows
    out, lse = empty_outputs(q, rows, in_place)
    if q.numel() == 0 or k.numel() == 0:
        return nothing_attended(out, lse)
    processors = processors or multiprocessors(q.device)
    config = config or hopper_forward_config(dim, rows.length, blocks.max_kv_length, causal, q.dtype == bfloat16,
                                             batch * heads * rows.number, processors, not listed.items.uniform)
    full = config.chunk if causal else full_chunk(listed.items.length, config.chunk)
    queue = work_queue(listed, full, kv_len - q_len if causal else None, config.chunk, config.pieces)
    list_batch, list_heads, width = extent(listed, full)
    places = processors * config.programs
    parts = -(-rows.length // (ROWS * config.warpgroups))
    tiles = batch * heads * rows.number * parts
    split_tiles, splits = split(tiles, width, places, causal)
    numbers = (width, rows.number, list_batch * list_heads, list_heads if list_batch > 1 else 0, heads // list_heads, batch, heads,
               heads // kv_heads, q_len, kv_len - q_len, tiles - split_tiles, splits,
               *[batch_tokens(x) or 0 for x in (q, k, v, out)])
    constants = dict(CAUSAL=causal, PARTS=parts, ROWS=ROWS, CHUNK=config.chunk, FULL=full, D=dim, STAGES=config.stages,
                     WARPGROUPS=config.warpgroups, OVERLAP=config.overlap, Q_TILES=2 if config.programs == 1 else 1,
                     Q_REGISTERS=config.q_registers, PIECES=config.pieces)
    # Programs may begin before the kernel before them, which writes the queue, has ended.
    options = dict(num_warps=4, maxnreg=REGISTER_FILE // (config.programs * 128 * (config.warpgroups + 1)) // 8 * 8, launch_pdl=True)
    # Where no list is split anything else stands for them.
    results = partial_results(split_tiles * splits, ROWS * config.warpgroups, dim, q.device) if split_tiles else (queue, lse, lse)
    descriptors = [tma_chunks(x, size) for x, size in (
        (q, ROWS), (k, config.chunk), (v, config.chunk), (k, config.chunk // config.pieces), (v, config.chunk // config.pieces),
        (out, ROWS))]
    launch(_forward_kernel, (min(tiles + split_tiles * (splits - 1), places), 1, 1), (lse, queue, *results), (*numbers, scale * LOG2E),
           constants, options, descriptors)
    if split_tiles:
        merge_parts(results, splits, out, lse)
    return out, lse
