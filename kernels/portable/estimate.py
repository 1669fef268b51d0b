"""The estimate by Triton's kernels: blocks' statistics, what queries see in them, the merge with the exact part, and gradients.

Arguments and results are those of ``eager/estimate.py``, on a GPU or in Triton's interpreter; each lse is float32 and contiguous. The same
inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..estimate import CAP, Blocks, Estimate, by_kv_head, sampled_queries, useful_heads
from ..lowering.chunks import block_lists
from ..lowering.inputs import loaded, strided
from . import coded, estimate_backward, estimate_order, estimate_rows, estimate_statistics

# A step works on so many heads at once that their matrices take this share of q's bytes, or with more keys than queries of the mean of q's
# and k's. Twice as much is free while attention's result, or the gradients of the exact part, are to come. At 720p a layer then holds 1.25
# times q, k, v and the result.
BUDGET = 0.65


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> Estimate:
    """``key_statistics`` of ``eager/estimate.py``."""
    k, v = strided(k), strided(v)
    log_count, order, k_mean, v_mean = _new_means(k, kv_blocks, parts)
    moments = _new_matrices(k_mean, estimate_statistics.packed_size(k.shape[3]))
    mixed = _new_matrices(k_mean, k.shape[3]**2) if covariances else None
    if k.numel():
        estimate_statistics.key_statistics(k, v, kv_blocks[0], k_mean, v_mean, log_count, order, parts, moments)
        if mixed is not None:
            estimate_statistics.covariances(k, v, kv_blocks[0], k_mean, v_mean, log_count, order, None, parts, mixed)
    else:
        for x in (moments, mixed):
            if x is not None:
                x.zero_()
    return Estimate(parts, log_count, order, k_mean, v_mean, moments, mixed)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: Estimate | None = None) -> Estimate:
    """``estimate`` of ``eager/estimate.py``."""
    q = strided(q)
    if known is None:
        k, v = strided(k), strided(v)
        keys = Estimate(parts, *_new_means(k, kv_blocks, parts))
    else:
        keys = Estimate(**vars(known) | {name: x.contiguous() for name, x in vars(known).items() if isinstance(x, Tensor)})
    log_count, order, k_mean, v_mean = keys.log_count, keys.order, keys.k_mean, keys.v_mean
    (offsets, blocks, longest), (batch, heads, _, dim), (kv_heads, units) = q_blocks, q.shape, k_mean.shape[1:3]
    group, entries = heads // kv_heads, estimate_statistics.packed_size(dim)
    half_variance, mass = (torch.empty(batch, heads, blocks, units, dtype=torch.bfloat16, device=q.device) for _ in range(2))
    if not q.numel() or known is None and not k.numel():
        useful = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if useful is None else useful
        scores = torch.zeros(batch, heads, blocks, units // parts, dtype=torch.float32, device=q.device)
        return replace(keys, moments=None, half_variance=half_variance.zero_(), mass=mass.zero_(), useful=useful, scores=scores)
    sample, rows = sampled_queries(longest), padded(units)
    # The kernel that compares queries with units reads numbers of four bytes faster.
    slabs = 1 if keys.scales is None else coded.slabs(dim)
    wide = torch.empty(batch, heads, blocks, rows if keys.scales is None else slabs * units, dtype=torch.float32, device=q.device)
    of_head = 2 * entries * (blocks * group + (rows if known is None else 0))
    for own, shared in head_groups(q, k, of_head, 2):
        if keys.moments is None:
            moments = _new_matrices(k_mean[shared], entries, rows)
            estimate_statistics.key_statistics(k[shared], v[shared], kv_blocks[0], k_mean[shared], v_mean[shared], log_count[shared],
                                           None if order is None else order[shared], parts, moments)
        else:
            moments = keys.moments[shared]
        queries = _new_matrices(wide[own], entries)
        estimate_statistics.query_moments(q[own], offsets, blocks, sample, 0.5 * scale**2, queries)
        if keys.scales is not None:
            coded.half_variances(queries, moments, keys.scales[shared], wide[own])
        else:
            products = wide[own][..., :moments.shape[2]]
            _wide_product(by_kv_head(queries, moments.shape[1]), moments.flatten(0, 1).mT, by_kv_head(products, moments.shape[1]))
        # Before those of the next heads.
        del moments, queries
    error, scores = (torch.empty(batch, heads, blocks, *each, dtype=torch.float32, device=q.device) for each in ((), (units // parts,)))
    estimate_rows.sampled_mass(q, k_mean, log_count, wide, offsets, scale, sample, CAP, mass, half_variance, error, scores, slabs)
    useful = useful_heads(error) if useful is None else useful
    return replace(keys, moments=None, half_variance=half_variance, mass=mass, useful=useful, scores=scores)


def merge(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: Estimate, scale: float, keep: bool, *, kernel: Callable[..., None] = estimate_rows.merge,
            kernel_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``merge`` of ``eager/estimate.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``kernel``, which takes
    so many rows at once: ``hopper_merge``, where a backend names it, or the portable kernel."""
    (merged, q), k, v = map(strided if kernel_rows is None else loaded, (out, q)), strided(k), strided(v)
    (q_offsets, blocks, longest), (kv_offsets, key_blocks, _), parts = q_blocks, kv_blocks, estimates.parts
    (batch, heads, tokens, dim), kv_heads, units = q.shape, k.shape[1], key_blocks * parts
    group = heads // kv_heads
    programs = -(-longest // (kernel_rows or estimate_rows.merged_rows(q)))
    shares = torch.empty(batch, heads, blocks, programs, dtype=torch.float32, device=q.device)
    saved = _new_pairs(batch, heads if keep else 0, tokens, blocks, units, q.device)
    if not q.numel():
        return shares.zero_(), saved[0], saved[1], saved[2][..., :units]
    if keep:
        # Rows of other blocks have no estimate.
        saved[0].fill_(-torch.inf)
    counts, indices = counts.contiguous(), indices.contiguous()
    # Matrices, and of pairs of a block and a unit the bias and the mixture.
    of_head = 2 * dim * dim * blocks * group + (0 if keep else 6 * group * blocks * units)
    if estimates.covariances is None:
        of_head += 2 * dim * dim * padded(units)
    for own, shared in head_groups(q, k, of_head):
        some, queries = _of_heads(estimates, own, shared), q[own]
        made = saved if keep else _new_pairs(queries.shape[0], queries.shape[1], tokens, blocks, units, q.device)
        estimate_lse, bias, mixture = [x[own] for x in made] if keep else made
        lists = block_lists(_of_lists(counts, heads, own, shared), _of_lists(indices, heads, own, shared), queries.shape[1], key_blocks)
        left = torch.empty(bias.shape[:3], dtype=torch.int32, device=q.device)
        half_variance, mass, useful = some.of_queries
        estimate_rows.unit_bias(some.log_count, half_variance, mass, lists, useful, parts, bias, left, mixture)
        matrix = torch.empty(*mixture.shape[:3], dim * dim, dtype=torch.bfloat16, device=q.device)
        if some.covariances is not None and some.scales is not None:
            coded.mixtures(mixture[..., :units], some.covariances, some.scales, matrix)
        else:
            covariances = some.covariances
            if covariances is None:
                covariances = _new_matrices(some.k_mean, dim * dim, padded(units))
                estimate_statistics.covariances(k[shared], v[shared], kv_offsets, some.k_mean, some.v_mean, some.log_count, some.order,
                                                useful, parts, covariances)
            _mix(mixture, covariances, matrix)
            del covariances
        kernel(merged[own], lse[own], queries, some.k_mean, some.v_mean, bias, left, matrix, estimate_lse, q_offsets, scale, shares[own])
        # Before those of the next heads.
        del matrix, made, estimate_lse, bias, mixture
    if merged is not out:
        out.copy_(merged)
    return shares, saved[0], saved[1], saved[2][..., :units]


def merge_backward(
    dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, estimate_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``merge_backward`` of ``eager/estimate.py``."""
    dout, exact, out, q, k, v = map(strided, (dout, exact, out, q, k, v))
    exact_lse, order = exact_lse.contiguous(), None if order is None else order.contiguous()
    # Rows without an estimate pass on the gradient that arrives, and add nothing. It lies as q does, so that dq may take its memory.
    dexact = torch.empty_like(q).copy_(dout)
    dexact_lse, dq, dk, dv = map(torch.zeros_like, (lse, q, k, v))
    if not q.numel() or not k.numel():
        return dexact, dexact_lse, dq, dk, dv
    dim, (blocks, units), group = q.shape[3], bias.shape[2:], q.shape[1] // k.shape[1]
    # Matrices of units and of blocks' queries; their gradients take the same memory.
    of_head = 2 * dim * dim * (padded(units) + blocks * group)
    for own, shared in head_groups(q, k, of_head, 2):
        keys, values, counts, places = k[shared], v[shared], log_count[shared], None if order is None else order[shared]
        of_units, mixed = (k_mean[shared], v_mean[shared]), pad(mixture[own], (0, padded(units) - units))
        covariances = _new_matrices(of_units[0], dim * dim, padded(units))
        estimate_statistics.covariances(keys, values, kv_blocks[0], *of_units, counts, places, None, units // kv_blocks[1], covariances)
        matrix = torch.empty(*mixed.shape[:3], dim * dim, dtype=torch.bfloat16, device=q.device)
        _mix(mixed, covariances, matrix)
        of_rows = estimate_backward.row_gradients(
            dexact[own], dexact_lse[own], dq[own], dout[own], exact[own], exact_lse[own], out[own], lse[own], estimate_lse[own], q[own],
            q_blocks, bias[own], *of_units, matrix, mixed, covariances, scale)
        del matrix
        estimate_backward.key_gradients(dk[shared], dv[shared], dout[own], q[own], keys, values, q_blocks, kv_blocks, bias[own], of_rows,
                                    counts, places, *of_units, covariances, scale)
        # Before those of the next heads.
        del covariances, of_rows
    return dexact, dexact_lse, dq, dk, dv


def head_groups(q: Tensor, k: Tensor, of_head: int, budgets: int = 1) -> Iterator[tuple[tuple, tuple]]:
    """Indices of the query heads and the key heads that a step works on at once: all, or some of one batch element.

    Args:
        of_head: bytes that a key head takes, with its query heads.
        budgets: how many budgets there are. Groups are as few as these allow, at least of one key head, and nearly of the same size.
    """
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
    return log_count, estimate_order.principal_order(k, kv_blocks[0], kv_blocks[1], log_count), k_mean, v_mean


def _new_matrices(means: Tensor, size: int, rows: int | None = None) -> Tensor:
    """Memory for a matrix of so many entries for each of ``means``, or for so many of each head."""
    return torch.empty(*means.shape[:2], rows or means.shape[2], size, dtype=torch.bfloat16, device=means.device)


def _new_pairs(batch: int, heads: int, tokens: int, blocks: int, units: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for estimate_lse, bias and the mixture of ``padded`` units."""
    bias = torch.empty(batch, heads, blocks, units, dtype=torch.float32, device=device)
    mixture = torch.empty(batch, heads, blocks, padded(units), dtype=torch.bfloat16, device=device)
    return torch.empty(batch, heads, tokens, dtype=torch.float32, device=device), bias, mixture


def padded(units: int) -> int:
    """The next multiple of 8: for other numbers cuBLAS takes kernels for Ampere, which need up to four times as long on Hopper."""
    return -(-units // 8) * 8


def _of_heads(estimates: Estimate, own: tuple, shared: tuple) -> Estimate:
    """The estimates of a group of ``head_groups``."""
    return Estimate(**vars(estimates) | {name: x[own if name in ("half_variance", "mass", "useful", "scores") else shared]
                                         for name, x in vars(estimates).items() if isinstance(x, Tensor)})


def _of_lists(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]


def _mix(mixture: Tensor, covariances: Tensor, matrix: Tensor) -> None:
    """Writes ``matrix [B, H, N, D * D]``, the product of ``mixture [B, H, N, U]``, which may have more columns, and ``covariances [B, Hkv,
    U, D * D]``. The query heads of a key head are rows of one product."""
    kv_heads, units = covariances.shape[1:3]
    torch.bmm(by_kv_head(mixture[..., :units], kv_heads), covariances.flatten(0, 1), out=by_kv_head(matrix, kv_heads))


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)
