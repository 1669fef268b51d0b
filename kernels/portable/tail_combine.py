"""The tail by Triton's kernels, after attention: the merge of the estimate with the exact part, and its gradients.

Arguments and results are those of ``eager/tail.py``, on a GPU or in Triton's interpreter; each lse is float32 and contiguous. The same
inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..lowering.chunks import block_lists
from ..lowering.inputs import loaded, strided, tma_ok
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


def combine(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, counts: Tensor, indices: Tensor,
            estimates: BlockEstimates, scale: float, keep: bool, *, merge: Callable[..., None] = tail_rows.merge,
            merge_rows: int | None = None, matrices: Callable[..., None] | None = None, room: float = MERGE_ROOM
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``combine`` of ``eager/tail.py``; the mixture is bfloat16, and its rows are dense but not contiguous. ``merge``, which takes so many
    rows at once: ``hopper_tail_merge``, where a backend names it, or the portable kernel; ``matrices``: there ``hopper_matrices``, else
    torch's product. ``room``: as MERGE_ROOM."""
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
    left = torch.empty(batch, heads, blocks, dtype=torch.int32, device=q.device)
    counts, indices = counts.contiguous(), indices.contiguous()
    held = KNOWN_OF_A_PAIR * estimates.half_variance.numel() + 4 * indices.numel()
    of_units = 2 * dim * dim * units
    if estimates.covariances is not None:
        held, of_units = held + min(2 * estimates.covariances.numel(), int(CACHED_ROOM * mean_bytes(q, k))), 0
    many, few = _at_once(kv_heads, room * mean_bytes(q, k) - held, of_units + 2 * dim * dim * blocks * group,
                         MADE_OF_A_PAIR * group * blocks * units)

    def merge_heads(own: tuple, shared: tuple, made: Sequence[Tensor]) -> None:
        """Of some heads, which have ``made`` for what is found of pairs: biases and mixtures, and for some of these after others matrices
        and the merge."""
        tail_lse, bias, mixture = made
        known, kv_heads = _of_heads(estimates, own, shared), k[shared].shape[1]
        lists = block_lists(_of_lists(counts, heads, own, shared), _of_lists(indices, heads, own, shared), kv_heads * group, key_blocks)
        tail_rows.unit_bias(known.log_count, known.half_variance, known.mass, lists, known.useful, parts, bias, left[own], mixture)
        for mine, its in head_groups(known.log_count.shape[0], kv_heads, group, few):
            some = _of_heads(known, mine, its)
            matrix = _mixed(k[shared][its], v[shared][its], kv_offsets, some, mixture[mine], matrices)
            merge(merged[own][mine], lse[own][mine], q[own][mine], some.k_mean, some.v_mean, bias[mine], left[own][mine], matrix,
                  tail_lse[mine], q_offsets, scale, shares[own][mine])
            # Before that of the next heads.
            del matrix

    for own, shared in head_groups(batch, kv_heads, group, batch * kv_heads if keep else many):
        some = q[own]
        merge_heads(own, shared, saved if keep else _new_pairs(some.shape[0], some.shape[1], tokens, blocks, units, q.device))
    if merged is not out:
        out.copy_(merged)
    return shares, *saved


def _new_pairs(batch: int, heads: int, tokens: int, blocks: int, units: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for tail_lse, bias and mixture."""
    bias = torch.empty(batch, heads, blocks, units, dtype=torch.float32, device=device)
    mixture = torch.empty(batch, heads, blocks, _row(units), dtype=torch.bfloat16, device=device)
    return torch.empty(batch, heads, tokens, dtype=torch.float32, device=device), bias, mixture[..., :units]


def _of_heads(estimates: BlockEstimates, own: tuple, shared: tuple) -> BlockEstimates:
    """The estimates of a group of ``head_groups``."""
    half_variance, mass, useful = of_group(own, estimates.half_variance, estimates.mass, estimates.useful)
    log_count, order, k_mean, v_mean, covariances, scales = of_group(
        shared, estimates.log_count, estimates.order, estimates.k_mean, estimates.v_mean, estimates.covariances, estimates.scales)
    return BlockEstimates(estimates.parts, log_count, half_variance, mass, order, k_mean, v_mean, useful, covariances, scales)


def _mixed(k: Tensor, v: Tensor, offsets: Tensor, estimates: BlockEstimates, mixture: Tensor, matrices: Callable[..., None] | None
           ) -> Tensor:
    """The blocks' matrices ``[B, H, N, D * D]`` of some heads, by ``matrices``. Covariances that are not known are found first."""
    matrix = torch.empty(*mixture.shape[:3], k.shape[3]**2, dtype=torch.bfloat16, device=k.device)
    covariances = estimates.covariances
    if covariances is not None and estimates.scales is not None:
        coded.mixtures(mixture, covariances, estimates.scales, matrix)
        return matrix
    if covariances is None:
        covariances = torch.empty(*estimates.k_mean.shape[:3], k.shape[3]**2, dtype=torch.bfloat16, device=k.device)
        tail_statistics.covariances(k, v, offsets, estimates.k_mean, estimates.v_mean, estimates.log_count, estimates.order,
                                    estimates.useful, estimates.parts, covariances)
    (matrices or _matrices)(mixture, covariances, matrix)
    return matrix


def _row(units: int) -> int:
    """Entries of a mixture's row in memory: all rows begin at multiples of 16 bytes, as what multiplies them wants it."""
    return -(-units // 8) * 8


def _matrices(mixture: Tensor, covariances: Tensor, matrix: Tensor) -> None:
    """``hopper_matrices`` by torch: the query heads of a key head are rows of one product."""
    kv_heads = covariances.shape[1]
    torch.bmm(by_kv_head(mixture, kv_heads), covariances.flatten(0, 1), out=by_kv_head(matrix, kv_heads))


def _at_once(kv_heads: int, room: float, matrices: int, pairs: int) -> tuple[int, int]:
    """(Key heads whose pairs, those whose matrices too are there at once), of which each takes so many bytes: of pairs half of all where
    that makes no more groups of matrices."""
    few = evenly(kv_heads, int(room / (matrices + pairs)))
    half = -(-kv_heads // 2)
    if half > few and few * matrices + half * pairs <= room and 2 * -(-half // few) <= -(-kv_heads // few):
        return half, few
    return few, few


def combine_backward(
    dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor, tail_lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias: Tensor, mixture: Tensor, log_count: Tensor,
    order: Tensor | None, k_mean: Tensor, v_mean: Tensor, scale: float, *, matrices: Callable[..., None] | None = None,
    room: float = BACKWARD_ROOM,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``combine_backward`` of ``eager/tail.py``. ``matrices``: as of ``combine``; ``room``: as BACKWARD_ROOM."""
    if not tma_ok(mixture):
        mixture = mixture.new_empty(*mixture.shape[:3], _row(mixture.shape[3]))[..., :mixture.shape[3]].copy_(mixture)
    dout, exact, out, q, k, v = map(strided, (dout, exact, out, q, k, v))
    exact_lse, order = exact_lse.contiguous(), None if order is None else order.contiguous()
    # Rows without an estimate pass on the gradient that arrives, and add nothing. It lies as q does, so that dq may take its memory.
    dexact = torch.empty_like(q).copy_(dout)
    dexact_lse, dq, dk, dv = map(torch.zeros_like, (lse, q, k, v))
    if not q.numel() or not k.numel():
        return dexact, dexact_lse, dq, dk, dv
    (batch, heads, _, dim), kv_heads, (blocks, units) = q.shape, k.shape[1], bias.shape[2:]
    group, parts, matrices = heads // kv_heads, units // kv_blocks[1], matrices or _matrices
    # Those of units, and of blocks' queries with their gradients.
    most = int(room * mean_bytes(q, k) / (2 * dim * dim * (units + 2 * blocks * group)))
    at_once = evenly(kv_heads, most)
    several = tail_backward.several_groups(q.device, q, k, blocks, units, at_once)
    for own, shared in head_groups(batch, kv_heads, group, at_once, several=several):
        keys, values, counts, places = k[shared], v[shared], log_count[shared], None if order is None else order[shared]
        of_units = k_mean[shared], v_mean[shared]
        covariances = torch.empty(*counts.shape, dim * dim, dtype=torch.bfloat16, device=q.device)
        tail_statistics.covariances(keys, values, kv_blocks[0], *of_units, counts, places, None, parts, covariances)
        mixed = mixture[own]
        matrix = torch.empty(*mixed.shape[:3], dim * dim, dtype=torch.bfloat16, device=q.device)
        for mine, its in head_groups(counts.shape[0], counts.shape[1], group, at_once):
            matrices(mixed[mine], covariances[its], matrix[mine])
        # The memory of matrices and covariances is that of their gradients.
        of_rows = tail_backward.row_gradients(
            dexact[own], dexact_lse[own], dq[own], dout[own], exact[own], exact_lse[own], out[own], lse[own], tail_lse[own], q[own],
            q_blocks, bias[own], *of_units, matrix, mixed, covariances, scale, at_once)
        del matrix
        tail_backward.key_gradients(dk[shared], dv[shared], dout[own], q[own], keys, values, q_blocks, kv_blocks, bias[own], of_rows,
                                    counts, places, *of_units, covariances, scale, at_once)
        # Before those of the next heads.
        del covariances, of_rows
    return dexact, dexact_lse, dq, dk, dv


def _of_lists(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]

