"""The softmax of the Hopper kernels, step by step: weights measured from a row's largest score, or from one that stays where it is."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lowering.primitives import LARGEST_SUM, LOWEST
from .inline_asm import lazy_rescale
from .primitives import by_lane, by_row, row_lanes, to_lanes


@gluon.jit
def softmax_step(scores, row_max, row_sum, scale_log2, follows, FOLLOW: gl.constexpr):
    """One softmax step in base 2: (weights, alpha, row_max, row_sum), alpha being the factor on what was summed so far.

    Weights are measured from row_max. FOLLOW: it is the row's largest score or one that was the largest until lately, see
    ``lazy_rescale``; but in rows without ``follows`` [ROWS, 1], and without FOLLOW in all, it stays where it is, and alpha is 1.
    row_max, row_sum and alpha are [ROWS, 4]: the four lanes that share a row agree on row_max, but each has a sum of its own until the end.
    """
    split = by_lane(scores)
    if FOLLOW:
        own = gl.max(gl.max(split, axis=3), axis=1) * scale_log2
        row_max, alpha = lazy_rescale(row_max, gl.where(follows, own, LOWEST))
        row_sum = row_sum * alpha
    else:
        alpha = gl.full(row_max.shape, 1.0, gl.float32, row_lanes(scores.shape[1]))
    weights = gl.exp2(split * scale_log2 - to_lanes(row_max, scores.shape[1]))
    return by_row(weights), alpha, row_max, row_sum + gl.sum(gl.sum(weights, axis=3), axis=1)


@gluon.jit
def overflown(acc, row_sum, CHUNK: gl.constexpr):
    """bool [ROWS, 1]: rows in which a weight or a weighted value became too large, or is not finite for another reason.

    What is not finite stays so in every sum that it enters.
    """
    split = by_lane(acc) * 0.0
    zero = gl.convert_layout(gl.sum(gl.sum(split, axis=3), axis=1), row_lanes(CHUNK), assert_trivial=True)
    of_lane = ((row_sum <= LARGEST_SUM) & (zero == 0.0)) == 0
    # The lane whose sums overflow need not be the one whose score was too large.
    return gl.max(of_lane.to(gl.int32), axis=1)[:, None] != 0
