"""How a partition of the Hopper backward kernel iterates over a tile's list: from one chunk of queries to the next, block after block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lowering.dq_schedule import BATCH, BLOCK, FIELDS, HEAD, PART, ROTATION, ROTATION_UNITS
from .gluon_compat import aggregate


@aggregate
class BackwardLists:
    """Where the lists stand, how the queries are divided, and in which order tiles add to dQ."""

    counts: gl.tensor           # pointers: those of BlockLists.transpose(), per key block the query blocks that attend to it
    indices: gl.tensor
    lock_values: gl.tensor      # see dq_schedule.DqSchedule
    skipped: gl.tensor
    q_starts: gl.tensor         # see lowering.chunks.Partition
    q_sizes: gl.tensor
    list_batch: gl.tensor       # strides, see shared_strides
    list_head: gl.tensor
    list_group: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_group: gl.tensor
    width: gl.tensor            # entries that a list has room for
    group: gl.tensor            # query heads of a key/value head
    heads: gl.tensor            # query heads
    blocks: gl.tensor           # key blocks of a head
    parts: gl.tensor            # tiles of a key block
    q_len: gl.tensor
    q_length: gl.tensor         # tokens of a query block, where it is uniform
    slots: gl.tensor            # slots of a head, see dq_accum
    shift: gl.tensor            # under a causal mask query i sees the keys up to i + shift
    uniform: gl.constexpr       # whether all query blocks but the last have q_length tokens
    causal: gl.constexpr
    deterministic: gl.constexpr  # whether each list begins where the schedule says, else where the head's other programs are


@aggregate
class Iteration:
    """One chunk of a query block in a tile's list."""

    batch: gl.tensor
    first_head: gl.tensor   # first of the query heads that share the key/value head
    block: gl.tensor        # key block
    part: gl.tensor
    rotation: gl.tensor     # in 1 / ROTATION_UNITS: where each query head's list begins
    cursor: gl.tensor       # pointer, not deterministic: where the head's programs are, see dq_schedule
    q_head: gl.tensor       # query head within the group, -1 before the first
    skipped: gl.tensor      # entries of that head's list that come before the first iteration, see DqSchedule
    count: gl.tensor        # entries from there on
    entry: gl.tensor        # how many of them come before, -1 before the first
    chunk: gl.tensor        # within the query block
    chunks: gl.tensor       # chunks of the query block
    start: gl.tensor        # its first token
    size: gl.tensor         # its tokens
    slot: gl.tensor         # of its first chunk, counted over all heads
    lock_value: gl.tensor   # at which the tile adds to the query block


@gluon.jit
def tile_field(work, tile, field):
    """One of a tile's numbers, see dq_schedule.FIELDS."""
    return gl.load(work.tiles + tile * FIELDS + field)


@gluon.jit
def before_first_iteration(lists, work, tile):
    """The state before the tile's first chunk."""
    none = gl.to_tensor(0)
    # In a field of the head's first tile.
    cursor = work.tiles + (tile - tile % (lists.blocks * lists.parts)) * FIELDS + ROTATION
    if lists.deterministic:
        rotation = tile_field(work, tile, ROTATION)
    else:
        rotation = gl.load(cursor, volatile=True)
    return Iteration(tile_field(work, tile, BATCH), tile_field(work, tile, HEAD) * lists.group, tile_field(work, tile, BLOCK),
                     tile_field(work, tile, PART), rotation, cursor, none - 1, none, none, none - 1,
                     none - 1, none, none, none, none, none)


@gluon.jit
def next_iteration(lists, at, QUERIES: gl.constexpr):
    """The iteration after ``at``; past the last one, something that may be read but means nothing."""
    q_head, skipped, count, entry = at.q_head, at.skipped, at.count, at.entry
    chunk, chunks, start, size, slot, lock_value = at.chunk + 1, at.chunks, at.start, at.size, at.slot, at.lock_value
    while (chunk >= chunks) & (q_head < lists.group):
        chunk = chunk - chunks
        chunks = gl.to_tensor(0)
        entry = entry + 1
        if entry < count:
            place = entry + at.rotation * count // ROTATION_UNITS
            place = gl.where(place >= count, place - count, place)
            if not lists.deterministic:
                # Tiles of one block would add to the same chunks at the same time.
                gl.store(at.cursor, place * ROTATION_UNITS // count, mask=lists.parts == 1)
            if lists.causal:
                place = place + skipped
            head = at.first_head + q_head
            row = at.batch.to(gl.int64) * lists.list_batch + (head // lists.list_group) * lists.list_head + at.block
            q_block = gl.load(lists.indices + row * lists.width + place)
            if lists.uniform:
                start = q_block * lists.q_length
                size = gl.minimum(lists.q_len - start, lists.q_length)
            else:
                bound = at.batch * lists.q_batch + (head // lists.q_group) * lists.q_head + q_block
                start, size = gl.load(lists.q_starts + bound), gl.load(lists.q_sizes + bound)
            chunks = gl.maximum(size + QUERIES - 1, 0) // QUERIES
            slot = (at.batch * lists.heads + head) * lists.slots + start // QUERIES + q_block
            if lists.deterministic:
                row = (at.batch.to(gl.int64) * lists.heads + head) * lists.blocks + at.block
                lock_value = gl.load(lists.lock_values + (row * lists.parts + at.part) * lists.width + place)
        else:
            entry = gl.to_tensor(-1)
            q_head = q_head + 1
            count = gl.to_tensor(0)
            if q_head < lists.group:
                head = at.first_head + q_head
                row = at.batch.to(gl.int64) * lists.list_batch + (head // lists.list_group) * lists.list_head + at.block
                count = gl.minimum(gl.load(lists.counts + row), lists.width)
                if lists.causal:
                    skipped = gl.load(lists.skipped + (at.batch.to(gl.int64) * lists.heads + head) * lists.blocks + at.block)
                    count = count - skipped
    return Iteration(at.batch, at.first_head, at.block, at.part, at.rotation, at.cursor, q_head, skipped, count, entry, chunk,
                     chunks, start, size, slot, lock_value)
