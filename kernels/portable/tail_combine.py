"""The tail by Triton's kernels, after attention: the merge of the estimate with the exact part, and its gradients.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter; each lse is float32 and contiguous. The same
inputs give the same bits. Both steps are planned once for a kind of tensors, see ``lowering/plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..lowering.chunks import block_lists
from ..lowering.inputs import loaded, strided, tma_ok
from ..lowering.plans import Plan, Plans, product
from ..tail import BlockEstimates, Blocks, by_kv_head
from . import coded, tail_backward, tail_rows, tail_statistics
from .tail_groups import evenly, head_groups, mean_bytes, of_group

# A step's matrices [D, D] of units and blocks may take this share of ``mean_bytes``; more heads than that are done one group after
# another. q, k, v and attention's result are there: MERGE_ROOM is of all that the tail holds beside them, numbers of pairs of a block and a
# unit too, so that a layer is within 1.25 times these four.
MERGE_ROOM, BACKWARD_ROOM = 0.84, 0.4
# A cache's covariances were there before the layer: they count as what the tail holds up to this share of mean_bytes.
CACHED_ROOM = 0.42
# Bytes of a pair of a block and a unit: mass and h, which wait; bias and the mixture.
KNOWN_OF_A_PAIR, MADE_OF_A_PAIR = 4, 6
# Bytes by which rooms may differ that hold as much, for where in them tensors begin.
SLACK = 1 << 16


def combine(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: BlockEstimates, scale: float, keep: bool, *, merge: Callable[..., None] = tail_rows.merge,
            merge_rows: int | None = None, matrices: Callable[..., None] | None = None, room: float = MERGE_ROOM
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``combine`` of ``eager/tail.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``merge``, which takes so many
    rows at once: ``hopper_tail_merge``, where a backend names it, or the portable kernel; ``matrices``: there ``hopper_matrices``, else
    torch's product. ``room``: as MERGE_ROOM."""
    (merged, q), k, v = map(strided if merge_rows is None else loaded, (out, q)), strided(k), strided(v)
    others = (lse, q_blocks[0], kv_blocks[0], counts.contiguous(), indices.contiguous(), estimates.log_count,
              estimates.half_variance, estimates.mass, estimates.k_mean, estimates.v_mean, estimates.useful, estimates.order,
              estimates.covariances, estimates.scales)
    matrices = matrices or _matrices if estimates.scales is None else coded.mixtures
    shares, tail_lse, bias, mixture = _merged(
        (merged, q, k, v), others, q_blocks[1:], kv_blocks[1:], scale, estimates.parts, keep, merge, merge_rows, matrices, room)
    if merged is not out:
        out.copy_(merged)
    return shares, tail_lse, bias, mixture[..., :bias.shape[3]]


def _write_combine(plan: Plan, xs: Sequence[Tensor], others: Sequence[Any], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                   scale: float, parts: int, keep: bool, merge: Callable[..., None], rows: int | None, matrices: Callable[..., None],
                   room: float) -> None:
    """The plan of ``combine``."""
    out, q, k, v = xs
    lse, q_offsets, kv_offsets, counts, indices, log_count, half_variance, mass, k_mean, v_mean, useful, order, covariances, scales = others
    (blocks, longest), (kv_blocks, _) = q_sizes, kv_sizes
    (batch, heads, tokens, dim), kv_heads, units = q.shape, k.shape[1], kv_blocks * parts
    kept, group = heads if keep else 0, heads // kv_heads
    shares = plan.result(batch, heads, blocks, -(-longest // (rows or tail_rows.merged_rows(plan, q))), dtype=torch.float32)
    tail_lse = plan.result(batch, kept, tokens, dtype=torch.float32)
    row = _row(units)
    bias = plan.result(batch, kept, blocks, units, dtype=torch.float32)
    mixture = plan.result(batch, kept, blocks, row, dtype=torch.bfloat16)
    if not q.numel():
        plan.call(Tensor.zero_, shares)
        return
    if keep:
        # Rows of other blocks have no estimate.
        plan.call(partial(Tensor.fill_, value=-torch.inf), tail_lse)
    left = plan.working(batch, heads, blocks, dtype=torch.int32)
    held = KNOWN_OF_A_PAIR * half_variance.numel() + 4 * indices.numel()
    if covariances is not None:
        held += min(2 * covariances.numel(), int(CACHED_ROOM * mean_bytes(q, k)))
    of_units, of_blocks, of_pairs = 2 * dim * dim * units, 2 * dim * dim * blocks * group, MADE_OF_A_PAIR * group * blocks * units
    free, own_keys = room * mean_bytes(q, k) - held, covariances is None and plan.owns(k) and plan.owns(v)
    if covariances is not None:
        of_units = 0
    elif own_keys and keep:
        # The memory of the layer's result, which is to come; biases and mixtures stay.
        free, of_pairs = max(free, mean_bytes(q, k)), 0

    def write(many: int, few: int, last: int) -> None:
        # Biases and mixtures of many heads, and for some of these after others matrices and the merge.
        groups = [*head_groups(batch, kv_heads, group, *((batch * kv_heads,) if keep else (many, last)))]
        for own, shared in groups:
            of_rows = of_group(own, out, lse, q, shares, left, useful)
            of_keys = of_group(shared, k, v, k_mean, v_mean, log_count, order, scales, covariances)
            some = q[own].shape[:2]
            made = (tail_lse, bias, mixture) if keep else (
                plan.working(*some, tokens, dtype=torch.float32), plan.working(*some, blocks, units, dtype=torch.float32),
                plan.working(*some, blocks, row, dtype=torch.bfloat16))
            made = *made[:2], made[2][..., :units]
            at_once = max(few, last) if own is groups[-1][0] else few
            if some[0] * some[1] <= at_once * group:
                of_keys[-1] = _write_covariances(plan, of_keys, kv_offsets, useful[own], parts)
            lists = block_lists(_of_lists(counts, heads, own, shared), _of_lists(indices, heads, own, shared), some[1], kv_blocks)
            tail_rows.unit_bias(plan, log_count[shared], half_variance[own], mass[own], lists, useful[own], parts, made[1], left[own],
                                made[2])
            for mine, its in head_groups(some[0], some[1] // group, group, at_once):
                _write_merge(plan, of_group(mine, *of_rows, *made), of_group(its, *of_keys), q_offsets, kv_offsets, scale, parts, merge,
                             matrices)

    grouping = *_at_once(kv_heads, free, of_units + of_blocks, of_pairs), 0
    if own_keys and not keep:
        # There is at least what attention's own lists took. Of the last heads all but covariances comes where keys and values were.
        free, keys = max(free, plan.spare([x for x in (*xs, *others) if x is not None])), k.numel() * k.element_size()
        last = min(int((free - 8 * lse.numel() - 4 * k_mean.numel()) / of_units), keys // of_blocks, keys // of_pairs)
        fewer = _fewer_groups(kv_heads, free, of_units + of_blocks, of_pairs, last)
        needs = [plan.needs(partial(write, *of), [out, counts, indices]) for of in (grouping, fewer)]
        if needs[1][0] <= needs[0][0] + SLACK and needs[1][1] < needs[0][1]:
            grouping = fewer
    write(*grouping)


def _write_covariances(plan: Plan, of_keys: Sequence[Any], offsets: Tensor, useful: Tensor, parts: int) -> Tensor:
    """Those of some heads, if they are not known."""
    k, v, k_mean, v_mean, log_count, order, _, covariances = of_keys
    if covariances is None:
        covariances = plan.working(*k_mean.shape[:3], k.shape[3]**2, dtype=torch.bfloat16)
        tail_statistics.covariances(plan, k, v, offsets, k_mean, v_mean, log_count, order, useful, parts, covariances)
    return covariances


def _write_merge(plan: Plan, of_rows: Sequence[Tensor], of_keys: Sequence[Tensor], q_offsets: Tensor, kv_offsets: Tensor, scale: float,
                 parts: int, merge: Callable[..., None], matrices: Callable[..., None]) -> None:
    """Matrices of some heads, and what is made of them."""
    out, lse, q, shares, left, useful, tail_lse, bias, mixture = of_rows
    _, _, k_mean, v_mean, _, _, scales, _ = of_keys
    covariances = _write_covariances(plan, of_keys, kv_offsets, useful, parts)
    matrix = plan.working(*mixture.shape[:3], q.shape[3]**2, dtype=torch.bfloat16)
    matrices(plan, mixture, covariances, *([] if scales is None else [scales]), matrix)
    merge(plan, out, lse, q, k_mean, v_mean, bias, left, matrix, tail_lse, q_offsets, scale, shares)


def _row(units: int) -> int:
    """Entries of a mixture's row in memory: all rows begin at multiples of 16 bytes, as what multiplies them wants it."""
    return -(-units // 8) * 8


def _matrices(plan: Plan, mixture: Tensor, covariances: Tensor, matrix: Tensor) -> None:
    """``hopper_matrices`` by torch: the query heads of a key head are rows of one product."""
    kv_heads = covariances.shape[1]
    plan.call(product, by_kv_head(mixture, kv_heads), covariances.flatten(0, 1), by_kv_head(matrix, kv_heads))


def _at_once(kv_heads: int, room: float, matrices: int, pairs: int) -> tuple[int, int]:
    """(Key heads whose pairs, those whose matrices too are there at once), of which each takes so many bytes: of pairs half of all where
    that makes no more groups of matrices."""
    few = evenly(kv_heads, int(room / (matrices + pairs)))
    half = -(-kv_heads // 2)
    if half > few and few * matrices + half * pairs <= room and 2 * -(-half // few) <= -(-kv_heads // few):
        return half, few
    return few, few


def _fewer_groups(kv_heads: int, room: float, matrices: int, pairs: int, last: int) -> tuple[int, int, int]:
    """The same and how many heads the last group may have, up to ``last``; of pairs as many as make no more groups of matrices."""
    few = max(int(room / (matrices + pairs)), 1)
    last = min(last, kv_heads) if last > few else 0
    rest = kv_heads - last or kv_heads
    few = evenly(rest, few)
    spare = int((room - few * matrices) / (few * pairs))
    return few * max(min(spare, -(-rest // few)), 1), few, last


def combine_backward(
    dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float, *, matrices: Callable[..., None] | None = None,
    room: float = BACKWARD_ROOM,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``combine_backward`` of ``eager/tail.py``. ``matrices``: as of ``combine``; ``room``: as BACKWARD_ROOM."""
    if not tma_ok(mixture):
        mixture = mixture.new_empty(*mixture.shape[:3], _row(mixture.shape[3]))[..., :mixture.shape[3]].copy_(mixture)
    others = (exact_lse.contiguous(), lse, tail_lse, q_blocks[0], kv_blocks[0], bias, log_count, k_mean, v_mean,
              None if order is None else order.contiguous())
    dexact, dexact_lse, dq, dk, dv = _gradients(
        (*map(strided, (dout, exact, out, q, k, v)), mixture), others, q_blocks[1:], kv_blocks[1:], scale, matrices or _matrices, room)
    return dexact, dexact_lse, dq, dk, dv


def _write_combine_backward(plan: Plan, xs: Sequence[Tensor], others: Sequence[Any], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                            scale: float, matrices: Callable[..., None], room: float) -> None:
    """The plan of ``combine_backward``."""
    dout, exact, out, q, k, v, mixture = xs
    exact_lse, lse, tail_lse, q_offsets, kv_offsets, bias, log_count, k_mean, v_mean, order = others
    dexact, dexact_lse, dq, dk, dv = (plan.result_like(x) for x in (dout, lse, q, k, v))
    # Rows without an estimate pass on the gradient that arrives, and add nothing.
    plan.call(Tensor.copy_, dexact, dout)
    for x in (dq, dk, dv, dexact_lse):
        plan.call(Tensor.zero_, x)
    if not q.numel() or not k.numel():
        return
    (batch, heads, _, dim), kv_heads, (blocks, units) = q.shape, k.shape[1], bias.shape[2:]
    group, parts = heads // kv_heads, units // kv_sizes[0]
    # Those of units, and of blocks' queries with their gradients.
    most = int(room * mean_bytes(q, k) / (2 * dim * dim * (units + 2 * blocks * group)))
    at_once = evenly(kv_heads, most)
    several = tail_backward.several_groups(plan.device, q, k, blocks, units, at_once)
    for own, shared in head_groups(batch, kv_heads, group, at_once, several=several):
        keys, values, counts, places = k[shared], v[shared], log_count[shared], None if order is None else order[shared]
        of_units = k_mean[shared], v_mean[shared]
        covariances = plan.working(*counts.shape, dim * dim, dtype=torch.bfloat16)
        tail_statistics.covariances(plan, keys, values, kv_offsets, *of_units, counts, places, None, parts, covariances)
        mixed, matrix = mixture[own], plan.working(*mixture[own].shape[:3], dim * dim, dtype=torch.bfloat16)
        for mine, its in head_groups(counts.shape[0], counts.shape[1], group, at_once):
            matrices(plan, mixed[mine], covariances[its], matrix[mine])
        # Their memory is that of their gradients.
        tail_backward.gradients(
            plan, dexact[own], dexact_lse[own], dq[own], dk[shared], dv[shared], dout[own], exact[own], exact_lse[own],
            out[own], lse[own], tail_lse[own], q[own], keys, values, (q_offsets, *q_sizes), (kv_offsets, *kv_sizes), bias[own], counts,
            places, *of_units, matrix, mixed, covariances, scale, at_once)


def _of_lists(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]


_merged, _gradients = Plans(_write_combine), Plans(_write_combine_backward)
