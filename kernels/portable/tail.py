"""The tail by Triton's kernels, before attention: blocks' statistics, what queries see in them, and scores.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter. The same inputs give the same bits. Each step is
planned once for a kind of tensors, see ``lowering/plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..lowering.inputs import strided
from ..lowering.plans import Plan, Plans
from ..tail import CAP, ITERATIONS, USELESS, BlockEstimates, Blocks, KeyStatistics, by_kv_head, sampled_queries
from . import tail_halves, tail_rows, tail_statistics
from .tail_groups import evenly, head_groups, mean_bytes

# What the estimate may take for matrices [D, D] of units and blocks, as a share of ``mean_bytes``; more heads than that are done one group
# after another. Attention's result, which is to come, takes as much.
ESTIMATE_ROOM = 1.2


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> KeyStatistics:
    """``key_statistics`` of ``eager/tail.py``."""
    log_count, k_mean, v_mean, moments, *rest = _keys((strided(k), strided(v)), (kv_blocks[0],), kv_blocks[1:], parts, covariances)
    return KeyStatistics(parts, log_count, rest.pop(0) if parts > 1 else None, k_mean, v_mean, moments, *rest)


def _write_key_statistics(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], sizes: tuple[int, int], parts: int,
                          wanted: bool) -> None:
    """The plan of ``key_statistics``. wanted: whether covariances are."""
    (k, v), (offsets,) = xs, others
    log_count, k_mean, v_mean = _new_means(plan, k, sizes[0] * parts)
    moments = plan.result(*k.shape[:2], sizes[0], tail_statistics.packed_size(k.shape[3]), dtype=torch.bfloat16)
    halves = plan.result(*k.shape[:3], dtype=torch.int8) if parts > 1 else None
    covariances = plan.result(*k.shape[:2], sizes[0], k.shape[3]**2, dtype=torch.bfloat16) if wanted else None
    if not k.numel():
        for x in plan.results:
            plan.call(Tensor.zero_, x)
        return
    _write_keys(plan, k, v, offsets, halves, k_mean, v_mean, log_count, moments)
    if covariances is not None:
        tail_statistics.covariances(plan, k, v, offsets, k_mean, v_mean, log_count, None, covariances)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: KeyStatistics | None = None) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``."""
    q, judge = strided(q), useful is None
    if known is not None:
        log_count, k_mean, v_mean, moments = (x.contiguous() for x in (known.log_count, known.k_mean, known.v_mean, known.moments))
        halves, covariances = (None if x is None else x.contiguous() for x in (known.halves, known.covariances))
        half_variance, mass, *judged = _estimates_of(
            (q,), (q_blocks[0], log_count, k_mean, moments), q_blocks[1:], scale, judge, ESTIMATE_ROOM)
        return BlockEstimates(parts, log_count, half_variance, mass, halves, k_mean, v_mean, judged[0] if useful is None else useful,
                              covariances)
    log_count, k_mean, v_mean, half_variance, mass, *rest = _estimates(
        (q, strided(k), strided(v)), (q_blocks[0], kv_blocks[0]), q_blocks[1:], kv_blocks[1:], scale, parts, judge, ESTIMATE_ROOM)
    useful = rest.pop(0) if useful is None else useful
    return BlockEstimates(parts, log_count, half_variance, mass, rest[0] if parts > 1 else None, k_mean, v_mean, useful)


def _write_estimate(plan: Plan, xs: Sequence[Tensor], offsets: Sequence[Tensor], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                    scale: float, parts: int, judge: bool, room: float) -> None:
    """The plan of ``estimate``, keys' statistics included, which are made for some heads after others. judge: whether which heads are
    useful is asked."""
    (q, k, v), (q_offsets, kv_offsets) = xs, offsets
    log_count, k_mean, v_mean = _new_means(plan, k, kv_sizes[0] * parts)
    seen = _new_estimates(plan, q, q_sizes[0], kv_sizes[0], judge)
    halves = plan.result(*k.shape[:3], dtype=torch.int8) if parts > 1 else None
    if not q.numel() or not k.numel():
        for x in plan.results:
            plan.call(_fill_with_ones if x is seen.useful else Tensor.zero_, x)
        return

    def keys_of(shared: tuple) -> Tensor:
        moments = plan.working(*k[shared].shape[:2], kv_sizes[0], tail_statistics.packed_size(k.shape[3]), dtype=torch.bfloat16)
        _write_keys(plan, k[shared], v[shared], kv_offsets, None if halves is None else halves[shared], k_mean[shared], v_mean[shared],
                    log_count[shared], moments)
        return moments

    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, keys_of, kv_sizes[0], seen, room * mean_bytes(q, k))


def _write_estimate_of(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], q_sizes: tuple[int, int], scale: float, judge: bool,
                       room: float) -> None:
    """The plan of ``estimate`` where keys' statistics are known."""
    (q,), (q_offsets, log_count, k_mean, moments) = xs, others
    seen = _new_estimates(plan, q, q_sizes[0], moments.shape[2], judge)
    if not q.numel():
        for x in plan.results:
            plan.call(_fill_with_ones, x)
        return
    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, lambda shared: moments[shared], 0, seen, room * mean_bytes(q, q))


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


def _new_estimates(plan: Plan, q: Tensor, blocks: int, kv_blocks: int, judge: bool) -> _Seen:
    half_variance, mass = (plan.result(*q.shape[:2], blocks, kv_blocks, dtype=torch.bfloat16) for _ in range(2))
    return _Seen(half_variance, mass, plan.result(*q.shape[:2], dtype=torch.bool) if judge else None)


def _write_keys(plan: Plan, k: Tensor, v: Tensor, offsets: Tensor, halves: Tensor | None, k_mean: Tensor, v_mean: Tensor,
                log_count: Tensor, moments: Tensor) -> None:
    """Keys' statistics but for covariances."""
    if halves is not None:
        tail_halves.principal_halves(plan, k, offsets, moments.shape[2], ITERATIONS, halves)
    tail_statistics.key_statistics(plan, k, v, offsets, halves, k_mean, v_mean, log_count, moments)


def _write_seen(plan: Plan, q: Tensor, offsets: Tensor, sizes: tuple[int, int], scale: float, log_count: Tensor, k_mean: Tensor,
                keys_of: Callable[[tuple], Tensor], made: int, seen: _Seen, room: float) -> None:
    """What query blocks see. keys_of: gives the moments of some key heads, and makes ``made`` matrices a head for them. room:
    in bytes."""
    (blocks, longest), (batch, heads, _, dim), kv_heads = sizes, q.shape, k_mean.shape[1]
    sample, group = sampled_queries(longest), heads // kv_heads
    # Of symmetric matrices half is kept.
    entries = tail_statistics.packed_size(dim)
    most = int(room / (2 * entries * (made + blocks * group)))
    # The kernel that compares queries with units reads numbers of four bytes faster. Rows of 16 bytes: what torch multiplies fast.
    units = seen.half_variance.shape[3]
    wide = plan.working(*seen.half_variance.shape[:3], -(-units // 8) * 8, dtype=torch.float32)[..., :units]
    error = plan.working(*wide.shape[:3], dtype=torch.float32)
    for own, shared in head_groups(batch, kv_heads, group, evenly(kv_heads, most)):
        with plan.memory_again():
            keys = keys_of(shared)
            queries = plan.working(*wide[own].shape[:3], entries, dtype=torch.bfloat16)
            tail_statistics.query_moments(plan, q[own], offsets, blocks, sample, 0.5 * scale**2, queries)
            plan.call(_wide_product, by_kv_head(queries, keys.shape[1]), keys.flatten(0, 1).mT, by_kv_head(wide[own], keys.shape[1]))
    tail_rows.sampled_mass(plan, q, k_mean, log_count, wide, offsets, scale, sample, CAP, seen.mass, seen.half_variance, error)
    if seen.useful is not None:
        tail_rows.useful_heads(plan, error, USELESS, seen.useful)


def scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    """``scores`` of ``eager/tail.py``, in float32."""
    return _scores((mass, half_variance, log_count), (), parts)[0]


def _write_scores(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], parts: int) -> None:
    found = plan.result(*xs[0].shape, dtype=torch.float32)
    if found.numel():
        mass, half_variance, log_count = xs
        tail_rows.scores(plan, mass, half_variance, log_count, parts, found)


def _fill_with_ones(x: Tensor) -> None:
    x.fill_(1)


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)


_keys, _estimates = Plans(_write_key_statistics), Plans(_write_estimate)
_estimates_of, _scores = Plans(_write_estimate_of), Plans(_write_scores)
