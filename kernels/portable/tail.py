"""The tail by Triton's kernels, before attention: blocks' statistics, what queries see in them, and scores.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter. The same inputs give the same bits. Each step is
planned once for a kind of tensors, see ``lowering/plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..lowering.inputs import strided
from ..lowering.plans import Plan, Plans
from ..tail import CAP, BlockEstimates, Blocks, KeyStatistics, by_kv_head, sampled_queries
from . import coded, tail_order, tail_rows, tail_statistics
from .tail_groups import evenly, head_groups, mean_bytes, of_group

# The estimate's matrices [D, D] of units and blocks may take this share of ``mean_bytes``; more heads than that are done one group after
# another. Attention's result and its lists, which are to come, take more.
ESTIMATE_ROOM = 1.4


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> KeyStatistics:
    """``key_statistics`` of ``eager/tail.py``."""
    log_count, k_mean, v_mean, moments, *rest = _keys((strided(k), strided(v)), (kv_blocks[0],), kv_blocks[1:], parts, covariances)
    return KeyStatistics(parts, log_count, rest.pop(0) if parts > 1 else None, k_mean, v_mean, moments, *rest)


def _write_key_statistics(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], sizes: tuple[int, int], parts: int,
                          wanted: bool) -> None:
    """The plan of ``key_statistics``. wanted: whether covariances are."""
    (k, v), (offsets,) = xs, others
    log_count, k_mean, v_mean = _new_means(plan, k, sizes[0] * parts)
    moments = plan.result(*k_mean.shape[:3], tail_statistics.packed_size(k.shape[3]), dtype=torch.bfloat16)
    order = plan.result(*k.shape[:3], dtype=torch.int32) if parts > 1 else None
    covariances = plan.result(*k_mean.shape[:3], k.shape[3]**2, dtype=torch.bfloat16) if wanted else None
    if not k.numel():
        for x in plan.results:
            plan.call(Tensor.zero_, x)
        return
    if order is not None:
        tail_order.principal_order(plan, k, offsets, sizes[0], order, log_count)
    tail_statistics.key_statistics(plan, k, v, offsets, k_mean, v_mean, log_count, order, parts, moments)
    if covariances is not None:
        tail_statistics.covariances(plan, k, v, offsets, k_mean, v_mean, log_count, order, None, parts, covariances)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: KeyStatistics | None = None, *, variances: Callable[..., None] | None = None,
             masses: Callable[..., None] = tail_rows.sampled_mass, room: float = ESTIMATE_ROOM) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``. ``variances``: ``hopper_half_variances``, for numbers of units for which it is faster than cuBLAS.
    ``masses``: ``hopper_mass`` or the portable kernel. ``room``: as ESTIMATE_ROOM."""
    q, judge = strided(q), useful is None
    # cuBLAS takes kernels for Ampere where the number of units is no multiple of 8.
    seeing = variances if variances is not None and kv_blocks[1] * parts % 8 else _half_variances, masses
    if known is not None:
        if known.scales is not None:
            seeing = coded.half_variances, masses
        log_count, k_mean, v_mean, moments = (x.contiguous() for x in (known.log_count, known.k_mean, known.v_mean, known.moments))
        order, covariances = (None if x is None else x.contiguous() for x in (known.order, known.covariances))
        half_variance, mass, *judged = _estimates_of(
            (q,), (q_blocks[0], log_count, k_mean, moments, known.scales), q_blocks[1:], scale, judge, seeing, room)
        return BlockEstimates(parts, log_count, half_variance, mass, order, k_mean, v_mean, judged[0] if useful is None else useful,
                              covariances, known.scales)
    log_count, k_mean, v_mean, half_variance, mass, *rest = _estimates(
        (q, strided(k), strided(v)), (q_blocks[0], kv_blocks[0]), q_blocks[1:], kv_blocks[1:], scale, parts, judge, seeing, room)
    useful = rest.pop(0) if useful is None else useful
    return BlockEstimates(parts, log_count, half_variance, mass, rest[0] if parts > 1 else None, k_mean, v_mean, useful)


def _write_estimate(plan: Plan, xs: Sequence[Tensor], offsets: Sequence[Tensor], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                    scale: float, parts: int, judge: bool, seeing: tuple[Callable[..., None], ...], room: float) -> None:
    """The plan of ``estimate``, keys' statistics included, which are made for some heads after others. judge: whether which heads are
    useful is asked. seeing: (variances, masses)."""
    (q, k, v), (q_offsets, kv_offsets) = xs, offsets
    log_count, k_mean, v_mean = _new_means(plan, k, kv_sizes[0] * parts)
    seen = _new_estimates(plan, q, q_sizes[0], k_mean.shape[2], judge)
    order = plan.result(*k.shape[:3], dtype=torch.int32) if parts > 1 else None
    if not q.numel() or not k.numel():
        for x in plan.results:
            plan.call(partial(Tensor.fill_, value=1 if x is seen.useful else 0), x)
        return
    if order is not None:
        tail_order.principal_order(plan, k, kv_offsets, kv_sizes[0], order, log_count)

    def keys_of(shared: tuple) -> tuple[Tensor, ...]:
        moments = plan.working(*k_mean[shared].shape[:3], tail_statistics.packed_size(k.shape[3]), dtype=torch.bfloat16)
        tail_statistics.key_statistics(plan, k[shared], v[shared], kv_offsets, k_mean[shared], v_mean[shared], log_count[shared],
                                       None if order is None else order[shared], parts, moments)
        return (moments,)

    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, keys_of, k_mean.shape[2], seen, seeing, room * mean_bytes(q, k))


def _write_estimate_of(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], q_sizes: tuple[int, int], scale: float, judge: bool,
                       seeing: tuple[Callable[..., None], ...], room: float) -> None:
    """The plan of ``estimate`` where keys' statistics are known."""
    (q,), (q_offsets, log_count, k_mean, *matrices) = xs, [x for x in others if x is not None]
    seen = _new_estimates(plan, q, q_sizes[0], k_mean.shape[2], judge)
    if not q.numel():
        for x in plan.results:
            plan.call(partial(Tensor.fill_, value=1), x)
        return
    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, lambda shared: of_group(shared, *matrices), 0, seen, seeing,
                room * mean_bytes(q, q))


class _Seen(NamedTuple):
    """What query blocks see in units, as ``BlockEstimates`` has it; no ``useful`` where that is not asked."""

    half_variance: Tensor
    mass: Tensor
    useful: Tensor | None


def _new_means(plan: Plan, k: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_count, k_mean and v_mean, which a plan returns."""
    log_count = plan.result(*k.shape[:2], units, dtype=torch.float32)
    k_mean, v_mean = (plan.result(*k.shape[:2], units, k.shape[3], dtype=k.dtype) for _ in range(2))
    return log_count, k_mean, v_mean


def _new_estimates(plan: Plan, q: Tensor, blocks: int, units: int, judge: bool) -> _Seen:
    half_variance, mass = (plan.result(*q.shape[:2], blocks, units, dtype=torch.bfloat16) for _ in range(2))
    return _Seen(half_variance, mass, plan.result(*q.shape[:2], dtype=torch.bool) if judge else None)


def _write_seen(plan: Plan, q: Tensor, offsets: Tensor, sizes: tuple[int, int], scale: float, log_count: Tensor, k_mean: Tensor,
                keys_of: Callable[[tuple], Sequence[Tensor]], made: int, seen: _Seen, seeing: tuple[Callable[..., None], ...],
                room: float) -> None:
    """What query blocks see. keys_of: gives what the units of some key heads have for ``variances``, and makes ``made`` matrices a head
    for them. room: in bytes."""
    (blocks, longest), (batch, heads, _, dim), kv_heads, (variances, masses) = sizes, q.shape, k_mean.shape[1], seeing
    sample, group = sampled_queries(longest), heads // kv_heads
    # Only half of a symmetric matrix is kept.
    entries = tail_statistics.packed_size(dim)
    most = int(room / (2 * entries * (made + blocks * group)))
    # The kernel that compares queries with units reads numbers of four bytes faster.
    slabs = coded.slabs(dim) if variances is coded.half_variances else 1
    wide = plan.working(*seen.half_variance.shape[:3], slabs * k_mean.shape[2], dtype=torch.float32)
    error = plan.working(*wide.shape[:3], dtype=torch.float32)
    for own, shared in head_groups(batch, kv_heads, group, evenly(kv_heads, most)):
        keys = keys_of(shared)
        queries = plan.working(*wide[own].shape[:3], entries, dtype=torch.bfloat16)
        tail_statistics.query_moments(plan, q[own], offsets, blocks, sample, 0.5 * scale**2, queries)
        variances(plan, queries, *keys, wide[own])
    masses(plan, q, k_mean, log_count, wide, offsets, scale, sample, CAP, seen.mass, seen.half_variance, error)
    if seen.useful is not None:
        tail_rows.useful_heads(plan, error, seen.useful)


def scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    """``scores`` of ``eager/tail.py``, in float32."""
    return _scores((mass, half_variance, log_count), (), parts)[0]


def _write_scores(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], parts: int) -> None:
    found = plan.result(*xs[0].shape[:3], xs[0].shape[3] // parts, dtype=torch.float32)
    if found.numel():
        mass, half_variance, log_count = xs
        tail_rows.scores(plan, mass, half_variance, log_count, parts, found)


def _half_variances(plan: Plan, queries: Tensor, keys: Tensor, half_variance: Tensor) -> None:
    """``hopper_half_variances`` by torch."""
    kv_heads = keys.shape[1]
    plan.call(_wide_product, by_kv_head(queries, kv_heads), keys.flatten(0, 1).mT, by_kv_head(half_variance, kv_heads))


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)


_keys, _estimates = Plans(_write_key_statistics), Plans(_write_estimate)
_estimates_of, _scores = Plans(_write_estimate_of), Plans(_write_scores)
