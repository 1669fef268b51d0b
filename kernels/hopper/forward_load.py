"""What a program of the Hopper forward works on, and its loading partition: one warp that brings tiles in by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import aggregate, copy_in
from .primitives import ring_at, ring_free


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor         # [WARPGROUPS, 1, 1, ROWS, D]
    k: gl.shared_memory_descriptor         # [STAGES, 1, 1, CHUNK, D]
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor    # one barrier a warpgroup
    k_full: gl.shared_memory_descriptor    # one a stage: TMA has written it
    v_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor      # one a stage: all warpgroups are through with the step that multiplied by its K
    v_zeroed: gl.shared_memory_descriptor  # all warpgroups are done with a step of zeroing what a partial chunk does not hold
    starts: gl.tensor                      # pointer to the first tokens of the row's full chunks, which stand at the front
    partial_starts: gl.tensor              # pointer behind those of the partial ones, which stand at the back
    partial_sizes: gl.tensor               # pointer behind their numbers of tokens
    full: gl.tensor                        # number of full chunks
    partial: gl.tensor                     # number of partial chunks
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor                         # first query row of the program
    rows: gl.tensor                        # rows from there to the end of the block
    key_norm: gl.tensor                    # largest squared norm of a key that the block attends to


@gluon.jit
def _load_chunk(work, i, start, k_desc, v_desc):
    """K and V of the ``i``-th chunk of the mainloop, as soon as its stage is free."""
    at = [work.batch, work.kv_head, start, 0]
    ring_free(work.done, i, True)
    mbarrier.expect(ring_at(work.k_full, i, True), k_desc.block_type.nbytes)
    copy_in(k_desc, at, ring_at(work.k_full, i, True), ring_at(work.k, i, True))
    # The step that multiplied by the stage's last K multiplied by the V before it.
    ring_free(work.done, i + 1, True)
    mbarrier.expect(ring_at(work.v_full, i, True), v_desc.block_type.nbytes)
    copy_in(v_desc, at, ring_at(work.v_full, i, True), ring_at(work.v, i, True))


@gluon.jit
def load(work, q_desc, k_desc, v_desc):
    """The loading partition: q once, then K and V of every chunk, partial ones first."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    for group in gl.static_range(WARPGROUPS):
        mbarrier.expect(work.q_full.index(group), q_desc.block_type.nbytes)
        copy_in(q_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
    for i in range(work.partial):
        _load_chunk(work, i, gl.load(work.partial_starts - 1 - i), k_desc, v_desc)
    for i in range(work.full):
        _load_chunk(work, work.partial + i, gl.load(work.starts + i), k_desc, v_desc)
