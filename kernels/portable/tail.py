"""The tail by Triton's kernels: blocks' statistics, the merge of their estimate with the exact part, and its gradients.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter; out's last stride must be 1, and each lse is
float32 and contiguous. The same inputs give the same bits. Each step is planned once for a kind of tensors, see ``lowering/plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..lowering.inputs import loadable, loaded, strided
from ..lowering.plans import Plan, Plans
from ..tail import CAP, ITERATIONS, USELESS, BlockEstimates, Blocks, KeyStatistics, by_kv_head, covariances_wait, sampled_queries
from . import tail_order, tail_rows, tail_statistics
from .tail_backward import triton_tail_backward

# What one step may take for matrices [D, D] of all units, as a share of q's bytes; more heads than that are done one group after another.
# Before attention there is room where its result will be. Afterwards q, k, v and that result are there: MERGE_ROOM is of all that the tail
# holds beside them, numbers of pairs of a block and a unit too, so that a layer is within 1.25 times these four.
ESTIMATE_ROOM, MERGE_ROOM, BACKWARD_ROOM = 1.0, 0.84, 0.4
# Bytes of a pair of a block and a unit: mass and h, which wait; bias and the mixture.
KNOWN_OF_A_PAIR, MADE_OF_A_PAIR = 4, 6


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool, *,
                   kernel: Callable[..., None] | None = None) -> KeyStatistics:
    """``key_statistics`` of ``eager/tail.py``. ``kernel``: ``hopper_key_statistics``, where ``why_not_hopper_statistics`` is None; it
    computes covariances with the rest."""
    kernel = kernel if covariances else None
    k, v = ((strided if kernel is None else loaded)(x) for x in (k, v))
    log_count, k_mean, v_mean, moments, *rest = _keys((k, v), (kv_blocks[0],), kv_blocks[1:], parts, covariances, kernel)
    return KeyStatistics(parts, log_count, rest.pop(0) if parts > 1 else None, k_mean, v_mean, moments, *rest)


def _write_key_statistics(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], sizes: tuple[int, int], parts: int, wanted: bool,
                          kernel: Callable[..., None] | None) -> None:
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
    _write_order(plan, k, offsets, sizes[0], order)
    _write_keys(plan, k, v, offsets, order, parts, log_count, k_mean, v_mean, moments, covariances, kernel)
    if covariances is not None and kernel is None:
        tail_statistics.covariances(plan, k, v, offsets, k_mean, v_mean, log_count, order, None, parts, covariances)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: KeyStatistics | None = None, *, kernel: Callable[..., None] | None = None) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``. ``kernel``: as of ``key_statistics``; it is taken where there is room for covariances to wait."""
    q, judge = strided(q), useful is None
    if known is not None:
        of_keys = known.log_count, known.k_mean, known.moments
        half_variance, mass, *judged = _estimates_of((q,), (q_blocks[0], *of_keys), q_blocks[1:], scale, judge, ESTIMATE_ROOM)
        return BlockEstimates(parts, known.log_count, half_variance, mass, known.order, known.k_mean, known.v_mean,
                              judged[0] if useful is None else useful, known.covariances)
    kernel = kernel if covariances_wait(q, k, kv_blocks[1]) else None
    k, v = ((strided if kernel is None else loaded)(x) for x in (k, v))
    log_count, k_mean, v_mean, half_variance, mass, *rest = _estimates(
        (q, k, v), (q_blocks[0], kv_blocks[0]), q_blocks[1:], kv_blocks[1:], scale, parts, judge, kernel, ESTIMATE_ROOM)
    useful = rest.pop(0) if useful is None else useful
    order = rest.pop(0) if parts > 1 else None
    return BlockEstimates(parts, log_count, half_variance, mass, order, k_mean, v_mean, useful, *rest)


def _write_estimate(plan: Plan, xs: Sequence[Tensor], offsets: Sequence[Tensor], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                    scale: float, parts: int, judge: bool, kernel: Callable[..., None] | None, room: float) -> None:
    """The plan of ``estimate``, keys' statistics included, which are made for some heads after others. judge: whether which heads are
    useful is asked."""
    (q, k, v), (q_offsets, kv_offsets) = xs, offsets
    log_count, k_mean, v_mean = _new_means(plan, k, kv_sizes[0] * parts)
    seen = _new_estimates(plan, q, q_sizes[0], k_mean.shape[2], judge)
    order = plan.result(*k.shape[:3], dtype=torch.int32) if parts > 1 else None
    covariances = None if kernel is None else plan.result(*k_mean.shape[:3], k.shape[3]**2, dtype=torch.bfloat16)
    if not q.numel() or not k.numel():
        for x in plan.results:
            plan.call(_fill_with_ones if x is seen.useful else Tensor.zero_, x)
        return
    _write_order(plan, k, kv_offsets, kv_sizes[0], order)

    def keys_of(shared: tuple) -> Tensor:
        moments = plan.working(*k_mean[shared].shape[:3], tail_statistics.packed_size(k.shape[3]), dtype=torch.bfloat16)
        _write_keys(plan, k[shared], v[shared], kv_offsets, None if order is None else order[shared], parts, log_count[shared],
                    k_mean[shared], v_mean[shared], moments, None if covariances is None else covariances[shared], kernel)
        return moments

    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, keys_of, k_mean.shape[2], seen, room)


def _write_estimate_of(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], q_sizes: tuple[int, int], scale: float, judge: bool,
                       room: float) -> None:
    """The plan of ``estimate`` where keys' statistics are known."""
    (q,), (q_offsets, log_count, k_mean, moments) = xs, others
    seen = _new_estimates(plan, q, q_sizes[0], k_mean.shape[2], judge)
    if not q.numel():
        for x in plan.results:
            plan.call(_fill_with_ones, x)
        return
    _write_seen(plan, q, q_offsets, q_sizes, scale, log_count, k_mean, lambda shared: moments[shared], 0, seen, room)


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


def _write_order(plan: Plan, k: Tensor, offsets: Tensor, blocks: int, order: Tensor | None) -> None:
    if order is not None:
        with plan.memory_again():
            tail_order.principal_order(plan, k, offsets, blocks, ITERATIONS, order)


def _write_keys(plan: Plan, k: Tensor, v: Tensor, offsets: Tensor, order: Tensor | None, parts: int, log_count: Tensor, k_mean: Tensor,
                v_mean: Tensor, moments: Tensor, covariances: Tensor | None, kernel: Callable[..., None] | None) -> None:
    """Keys' statistics; covariances only by ``kernel``."""
    if kernel is None:
        tail_statistics.key_statistics(plan, k, v, offsets, k_mean, v_mean, log_count, order, parts, moments)
    else:
        kernel(plan, k, v, offsets, k_mean, v_mean, log_count, moments, covariances, tail_statistics.SLAB)


def _write_seen(plan: Plan, q: Tensor, offsets: Tensor, sizes: tuple[int, int], scale: float, log_count: Tensor, k_mean: Tensor,
                keys_of: Callable[[tuple], Tensor], made: int, seen: _Seen, room: float) -> None:
    """What query blocks see. keys_of: gives the moments of the units of some key heads, and makes ``made`` matrices a head for them."""
    (blocks, longest), kv_heads = sizes, k_mean.shape[1]
    sample, entries = sampled_queries(longest), tail_statistics.packed_size(q.shape[3])
    # Of symmetric matrices half is kept.
    matrices = -(-(made + blocks * (q.shape[1] // kv_heads)) * entries // q.shape[3]**2)
    # The kernel that compares queries with units reads numbers of four bytes faster.
    wide = plan.working(*seen.half_variance.shape, dtype=torch.float32)
    error = plan.working(*wide.shape[:3], dtype=torch.float32)
    for own, shared in _head_groups(q, kv_heads, matrices, room):
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
    found = plan.result(*xs[0].shape[:3], xs[0].shape[3] // parts, dtype=torch.float32)
    if found.numel():
        mass, half_variance, log_count = xs
        tail_rows.scores(plan, mass, half_variance, log_count, parts, found)


def combine(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: BlockEstimates, scale: float, keep: bool, *, merge: Callable[..., None] = tail_rows.merge,
            merge_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``combine`` of ``eager/tail.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``merge``, which takes so many
    rows at once: ``hopper_tail_merge``, where ``why_not_hopper_merge`` is None, or the portable kernel."""
    portable = merge_rows is None
    if not portable and not loadable(out):
        copy = loaded(out)
        results = combine(copy, lse, q, k, v, q_blocks, kv_blocks, counts, indices, estimates, scale, keep, merge=merge,
                          merge_rows=merge_rows)
        out.copy_(copy)
        return results
    q, k, v = (strided if portable else loaded)(q), strided(k), strided(v)
    waiting = [x for x in (estimates.order, estimates.covariances) if x is not None]
    others = (lse, q_blocks[0], kv_blocks[0], counts.contiguous(), indices.contiguous(), estimates.log_count,
              estimates.half_variance, estimates.mass, estimates.k_mean, estimates.v_mean, estimates.useful, *waiting)
    shares, tail_lse, bias, mixture = _merged(
        (out, q, k, v), others, q_blocks[1:], kv_blocks[1:], scale, estimates.parts, keep, estimates.covariances is not None, merge,
        merge_rows, MERGE_ROOM)
    return shares, tail_lse, bias, mixture[..., :bias.shape[3]]


def _write_combine(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], q_sizes: tuple[int, int], kv_sizes: tuple[int, int],
                   scale: float, parts: int, keep: bool, known: bool, merge: Callable[..., None], rows: int | None, room: float) -> None:
    """The plan of ``combine``. known: whether covariances were computed with the estimates."""
    out, q, k, v = xs
    lse, q_offsets, kv_offsets, counts, indices, log_count, half_variance, mass, k_mean, v_mean, useful, *rest = others
    order, covariances = rest[0] if parts > 1 else None, rest[-1] if known else None
    (blocks, longest), (kv_blocks, _) = q_sizes, kv_sizes
    (batch, heads, tokens, dim), kv_heads, units = q.shape, k.shape[1], kv_blocks * parts
    kept = heads if keep else 0
    shares = plan.result(batch, heads, blocks, -(-longest // (rows or tail_rows.merged_rows(plan, q))), dtype=torch.float32)
    tail_lse = plan.result(batch, kept, tokens, dtype=torch.float32)
    # Rows of 16 bytes: what torch multiplies fast.
    row = -(-units // 8) * 8
    bias = plan.result(batch, kept, blocks, units, dtype=torch.float32)
    mixture = plan.result(batch, kept, blocks, row, dtype=torch.bfloat16)
    if not q.numel():
        plan.call(Tensor.zero_, shares)
        return
    if keep:
        # Rows of other blocks have no estimate.
        plan.call(_fill_with_nothing, tail_lse)
    else:
        tail_lse = plan.working(batch, heads, tokens, dtype=torch.float32)
    left = plan.working(batch, heads, blocks, dtype=torch.int32)
    pairs = heads // kv_heads * blocks * units
    held = KNOWN_OF_A_PAIR * half_variance.numel() + 4 * indices.numel() + (0 if covariances is None else 2 * covariances.numel())
    matrices = blocks * (heads // kv_heads) + (units if covariances is None else 0)
    for own, shared in _head_groups(q, kv_heads, matrices, room - held / (q.numel() * q.element_size()), MADE_OF_A_PAIR * pairs):
        with plan.memory_again():
            some, means = q[own], (k_mean[shared], v_mean[shared])
            if keep:
                own_bias, own_mixture = bias[own], mixture[own]
            else:
                own_bias = plan.working(*some.shape[:2], blocks, units, dtype=torch.float32)
                own_mixture = plan.working(*some.shape[:2], blocks, row, dtype=torch.bfloat16)
            own_mixture = own_mixture[..., :units]
            lists = tail_rows.block_lists(_of_group(counts, heads, own, shared), _of_group(indices, heads, own, shared), some.shape[1],
                                          kv_blocks)
            tail_rows.unit_bias(plan, log_count[shared], half_variance[own], mass[own], lists, useful[own], CAP, parts, own_bias, left[own],
                                own_mixture)
            if covariances is not None:
                squares = covariances[shared]
            else:
                squares = plan.working(*means[0].shape[:3], dim * dim, dtype=torch.bfloat16)
                tail_statistics.covariances(plan, k[shared], v[shared], kv_offsets, *means, log_count[shared],
                                            None if order is None else order[shared], useful[own], parts, squares)
            mixed = by_kv_head(own_mixture, squares.shape[1])
            matrix = plan.working(*mixed.shape[:2], dim * dim, dtype=torch.bfloat16)
            plan.call(_product, mixed, squares.flatten(0, 1), matrix)
            merge(plan, out[own], lse[own], some, *means, own_bias, left[own], matrix, tail_lse[own], q_offsets, scale, shares[own])


def combine_backward(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``combine_backward`` of ``eager/tail.py``."""
    # What rows get that no estimate has touched: what arrives passes on, and nothing is added.
    dexact = dout.clone(memory_format=torch.contiguous_format if dout.stride(-1) != 1 else torch.preserve_format)
    dexact_lse = torch.zeros_like(lse) if dlse is None else dlse.clone(memory_format=torch.contiguous_format)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dexact, dexact_lse, dq, dk, dv
    kv_heads, (blocks, units) = k.shape[1], bias.shape[2:]
    kv_offsets, kv_number, _ = kv_blocks
    parts = units // kv_number
    q, k, v = map(strided, (q, k, v))
    exact_lse = exact_lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    # Those of units, and of blocks' queries with their gradients.
    matrices = units + blocks * (2 * q.shape[1] // kv_heads)
    for own, shared in _head_groups(q, kv_heads, matrices, BACKWARD_ROOM):
        keys, values, halves, counts = k[shared], v[shared], None if order is None else order[shared], log_count[shared]
        means = k_mean[shared], v_mean[shared]
        covariances, = _covariances((keys, values), (kv_offsets, *means, counts, *([] if halves is None else [halves])), parts)
        mixed = by_kv_head(mixture[own], covariances.shape[1])
        matrix = torch.bmm(mixed, covariances.flatten(0, 1))
        del covariances
        triton_tail_backward(
            dexact[own], dexact_lse[own], dq[own], dk[shared], dv[shared], dout[own], None if dlse is None else dlse[own], exact[own],
            exact_lse[own], out[own], lse[own], tail_lse[own], q[own], keys, values, q_blocks, kv_blocks, bias[own], counts, halves, *means,
            matrix, mixed, scale)
        del matrix
    return dexact, dexact_lse, dq, dk, dv


def _write_covariances(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], parts: int) -> None:
    (k, v), (offsets, k_mean, v_mean, log_count, *order) = xs, others
    out = plan.result(*k_mean.shape[:3], k_mean.shape[3]**2, dtype=torch.bfloat16)
    tail_statistics.covariances(plan, k, v, offsets, k_mean, v_mean, log_count, order[0] if order else None, None, parts, out)


def _head_groups(q: Tensor, kv_heads: int, matrices: int, room: float, more: int = 0) -> Iterator[tuple[tuple, tuple]]:
    """Indices of a group's (query heads, key heads), so that ``matrices`` of a key head's, two bytes an entry, and ``more`` bytes are
    ``room`` times q."""
    batch, heads, tokens, dim = q.shape
    each = max(2 * dim * dim * matrices + more, 1)
    held = room * batch * heads * tokens * dim * q.element_size()
    if batch * kv_heads * each <= held:
        yield (slice(None),) * 2, (slice(None),) * 2
        return
    groups = -(-kv_heads // max(1, int(held / each)))
    size, group = -(-kv_heads // groups), heads // kv_heads
    for b in range(batch):
        for h in range(0, kv_heads, size):
            yield (slice(b, b + 1), slice(h * group, (h + size) * group)), (slice(b, b + 1), slice(h, h + size))


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a, b, out=out)


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)


def _fill_with_ones(x: Tensor) -> None:
    x.fill_(1)


def _fill_with_nothing(lse: Tensor) -> None:
    lse.fill_(-torch.inf)


def _of_group(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``_head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]


_keys, _estimates, _estimates_of = Plans(_write_key_statistics), Plans(_write_estimate), Plans(_write_estimate_of)
_scores, _merged, _covariances = Plans(_write_scores), Plans(_write_combine), Plans(_write_covariances)
