"""What a program of the Hopper forward works on, and its loading partition: one warp that brings tiles in by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import aggregate, copy_in
from .primitives import one_word, ring_at, ring_free


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
    walked: gl.shared_memory_descriptor    # one barrier: all warpgroups are through with their first walk over the list
    again: gl.shared_memory_descriptor     # a word: not 0 if in one of them a row overflowed


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
def walk_again(work, WARPS: gl.constexpr):
    """Whether the program walks over its list a second time, once all warpgroups know; for a partition of WARPS warps."""
    mbarrier.wait(work.walked.index(0), 0)
    return gl.max(work.again.load(one_word(WARPS)), axis=0) != 0


@gluon.jit
def _load_list(work, k_desc, v_desc, WALK: gl.constexpr):
    """K and V of every chunk for the WALK-th time, partial ones first."""
    first = WALK * (work.partial + work.full)
    for i in range(work.partial):
        _load_chunk(work, first + i, gl.load(work.partial_starts - 1 - i), k_desc, v_desc)
    for i in range(work.full):
        _load_chunk(work, first + work.partial + i, gl.load(work.starts + i), k_desc, v_desc)


@gluon.jit
def load(work, q_desc, k_desc, v_desc):
    """The loading partition: q once, then the list, and again if that is needed."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    OPTIMISTIC: gl.constexpr = work.q.dtype == gl.bfloat16
    for group in gl.static_range(WARPGROUPS):
        mbarrier.expect(work.q_full.index(group), q_desc.block_type.nbytes)
        copy_in(q_desc, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
    _load_list(work, k_desc, v_desc, 0)
    if OPTIMISTIC:
        if walk_again(work, 1):
            _load_list(work, k_desc, v_desc, 1)
