"""The tail by Triton's kernels, before attention: blocks' statistics, what queries see in them, and scores.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter. The same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..lowering.inputs import strided
from ..tail import CAP, BlockEstimates, Blocks, KeyStatistics, by_kv_head, sampled_queries
from . import coded, tail_order, tail_rows, tail_statistics
from .tail_groups import evenly, head_groups, mean_bytes, of_group

# The estimate's matrices [D, D] of units and blocks may take this share of ``mean_bytes``; more heads than that are done one group after
# another. Attention's result and its lists, which are to come, take more.
ESTIMATE_ROOM = 1.4


def key_statistics(k: Tensor, v: Tensor, kv_blocks: Blocks, parts: int, covariances: bool) -> KeyStatistics:
    """``key_statistics`` of ``eager/tail.py``."""
    k, v, (offsets, blocks, _) = strided(k), strided(v), kv_blocks
    log_count, k_mean, v_mean = _new_means(k, blocks * parts)
    moments = _new_matrices(k_mean, tail_statistics.packed_size(k.shape[3]))
    known = _new_matrices(k_mean, k.shape[3]**2) if covariances else None
    if not k.numel():
        for x in (log_count, k_mean, v_mean, moments, known):
            if x is not None:
                x.zero_()
        return KeyStatistics(parts, log_count, _no_order(k, parts), k_mean, v_mean, moments, known)
    order = tail_order.principal_order(k, offsets, blocks, log_count) if parts > 1 else None
    tail_statistics.key_statistics(k, v, offsets, k_mean, v_mean, log_count, order, parts, moments)
    if known is not None:
        tail_statistics.covariances(k, v, offsets, k_mean, v_mean, log_count, order, None, parts, known)
    return KeyStatistics(parts, log_count, order, k_mean, v_mean, moments, known)


def estimate(q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, scale: float, parts: int, useful: Tensor | None = None,
             known: KeyStatistics | None = None, *, variances: Callable[..., None] | None = None,
             masses: Callable[..., None] = tail_rows.sampled_mass, room: float = ESTIMATE_ROOM) -> BlockEstimates:
    """``estimate`` of ``eager/tail.py``. ``variances``: ``hopper_half_variances``, for numbers of units for which it is faster than cuBLAS.
    ``masses``: ``hopper_mass`` or the portable kernel. ``room``: as ESTIMATE_ROOM."""
    q = strided(q)
    # cuBLAS takes kernels for Ampere where the number of units is no multiple of 8.
    variances = variances if variances is not None and kv_blocks[1] * parts % 8 else _half_variances
    if known is not None:
        return _estimate_of_known(q, q_blocks, scale, known, useful, variances, masses, room * mean_bytes(q, q))
    k, v, (offsets, blocks, _) = strided(k), strided(v), kv_blocks
    log_count, k_mean, v_mean = _new_means(k, blocks * parts)
    if not q.numel() or not k.numel():
        for x in (log_count, k_mean, v_mean):
            x.zero_()
        return BlockEstimates(parts, log_count, *_nothing_seen(q, q_blocks, k_mean), _no_order(k, parts), k_mean, v_mean,
                              _all_useful(q, useful))
    # Keys' statistics are made for some heads after others.
    order = tail_order.principal_order(k, offsets, blocks, log_count) if parts > 1 else None

    def keys_of(shared: tuple) -> tuple[Tensor, ...]:
        moments = _new_matrices(k_mean[shared], tail_statistics.packed_size(k.shape[3]))
        tail_statistics.key_statistics(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared],
                                       None if order is None else order[shared], parts, moments)
        return (moments,)

    half_variance, mass, error = _seen(q, q_blocks, scale, log_count, k_mean, keys_of, k_mean.shape[2], 1, variances, masses,
                                       room * mean_bytes(q, k))
    return BlockEstimates(parts, log_count, half_variance, mass, order, k_mean, v_mean, _useful(error, useful))


def _estimate_of_known(q: Tensor, q_blocks: Blocks, scale: float, known: KeyStatistics, useful: Tensor | None,
                       variances: Callable[..., None], masses: Callable[..., None], room: float) -> BlockEstimates:
    """``estimate`` where keys' statistics are known. room: in bytes."""
    log_count, k_mean, v_mean, moments = (x.contiguous() for x in (known.log_count, known.k_mean, known.v_mean, known.moments))
    order, covariances = (None if x is None else x.contiguous() for x in (known.order, known.covariances))
    slabs, matrices = 1, [moments]
    if known.scales is not None:
        variances, slabs, matrices = coded.half_variances, coded.slabs(q.shape[3]), [moments, known.scales.contiguous()]
    if q.numel():
        half_variance, mass, error = _seen(q, q_blocks, scale, log_count, k_mean, lambda shared: of_group(shared, *matrices), 0, slabs,
                                           variances, masses, room)
        useful = _useful(error, useful)
    else:
        (half_variance, mass), useful = _nothing_seen(q, q_blocks, k_mean), _all_useful(q, useful)
    return BlockEstimates(known.parts, log_count, half_variance, mass, order, k_mean, v_mean, useful, covariances, known.scales)


def _new_means(k: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for log_count, k_mean and v_mean."""
    shape = *k.shape[:2], units
    k_mean, v_mean = (torch.empty(*shape, k.shape[3], dtype=k.dtype, device=k.device) for _ in range(2))
    return torch.empty(shape, dtype=torch.float32, device=k.device), k_mean, v_mean


def _new_matrices(means: Tensor, size: int) -> Tensor:
    """Memory for a matrix of so many entries for each of ``means``."""
    return torch.empty(*means.shape[:3], size, dtype=torch.bfloat16, device=means.device)


def _no_order(k: Tensor, parts: int) -> Tensor | None:
    return torch.zeros(k.shape[:3], dtype=torch.int32, device=k.device) if parts > 1 else None


def _nothing_seen(q: Tensor, q_blocks: Blocks, k_mean: Tensor) -> tuple[Tensor, Tensor]:
    """half_variance and mass where there are no queries or no keys."""
    half_variance, mass = (torch.zeros(*q.shape[:2], q_blocks[1], k_mean.shape[2], dtype=torch.bfloat16, device=q.device)
                           for _ in range(2))
    return half_variance, mass


def _all_useful(q: Tensor, useful: Tensor | None) -> Tensor:
    return torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if useful is None else useful


def _useful(error: Tensor, useful: Tensor | None) -> Tensor:
    return tail_rows.useful_heads(error) if useful is None else useful


def _seen(q: Tensor, q_blocks: Blocks, scale: float, log_count: Tensor, k_mean: Tensor, keys_of: Callable[[tuple], Sequence[Tensor]],
          made: int, slabs: int, variances: Callable[..., None], masses: Callable[..., None], room: float) -> tuple[Tensor, Tensor, Tensor]:
    """What query blocks see in units: half_variance and mass, as ``BlockEstimates`` has them, and float32 ``[B, H, N]``, the sum of
    mass x h.

    Args:
        keys_of: gives what the units of some key heads have for ``variances``, and makes ``made`` matrices a head for them.
        slabs: parts of a sum in which ``variances`` writes h.
        room: in bytes.
    """
    (offsets, blocks, longest), (batch, heads, _, dim), (kv_heads, units) = q_blocks, q.shape, k_mean.shape[1:3]
    sample, group = sampled_queries(longest), heads // kv_heads
    # Only half of a symmetric matrix is kept.
    entries = tail_statistics.packed_size(dim)
    most = int(room / (2 * entries * (made + blocks * group)))
    # The kernel that compares queries with units reads numbers of four bytes faster.
    wide = torch.empty(batch, heads, blocks, slabs * units, dtype=torch.float32, device=q.device)
    for own, shared in head_groups(batch, kv_heads, group, evenly(kv_heads, most)):
        keys, queries = keys_of(shared), _new_matrices(wide[own], entries)
        tail_statistics.query_moments(q[own], offsets, blocks, sample, 0.5 * scale**2, queries)
        variances(queries, *keys, wide[own])
        # Before those of the next heads.
        del keys, queries
    half_variance, mass = (torch.empty(batch, heads, blocks, units, dtype=torch.bfloat16, device=q.device) for _ in range(2))
    error = torch.empty(batch, heads, blocks, dtype=torch.float32, device=q.device)
    masses(q, k_mean, log_count, wide, offsets, scale, sample, CAP, mass, half_variance, error)
    return half_variance, mass, error


def _half_variances(queries: Tensor, keys: Tensor, half_variance: Tensor) -> None:
    """``hopper_half_variances`` by torch."""
    kv_heads = keys.shape[1]
    _wide_product(by_kv_head(queries, kv_heads), keys.flatten(0, 1).mT, by_kv_head(half_variance, kv_heads))


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """In float32, of bfloat16."""
    if a.is_cuda:
        torch.bmm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(a.float(), b.float(), out=out)

