"""The tail: what blocks that no list names would have added to attention, estimated from their means and covariances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from .blocks import BlockLists
from .checks import without_autocast
from .device import capability
from .operators import NAMESPACE, operator, watched

# Of h: beyond it the estimate is damped.
CAP = 1.0
# Of h's mean weighted by mass: heads above it are not compensated.
USELESS = 3.0
# Of the power iteration that finds a block's first principal direction.
ITERATIONS = 10
# What one step may take for matrices [D, D] of all units, as a share of q's bytes; more heads than that are done one group after another.
# Before attention there is room where its result will be. Afterwards q, k, v and that result are there: MERGE_ROOM is of all that the tail
# holds beside them, numbers of pairs of a block and a unit too, so that a layer is within 1.25 times these four.
ESTIMATE_ROOM, MERGE_ROOM, TAIL_ROOM = 1.0, 0.84, 0.4
# Covariances that take no more are computed with the moments, and wait for the merge.
WAITING_ROOM = 0.42
# Bytes of a pair of a block and a unit: mass and h, which wait; bias and the mixture.
KNOWN_OF_A_PAIR, MADE_OF_A_PAIR = 4, 6


@dataclass(frozen=True, eq=False)
class BlockEstimates:
    """What is known of N blocks before any is selected; constants to autograd. U = parts * N units, of block u // parts.

    Attributes:
        parts: units of a block.
        log_count: float32 ``[B, Hkv, U]``, log of a unit's tokens; -inf where it has none, or its block holds NaN or inf: nothing is
            estimated of that.
        half_variance: h, ``[B, H, N, U]``, half the variance of a unit's scores as a query block sees it. bfloat16, because it waits while
            attention runs; float32 or float64 where plain torch runs.
        mass: likewise, the softmax over all units, mean of a query block's ``sampled_queries``, spread over it.
        order: int32 ``[B, Hkv, P]``, which token each place of the compensated blocks takes when units divide them, ascending in each
            unit; None where that is its own. (int64 ``[B, Hkv, N, L]``, places of a block by projection, where plain torch made it.)
        k_mean, v_mean: ``[B, Hkv, U, D]`` in the dtype that kernels multiply; None where plain torch runs, which makes them anew for
            autograd.
        useful: bool ``[B, H]``, the heads that are compensated; None = all.
        covariances: bfloat16 ``[B, Hkv, U, D * D]``, of keys with values, where they were computed with the rest; else None.
    """

    parts: int
    log_count: Tensor
    half_variance: Tensor
    mass: Tensor
    order: Tensor | None = None
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None
    useful: Tensor | None = None
    covariances: Tensor | None = None

    def scores(self) -> Tensor:
        """mass x h / tokens, float32 ``[B, H, N, N]``: how far each block's estimate may be off, for each key that computing it costs; -inf
        for blocks that hold NaN or inf."""
        if self.k_mean is not None:
            with torch.no_grad():
                return _scores(self.mass, self.half_variance, self.log_count, self.parts)
        scores = (self.mass * self.half_variance).unflatten(-1, (-1, self.parts)).sum(-1)
        # Of a block of one token one half is empty, which is nothing bad.
        tokens = per_query_head(self.log_count.exp().unflatten(-1, (-1, self.parts)).sum(-1), scores.shape[1])[:, :, None]
        return (scores / tokens).masked_fill(tokens == 0, -torch.inf)


def sampled_queries(longest: int) -> int:
    """How many of a block's queries say what mass and what variance it sees in units, where blocks have up to ``longest``.

    Of models of a few minutes' training, at tiles of 128, 256 and 384 tokens, errors of the output are the same within 1 % as where all do.
    """
    return 32 if longest <= 128 else 64


def useful_heads(error: Tensor) -> Tensor:
    """bool ``[B, H]``: the heads whose blocks can be estimated. ``error``: ``[B, H, N]``, the sum of mass x h over units."""
    return error.mean(-1) <= USELESS


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, ...]`` -> ``[B, H, ...]``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@dataclass(frozen=True, eq=False)
class TailForward:
    """What a backward may want of ``tail_forward``.

    Attributes:
        share: float32 ``[B, H, N]``: the share of the softmax that was computed exactly, mean of a query block's rows.
        tail_lse: float32 ``[B, H, P]``, log-sum-exp of the estimate; -inf in rows that leave nothing out, and in those of other blocks.
        bias: float32 ``[B, H, N, U]``: what a unit's logit has beside scale q . k_mean, in base 2; -inf where it is not estimated. Empty
            where no backward is to come, and so is the mixture.
        mixture: bfloat16 ``[B, H, N, U]``, rows dense but not contiguous: the damped weights of covariances in a query block's matrix.
    """

    share: Tensor
    tail_lse: Tensor
    bias: Tensor
    mixture: Tensor


def estimate_blocks(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, *, scale: float, parts: int,
                    useful: Tensor | None = None) -> BlockEstimates:
    """What selection and estimate need to know of the first ``num_blocks`` blocks, by Triton's kernels; a constant to autograd.

    Args:
        q: ``[B, H, P, D]`` in the order of blocks, any strides; ``kernels_run(q)`` must be true.
        k, v: ``[B, Hkv, P, D]``, q's dtype and device.
        offsets: int32 ``[T + 1]``: block i owns the places from ``offsets[i]`` up to ``offsets[i + 1]``.
        num_blocks: N of the T blocks, at least one: those that may be estimated, and whose rows estimate.
        longest: an upper bound on their tokens.
        scale: factor on the scores.
        parts: 1 or 2 units of a block.
        useful: ``BlockEstimates.useful`` of an earlier call, whose selection is attended to again.
    """
    # A graph that is compiled would look for the operator's gradient.
    with torch.no_grad():
        ahead = _computed_ahead(q, k, num_blocks, parts)
        log_count, half_variance, mass, order, k_mean, v_mean, error, covariances = _estimate(
            q, k, v, offsets, num_blocks, longest, scale, parts, ahead)
        useful = useful_heads(error) if useful is None else useful
    return BlockEstimates(parts, log_count, half_variance, mass, order=order if parts > 1 else None, k_mean=k_mean, v_mean=v_mean,
                          useful=useful, covariances=covariances if ahead else None)


def add_tail(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, blocks: BlockLists,
             estimates: BlockEstimates, *, scale: float, owned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, share): attention with the blocks that ``blocks`` leaves out estimated, by Triton's kernels; without a gradient.

    Args:
        out: ``[B, H, P, D]``, attention to the listed blocks; lse float32 ``[B, H, P]``. With ``owned`` they are written over.
        q, k, v, offsets, num_blocks, longest, scale: as for ``estimate_blocks``, which gave ``estimates``. q's memory is not out's.
        blocks: of which the first ``num_blocks`` query blocks are those of ``offsets``, and so are the key blocks.

    Returns:
        out and lse of what is listed and estimated; rows that leave nothing out, and those of other blocks, are the same bits as before.
        And ``TailForward.share``.
    """
    with torch.no_grad():
        out, lse = (out, lse) if owned else (out.clone(), lse.clone())
        # Kernels write rows of unit stride.
        out, lse = out if out.stride(-1) == 1 else out.contiguous(), lse.contiguous()
        done = tail_forward(out, lse, q, k, v, offsets, num_blocks, longest, blocks, estimates, scale=scale, keep=False)
    return out, lse, done.share


def tail_forward(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int,
                 blocks: BlockLists, estimates: BlockEstimates, *, scale: float, keep: bool = True) -> TailForward:
    """``add_tail`` in place, with what its backward may want if ``keep``: out's last stride is 1, lse is contiguous, and both are
    overwritten."""
    assert estimates.k_mean is not None and estimates.v_mean is not None, "kernels made the estimates"
    run = _add_operator if watched(out) else _add
    tail_lse, share, bias, mixture = run(
        out, lse, q, k, v, offsets, blocks.counts, blocks.indices, estimates.log_count, estimates.half_variance, estimates.mass,
        estimates.useful, estimates.order, estimates.k_mean, estimates.v_mean, estimates.covariances, num_blocks, longest,
        estimates.parts, scale, keep)
    return TailForward(share, tail_lse, bias, mixture)


@lru_cache
def _kernels(name: str) -> ModuleType:
    """Loaded when first asked for, because triton is."""
    return import_module(f".portable.tail_{name}", __package__)


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


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[B, H, N, n]`` -> ``[B * Hkv, H / Hkv * N, n]``, a view."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3).flatten(0, 1)


def _half_variance(queries: Tensor, keys: Tensor) -> Tensor:
    """float32 ``[B, H, N, U]`` of moments ``[B, H, N, n]`` and ``[B, Hkv, U, n]``."""
    a, b = _by_kv_head(queries, keys.shape[1]), keys.flatten(0, 1).mT
    product = torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
    return product.view(*queries.shape[:3], -1)


def _of_group(x: Tensor, heads: int, own: tuple, shared: tuple) -> Tensor:
    """What lists ``[B or 1, lists, ...]`` for all heads have for a group of ``_head_groups``."""
    return x[own[0] if x.shape[0] > 1 else slice(None), slice(None) if x.shape[1] == 1 else own[1] if x.shape[1] == heads else shared[1]]


def hopper_merges(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Hopper kernel of the merge takes such queries on such a GPU."""
    return capability == (9, 0) and dtype == torch.bfloat16 and head_dim in (64, 128)


def _hopper_statistics() -> ModuleType:
    return import_module(".hopper.tail_statistics", __package__)


def _computed_ahead(q: Tensor, k: Tensor, num_blocks: int, parts: int) -> bool:
    """Whether covariances are computed with the moments: where they take little room, and as the Hopper kernel computes them."""
    entries = k.shape[0] * k.shape[1] * num_blocks * k.shape[3]**2
    return (k.is_cuda and k.dtype == torch.bfloat16 and k.shape[3] == 128 and parts == 1
            and 2 * entries <= WAITING_ROOM * q.numel() * q.element_size())


def _merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor, matrix: Tensor,
           tail_lse: Tensor, offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """``combine`` of the portable kernels, by Hopper's own where it can."""
    if q.is_cuda and hopper_merges(capability(q.device), q.dtype, q.shape[3]):
        hopper = import_module(".hopper.tail_merge", __package__)
        if hopper.mergeable(q, out):
            hopper.hopper_tail_merge(out, lse, q, k_mean, v_mean, bias, left, matrix, tail_lse, offsets, longest, scale, share)
            return
    _kernels("rows").combine(out, lse, q, k_mean, v_mean, bias, left, matrix, tail_lse, offsets, longest, scale, share)


def _new_estimates(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, scale: float, parts: int, ahead: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised; what is not wanted is empty."""
    batch, heads, tokens, dim = q.shape
    kv_heads, units = k.shape[1], num_blocks * parts
    pairs = batch, heads, num_blocks, units
    return (q.new_empty(batch, kv_heads, units, dtype=torch.float32),
            q.new_empty(pairs, dtype=torch.bfloat16), q.new_empty(pairs, dtype=torch.bfloat16),
            q.new_empty((batch, kv_heads, tokens) if parts > 1 else (0,), dtype=torch.int32),
            k.new_empty(batch, kv_heads, units, dim), v.new_empty(batch, kv_heads, units, dim),
            q.new_empty(batch, heads, num_blocks, dtype=torch.float32),
            k.new_empty((batch, kv_heads, units, dim * dim) if ahead else (0,), dtype=torch.bfloat16))


@operator("estimate_blocks", _new_estimates)
def _estimate(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, longest: int, scale: float, parts: int, ahead: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    new = _new_estimates(q, k, v, offsets, num_blocks, longest, scale, parts, ahead)
    log_count, half_variance, mass, order, k_mean, v_mean, error, covariances = new
    if not q.numel():
        return tuple(x.zero_() for x in new)  # type: ignore[return-value]
    statistics, rows = _kernels("statistics"), _kernels("rows")
    units, sample = num_blocks * parts, sampled_queries(longest)
    with torch.no_grad(), without_autocast(q.device.type), torch.cuda.device_of(q):
        halves = None
        if parts > 1:
            _kernels("order").principal_order(k, offsets, num_blocks, ITERATIONS, order)
            halves = order
        # Of symmetric matrices half is kept.
        matrices = -(-(units + num_blocks * (q.shape[1] // k.shape[1])) * statistics.packed_size(k.shape[3]) // k.shape[3]**2)
        # The kernel that compares queries with units reads numbers of four bytes faster.
        wide = torch.empty(half_variance.shape, dtype=torch.float32, device=q.device)
        at_once = ahead and capability(k.device) == (9, 0) and _hopper_statistics().readable(k, v)
        for own, shared in _head_groups(q, k.shape[1], matrices, ESTIMATE_ROOM):
            if at_once:
                keys = statistics.new_moments(k_mean[shared])
                _hopper_statistics().hopper_key_statistics(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared],
                                                           keys, covariances[shared], statistics.SLAB)
            else:
                keys = statistics.key_statistics(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared],
                                                 None if halves is None else halves[shared], parts)
                if ahead:
                    covariances[shared] = statistics.covariances(k[shared], v[shared], offsets, k_mean[shared], v_mean[shared],
                                                                 log_count[shared], None, None, parts)
            wide[own] = _half_variance(statistics.query_moments(q[own], offsets, num_blocks, sample, 0.5 * scale**2), keys)
            del keys
        rows.sampled_mass(q, k_mean, log_count, wide, offsets, scale, sample, CAP, mass, half_variance, error)
    return new


def _new_scores(mass: Tensor, *_) -> Tensor:
    return mass.new_empty(*mass.shape[:3], mass.shape[2], dtype=torch.float32)


@operator("block_scores", _new_scores)
def _scores(mass: Tensor, half_variance: Tensor, log_count: Tensor, parts: int) -> Tensor:
    scores = _new_scores(mass)
    if scores.numel():
        with torch.cuda.device_of(mass):
            _kernels("rows").scores(mass, half_variance, log_count, scores)
    return scores


def _new_tail(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, indices: Tensor, log_count: Tensor,
    half_variance: Tensor, mass: Tensor, useful: Tensor | None, order: Tensor | None, k_mean: Tensor, v_mean: Tensor,
    covariances: Tensor | None, num_blocks: int, longest: int, parts: int, scale: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tail_lse, share, bias and mixture, uninitialised; the last two are empty unless they are to be kept."""
    batch, heads, tokens, _ = q.shape
    return (q.new_empty(batch, heads, tokens, dtype=torch.float32), q.new_empty(batch, heads, num_blocks, dtype=torch.float32),
            *_new_pairs(q, heads if keep else 0, num_blocks, parts))


def _new_pairs(q: Tensor, heads: int, num_blocks: int, parts: int) -> tuple[Tensor, Tensor]:
    """bias and mixture of some heads, uninitialised."""
    units = num_blocks * parts
    # Rows of 16 bytes: what torch multiplies fast.
    mixture = q.new_empty(q.shape[0], heads, num_blocks, -(-units // 8) * 8, dtype=torch.bfloat16)
    return q.new_empty(q.shape[0], heads, num_blocks, units, dtype=torch.float32), mixture[..., :units]


def _add(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, counts: Tensor, indices: Tensor, log_count: Tensor,
    half_variance: Tensor, mass: Tensor, useful: Tensor | None, order: Tensor | None, k_mean: Tensor, v_mean: Tensor,
    covariances: Tensor | None, num_blocks: int, longest: int, parts: int, scale: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = _new_tail(out, lse, q, k, v, offsets, counts, indices, log_count, half_variance, mass, useful, order, k_mean, v_mean,
                    covariances, num_blocks, longest, parts, scale, keep)
    tail_lse, share, kept_bias, kept_mixture = new
    tail_lse.fill_(-torch.inf)
    heads, kv_heads = q.shape[1], k.shape[1]
    if not q.numel():
        for x in new[1:]:
            x.zero_()
        return new
    statistics, rows = _kernels("statistics"), _kernels("rows")
    with torch.no_grad(), without_autocast(q.device.type), torch.cuda.device_of(q):
        left = torch.empty(share.shape, dtype=torch.int32, device=q.device)
        used = useful if useful is None or heads == kv_heads else useful.unflatten(1, (kv_heads, -1)).any(-1)
        pairs = heads // kv_heads * num_blocks**2 * parts
        held = KNOWN_OF_A_PAIR * half_variance.numel() + 4 * indices.numel() + (0 if covariances is None else 2 * covariances.numel())
        matrices = num_blocks * (heads // kv_heads + (parts if covariances is None else 0))
        for own, shared in _head_groups(q, kv_heads, matrices, MERGE_ROOM - held / (q.numel() * q.element_size()), MADE_OF_A_PAIR * pairs):
            some = q[own]
            if keep:
                bias, mixture = kept_bias[own], kept_mixture[own]
            else:
                bias, mixture = _new_pairs(some, some.shape[1], num_blocks, parts)
            lists = rows.block_lists(*(_of_group(x, heads, own, shared) for x in (counts, indices)), some.shape[1], num_blocks)
            rows.unit_bias(log_count[shared], half_variance[own], mass[own], lists, None if useful is None else useful[own], CAP, bias,
                           left[own], mixture)
            if covariances is not None:
                squares = covariances[shared]
            else:
                squares = statistics.covariances(
                    k[shared], v[shared], offsets, k_mean[shared], v_mean[shared], log_count[shared],
                    None if order is None else order[shared], None if used is None else used[shared], parts)
            matrix = torch.bmm(_by_kv_head(mixture, squares.shape[1]), squares.flatten(0, 1))
            del squares, mixture
            _merge(out[own], lse[own], some, k_mean[shared], v_mean[shared], bias, left[own], matrix, tail_lse[own], offsets, longest,
                   scale, share[own])
            del matrix, bias
    return new


_add_operator = torch.library.custom_op(f"{NAMESPACE}::add_tail", _add, mutates_args=("out", "lse"))
_add_operator.register_fake(_new_tail)
