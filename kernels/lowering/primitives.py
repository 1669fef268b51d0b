"""The pieces that every portable kernel is made of: load a tile of rows, mask scores, take one online-softmax step."""

import triton
import triton.language as tl

# Between natural logarithms and those to base 2. LOG2E is for the host; a kernel can use a module's constant only as a constexpr.
LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
LN2 = tl.constexpr(0.6931471805599453)
# The largest score of a row that has seen nothing. It is finite, because a difference to minus infinity would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# The largest sum of weights that counts as not overflown: its inverse is a normal number, of four such sums too, which a row has on Hopper.
LARGEST_SUM = tl.constexpr(2.0 ** 120)


@triton.jit
def block_bounds(bounds, at, block):
    """(first token, real tokens) of a block or of several of ``Bounds``: by arithmetic where all have one length, else read at
    ``at + block``."""
    if bounds.starts is None:
        start = block * bounds.length
        return start, tl.minimum(bounds.tokens - start, bounds.length)
    else:
        return tl.load(bounds.starts + at + block), tl.load(bounds.sizes + at + block)


@triton.jit
def own_rows(place, bounds, heads, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """(batch, head, block, first row, rows from there to the block's end) of a program that owns the ``place % PARTS``-th ROWS rows of
    block ``place // PARTS``; no rows, or fewer than none, where the block is too short to have them."""
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    block, before = place // PARTS, place % PARTS * ROWS
    at = batch * bounds.batch + head // bounds.group * bounds.head
    row, rows = block_bounds(bounds, at, block)
    return batch, head, block, row + before, rows - before


@triton.jit
def of_head(x, batch, head):
    """Where a head of a ``View`` begins."""
    return x.ptr + batch * x.batch + tl.cast(head, tl.int64) * x.head


@triton.jit
def row_of_lists(lists, batch, head, block):
    """Which row of ``Lists`` or ``ChunkLists`` is a block's."""
    return batch * lists.batch + tl.cast(head // lists.group, tl.int64) * lists.head + block


@triton.jit
def row_pointers(base, row, stride, ROWS: tl.constexpr, DIM_PAD: tl.constexpr):
    """Pointers [ROWS, DIM_PAD] to a [tokens, dim] matrix from ``row`` on: a 64-bit start for all, 32-bit offsets from it."""
    start = base + tl.cast(row, tl.int64) * stride
    return start + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, DIM_PAD)[None, :])


@triton.jit
def load_rows(base, row, stride, size, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``row`` to ``row + ROWS`` of a [tokens, DIM] matrix as [ROWS, DIM_PAD]; with MASKED, zeros from row ``row + size`` on."""
    pointers = row_pointers(base, row, stride, ROWS, DIM_PAD)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    if MASKED:
        return tl.load(pointers, mask=(rows < size)[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM < DIM_PAD:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def gather_rows(base, rows, stride, kept, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """[N, DIM_PAD]: the given rows of a [tokens, DIM] matrix, zeros where not kept."""
    dims = tl.arange(0, DIM_PAD)
    return tl.load(base + rows[:, None] * stride + dims[None, :], mask=kept[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def next_start(starts, i, following, AHEAD: tl.constexpr):
    """(where chunk i begins, and under AHEAD, given that as ``following``, where the one after it does, of the last one any number).

    Read in the iteration that loads the chunk, the number takes a stage of the pipeline. Where products are not asynchronous that leaves
    one buffer, and nothing is loaded while the program multiplies (Triton 3.6 to 3.9); so a loop carries it along.
    """
    if AHEAD:
        # Behind the last row of a list's starts are its sizes.
        return following, tl.load(starts + i + 1)
    else:
        return tl.load(starts + i), following


@triton.jit
def load_chunk(descriptor, base, batch, head, row, stride, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A full chunk, [ROWS, DIM_PAD]: through TMA where there is a descriptor of the [B, H, tokens, DIM] tensor."""
    if descriptor is None:
        return load_rows(base, row, stride, ROWS, ROWS, DIM, DIM_PAD, False)
    else:
        return descriptor.load([batch, head, row, 0]).reshape(ROWS, DIM_PAD)


@triton.jit
def store_rows(base, row, stride, size, x, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The first ``size`` rows of x [ROWS, DIM_PAD] into a [tokens, DIM] matrix from ``row`` on, in its dtype."""
    mask = (tl.arange(0, ROWS) < size)[:, None] & (tl.arange(0, DIM_PAD) < DIM)[None, :]
    tl.store(row_pointers(base, row, stride, ROWS, DIM_PAD), x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def visible_keys(query, key, size, shift, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    """bool [M, N]: the first ``size`` keys from ``key`` on, and under CAUSAL just those up to query + shift."""
    keys = tl.arange(0, N)[None, :]
    visible = (keys < size) & (tl.arange(0, M)[:, None] >= 0)
    if CAUSAL:
        visible = visible & (key + keys <= query + tl.arange(0, M)[:, None] + shift)
    return visible


@triton.jit
def finite_or_zero(x):
    return tl.where((x != x) | (tl.abs(x) == float("inf")), 0.0, x).to(x.dtype)


@triton.jit
def softmax_step(scores, row_max, row_sum, scale_log2, follows=None):
    """One step of the online softmax (Milakov and Gimelshein 2018) in base 2: (weights, alpha, row_max, row_sum), where alpha rescales
    what was summed so far. Rows without ``follows`` keep their row_max."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    if follows is not None:
        new_max = tl.where(follows, new_max, row_max)
    # A row that has seen nothing yet has row_max = -inf; measuring from 0 keeps its weights at 0 instead of NaN.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - safe_max[:, None])
    alpha = tl.exp2(row_max - safe_max)
    return weights, alpha, new_max, row_sum * alpha + tl.sum(weights, 1)


@triton.jit
def optimistic_step(scores, origin, row_sum, scale_log2):
    """(weights, row_sum) with weights measured from an origin that stays where it is. Where one of a row's scores is not below it, those
    that count do not underflow; ``overflown`` says afterwards whether one did the contrary."""
    weights = tl.exp2(scores * scale_log2 - origin[:, None])
    return weights, row_sum + tl.sum(weights, 1)


@triton.jit
def overflown(acc, row_sum):
    """(bool [M], whether there is one): rows in which a weight or a weighted value became too large, or is not finite for another reason.
    What is not finite stays so in sums."""
    heavy = (row_sum <= LARGEST_SUM) == 0
    # Over all of acc at once: reducing once more what was reduced by rows does not compile for sm_100 (Triton 3.6).
    some = (tl.max(heavy.to(tl.int32), 0) > 0) | (tl.sum(acc * 0.0) != 0)
    return heavy | (tl.sum(acc * 0.0, 1) != 0), some


@triton.jit
def finish_softmax(acc, row_max, row_sum):
    """(out, lse in natural logarithm) after the last step; 0 and -inf for rows that attended to nothing."""
    empty = row_sum == 0
    divisor = tl.where(empty, 1.0, row_sum)
    return acc / divisor[:, None], tl.where(empty, float("-inf"), (row_max + tl.log2(divisor)) * LN2)


@triton.jit
def part_weights(lse, lse_max):
    """The weight of a part in a merge of partial results whose largest lse is ``lse_max``; 0 where the part is empty."""
    return tl.exp(lse - tl.where(lse_max == float("-inf"), 0.0, lse_max))


@triton.jit
def merged_lse(lse_max, total):
    """(what the parts' weighted sum is divided by, lse) of merged parts, ``total`` the sum of their weights."""
    divisor = tl.where(total == 0, 1.0, total)
    return divisor, tl.where(total == 0, float("-inf"), lse_max + tl.log(divisor))


@triton.jit
def lse_in_base_2(lse):
    """For a backward, whose weights are exp2(score - this): +inf for empty rows, so that their weights are 0 as they must be."""
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)


@triton.jit
def ordered(scores):
    """int32 in the order of the float32 scores, of which NaN counts as -inf: a float's bits, with all but the sign flipped where it is
    negative. None is the lowest integer."""
    # -0.0 equals 0.0, but its bits do not.
    scores = tl.where(scores == 0, 0.0, tl.where(scores == scores, scores, float("-inf")))
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def tanh(x):
    # exp2 of a large x is inf, and 2 / inf is 0: both ends come out as they should.
    return 1.0 - 2.0 / (tl.exp2(x * (2 * _LOG2E)) + 1.0)


@triton.jit
def sampled_rows(offsets, block, blocks, run, SAMPLE: tl.constexpr):
    """(rows of the queries that speak for blocks, whether they are there): one of each of SAMPLE equal runs of a block, numbered
    ``run``."""
    inside = block < blocks
    start = tl.load(offsets + block, mask=inside, other=0)
    size = tl.load(offsets + block + 1, mask=inside, other=0) - start
    low = run * size // SAMPLE
    length = (run + 1) * size // SAMPLE - low
    # Places spread evenly by the golden ratio, and not in step with the lines of a picture.
    return start + low + ((run * 40503 % 65536) * length >> 16), length > 0
