"""The tail by Triton's kernels: blocks' statistics, the merge of their estimate with the exact part, and its gradients.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter; out's last stride must be 1, and each lse is
float32 and contiguous. The same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..tail import CAP, ITERATIONS, BlockEstimates, by_kv_head, covariances_wait, sampled_queries, useful_heads
from . import tail_order, tail_rows, tail_statistics
from .tail_backward import triton_tail_backward

# What one step may take for matrices [D, D] of all units, as a share of q's bytes; more heads than that are done one group after another.
# Before attention there is room where its result will be. Afterwards q, k, v and that result are there: MERGE_ROOM is of all that the tail
# holds beside them, numbers of pairs of a block and a unit too, so that a layer is within 1.25 times these four.
ESTIMATE_ROOM, MERGE_ROOM, BACKWARD_ROOM = 1.0, 0.84, 0.4
# Bytes of a pair of a block and a unit: mass and h, which wait; bias and the mixture.
KNOWN_OF_A_PAIR, MADE_OF_A_PAIR = 4, 6


def estimate(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, scale: float, parts: int,
             useful: Tensor | None = None, *, key_statistics: Callable[..., None] | None = None) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``. ``key_statistics``: ``hopper_key_statistics``, where ``why_not_hopper_statistics`` is None; it
    computes covariances with the rest, and does so where there is room for them to wait."""
    new = log_count, half_variance, mass, order, k_mean, v_mean, error = _new_estimates(q, k, v, num_blocks, parts)
    covariances = None
    if key_statistics is not None and covariances_wait(q, k, num_blocks):
        covariances = tail_statistics.new_covariances(k_mean)
    halves = order if parts > 1 else None
    if not q.numel():
        for x in (*new, *([] if covariances is None else [covariances])):
            x.zero_()
        return BlockEstimates(parts, log_count, half_variance, mass, halves, k_mean, v_mean,
                              useful_heads(error) if useful is None else useful, covariances)
    units, sample = num_blocks * parts, sampled_queries(longest)
    with torch.cuda.device_of(q):
        if halves is not None:
            tail_order.principal_order(k, offsets, num_blocks, ITERATIONS, halves)
        # Of symmetric matrices half is kept.
        matrices = -(-(units + num_blocks * (q.shape[1] // k.shape[1])) * tail_statistics.packed_size(k.shape[3]) // k.shape[3]**2)
        # The kernel that compares queries with units reads numbers of four bytes faster.
        wide = torch.empty(half_variance.shape, dtype=torch.float32, device=q.device)
        for own, shared in _head_groups(q, k.shape[1], matrices, ESTIMATE_ROOM):
            if covariances is not None and key_statistics is not None:
                keys = tail_statistics.new_moments(k_mean[shared])
                key_statistics(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared], keys, covariances[shared],
                               tail_statistics.SLAB)
            else:
                keys = tail_statistics.key_statistics(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared],
                                                      None if halves is None else halves[shared], parts)
            wide[own] = _half_variance(tail_statistics.query_moments(q[own], offsets, num_blocks, sample, 0.5 * scale**2), keys)
            del keys
        tail_rows.sampled_mass(q, k_mean, log_count, wide, offsets, scale, sample, CAP, mass, half_variance, error)
    return BlockEstimates(parts, log_count, half_variance, mass, halves, k_mean, v_mean,
                          useful_heads(error) if useful is None else useful, covariances)


def scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    """``scores`` of ``eager/tail.py``, in float32."""
    found = torch.empty(*mass.shape[:3], mass.shape[2], dtype=torch.float32, device=mass.device)
    if found.numel():
        with torch.cuda.device_of(mass):
            tail_rows.scores(mass, half_variance, log_count, found)
    return found


def combine(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, counts: Tensor,
            indices: Tensor, estimates: BlockEstimates, scale: float, keep: bool, *,
            merge: Callable[..., None] = tail_rows.combine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``combine`` of ``eager/tail.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``merge``:
    ``hopper_tail_merge``, where ``why_not_hopper_merge`` is None, or the portable kernel."""
    heads, kv_heads, parts = q.shape[1], k.shape[1], estimates.parts
    share = torch.empty(q.shape[0], heads, num_blocks, dtype=torch.float32, device=q.device)
    tail_lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    kept_bias, kept_mixture = _new_pairs(q, heads if keep else 0, num_blocks, parts)
    if not q.numel():
        return share.zero_(), tail_lse, kept_bias.zero_(), kept_mixture.zero_()
    half_variance, covariances, order, useful = estimates.half_variance, estimates.covariances, estimates.order, estimates.useful
    with torch.cuda.device_of(q):
        left = torch.empty(share.shape, dtype=torch.int32, device=q.device)
        used = useful if heads == kv_heads else useful.unflatten(1, (kv_heads, -1)).any(-1)
        pairs = heads // kv_heads * num_blocks**2 * parts
        held = KNOWN_OF_A_PAIR * half_variance.numel() + 4 * indices.numel() + (0 if covariances is None else 2 * covariances.numel())
        matrices = num_blocks * (heads // kv_heads + (parts if covariances is None else 0))
        for own, shared in _head_groups(q, kv_heads, matrices, MERGE_ROOM - held / (q.numel() * q.element_size()), MADE_OF_A_PAIR * pairs):
            some = q[own]
            if keep:
                bias, mixture = kept_bias[own], kept_mixture[own]
            else:
                bias, mixture = _new_pairs(some, some.shape[1], num_blocks, parts)
            lists = tail_rows.block_lists(_of_group(counts, heads, own, shared), _of_group(indices, heads, own, shared), some.shape[1],
                                          num_blocks)
            tail_rows.unit_bias(estimates.log_count[shared], half_variance[own], estimates.mass[own], lists, useful[own], CAP, bias,
                                left[own], mixture)
            k_mean, v_mean = estimates.k_mean[shared], estimates.v_mean[shared]
            if covariances is not None:
                squares = covariances[shared]
            else:
                squares = tail_statistics.covariances(k[shared], v[shared], offsets, k_mean, v_mean, estimates.log_count[shared],
                                                      None if order is None else order[shared], used[shared], parts)
            matrix = torch.bmm(by_kv_head(mixture, squares.shape[1]), squares.flatten(0, 1))
            del squares, mixture
            merge(out[own], lse[own], some, k_mean, v_mean, bias, left[own], matrix, tail_lse[own], offsets, longest, scale, share[own])
            del matrix, bias
    return share, tail_lse, kept_bias, kept_mixture


def combine_backward(
    dout: Tensor, dlse: Tensor | None, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, mixture: Tensor, log_count: Tensor, order: Tensor | None,
    k_mean: Tensor, v_mean: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``combine_backward`` of ``eager/tail.py``."""
    # What rows get that no estimate has touched: what arrives passes on, and nothing is added.
    dexact = dout.clone(memory_format=torch.contiguous_format if dout.stride(-1) != 1 else torch.preserve_format)
    dexact_lse = torch.zeros_like(lse) if dlse is None else dlse.clone(memory_format=torch.contiguous_format)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dexact, dexact_lse, dq, dk, dv
    kv_heads, (blocks, units) = k.shape[1], bias.shape[2:]
    parts = units // blocks
    exact_lse = exact_lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    # Those of a block's units, and of its queries with their gradients.
    matrices = blocks * (parts + 2 * q.shape[1] // kv_heads)
    with torch.cuda.device_of(q):
        for own, shared in _head_groups(q, kv_heads, matrices, BACKWARD_ROOM):
            halves = None if order is None else order[shared]
            covariances = tail_statistics.covariances(
                k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared], halves, None, parts)
            mixed = by_kv_head(mixture[own], covariances.shape[1])
            matrix = torch.bmm(mixed, covariances.flatten(0, 1))
            del covariances
            triton_tail_backward(
                dexact[own], dexact_lse[own], dq[own], dk[shared], dv[shared], dout[own], None if dlse is None else dlse[own], exact[own],
                exact_lse[own], out[own], lse[own], tail_lse[own], q[own], k[shared], v[shared], offsets, longest, bias[own],
                log_count[shared], halves, k_mean[shared], v_mean[shared], matrix, mixed, scale)
            del matrix
    return dexact, dexact_lse, dq, dk, dv


def _new_estimates(q: Tensor, k: Tensor, v: Tensor, num_blocks: int, parts: int) -> tuple[Tensor, ...]:
    """log_count, h, mass, order (empty where blocks are not divided), k_mean, v_mean and the sum of mass x h, uninitialised."""
    batch, heads, tokens, dim = q.shape
    kv_heads, units = k.shape[1], num_blocks * parts
    pairs = batch, heads, num_blocks, units
    return (q.new_empty(batch, kv_heads, units, dtype=torch.float32),
            q.new_empty(pairs, dtype=torch.bfloat16), q.new_empty(pairs, dtype=torch.bfloat16),
            q.new_empty((batch, kv_heads, tokens) if parts > 1 else (0,), dtype=torch.int32),
            k.new_empty(batch, kv_heads, units, dim), v.new_empty(batch, kv_heads, units, dim),
            q.new_empty(batch, heads, num_blocks, dtype=torch.float32))


def _new_pairs(q: Tensor, heads: int, num_blocks: int, parts: int) -> tuple[Tensor, Tensor]:
    """bias and mixture of some heads, uninitialised."""
    units = num_blocks * parts
    # Rows of 16 bytes: what torch multiplies fast.
    mixture = q.new_empty(q.shape[0], heads, num_blocks, -(-units // 8) * 8, dtype=torch.bfloat16)
    return q.new_empty(q.shape[0], heads, num_blocks, units, dtype=torch.float32), mixture[..., :units]


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


def _half_variance(queries: Tensor, keys: Tensor) -> Tensor:
    """float32 ``[B, H, N, U]`` of moments ``[B, H, N, n]`` and ``[B, Hkv, U, n]``."""
    a, b = by_kv_head(queries, keys.shape[1]), keys.flatten(0, 1).mT
    product = torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
    return product.view(*queries.shape[:3], -1)


def _of_group(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``_head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]
