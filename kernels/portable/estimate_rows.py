"""Portable kernels that compare queries with units: the mass that a block sees in them, biases, and the merge with the exact part."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..estimate import CAP
from ..launch import launch
from ..lowering.arguments import Lists
from ..lowering.primitives import LN2, LOG2E, finish_softmax, load_rows, sampled_rows, softmax_step
from .config import LaunchConfig
from .estimate_config import estimate_config, strides
from .estimate_statistics import block_rows, head_at, padded

# Units, and ids of a list, that a program of the bias kernel takes at once.
WIDTH = 512


@triton.jit
def _bias_kernel(log_count, half_variance, mass, counts, indices, useful, bias, left, mixture, lists_batch, lists_head, lists_group,
                 capacity, heads, group, blocks, units, mixture_row,
                 CAP: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """A block's biases, how many units are estimated, and the mixture: what these have of their mass together, damped."""
    block = tl.program_id(0)
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row = (batch * heads + head) * blocks + block
    log_count += (batch * (heads // group) + head // group) * units
    bias += row * units
    for start in range(0, units, WIDTH):
        unit = start + tl.arange(0, WIDTH)
        value = tl.load(log_count + unit, mask=unit < units, other=float("-inf"))
        h = tl.load(half_variance + row * units + unit, mask=unit < units, other=0.0).to(tl.float32)
        value += tl.minimum(h, CAP)
        value = tl.where(tl.load(useful + batch * heads + head) != 0, value, float("-inf"))
        tl.store(bias + unit, value * (1 / LN2), mask=unit < units)
    # Other threads wrote what is written over.
    tl.debug_barrier()
    list_row = batch * lists_batch + tl.cast(head // lists_group, tl.int64) * lists_head + block
    count = tl.minimum(tl.load(counts + list_row), capacity)
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        item = tl.load(indices + list_row * capacity + place, mask=place < count, other=-1)
        for part in tl.static_range(PARTS):
            known = (item >= 0) & (item < units // PARTS)
            tl.store(bias + item * PARTS + part, tl.full([WIDTH], float("-inf"), tl.float32), mask=known)
    tl.debug_barrier()
    number = tl.zeros([WIDTH], tl.int32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, units, WIDTH):
        unit = start + tl.arange(0, WIDTH)
        estimated = tl.load(bias + unit, mask=unit < units, other=float("-inf")) > float("-inf")
        number += estimated.to(tl.int32)
        total += tl.load(mass + row * units + unit, mask=estimated, other=0.0).to(tl.float32)
    tl.store(left + row, tl.sum(number, 0))
    factor = 1.0 / tl.maximum(tl.sum(total, 0), 1e-30)
    # Units that pad the mixture have no share.
    for start in range(0, mixture_row, WIDTH):
        unit = start + tl.arange(0, WIDTH)
        estimated = tl.load(bias + unit, mask=unit < units, other=float("-inf")) > float("-inf")
        h = tl.load(half_variance + row * units + unit, mask=unit < units, other=0.0).to(tl.float32)
        share = tl.load(mass + row * units + unit, mask=estimated, other=0.0).to(tl.float32) * factor
        share *= tl.sqrt(tl.minimum(CAP / tl.maximum(h, 1e-6), 1.0))
        tl.store(mixture + row * mixture_row + unit, share.to(mixture.dtype.element_ty), mask=unit < mixture_row)


@triton.jit
def _summed(pointers, mask, units, SLABS: tl.constexpr):
    """The sum over slabs of the numbers of units, which stand slab by slab."""
    total = tl.load(pointers, mask=mask, other=0.0)
    for slab in tl.static_range(1, SLABS):
        total += tl.load(pointers + slab * units, mask=mask, other=0.0)
    return total


@triton.jit
def _mass_kernel(q, k_mean, log_count, half_variance, offsets, mass, rounded, error, scores_of_blocks, q_batch, q_head, q_row, heads, group,
                 blocks, units, h_row, scale_log2, SAMPLE: tl.constexpr, CAP: tl.constexpr, SLABS: tl.constexpr, PARTS: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The softmax over units, mean of SAMPLE rows of a block, for M / SAMPLE blocks: one of each of SAMPLE equal runs, all rows of a block
    that has no more; h rounded, the sum of mass x h, and mass x h of each key block over its tokens, -inf where nothing is estimated."""
    BLOCKS: tl.constexpr = M // SAMPLE
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at, first = batch * heads + head, tl.program_id(0) * BLOCKS
    lines, dims, columns = tl.arange(0, M), tl.arange(0, DIM_PAD), tl.arange(0, N)
    row, there = sampled_rows(offsets, first + lines // SAMPLE, blocks, lines % SAMPLE, SAMPLE)
    pointers = head_at(q, batch, head, q_batch, q_head) + (row.to(tl.int64)[:, None] * q_row + dims[None, :])
    queries = tl.load(pointers, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    # Neither a query that is not finite nor one that is not there has weights.
    counts = there & (tl.sum(queries.to(tl.float32) * 0.0, 1) == 0.0)
    queries = tl.where(counts[:, None], queries, 0.0).to(q.dtype.element_ty)

    kv_head = batch * (heads // group) + head // group
    k_mean += kv_head * units * DIM
    log_count += kv_head * units
    block = first + tl.arange(0, BLOCKS)
    half_variance += (at * blocks + block) * h_row
    # Each of four lanes that share a row of a product follows what it sees itself.
    row_max = tl.full([BLOCKS, SAMPLE, 4], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCKS, SAMPLE, 4], tl.float32)
    for unit in range(0, units, N):
        keys = load_rows(k_mean, unit, DIM, units - unit, N, DIM, DIM_PAD, True)
        bias = tl.load(log_count + unit + columns, mask=unit + columns < units, other=float("-inf"))[None, :]
        mask = (block < blocks)[:, None] & (unit + columns < units)[None, :]
        bias += tl.minimum(_summed(half_variance[:, None] + (unit + columns)[None, :], mask, units, SLABS), CAP)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee").reshape(BLOCKS, SAMPLE, N) * scale_log2
        scores = (scores + (bias * (1 / LN2))[:, None, :]).reshape(BLOCKS, SAMPLE, N // 8, 4, 2)
        higher = tl.maximum(row_max, tl.max(tl.max(scores, 4), 2))
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - origin[:, :, None, :, None])
        row_sum = row_sum * tl.exp2(row_max - origin) + tl.sum(tl.sum(weights, 4), 2)
        row_max = higher
    origin = tl.max(row_max, 2)
    row_sum = tl.sum(row_sum * tl.exp2(row_max - tl.where(origin == float("-inf"), 0.0, origin)[:, :, None]), 2)
    # Minus infinity where nothing is estimated; there every logit is.
    row_lse = tl.where(row_sum > 0.0, origin + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0)), 0.0)
    # As weights, so that a row that does not count adds nothing.
    row_lse = tl.where(counts.reshape(BLOCKS, SAMPLE), row_lse, float("inf"))
    sizes = tl.load(offsets + block + 1, mask=block < blocks, other=0) - tl.load(offsets + block, mask=block < blocks, other=0)
    share = 1.0 / tl.minimum(tl.maximum(sizes, 1), SAMPLE).to(tl.float32)
    mass += (at * blocks + block) * units
    rounded += (at * blocks + block) * units
    KV_BLOCKS: tl.constexpr = N // PARTS
    kv_blocks, items = units // PARTS, tl.arange(0, KV_BLOCKS)
    scores_of_blocks += (at * blocks + block) * kv_blocks
    errors = tl.zeros([N, BLOCKS], tl.float32)
    for unit in range(0, units, N):
        keys = load_rows(k_mean, unit, DIM, units - unit, N, DIM, DIM_PAD, True)
        mask = (unit + columns < units)[:, None] & (block < blocks)[None, :]
        count = tl.load(log_count + unit + columns, mask=unit + columns < units, other=float("-inf"))
        h = _summed(half_variance[None, :] + (unit + columns)[:, None], mask, units, SLABS)
        bias = count[:, None] + tl.minimum(h, CAP)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee").reshape(N, BLOCKS, SAMPLE) * scale_log2
        total = tl.sum(tl.exp2(scores + (bias * (1 / LN2))[:, :, None] - row_lse[None, :, :]), 2) * share[None, :]
        errors += total * h
        weight, h = total.to(mass.dtype.element_ty), h.to(rounded.dtype.element_ty)
        tl.store(mass[None, :] + (unit + columns)[:, None], weight, mask=mask)
        tl.store(rounded[None, :] + (unit + columns)[:, None], h, mask=mask)
        score, tokens = weight.to(tl.float32) * h.to(tl.float32), tl.exp(count)
        if PARTS > 1:
            score = tl.sum(score.reshape(KV_BLOCKS, PARTS, BLOCKS), 1)
            tokens = tl.sum(tokens.reshape(KV_BLOCKS, PARTS), 1)
        score = tl.where((tokens > 0.0)[:, None], score / tokens[:, None], float("-inf"))
        item = unit // PARTS + items
        tl.store(scores_of_blocks[None, :] + item[:, None], score, mask=(item < kv_blocks)[:, None] & (block < blocks)[None, :])
    tl.store(error + at * blocks + block, tl.sum(errors, 0), mask=block < blocks)


@triton.jit
def part_shares(exact_lse, estimate_lse):
    """(the exact part's share of the softmax, the estimate's, log-sum-exp of both). The shares add up to 1 however large lse is: no rounded
    sum of it is in them."""
    larger = tl.maximum(exact_lse, estimate_lse)
    exact, estimated = tl.exp(exact_lse - larger), tl.exp(estimate_lse - larger)
    total = exact + estimated
    return exact / total, estimated / total, larger + tl.log(total)


@triton.jit
def _merge_kernel(q, k_mean, v_mean, bias, left, matrix, estimate_lse, out, lse, share, offsets, q_batch, q_head, q_row, out_batch,
                  out_head, out_row, heads, group, blocks, units, tokens, scale, scale_log2, TILES: tl.constexpr, DEPTH: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    block, before = tl.program_id(0) // TILES, tl.program_id(0) % TILES * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    first, size = block_rows(offsets, block)
    row, rows = first + before, size - before
    at = batch * heads + head
    share += (at * blocks + block) * TILES + before // M
    if rows <= 0:
        tl.store(share, 0.0)
        return
    lines = tl.arange(0, M)
    inside = lines < rows
    estimate_lse += at * tokens + row + lines
    bias += (at * blocks + block) * units
    # Rows that leave nothing out keep their bits.
    if tl.load(left + at * blocks + block) == 0:
        tl.store(estimate_lse, tl.full([M], float("-inf"), tl.float32), mask=inside)
        tl.store(share, tl.minimum(rows, M).to(tl.float32) / size)
        return
    q = head_at(q, batch, head, q_batch, q_head)
    queries = load_rows(q, row, q_row, rows, M, DIM, DIM_PAD, True)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    means = (batch * (heads // group) + head // group) * units * DIM
    columns, dims = tl.arange(0, N), tl.arange(0, DIM_PAD)
    for start in range(0, units, N):
        keys = load_rows(k_mean + means, start, DIM, units - start, N, DIM, DIM_PAD, True)
        more = tl.load(bias + start + columns, mask=start + columns < units, other=float("-inf"))
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2 + more[None, :]
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
        values = load_rows(v_mean + means, start, DIM, units - start, N, DIM, DIM_PAD, True)
        acc = tl.dot(weights.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
    acc, row_estimate = finish_softmax(acc, row_max, row_sum)
    acc *= 1 / scale
    matrix += (at * blocks + block) * DIM * DIM
    for column in tl.static_range(0, DIM_PAD, DEPTH):
        depth = column + tl.arange(0, DEPTH)
        part = tl.load(matrix + depth[:, None] * DIM + dims[None, :], mask=(depth < DIM)[:, None] & (dims < DIM)[None, :], other=0.0)
        if DEPTH == DIM_PAD:
            x = queries
        else:
            x = tl.load(q + row.to(tl.int64) * q_row + (lines[:, None] * q_row + depth[None, :]),
                        mask=inside[:, None] & (depth < DIM)[None, :], other=0.0)
        # Float16 has not the range of the matrix.
        if queries.dtype == tl.float32:
            acc = tl.dot(x, part.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x.to(tl.bfloat16), part, acc)
    acc *= scale

    exact, of_estimate, total = part_shares(tl.load(lse + at * tokens + row + lines, mask=inside, other=0.0), row_estimate)
    pointers = head_at(out, batch, head, out_batch, out_head) + row.to(tl.int64) * out_row + (lines[:, None] * out_row + dims[None, :])
    # A query of which no weight is left, as none is of one that is infinite, has no estimate.
    some = row_estimate != float("-inf")
    written = inside & some
    mask = written[:, None] & (dims < DIM)[None, :]
    merged = exact[:, None] * tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + of_estimate[:, None] * acc
    tl.store(pointers, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at * tokens + row + lines, total, mask=written)
    tl.store(estimate_lse, row_estimate, mask=inside)
    tl.store(share, tl.sum(tl.where(inside, tl.where(some, exact, 1.0), 0.0), 0) / size)


def unit_bias(log_count: Tensor, half_variance: Tensor, mass: Tensor, lists: Lists, useful: Tensor, parts: int,
              bias: Tensor, left: Tensor, mixture: Tensor) -> None:
    """Writes ``bias``, float32 ``[B, H, N, U]``, in base 2: what a unit's logit has beside its mean key's; ``left``, int32 ``[B, H, N]``,
    how many units a block estimates; and ``mixture``, bfloat16 with dense rows: what share a unit has of the mass of these, damped.

    The bias is -inf where nothing is estimated: in units that hold nothing or what is not finite, in blocks that ``lists`` name, and in
    heads not ``useful``, bool ``[B, H]``.
    """
    batch, heads, blocks, units = bias.shape
    launch(_bias_kernel, (blocks, batch * heads, 1),
           (log_count, half_variance, mass, lists.counts, lists.indices, useful, bias, left, mixture),
           (lists.batch, lists.head, lists.group, lists.capacity, heads, heads // log_count.shape[1], blocks, units,
            mixture.stride(2)), dict(CAP=CAP, PARTS=parts, WIDTH=WIDTH))


def sampled_mass(q: Tensor, k_mean: Tensor, log_count: Tensor, half_variance: Tensor, offsets: Tensor, scale: float,
                 sample: int, cap: float, mass: Tensor, rounded: Tensor, error: Tensor, scores: Tensor, slabs: int = 1) -> None:
    """Writes ``mass``, bfloat16 ``[B, H, N, U]``: the softmax of scale q . k_mean + log_count + min(h, ``cap``), mean of ``sample`` of a
    block's queries; 0 for those that are not finite. And ``error``, float32 ``[B, H, N]``, the sum of mass x h; and in ``rounded``, like
    mass, h, which comes in float32, ``[B, H, N, slabs * U]``, as so many parts of a sum, maybe with columns behind them. And
    ``scores``, float32 ``[B, H, N, K]``, mass x h of the U / K units of each key block over its tokens; -inf where nothing is estimated."""
    batch, heads, blocks, units = mass.shape
    config, sizes = _config("mass", q)
    sizes["M"] = max(sizes["M"], sample)
    launch(_mass_kernel, (-(-blocks // (sizes["M"] // sample)), batch * heads, 1),
           (q, k_mean, log_count, half_variance, offsets, mass, rounded, error, scores),
           (*strides(q), heads, heads // k_mean.shape[1], blocks, units, half_variance.shape[3], scale * LOG2E),
           dict(SAMPLE=sample, CAP=cap, SLABS=slabs, PARTS=units // scores.shape[3], **sizes), config.options())


def merge(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, left: Tensor, matrix: Tensor,
          estimate_lse: Tensor, offsets: Tensor, scale: float, shares: Tensor) -> None:
    """Merges the estimate into out and lse in place; writes ``estimate_lse``, its log-sum-exp, float32 ``[B, H, P]``, where blocks are, and
    ``shares``, float32 ``[B, H, N, T]``, of which a block's T sum to the exact part's share: T times ``merged_rows`` are no fewer than the
    longest block's."""
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("merge", q)
    tiles = shares.shape[3]
    launch(_merge_kernel, (blocks * tiles, batch * heads, 1),
           (q, k_mean, v_mean, bias, left, matrix, estimate_lse, out, lse, shares, offsets),
           (*strides(q, out), heads, heads // k_mean.shape[1], blocks, units, q.shape[2], scale, scale * LOG2E),
           dict(TILES=tiles, DEPTH=depth(sizes["DIM_PAD"], sizes["M"]), **sizes), config.options())


def merged_rows(q: Tensor) -> int:
    """Rows of a block that a program of ``merge`` has."""
    return _config("merge", q)[0].block_m


def depth(dim_pad: int, block_m: int) -> int:
    """Rows of a query block's matrix that are multiplied at once: all, but where tiles must be small."""
    return dim_pad if block_m > 32 else min(dim_pad, 32)


def _config(kernel: str, q: Tensor) -> tuple[LaunchConfig, dict[str, int]]:
    config = estimate_config(kernel, q.shape[3], q.dtype, device_limits(q.device))
    return config, dict(M=config.block_m, N=config.block_n, **padded(q.shape[3]))
