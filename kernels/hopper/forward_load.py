"""The work of a program of the Hopper forward, and its loading partition: a warp that takes tiles and loads what they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..lowering.chunks import ENTRY, HEADER, SIZES
from ..lowering.tma import FAR
from .gluon_compat import aggregate, barrier, copy_in
from .inline_asm import wait_for_previous_kernel
from .primitives import one_word, read_word, ring_arrive, ring_at, ring_free, ring_wait

# Numbers of a tile in shared memory.
FIELDS = gl.constexpr(9)


@aggregate
class ForwardWork:
    """Inputs of all programs, and the shared memory and barriers through which the partitions of one work together."""

    q: gl.shared_memory_descriptor         # [Q_TILES * WARPGROUPS, 1, 1, 1, ROWS, D]: of one or two tiles
    k: gl.shared_memory_descriptor         # [STAGES, 1, 1, 1, CHUNK, D]
    v: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor     # [2 * FIELDS, 1]: two tiles; behind them the tails of both, where there are pieces
    again: gl.shared_memory_descriptor     # [2, 1], of two tiles: not 0 if in a warpgroup a row overflowed
    tile_full: gl.shared_memory_descriptor  # one a tile: its numbers can be read
    tile_free: gl.shared_memory_descriptor  # one a tile: all warpgroups are through with it, and with its q
    q_full: gl.shared_memory_descriptor    # one a warpgroup and tile
    k_full: gl.shared_memory_descriptor    # one a stage: TMA has written it
    v_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor      # one a stage: all warpgroups are through with the step that multiplied by its K
    v_zeroed: gl.shared_memory_descriptor  # causal: all warpgroups are done with a step of zeroing what is not finite
    walked: gl.shared_memory_descriptor    # all warpgroups are through with their first walk over a tile's list
    queue: gl.tensor                       # pointer, see lowering.chunks.Queue
    width: gl.tensor                       # entries that a list has room for
    number: gl.tensor                      # rows of the lists of a head
    lists: gl.tensor                       # heads of all batch elements that have lists of their own
    list_batch: gl.tensor                  # strides of these, see shared_strides
    list_group: gl.tensor
    batches: gl.tensor
    heads: gl.tensor
    group: gl.tensor                       # query heads of a key/value head
    programs: gl.tensor                    # programs of the launch
    whole: gl.tensor                       # tiles that are not split, followed by those that are
    splits: gl.tensor                      # parts into which a split tile's list is divided
    q_batch: gl.tensor                     # tokens from a batch element to the next, see tma_chunks
    k_batch: gl.tensor
    v_batch: gl.tensor
    out_batch: gl.tensor
    partial_rows: gl.tensor                # pointers, of each part: [at_head, row, rows, -],
    partial_out: gl.tensor                 # [WARPGROUPS * ROWS, D], float32
    partial_lse: gl.tensor                 # [WARPGROUPS * ROWS]
    parts: gl.constexpr                    # tiles of a block
    full: gl.constexpr                     # tokens of a full chunk, CHUNK or less
    pieces: gl.constexpr                   # of a packed chunk
    warpgroups: gl.constexpr
    q_registers: gl.constexpr              # whether a warpgroup multiplies by q from registers


@aggregate
class Tile:
    """Rows of one block and head, as many as all warpgroups have or fewer, and the list of what they attend to."""

    at_head: gl.tensor         # batch * heads + head
    row: gl.tensor             # first query row
    rows: gl.tensor            # rows from there to the end of the block; 0: there is no further tile
    full: gl.tensor            # number of full chunks
    partial: gl.tensor         # number of packed chunks, which are partial ones if they have one piece
    list_row: gl.tensor        # which row of the lists is its own
    full_before: gl.tensor     # full chunks that other parts of the list have
    partial_before: gl.tensor
    part: gl.tensor            # number among the parts of all split tiles; -1: not split
    tails: gl.tensor           # number of partial chunks of all parts, where packed ones have several pieces


@gluon.jit
def starts_of(work, tile):
    """(pointer to the first tokens of a tile's full chunks, which stand at the front; pointers behind those of the partial ones, which
    stand at the back, and behind the partial ones' numbers of tokens)"""
    all_rows = work.lists.to(gl.int64) * work.number
    starts = work.queue + HEADER + all_rows * ENTRY + tile.list_row.to(gl.int64) * work.width
    ends = starts + work.width - tile.partial_before
    return starts + tile.full_before, ends, ends + all_rows * work.width


@gluon.jit
def pieces_of(work, tile, packed):
    """(first tokens, numbers of tokens) of the pieces of the ``packed``-th packed chunk: tuples, with no tokens behind the list's last
    piece, and in all of them where ``packed`` is below 0."""
    PIECES: gl.constexpr = work.pieces
    PIECE: gl.constexpr = work.k.shape[4] // PIECES
    _, ends, size_ends = starts_of(work, tile)
    # Those of all parts.
    ends, size_ends, at = ends + tile.partial_before, size_ends + tile.partial_before, packed + tile.partial_before
    first = gl.load(size_ends - 1 - at, mask=(packed >= 0) & (at < tile.tails), other=0) // SIZES
    number, within = first // PIECES, first % PIECES
    # All partial chunks that it can have pieces of are read at once, though the first ones may fill it.
    chunk_starts: gl.tuple = ()
    chunk_sizes: gl.tuple = ()
    for i in gl.static_range(PIECES):
        there = (packed >= 0) & (number + i < tile.tails)
        chunk_starts += (gl.load(ends - 1 - number - i, mask=there, other=0),)
        chunk_sizes += (gl.load(size_ends - 1 - number - i, mask=there, other=0) % SIZES,)
    starts: gl.tuple = ()
    sizes: gl.tuple = ()
    at = packed * 0
    for i in gl.static_range(PIECES):
        start, left = chunk_starts[0], chunk_sizes[0]
        for chunk in gl.static_range(1, i + 1):
            start, left = gl.where(at == chunk, chunk_starts[chunk], start), gl.where(at == chunk, chunk_sizes[chunk], left)
        left = left - within * PIECE
        starts += (start + within * PIECE,)
        sizes += (gl.minimum(left, PIECE),)
        at, within = gl.where(left > PIECE, at, at + 1), gl.where(left > PIECE, within + 1, 0)
    return starts, sizes


@gluon.jit
def read_tile(work, n):
    """The program's ``n``-th tile, for a warpgroup."""
    ring_wait(work.tile_full, n, True)
    first = (n & 1) * FIELDS
    tails = first
    if work.pieces > 1:
        tails = read_word(work.tiles.index(2 * FIELDS + (n & 1)), 4)
    return Tile(read_word(work.tiles.index(first), 4), read_word(work.tiles.index(first + 1), 4), read_word(work.tiles.index(first + 2), 4),
                read_word(work.tiles.index(first + 3), 4), read_word(work.tiles.index(first + 4), 4),
                read_word(work.tiles.index(first + 5), 4), read_word(work.tiles.index(first + 6), 4),
                read_word(work.tiles.index(first + 7), 4), read_word(work.tiles.index(first + 8), 4),
                tails)


@gluon.jit
def _scheduled(place, number, heads):
    """(batch * heads + head, rank) of the ``place``-th block of the launch, of ``number`` in each of ``heads``.

    The sixteenth of every head's blocks with the longest lists goes first, for all heads, because a long list that starts late ends late.
    Then head follows head, so that the keys in use fit in L2.
    """
    early = number // 16
    late = place - early * heads
    rest = number - early
    return gl.where(late < 0, place % heads, late // rest), gl.where(late < 0, place // heads, early + late % rest)


@gluon.jit
def _take_tile(work, place):
    """The first tile from ``place`` on that has rows, for the loading warp; without rows where there is none."""
    ROWS: gl.constexpr = work.warpgroups * work.q.shape[4]
    tiles = work.batches * work.heads * work.number * work.parts
    places = work.whole + (tiles - work.whole) * work.splits
    tile = Tile(place, place, place * 0, place, place, place, place, place, place, place)
    while (place < places) & (tile.rows <= 0):
        late = place - work.whole
        number = gl.where(late < 0, place, work.whole + late // work.splits)
        # The tiles of a block are neighbours: they read the same keys.
        at_head, rank = _scheduled(number // work.parts, work.number, work.batches * work.heads)
        head, batch = at_head % work.heads, at_head // work.heads
        first_row = (batch * work.list_batch + head // work.list_group) * work.number
        entry = work.queue + HEADER + (first_row + rank).to(gl.int64) * ENTRY
        before = number % work.parts * ROWS
        row, rows, full, partial = gl.load(entry) + before, gl.load(entry + 1) - before, gl.load(entry + 2), gl.load(entry + 3)
        list_row, tails = first_row + gl.load(entry + 4), partial
        if work.pieces > 1:
            tails = gl.load(entry + 5)
        if late < 0:
            tile = Tile(at_head, row, rows, full, partial, list_row, late * 0, late * 0, late * 0 - 1, tails)
        else:
            gl.store(work.partial_rows + late * 4, at_head)
            gl.store(work.partial_rows + late * 4 + 1, row)
            gl.store(work.partial_rows + late * 4 + 2, rows)
            share = late % work.splits
            first, last = (full + partial) * share // work.splits, (full + partial) * (share + 1) // work.splits
            full_first, partial_first = gl.minimum(first, full), gl.maximum(first - full, 0)
            tile = Tile(at_head, row, rows, gl.minimum(last, full) - full_first, gl.maximum(last - full, 0) - partial_first, list_row,
                        full_first, partial_first, late, tails)
        if tile.rows <= 0:
            place = next_place(work)
    return tile


@gluon.jit
def next_place(work):
    """The first tile that no program has taken."""
    return gl.atomic_add(work.queue, 1, sem="relaxed") + work.programs


@gluon.jit
def _put(memory, x):
    memory.store(gl.zeros([1], gl.int32, one_word(1)) + x)


@gluon.jit
def _give_tile(work, n, tile):
    """Tells the warpgroups of the program's ``n``-th tile."""
    ring_free(work.tile_free, n, True)
    first = (n & 1) * FIELDS
    _put(work.tiles.index(first), tile.at_head)
    _put(work.tiles.index(first + 1), tile.row)
    _put(work.tiles.index(first + 2), gl.maximum(tile.rows, 0))
    _put(work.tiles.index(first + 3), tile.full)
    _put(work.tiles.index(first + 4), tile.partial)
    _put(work.tiles.index(first + 5), tile.list_row)
    _put(work.tiles.index(first + 6), tile.full_before)
    _put(work.tiles.index(first + 7), tile.partial_before)
    _put(work.tiles.index(first + 8), tile.part)
    if work.pieces > 1:
        _put(work.tiles.index(2 * FIELDS + (n & 1)), tile.tails)
    _put(work.again.index(n & 1), 0)
    barrier()
    ring_arrive(work.tile_full, n, True)


@gluon.jit
def q_place(work, n, group: gl.constexpr):
    """(where the q of a warpgroup and the program's ``n``-th tile lies, how many tiles had theirs there before)"""
    Q_TILES: gl.constexpr = work.q.shape[0] // work.warpgroups
    return n % Q_TILES * work.warpgroups + group, n // Q_TILES


@gluon.jit
def _load_q(work, n, tile, q_desc):
    """Brings in the q of the program's ``n``-th tile; its place must be free."""
    ROWS: gl.constexpr = work.q.shape[4]
    if tile.rows > 0:
        for group in gl.static_range(work.warpgroups):
            at, _ = q_place(work, n, group)
            size = gl.minimum(gl.maximum(tile.rows - group * ROWS, 0), ROWS)
            mbarrier.expect(work.q_full.index(at), q_desc.block_type.nbytes)
            end = tile.at_head // work.heads * work.q_batch + tile.row + group * ROWS + size
            copy_in(q_desc, [FAR, tile.at_head % work.heads, end, FAR - size, 0],
                    work.q_full.index(at), work.q.index(at))


@gluon.jit
def _load_chunk(work, i, batch, head, start, size, k_desc, v_desc):
    """K and V of the ``i``-th chunk of the mainloop, ``size`` tokens and then zeros, as soon as its stage is free."""
    end = start + size
    ring_free(work.done, i, True)
    mbarrier.expect(ring_at(work.k_full, i, True), k_desc.block_type.nbytes)
    copy_in(k_desc, [FAR, head, batch * work.k_batch + end, FAR - size, 0], ring_at(work.k_full, i, True), ring_at(work.k, i, True))
    # The step that multiplied by the stage's last K multiplied by the V before it.
    ring_free(work.done, i + 1, True)
    mbarrier.expect(ring_at(work.v_full, i, True), v_desc.block_type.nbytes)
    copy_in(v_desc, [FAR, head, batch * work.v_batch + end, FAR - size, 0], ring_at(work.v_full, i, True), ring_at(work.v, i, True))


@gluon.jit
def _load_part(work, desc, pieces_desc, before, head, start, starts, sizes, full, buffer):
    """K or V of a full chunk from token ``start`` of a head on, ``before`` tokens behind the tensor's first; where ``start`` is below 0, of
    a packed one's pieces, with zeros behind those that are short."""
    FULL: gl.constexpr = work.full
    PIECE: gl.constexpr = work.k.shape[4] // work.pieces
    mbarrier.expect(full, desc.block_type.nbytes)
    if start >= 0:
        copy_in(desc, [FAR, head, before + start + FULL, FAR - FULL, 0], full, buffer)
    else:
        for i in gl.static_range(work.pieces):
            copy_in(pieces_desc, [FAR, head, before + starts[i] + sizes[i], FAR - sizes[i], 0], full, buffer.slice(i * PIECE, PIECE, 3))


@gluon.jit
def _load_in_pieces(work, tile, first, begin, end, k_desc, v_desc, k_pieces, v_pieces):
    """``_load_list`` where packed chunks have several pieces."""
    batch, head = tile.at_head // work.heads, tile.at_head % work.heads // work.group
    full_starts, _, _ = starts_of(work, tile)
    for place in range(begin, end):
        i = first + place
        start = gl.load(full_starts + place, mask=place < tile.full, other=-1)
        starts, sizes = pieces_of(work, tile, place - tile.full)
        ring_free(work.done, i, True)
        _load_part(work, k_desc, k_pieces, batch * work.k_batch, head, start, starts, sizes,
                   ring_at(work.k_full, i, True), ring_at(work.k, i, True))
        # As in ``_load_chunk``.
        ring_free(work.done, i + 1, True)
        _load_part(work, v_desc, v_pieces, batch * work.v_batch, head, start, starts, sizes,
                   ring_at(work.v_full, i, True), ring_at(work.v, i, True))


@gluon.jit
def _load_list(work, tile, first, begin, end, k_desc, v_desc, k_pieces, v_pieces, CAUSAL: gl.constexpr):
    """K and V of the chunks ``begin`` to ``end`` of a tile, the first chunk of which is the ``first`` use of their rings.

    Packed ones come last, but first under a causal mask.
    """
    if work.pieces > 1:
        _load_in_pieces(work, tile, first, begin, end, k_desc, v_desc, k_pieces, v_pieces)
    else:
        _load_whole(work, tile, first, begin, end, k_desc, v_desc, CAUSAL)


@gluon.jit
def _load_whole(work, tile, first, begin, end, k_desc, v_desc, CAUSAL: gl.constexpr):
    """``_load_list`` where packed chunks are partial ones."""
    FULL: gl.constexpr = work.full
    batch, head = tile.at_head // work.heads, tile.at_head % work.heads // work.group
    starts, partial_starts, partial_sizes = starts_of(work, tile)
    for i in range(begin, end):
        full, partial = i, i - tile.full
        if CAUSAL:
            full, partial = i - tile.partial, i
        size = gl.to_tensor(FULL)
        if (full >= 0) & (full < tile.full):
            start = gl.load(starts + full)
        else:
            start, size = gl.load(partial_starts - 1 - partial), gl.load(partial_sizes - 1 - partial)
        _load_chunk(work, first + i, batch, head, start, size, k_desc, v_desc)


@gluon.jit
def loaded_ahead(work, tile):
    """How many chunks of the next tile the loading warp loads before it knows whether this tile's list is walked again: as many as
    there are free stages."""
    STAGES: gl.constexpr = work.k.shape[0]
    return gl.where(tile.rows > 0, gl.minimum(tile.full + tile.partial, STAGES - 1), 0)


@gluon.jit
def walk_again(work, n, WARPS: gl.constexpr):
    """Whether the program walks over its ``n``-th tile's list a second time, once all warpgroups know; for a partition of WARPS warps."""
    ring_wait(work.walked, n, True)
    return read_word(work.again.index(n & 1), WARPS) != 0


@gluon.jit
def load(work, program, q_desc, k_desc, v_desc, k_pieces, v_pieces, CAUSAL: gl.constexpr):
    """The loading partition: tile after tile its q and its list, and the list again if that is needed."""
    OPTIMISTIC: gl.constexpr = work.q.dtype == gl.bfloat16
    ONE_Q: gl.constexpr = work.q.shape[0] == work.warpgroups
    # The queue is written by the kernel before, which may still run.
    wait_for_previous_kernel()
    tile = _take_tile(work, program)
    n, uses = gl.to_tensor(0), gl.to_tensor(0)
    _give_tile(work, n, tile)
    _load_q(work, n, tile, q_desc)
    ahead = gl.to_tensor(0)
    while tile.rows > 0:
        chunks = tile.full + tile.partial
        _load_list(work, tile, uses, ahead, chunks, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)
        following = _take_tile(work, next_place(work))
        # In the memory of two tiles the next one's q has room as soon as its numbers have.
        _give_tile(work, n + 1, following)
        if not ONE_Q:
            _load_q(work, n + 1, following, q_desc)
        uses = uses + chunks
        if OPTIMISTIC or ONE_Q:
            ahead = loaded_ahead(work, following)
            _load_list(work, following, uses, 0, ahead, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)
        if OPTIMISTIC:
            if walk_again(work, n, 1):
                # The warpgroups drop what came too early.
                _load_list(work, tile, uses + ahead, 0, chunks, k_desc, v_desc, k_pieces, v_pieces, CAUSAL)
                uses = uses + ahead + chunks
                ahead = gl.to_tensor(0)
        if ONE_Q:
            ring_wait(work.tile_free, n, True)
            _load_q(work, n + 1, following, q_desc)
        tile = following
        n += 1
