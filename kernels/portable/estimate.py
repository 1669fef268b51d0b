"""The estimate by Triton's kernels: blocks' statistics, what queries see in them, the merge with the exact part, and gradients.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter; each lse is float32 and contiguous. The same
inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..lowering.chunks import block_lists
from ..lowering.inputs import loaded, strided, tma_ok
from ..tail import CAP, BlockEstimates, Blocks, KeyStatistics, by_kv_head, sampled_queries
from . import coded, tail_backward, tail_order, tail_rows, tail_statistics

# What a step makes for some heads at once may take this share of the mean bytes of q, k, v and attention's result, and twice as much while
# that result, or the gradients of the exact part, are to come: a layer is within 1.25 times q, k, v and the result.
BUDGET = 0.65


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> KeyStatistics:
    """``key_statistics`` of ``eager/tail.py``."""
    k, v = strided(k), strided(v)
    log_count, order, k_mean, v_mean = _new_means(k, kv_blocks, parts)
    moments = _new_matrices(k_mean, tail_statistics.packed_size(k.shape[3]))
    mixed = _new_matrices(k_mean, k.shape[3]**2) if covariances else None
    if k.numel():
        tail_statistics.key_statistics(k, v, kv_blocks[0], k_mean, v_mean, log_count, order, parts, moments)
        if mixed is not None:
            tail_statistics.covariances(k, v, kv_blocks[0], k_mean, v_mean, log_count, order, None, parts, mixed)
    else:
        for x in (moments, mixed):
            if x is not None:
                x.zero_()
    return KeyStatistics(parts, log_count, order, k_mean, v_mean, moments, mixed)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: KeyStatistics | None = None, *, variances: Callable[..., None] | None = None,
             masses: Callable[..., None] = tail_rows.sampled_mass) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``. ``variances``: ``hopper_half_variances``, for numbers of units for which it is faster than cuBLAS.
    ``masses``: ``hopper_mass`` or the portable kernel."""
    q = strided(q)
    moments = covariances = scales = None
    if known is None:
        k, v = strided(k), strided(v)
        log_count, order, k_mean, v_mean = _new_means(k, kv_blocks, parts)
    else:
        log_count, order, k_mean, v_mean, moments, covariances, scales = (
            None if x is None else x.contiguous() for x in (known.log_count, known.order, known.k_mean, known.v_mean, known.moments,
                                                            known.covariances, known.scales))
    (offsets, blocks, longest), (batch, heads, _, dim), (kv_heads, units) = q_blocks, q.shape, k_mean.shape[1:3]
    group, entries = heads // kv_heads, tail_statistics.packed_size(dim)
    half_variance, mass = (torch.empty(batch, heads, blocks, units, dtype=torch.bfloat16, device=q.device) for _ in range(2))
    if not q.numel() or known is None and not k.numel():
        useful = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if useful is None else useful
        return BlockEstimates(parts, log_count, half_variance.zero_(), mass.zero_(), order, k_mean, v_mean, useful, covariances, scales)
    sample, slabs = sampled_queries(longest), 1 if scales is None else coded.slabs(dim)
    # The kernel that compares queries with units reads numbers of four bytes faster.
    wide = torch.empty(batch, heads, blocks, slabs * units, dtype=torch.float32, device=q.device)
    of_head = 2 * entries * (blocks * group + (units if known is None else 0))
    for own, shared in head_groups(q, k, of_head, 2):
        if known is None:
            keys = _new_matrices(k_mean[shared], entries)
            tail_statistics.key_statistics(k[shared], v[shared], kv_blocks[0], k_mean[shared], v_mean[shared], log_count[shared],
                                           None if order is None else order[shared], parts, keys)
        else:
            keys = moments[shared]
        queries = _new_matrices(wide[own], entries)
        tail_statistics.query_moments(q[own], offsets, blocks, sample, 0.5 * scale**2, queries)
        if scales is not None:
            coded.half_variances(queries, keys, scales[shared], wide[own])
        elif variances is not None and units % 8:
            # cuBLAS takes kernels for Ampere where the number of units is no multiple of 8.
            variances(queries, keys, wide[own])
        else:
            _wide_product(by_kv_head(queries, keys.shape[1]), keys.flatten(0, 1).mT, by_kv_head(wide[own], keys.shape[1]))
        # Before those of the next heads.
        del keys, queries
    error = torch.empty(batch, heads, blocks, dtype=torch.float32, device=q.device)
    masses(q, k_mean, log_count, wide, offsets, scale, sample, CAP, mass, half_variance, error)
    useful = tail_rows.useful_heads(error) if useful is None else useful
    return BlockEstimates(parts, log_count, half_variance, mass, order, k_mean, v_mean, useful, covariances, scales)


def combine(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: BlockEstimates, scale: float, keep: bool, *, merge: Callable[..., None] = tail_rows.merge,
            merge_rows: int | None = None, matrices: Callable[..., None] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``combine`` of ``eager/tail.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``merge``, which takes so many
    rows at once: ``hopper_tail_merge``, where a backend names it, or the portable kernel; ``matrices``: there ``hopper_matrices``, else
    torch's product."""
    (merged, q), k, v = map(strided if merge_rows is None else loaded, (out, q)), strided(k), strided(v)
    (q_offsets, blocks, longest), (kv_offsets, key_blocks, _), parts = q_blocks, kv_blocks, estimates.parts
    (batch, heads, tokens, dim), kv_heads, units = q.shape, k.shape[1], key_blocks * parts
    group = heads // kv_heads
    programs = -(-longest // (merge_rows or tail_rows.merged_rows(q)))
    shares = torch.empty(batch, heads, blocks, programs, dtype=torch.float32, device=q.device)
    saved = _new_pairs(batch, heads if keep else 0, tokens, blocks, units, q.device)
    if not q.numel():
        return shares.zero_(), *saved
    if keep:
        # Rows of other blocks have no estimate.
        saved[0].fill_(-torch.inf)
    counts, indices = counts.contiguous(), indices.contiguous()
    # Matrices, and of pairs of a block and a unit the bias and the mixture.
    of_head = 2 * dim * dim * (blocks * group + (units if estimates.covariances is None else 0)) + 6 * group * blocks * units * (not keep)
    for own, shared in head_groups(q, k, of_head):
        some, queries = _of_heads(estimates, own, shared), q[own]
        tail_lse, bias, mixture = [x[own] for x in saved] if keep else _new_pairs(*queries.shape[:3], blocks, units, q.device)
        lists = block_lists(_of_lists(counts, heads, own, shared), _of_lists(indices, heads, own, shared), queries.shape[1], key_blocks)
        left = torch.empty(bias.shape[:3], dtype=torch.int32, device=q.device)
        tail_rows.unit_bias(some.log_count, some.half_variance, some.mass, lists, some.useful, parts, bias, left, mixture)
        matrix = torch.empty(*mixture.shape[:3], dim * dim, dtype=torch.bfloat16, device=q.device)
        if some.scales is not None:
            coded.mixtures(mixture, some.covariances, some.scales, matrix)
        else:
            covariances = some.covariances
            if covariances is None:
                covariances = _new_matrices(some.k_mean, dim * dim)
                tail_statistics.covariances(k[shared], v[shared], kv_offsets, some.k_mean, some.v_mean, some.log_count, some.order,
                                            some.useful, parts, covariances)
            (matrices or _matrices)(mixture, covariances, matrix)
            del covariances
        merge(merged[own], lse[own], queries, some.k_mean, some.v_mean, bias, left, matrix, tail_lse, q_offsets, scale, shares[own])
        # Before those of the next heads.
        del matrix, tail_lse, bias, mixture
    if merged is not out:
        out.copy_(merged)
    return shares, *saved


def combine_backward(
    dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float, *, matrices: Callable[..., None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``combine_backward`` of ``eager/tail.py``. ``matrices``: as of ``combine``."""
    if not tma_ok(mixture):
        mixture = mixture.new_empty(*mixture.shape[:3], _row(mixture.shape[3]))[..., :mixture.shape[3]].copy_(mixture)
    dout, exact, out, q, k, v = map(strided, (dout, exact, out, q, k, v))
    exact_lse, order = exact_lse.contiguous(), None if order is None else order.contiguous()
    # Rows without an estimate pass on the gradient that arrives, and add nothing. It lies as q does, so that dq may take its memory.
    dexact = torch.empty_like(q).copy_(dout)
    dexact_lse, dq, dk, dv = map(torch.zeros_like, (lse, q, k, v))
    if not q.numel() or not k.numel():
        return dexact, dexact_lse, dq, dk, dv
    dim, (blocks, units), group = q.shape[3], bias.shape[2:], q.shape[1] // k.shape[1]
    # Matrices of units and of blocks' queries; their gradients take the same memory.
    of_head = 2 * dim * dim * (units + blocks * group)
    for own, shared in head_groups(q, k, of_head, 2):
        keys, values, counts, places = k[shared], v[shared], log_count[shared], None if order is None else order[shared]
        of_units, mixed = (k_mean[shared], v_mean[shared]), mixture[own]
        covariances = _new_matrices(of_units[0], dim * dim)
        tail_statistics.covariances(keys, values, kv_blocks[0], *of_units, counts, places, None, units // kv_blocks[1], covariances)
        matrix = torch.empty(*mixed.shape[:3], dim * dim, dtype=torch.bfloat16, device=q.device)
        (matrices or _matrices)(mixed, covariances, matrix)
        of_rows = tail_backward.row_gradients(
            dexact[own], dexact_lse[own], dq[own], dout[own], exact[own], exact_lse[own], out[own], lse[own], tail_lse[own], q[own],
            q_blocks, bias[own], *of_units, matrix, mixed, covariances, scale)
        del matrix
        tail_backward.key_gradients(dk[shared], dv[shared], dout[own], q[own], keys, values, q_blocks, kv_blocks, bias[own], of_rows,
                                    counts, places, *of_units, covariances, scale)
        # Before those of the next heads.
        del covariances, of_rows
    return dexact, dexact_lse, dq, dk, dv


def head_groups(q: Tensor, k: Tensor, of_head: int, budgets: int = 1) -> Iterator[tuple[tuple, tuple]]:
    """Indices of (query heads, key heads) that a step does at once: as many key heads of one batch element, each of which takes ``of_head``
    bytes, as so many budgets allow, at least one, in groups of nearly the same size; or all of all."""
    batch, heads, kv_heads = *q.shape[:2], k.shape[1]
    group = heads // kv_heads
    most = max(1, int(budgets * BUDGET * max(q.numel(), (q.numel() + k.numel()) // 2) * q.element_size()) // of_head)
    if batch * kv_heads <= most:
        yield (slice(None),) * 2, (slice(None),) * 2
        return
    at_once = -(-kv_heads // -(-kv_heads // most))
    for b in range(batch):
        for first in range(0, kv_heads, at_once):
            end = min(first + at_once, kv_heads)
            yield (slice(b, b + 1), slice(first * group, end * group)), (slice(b, b + 1), slice(first, end))


def _new_means(k: Tensor, kv_blocks: Blocks, parts: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """log_count, order, k_mean and v_mean, of which the order and of two units the count are found; zeros where there are no keys."""
    shape = *k.shape[:2], kv_blocks[1] * parts
    new = torch.empty if k.numel() else torch.zeros
    log_count = new(shape, dtype=torch.float32, device=k.device)
    k_mean, v_mean = (new(*shape, k.shape[3], dtype=k.dtype, device=k.device) for _ in range(2))
    if parts == 1:
        return log_count, None, k_mean, v_mean
    if not k.numel():
        return log_count, new(k.shape[:3], dtype=torch.int32, device=k.device), k_mean, v_mean
    return log_count, tail_order.principal_order(k, kv_blocks[0], kv_blocks[1], log_count), k_mean, v_mean


def _new_matrices(means: Tensor, size: int) -> Tensor:
    """Memory for a matrix of so many entries for each of ``means``."""
    return torch.empty(*means.shape[:3], size, dtype=torch.bfloat16, device=means.device)


def _new_pairs(batch: int, heads: int, tokens: int, blocks: int, units: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for tail_lse, bias and mixture."""
    bias = torch.empty(batch, heads, blocks, units, dtype=torch.float32, device=device)
    mixture = torch.empty(batch, heads, blocks, _row(units), dtype=torch.bfloat16, device=device)
    return torch.empty(batch, heads, tokens, dtype=torch.float32, device=device), bias, mixture[..., :units]


def _row(units: int) -> int:
    """Entries of a mixture's row in memory: all rows begin at multiples of 16 bytes, as what multiplies them wants it."""
    return -(-units // 8) * 8


def _of_heads(estimates: BlockEstimates, own: tuple, shared: tuple) -> BlockEstimates:
    """The estimates of a group of ``head_groups``."""
    fields = {name: x[own if name in ("half_variance", "mass", "useful") else shared] for name, x in vars(estimates).items()
              if isinstance(x, Tensor)}
    return BlockEstimates(**vars(estimates) | fields)


def _of_lists(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]


def _matrices(mixture: Tensor, covariances: Tensor, matrix: Tensor) -> None:
    """``hopper_matrices`` by torch: the query heads of a key head are rows of one product."""
    kv_heads = covariances.shape[1]
    torch.bmm(by_kv_head(mixture, kv_heads), covariances.flatten(0, 1), out=by_kv_head(matrix, kv_heads))


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)
