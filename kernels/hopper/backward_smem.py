"""Shared memory and barriers of a program of the Hopper backward kernel, used by all its partitions."""

from triton.experimental.gluon import language as gl

from .gluon_compat import aggregate


@aggregate
class BackwardWork:
    """The shared memory and the barriers through which the partitions of a program do its tiles, one after another.

    Barriers stand in rings, one a stage: ``_full`` of those who fill it, ``_empty`` of those who read it.
    """

    k: gl.shared_memory_descriptor          # [1, ..., KEYS * WARPGROUPS, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor          # [STAGES, 1, ..., QUERIES, D]
    do: gl.shared_memory_descriptor
    lse_dpsum: gl.shared_memory_descriptor  # [STAGES, 1, QUERIES, 16], bfloat16, see dq_accum.Accum
    slots: gl.shared_memory_descriptor      # [NUMBERS, 1], int32, where the chunk's dQ is added up
    lock_values: gl.shared_memory_descriptor    # [NUMBERS, 1], int32, see dq_schedule.DqSchedule
    limits: gl.shared_memory_descriptor     # [STAGES, 1], int32: query i of the chunk sees the tile's keys up to i + limit
    selector: gl.shared_memory_descriptor   # [2, KEYS, 16], ones where lse_dpsum has lse, and where it has dPsum; or, where tiles have
    #                                         fewer keys, twice that: each warpgroup's own, see select_keys
    ds: gl.shared_memory_descriptor         # [2, KEYS * WARPGROUPS, QUERIES]
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor    # both multiplying warpgroups and the dQ warpgroup have read it
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor    # both multiplying warpgroups have stored dV and dK, which leave through V's memory
    q_full: gl.shared_memory_descriptor     # TMA has written q and lse_dpsum
    do_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor    # both multiplying warpgroups have read q, dO and lse_dpsum
    ds_full: gl.shared_memory_descriptor    # both multiplying warpgroups have written dS
    ds_empty: gl.shared_memory_descriptor   # the dQ warpgroup has read it
    told: gl.shared_memory_descriptor       # the loading partition has stored slots and lock_values
    turn: gl.shared_memory_descriptor       # for every 64 columns: the tiles that come before have added to the slot
    dq_full: gl.shared_memory_descriptor    # for every 64 columns: the dQ warpgroup has begun to add them
    dq_empty: gl.shared_memory_descriptor   # that is announced
    tiles: gl.tensor                        # pointer, see dq_schedule.DqSchedule
    first: gl.tensor                        # number of the program's first tile, or -1
