"""What a program of the Hopper forward works on, and its loading partition: one warp that brings tiles in through the copy engine."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_compat import aggregate, copy_in


@aggregate
class Work:
    """What one program does, and the shared memory and barriers through which its partitions do it."""

    q: gl.shared_memory_descriptor         # [WARPGROUPS, 1, 1, ROWS, D]
    k: gl.shared_memory_descriptor         # [STAGES, 1, 1, CHUNK, D]
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor    # one barrier a warpgroup
    k_full: gl.shared_memory_descriptor    # one a stage: the copy engine has written it
    v_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor      # one a stage: all warpgroups are through with the step that multiplied by its K
    v_clean: gl.shared_memory_descriptor   # all warpgroups are done with a step of cleaning a cut chunk
    starts: gl.tensor                      # pointer to the first tokens of the row's whole chunks, which stand at the front
    cut_starts: gl.tensor                  # pointer behind those of the cut ones, which stand at the back
    cut_sizes: gl.tensor                   # pointer behind their numbers of tokens
    whole: gl.tensor                       # number of whole chunks
    cut: gl.tensor                         # number of cut chunks
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    row: gl.tensor                         # first query row of the program
    rows: gl.tensor                        # rows from there to the end of the block
    key_norm: gl.tensor                    # largest squared norm of a key that the block attends to

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, k_full, v_full, done, v_clean, starts, cut_starts, cut_sizes, whole, cut,
                 batch, head, kv_head, row, rows, key_norm):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.v_full = v_full
        self.done = done
        self.v_clean = v_clean
        self.starts = starts
        self.cut_starts = cut_starts
        self.cut_sizes = cut_sizes
        self.whole = whole
        self.cut = cut
        self.batch = batch
        self.head = head
        self.kv_head = kv_head
        self.row = row
        self.rows = rows
        self.key_norm = key_norm


@gluon.jit
def _load_chunk(work, i, start, k_tiles, v_tiles):
    """K and V of the ``i``-th chunk that the program walks, as soon as its stage is free."""
    STAGES: gl.constexpr = work.k.shape[0]
    stage = i % STAGES
    # The step that multiplied by the stage's last K multiplied by the V before it. A fresh barrier counts as one whose previous phase is
    # over, so the first round does not wait.
    mbarrier.wait(work.done.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(work.k_full.index(stage), k_tiles.block_type.nbytes)
    copy_in(k_tiles, [work.batch, work.kv_head, start, 0], work.k_full.index(stage), work.k.index(stage))
    mbarrier.wait(work.done.index((i + 1) % STAGES), (((i + 1) // STAGES) & 1) ^ 1)
    mbarrier.expect(work.v_full.index(stage), v_tiles.block_type.nbytes)
    copy_in(v_tiles, [work.batch, work.kv_head, start, 0], work.v_full.index(stage), work.v.index(stage))


@gluon.jit
def load(work, q_tiles, k_tiles, v_tiles):
    """The loading partition: q once, then K and V of every chunk, cut ones first."""
    WARPGROUPS: gl.constexpr = work.q.shape[0]
    ROWS: gl.constexpr = work.q.shape[3]
    for group in gl.static_range(WARPGROUPS):
        mbarrier.expect(work.q_full.index(group), q_tiles.block_type.nbytes)
        copy_in(q_tiles, [work.batch, work.head, work.row + group * ROWS, 0], work.q_full.index(group), work.q.index(group))
    for i in range(work.cut):
        _load_chunk(work, i, gl.load(work.cut_starts - 1 - i), k_tiles, v_tiles)
    for i in range(work.whole):
        _load_chunk(work, work.cut + i, gl.load(work.starts + i), k_tiles, v_tiles)
