"""How a partition of the Hopper backward kernel walks a tile's list: from one chunk of queries to the next, block after block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lowering.dq_schedule import BATCH, BEGIN, BLOCK, FIELDS, HEAD, PART, RING
from .gluon_compat import aggregate


@aggregate
class Lists:
    """Where the lists stand, how the queries are cut, and in which order tiles add to dQ."""

    counts: gl.tensor        # pointers: those of BlockLists.transpose(), per key block the query blocks that attend to it
    indices: gl.tensor
    lock_values: gl.tensor         # see dq_schedule.Schedule
    passed: gl.tensor
    q_starts: gl.tensor      # see lowering.chunks.Partition
    q_sizes: gl.tensor
    list_batch: gl.tensor    # strides, see shared_strides
    list_head: gl.tensor
    list_group: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    q_group: gl.tensor
    width: gl.tensor         # of a list
    group: gl.tensor         # query heads of a key/value head
    heads: gl.tensor         # query heads
    blocks: gl.tensor        # key blocks of a head
    parts: gl.tensor         # tiles of a key block
    q_len: gl.tensor
    q_length: gl.tensor      # tokens of a query block, where it is uniform
    slots: gl.tensor         # of a head
    shift: gl.tensor         # under a causal mask query i sees the keys up to i + shift
    causal: gl.constexpr
    rings: gl.constexpr      # whether tiles enter their lists anywhere, where additions have an order, or at the first block

    @gluon.constexpr_function
    def __init__(self, counts, indices, lock_values, passed, q_starts, q_sizes, list_batch, list_head, list_group, q_batch, q_head, q_group,
                 width, group, heads, blocks, parts, q_len, q_length, slots, shift, causal, rings):
        self.counts = counts
        self.indices = indices
        self.lock_values = lock_values
        self.passed = passed
        self.q_starts = q_starts
        self.q_sizes = q_sizes
        self.list_batch = list_batch
        self.list_head = list_head
        self.list_group = list_group
        self.q_batch = q_batch
        self.q_head = q_head
        self.q_group = q_group
        self.width = width
        self.group = group
        self.heads = heads
        self.blocks = blocks
        self.parts = parts
        self.q_len = q_len
        self.q_length = q_length
        self.slots = slots
        self.shift = shift
        self.causal = gl.constexpr(causal)
        self.rings = gl.constexpr(rings)


@aggregate
class Visit:
    """One chunk of a query block in a tile's list."""

    batch: gl.tensor
    first_head: gl.tensor   # of the query heads that share the key/value head
    block: gl.tensor        # key block
    part: gl.tensor
    begin: gl.tensor        # in 1 / RING: where in each query head's list the walk begins
    member: gl.tensor       # query head within the group, -1 before the first
    passed: gl.tensor       # entries of that head's list that come before the first visit, see Schedule
    count: gl.tensor        # entries from there on
    entry: gl.tensor        # how many of them come before, -1 before the first
    chunk: gl.tensor        # within the query block
    chunks: gl.tensor       # of the query block
    start: gl.tensor        # its first token
    size: gl.tensor         # its tokens
    slot: gl.tensor         # of its first chunk, counted over all heads
    rank: gl.tensor         # of the tile at the query block

    @gluon.constexpr_function
    def __init__(self, batch, first_head, block, part, begin, member, passed, count, entry, chunk, chunks, start, size, slot, rank):
        self.batch = batch
        self.first_head = first_head
        self.block = block
        self.part = part
        self.begin = begin
        self.member = member
        self.passed = passed
        self.count = count
        self.entry = entry
        self.chunk = chunk
        self.chunks = chunks
        self.start = start
        self.size = size
        self.slot = slot
        self.rank = rank


@gluon.jit
def tile_number(work, tile, field):
    """One of a tile's numbers, see dq_schedule.FIELDS."""
    return gl.load(work.tiles + tile * FIELDS + field)


@gluon.jit
def visit_before_first(lists, work, tile, skipped, step):
    """What stands ``step`` chunks before the first of the tile's that is not skipped."""
    none = gl.to_tensor(0)
    return Visit(tile_number(work, tile, BATCH), tile_number(work, tile, HEAD) * lists.group, tile_number(work, tile, BLOCK),
                 tile_number(work, tile, PART), tile_number(work, tile, BEGIN), none - 1, none, none, none - 1,
                 none + skipped - step, none, none, none, none, none)


@gluon.jit
def visit_after(lists, visit, step, QUERIES: gl.constexpr, UNIFORM: gl.constexpr, RANKED: gl.constexpr):
    """The visit ``step`` chunks further on; past the last one, something that may be read but means nothing."""
    member, passed, count, entry = visit.member, visit.passed, visit.count, visit.entry
    chunk, chunks, start, size, slot, rank = visit.chunk + step, visit.chunks, visit.start, visit.size, visit.slot, visit.rank
    while (chunk >= chunks) & (member < lists.group):
        chunk = chunk - chunks
        chunks = gl.to_tensor(0)
        entry = entry + 1
        if entry < count:
            at = entry
            if lists.rings:
                at = entry + visit.begin * count // RING
                at = gl.where(at >= count, at - count, at)
            if lists.causal:
                at = at + passed
            head = visit.first_head + member
            row = visit.batch.to(gl.int64) * lists.list_batch + (head // lists.list_group) * lists.list_head + visit.block
            item = gl.load(lists.indices + row * lists.width + at)
            if UNIFORM:
                start = item * lists.q_length
                size = gl.minimum(lists.q_len - start, lists.q_length)
            else:
                bound = visit.batch * lists.q_batch + (head // lists.q_group) * lists.q_head + item
                start, size = gl.load(lists.q_starts + bound), gl.load(lists.q_sizes + bound)
            chunks = gl.maximum(size + QUERIES - 1, 0) // QUERIES
            slot = (visit.batch * lists.heads + head) * lists.slots + start // QUERIES + item
            if RANKED:
                row = (visit.batch.to(gl.int64) * lists.heads + head) * lists.blocks + visit.block
                rank = gl.load(lists.lock_values + (row * lists.parts + visit.part) * lists.width + at)
        else:
            entry = gl.to_tensor(-1)
            member = member + 1
            count = gl.to_tensor(0)
            if member < lists.group:
                head = visit.first_head + member
                row = visit.batch.to(gl.int64) * lists.list_batch + (head // lists.list_group) * lists.list_head + visit.block
                count = gl.minimum(gl.load(lists.counts + row), lists.width)
                if lists.causal:
                    passed = gl.load(lists.passed + (visit.batch.to(gl.int64) * lists.heads + head) * lists.blocks + visit.block)
                    count = count - passed
    return Visit(visit.batch, visit.first_head, visit.block, visit.part, visit.begin, member, passed, count, entry, chunk,
                 chunks, start, size, slot, rank)
