"""What the partitions of a program of the Hopper backward kernel share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import aggregate


@aggregate
class Work:
    """The shared memory and the barriers through which the partitions of a program do its tiles, one after another."""

    k: gl.shared_memory_descriptor         # [1, 1, KEYS * WARPGROUPS, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor         # [STAGES, 1, 1, QUERIES, D]
    do: gl.shared_memory_descriptor
    lse_dpsum: gl.shared_memory_descriptor      # [STAGES, 1, QUERIES, 16], bfloat16, see dq_accum.Accum
    sizes: gl.shared_memory_descriptor     # [STAGES, 1], int32, tokens of the chunk
    limits: gl.shared_memory_descriptor    # [STAGES, 1], int32: query i of the chunk sees the tile's keys up to i + limit
    ones: gl.shared_memory_descriptor      # [2, KEYS, 16], what picks lse or delta out of lse_dpsum
    ds: gl.shared_memory_descriptor        # [2, KEYS * WARPGROUPS, QUERIES]
    dq: gl.shared_memory_descriptor        # [STAGED, 1, QUERIES, 64], 64 columns of a chunk's dQ after another
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor   # both multiplying warpgroups have stored dK, which leaves through K's memory
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor    # one a stage: the copy engine has written q and lse_dpsum
    do_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor     # both multiplying warpgroups have read the stage
    ds_full: gl.shared_memory_descriptor   # both multiplying warpgroups have written dS
    ds_empty: gl.shared_memory_descriptor  # the dQ warpgroup has read it
    dq_full: gl.shared_memory_descriptor   # one a staging, where others add it up: the dQ warpgroup has written it
    dq_empty: gl.shared_memory_descriptor  # the copy engine has read it
    clean: gl.shared_memory_descriptor     # both multiplying warpgroups have zeroed what the chunk does not hold
    tiles: gl.tensor                       # pointer, see dq_schedule.Schedule
    first: gl.tensor                       # number of the program's first tile, or -1

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, lse_dpsum, sizes, limits, ones, ds, dq, k_full, k_empty, v_full, v_empty, q_full, do_full, empty,
                 ds_full, ds_empty, dq_full, dq_empty, clean, tiles, first):
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse_dpsum = lse_dpsum
        self.sizes = sizes
        self.limits = limits
        self.ones = ones
        self.ds = ds
        self.dq = dq
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.q_full = q_full
        self.do_full = do_full
        self.empty = empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty
        self.dq_full = dq_full
        self.dq_empty = dq_empty
        self.clean = clean
        self.tiles = tiles
        self.first = first
