"""Building blocks of the Hopper kernels: rings of stages, views of tiles, register layouts, rescaled products, rows filled with zeros."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .inline_asm import rescale_lanes


@gluon.jit
def barrier_ring(STAGES: gl.constexpr):
    """Memory for the barriers of a ring."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def ring_init(barriers, count: gl.constexpr):
    """Each of the barriers waits for ``count`` arrivals.

    Not of a ring that no partition uses: Triton would leave in its memory what ``warp_specialize`` gives to partitions, and the hardware
    may set up a barrier later than the same thread writes there.
    """
    STAGES: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=count)


# MASKED rings find a stage by a mask in place of a remainder where they have a power of two of stages. The forward's do; the backward's do
# not, though some could: with masks the deterministic one took 1.03 of the time on an H200, by what the assembler then makes of the loop.


@gluon.jit
def ring_at(ring, i, MASKED: gl.constexpr = False):
    """The stage of a ring, [STAGES, ...] of buffers or of barriers, that the ``i``-th use of it takes."""
    STAGES: gl.constexpr = ring.shape[0]
    if MASKED and STAGES & (STAGES - 1) == 0:
        stage = i & (STAGES - 1)
    else:
        stage = i % STAGES
    return ring.index(stage)


@gluon.jit
def ring_wait(barriers, i, MASKED: gl.constexpr = False):
    """Waits until the ``i``-th use of a ring has come as far as ``barriers`` announce."""
    mbarrier.wait(ring_at(barriers, i, MASKED), (i // barriers.shape[0]) & 1)


@gluon.jit
def ring_free(barriers, i, MASKED: gl.constexpr = False):
    """Waits until the use before the ``i``-th of the same stage has come as far as ``barriers`` announce: then the stage may be filled.

    A fresh barrier counts as one whose previous phase is over, so the first round does not wait.
    """
    mbarrier.wait(ring_at(barriers, i, MASKED), ((i // barriers.shape[0]) & 1) ^ 1)


@gluon.jit
def ring_arrive(barriers, i, MASKED: gl.constexpr = False):
    """Announces the ``i``-th use of a ring: one of the arrivals that its stage's barrier counts."""
    mbarrier.arrive(ring_at(barriers, i, MASKED), count=1)


@gluon.constexpr_function
def product_layout(columns):
    """The registers of a product of 64 rows by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def lanes(columns):
    """The same registers as [64, columns / 8, 4, 2]: the third dimension is four lanes that share a row, each of which has all others."""
    across = [[0, 1 << i, 0, 0] for i in range((columns // 8).bit_length() - 1)]
    rows = [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 0, 1], [8, 0, 0, 0]] + across, [[0, 0, 1, 0], [0, 0, 2, 0]] + rows,
                                      [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, columns // 8, 4, 2])


@gluon.constexpr_function
def by_thread_layout(columns):
    """Layout of a product [64, columns] as each thread of four warps holds it: [128, columns / 8, 4]."""
    return gl.BlockedLayout([1, columns // 8, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0])


@gluon.jit
def by_thread(x):
    """A product [64, N] as [128, N / 8, 4]: thread by thread, of every eight columns two in each of two rows."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([128, N // 8, 4])
    return gl.convert_layout(x, by_thread_layout(N), assert_trivial=True)


@gluon.constexpr_function
def row_lanes(columns):
    """A number for each lane of each row, [64, 4]."""
    return gl.SliceLayout(1, gl.SliceLayout(3, lanes(columns)))


@gluon.jit
def by_lane(x):
    """A product [64, N] as [64, N / 8, 4, 2]."""
    N: gl.constexpr = x.shape[1]
    return gl.convert_layout(x.reshape([x.shape[0], N // 8, 4, 2]), lanes(N), assert_trivial=True)


@gluon.jit
def by_row(x):
    """Back to [64, N]."""
    N: gl.constexpr = x.shape[1] * 8
    return gl.convert_layout(x.reshape([x.shape[0], N]), product_layout(N), assert_trivial=True)


@gluon.jit
def to_lanes(x, N: gl.constexpr):
    """Numbers [64, 4] as they stand beside ``by_lane`` of a product [64, N]."""
    return gl.convert_layout(x, row_lanes(N), assert_trivial=True)[:, None, :, None]


@gluon.jit
def eighths(N: gl.constexpr):
    """0 to N / 8 - 1, as ``by_lane`` has the columns of a product [64, N] by eights: numbers of the compiler, which take no registers."""
    return gl.arange(0, N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lanes(N)))))


@gluon.jit
def hide_columns(x, size, PIECES: gl.constexpr):
    """A product [64, N] with minus infinity in the columns from ``size`` on, or in each of PIECES equal parts of them from the size on that
    ``size`` [N / 8] has for every eight columns."""
    N: gl.constexpr = x.shape[1]
    registers: gl.constexpr = lanes(N)
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, registers))))
    bit = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, registers))))
    # A thread's columns are numbers of the compiler beside one of its lane.
    column = (8 * eighths(N) % (N // PIECES))[None, :, None, None] + bit[None, None, None, :]
    if PIECES == 1:
        end = (size - 2 * lane)[None, None, :, None]
    else:
        end = size[None, :, None, None] - (2 * lane)[None, None, :, None]
    return by_row(gl.where(column < end, by_lane(x), float("-inf")))


@gluon.jit
def rescale(x, alpha):
    """A product [64, N] times the factors of its rows, [64, 4] in ``row_lanes``; a warp all of whose factors are 1 skips it."""
    return by_row(rescale_lanes(by_lane(x), to_lanes(alpha, x.shape[1])))


@gluon.constexpr_function
def one_word(warps):
    """A single number that all threads of a partition hold."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def read_word(memory, WARPS: gl.constexpr):
    """The number that stands in one word of shared memory, in a partition of so many warps."""
    return gl.max(memory.load(one_word(WARPS)), axis=0)


@gluon.jit
def _selects(half: gl.constexpr, size):
    """[64, 16] ones in the first ``size`` rows of columns 0 to 2, or, of half 1, 8 to 10, and so on; else zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :]
    kept = (gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) < size)[:, None]
    return gl.where(kept & (columns >= 8 * half) & (columns < 8 * half + 3), 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def fill_selector(selector):
    """Ones in columns 0 to 2 of the first of some matrices [64, 16], in 8 to 10 of the second: by which products add up the three parts of
    a number."""
    NUMBER: gl.constexpr = selector.shape[0]
    for half in gl.static_range(NUMBER):
        selector.index(half).store(_selects(half, 64))


@gluon.jit
def select_keys(selector, group: gl.constexpr, size):
    """The ``group``-th two matrices of ``fill_selector`` for the first ``size`` keys, and zeros for the others. Where keys and values are
    zeros as well, these get weights of 1 and a dS of 0, whatever lse and dPsum are, and their scores need no mask."""
    for half in gl.static_range(2):
        selector.index(2 * group + half).store(_selects(half, size))


# Numbers in three parts as the matrix unit takes them, [N, 16] of 16 bits; and what stands for minus infinity, which has no parts.
BIASES = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
NEVER = gl.constexpr(-1e30)


@gluon.constexpr_function
def biases_layout():
    """[N, 16] in one warp: a lane has whole rows, two stores each."""
    return gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0])


@gluon.jit
def three_parts(x):
    """float32 numbers as three that 16 bits hold, the last but for rounding, in float32."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    return high, middle, x - high - middle


@gluon.constexpr_function
def axis_of(shape, axis):
    """A tile's length along an axis, which may be counted from the last."""
    return shape[axis]


@gluon.constexpr_function
def in_stages(stages, shape):
    """The shape of so many tiles."""
    return [stages, *shape]


@gluon.jit
def matrix(buffer):
    """A [1, ..., rows, D] tile as the matrix it is."""
    return buffer.reshape([buffer.shape[len(buffer.shape) - 2], buffer.shape[len(buffer.shape) - 1]])


@gluon.jit
def not_finite(x):
    return (x != x) | (gl.abs(x.to(gl.float32)) == float("inf"))


@gluon.jit
def zero_rows(buffer, size, share: gl.constexpr, SHARES: gl.constexpr):
    """Zeroes the rows from ``size`` on, and what is not finite before, in one of SHARES equal parts of a [CHUNK, D] matrix: a weight of
    zero times a NaN is NaN."""
    ROWS: gl.constexpr = buffer.shape[0] // SHARES
    part = buffer.slice(share * ROWS, ROWS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = part.load(layout)
    rows = share * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    kept = (rows < size)[:, None] & (not_finite(values) == 0)
    part.store(gl.where(kept, values, 0.0))
