"""Portable kernels that compare queries with units: biases, log-sum-exps, mean weights of a block, the merge with the exact part."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..lowering.arguments import Lists
from ..lowering.chunks import shared_strides
from ..lowering.inputs import strided
from ..lowering.primitives import LN2, LOG2E, finish_softmax, load_rows, softmax_step
from .config import LaunchConfig
from .tail_config import launcher, strides, tail_config
from .tail_statistics import head_at

# Units, and ids of a list, that a program of the bias and error kernels takes at once.
WIDTH = 512
# Blocks of at most so many rows are compared with the same units so many at a time, because one alone is not worth loading units for.
SHORT, TOGETHER = 128, 8
# What the listed units leave of the softmax over all is told by subtraction where it is no smaller: to 2^-14 or so.
LEAST_LEFT = 2**-6


class Whole(NamedTuple):
    """What is known of a softmax over all units: its log-sum-exp, float32 ``[B, H, P]``, and what went into its biases; the arguments of
    ``unit_bias``."""

    lse: Tensor
    log_count: Tensor
    half_variance: Tensor | None
    lists: Lists
    useful: Tensor | None


@triton.jit
def _list(counts, indices, batch, head, block, lists_batch, lists_head, lists_group, capacity):
    """(pointer to a block's list, entries)"""
    row = batch * lists_batch + tl.cast(head // lists_group, tl.int64) * lists_head + block
    return indices + row * capacity, tl.minimum(tl.load(counts + row), capacity)


@triton.jit
def _bias_kernel(log_count, half_variance, counts, indices, useful, bias, lists_batch, lists_head, lists_group, capacity, heads, group,
                 blocks, units,
                 CAP: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    block = tl.program_id(0)
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = ((batch * heads + head) * blocks + block) * units
    log_count += (batch * (heads // group) + head // group) * units
    for start in range(0, units, WIDTH):
        unit = start + tl.arange(0, WIDTH)
        value = tl.load(log_count + unit, mask=unit < units, other=float("-inf"))
        if half_variance is not None:
            value += tl.minimum(tl.load(half_variance + at + unit, mask=unit < units, other=0.0), CAP)
        if useful is not None:
            value = tl.where(tl.load(useful + batch * heads + head) != 0, value, float("-inf"))
        tl.store(bias + at + unit, value * (1 / LN2), mask=unit < units)
    if counts is not None:
        # Other threads wrote what is written over.
        tl.debug_barrier()
        listed, count = _list(counts, indices, batch, head, block, lists_batch, lists_head, lists_group, capacity)
        for start in range(0, count, WIDTH):
            place = start + tl.arange(0, WIDTH)
            item = tl.load(listed + place, mask=place < count, other=-1)
            for part in tl.static_range(PARTS):
                known = (item >= 0) & (item < blocks)
                tl.store(bias + at + item * PARTS + part, tl.full([WIDTH], float("-inf"), tl.float32), mask=known)


@triton.jit
def _error_kernel(mass, half_variance, log_count, scores, error, heads, group, blocks, units, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """mass x h of a block's units for each of its tokens, -inf where nothing is estimated of any, into scores; and the sum of mass x h over
    blocks into error."""
    block = tl.program_id(0)
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row = (batch * heads + head) * blocks + block
    log_count += (batch * (heads // group) + head // group) * units
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, blocks, WIDTH):
        item = start + tl.arange(0, WIDTH)
        inside = item < blocks
        score = tl.zeros([WIDTH], tl.float32)
        tokens = tl.zeros([WIDTH], tl.float32)
        for part in tl.static_range(PARTS):
            unit = item * PARTS + part
            score += tl.load(mass + row * units + unit, mask=inside, other=0.0) * tl.load(half_variance + row * units + unit, mask=inside,
                                                                                        other=0.0)
            tokens += tl.exp(tl.load(log_count + unit, mask=inside, other=0.0))
        total += score
        if scores is not None:
            tl.store(scores + row * blocks + item, tl.where(tokens > 0.0, score / tokens, float("-inf")), mask=inside)
    if error is not None:
        tl.store(error + row, tl.sum(total, 0))


@triton.jit
def _block_rows(offsets, block, before):
    """(a block's row ``before`` rows behind its first, rows from there to its end, rows of the block)"""
    first = tl.load(offsets + block)
    size = tl.load(offsets + block + 1) - first
    return first + before, size - before, size


@triton.jit
def _logits(a, b, bias, scale_log2):
    return tl.dot(a, tl.trans(b), input_precision="ieee") * scale_log2 + bias


@triton.jit
def _share_of_listed(queries, row_lse2, k_mean, log_count, half_variance, listed, count, blocks, scale_log2, CAP: tl.constexpr,
                     PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """[M]: what share of the softmax over all units, of log-sum-exp ``row_lse2`` in base 2, are those of the listed blocks."""
    share = tl.zeros([M], tl.float32)
    columns, dims = tl.arange(0, N), tl.arange(0, DIM_PAD)
    for start in range(0, count * PARTS, N):
        place = start + columns
        item = tl.load(listed + place // PARTS, mask=place < count * PARTS, other=-1)
        known = (item >= 0) & (item < blocks)
        unit = item * PARTS + place % PARTS
        keys = tl.load(k_mean + unit[:, None] * DIM + dims[None, :], mask=known[:, None] & (dims < DIM)[None, :], other=0.0)
        more = tl.load(log_count + unit, mask=known, other=float("-inf"))
        if half_variance is not None:
            more += tl.minimum(tl.load(half_variance + unit, mask=known, other=0.0), CAP)
        share += tl.sum(tl.exp2(_logits(queries, keys, (more * (1 / LN2))[None, :], scale_log2) - row_lse2[:, None]), 1)
    return share


@triton.jit
def _lse_kernel(q, k_mean, bias, offsets, lse, whole, log_count, half_variance, counts, indices, useful, q_batch, q_head, q_row,
                lists_batch, lists_head, lists_group, capacity, heads, group, blocks, units, tokens, scale_log2,
                CAP: tl.constexpr, PARTS: tl.constexpr, LEAST_LEFT: tl.constexpr, TILES: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Over the units that have a bias. With ``whole``, that over all units, by what the listed ones leave of it where that is enough."""
    block, before = tl.program_id(0) // TILES, tl.program_id(0) % TILES * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row, rows, size = _block_rows(offsets, block, before)
    if rows <= 0:
        return
    at = batch * heads + head
    columns, lines = tl.arange(0, N), tl.arange(0, M)
    lse += at * tokens + row + lines
    k_mean += (batch * (heads // group) + head // group) * units * DIM
    queries = load_rows(head_at(q, batch, head, q_batch, q_head), row, q_row, rows, M, DIM, DIM_PAD, True)
    if whole is not None:
        if useful is not None:
            if tl.load(useful + at) == 0:
                tl.store(lse, tl.full([M], float("-inf"), tl.float32), mask=lines < rows)
                return
        listed, count = _list(counts, indices, batch, head, block, lists_batch, lists_head, lists_group, capacity)
        if count * 2 <= blocks:
            row_lse = tl.load(whole + at * tokens + row + lines, mask=lines < rows, other=0.0)
            log_count += (batch * (heads // group) + head // group) * units
            if half_variance is not None:
                half_variance += (at * blocks + block) * units
            left = 1.0 - _share_of_listed(queries, row_lse * (1 / LN2), k_mean, log_count, half_variance, listed, count, blocks, scale_log2,
                                          CAP, PARTS, M, N, DIM, DIM_PAD)
            # Neither what is close to nothing nor NaN.
            enough = (left >= LEAST_LEFT) | (lines >= rows)
            if tl.min(enough.to(tl.int32), 0) == 1:
                tl.store(lse, row_lse + tl.log(left), mask=lines < rows)
                return
    bias += (at * blocks + block) * units
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    for start in range(0, units, N):
        keys = load_rows(k_mean, start, DIM, units - start, N, DIM, DIM_PAD, True)
        more = tl.load(bias + start + columns, mask=start + columns < units, other=float("-inf"))
        scores = _logits(queries, keys, more[None, :], scale_log2)
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
    empty, row_lse = finish_softmax(tl.zeros([M, 1], tl.float32), row_max, row_sum)
    tl.store(lse, row_lse, mask=lines < rows)


@triton.jit
def _weights_of_rows(total, q, row, rows, lse, q_row, keys, more, scale_log2, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """``total``, [M], more by the sum of exp(logit - lse) over up to N rows from ``row`` on, of which there are ``rows``."""
    lines, dims = tl.arange(0, N), tl.arange(0, DIM_PAD)
    row_lse = tl.load(lse + row + lines, mask=lines < rows, other=float("inf"))
    # Neither a query that is not finite nor one that estimates nothing has weights: both count as queries of zeros and exp(-inf).
    counts = tl.abs(row_lse) < float("inf")
    pointers = q + row.to(tl.int64) * q_row + (lines[:, None] * q_row + dims[None, :])
    queries = tl.load(pointers, mask=counts[:, None] & (dims < DIM)[None, :], other=0.0)
    row_lse = tl.where(counts, row_lse * (1 / LN2), float("inf"))
    return total + tl.sum(tl.exp2(_logits(keys, queries, more[:, None], scale_log2) - row_lse[None, :]), 1)


@triton.jit
def _weights_kernel(q, k_mean, bias, half_variance, offsets, lse, weights, q_batch, q_head, q_row, heads, group, blocks, units, tokens,
                    weights_row, scale_log2, CAP: tl.constexpr, CHUNKS: tl.constexpr, TOGETHER: tl.constexpr, SHORT: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The mean over a block's rows of exp(logit - lse) of M units, for TOGETHER blocks; damped where h is given. Products lie with units
    along their rows, so that the sum over queries is one within rows. With SHORT no block has more than N rows."""
    of_blocks, start = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = batch * heads + head
    unit = start + tl.arange(0, M)
    k_mean += (batch * (heads // group) + head // group) * units * DIM
    keys = load_rows(k_mean, start, DIM, units - start, M, DIM, DIM_PAD, True)
    q = head_at(q, batch, head, q_batch, q_head)
    lse += at * tokens
    for block in range(of_blocks * TOGETHER, tl.minimum(of_blocks * TOGETHER + TOGETHER, blocks)):
        first, rows, size = _block_rows(offsets, block, 0)
        more = tl.load(bias + (at * blocks + block) * units + unit, mask=unit < units, other=float("-inf"))
        total = tl.zeros([M], tl.float32)
        # Not one of these units is estimated where a head does without.
        if tl.max(more, 0) > float("-inf"):
            if SHORT:
                total = _weights_of_rows(total, q, first, size, lse, q_row, keys, more, scale_log2, N, DIM, DIM_PAD)
            else:
                for row in range(0, size, N):
                    total = _weights_of_rows(total, q, first + row, size - row, lse, q_row, keys, more, scale_log2, N, DIM, DIM_PAD)
            total /= tl.maximum(size, 1)
            if half_variance is not None:
                h = tl.load(half_variance + (at * blocks + block) * units + unit, mask=unit < units, other=0.0)
                total *= tl.sqrt(tl.minimum(CAP / tl.maximum(h, 1e-6), 1.0))
        tl.store(weights + (at * blocks + block) * weights_row + unit, total.to(weights.dtype.element_ty), mask=unit < units)


@triton.jit
def _combine_kernel(q, k_mean, v_mean, bias, matrix, tail_lse, out, lse, share, offsets, q_batch, q_head, q_row, out_batch, out_head,
                    out_row, heads, group, blocks, units, tokens, scale, scale_log2, TILES: tl.constexpr, DEPTH: tl.constexpr,
                    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    block, before = tl.program_id(0) // TILES, tl.program_id(0) % TILES * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row, rows, size = _block_rows(offsets, block, before)
    at = batch * heads + head
    share += (at * blocks + block) * TILES + before // M
    if rows <= 0:
        tl.store(share, 0.0)
        return
    lines = tl.arange(0, M)
    inside = lines < rows
    row_tail = tl.load(tail_lse + at * tokens + row + lines, mask=inside, other=float("-inf"))
    # A row that leaves nothing out keeps its bits.
    some = row_tail != float("-inf")
    if tl.max(some.to(tl.int32), 0) == 0:
        tl.store(share, tl.minimum(rows, M).to(tl.float32) / size)
        return
    q = head_at(q, batch, head, q_batch, q_head)
    queries = load_rows(q, row, q_row, rows, M, DIM, DIM_PAD, True)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    dims = tl.arange(0, DIM_PAD)
    if matrix is not None:
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
    bias += (at * blocks + block) * units
    means = (batch * (heads // group) + head // group) * units * DIM
    columns = tl.arange(0, N)
    row_tail2 = row_tail * (1 / LN2)
    for start in range(0, units, N):
        keys = load_rows(k_mean + means, start, DIM, units - start, N, DIM, DIM_PAD, True)
        more = tl.load(bias + start + columns, mask=start + columns < units, other=float("-inf"))
        weights = tl.exp2(_logits(queries, keys, more[None, :], scale_log2) - row_tail2[:, None])
        values = load_rows(v_mean + means, start, DIM, units - start, N, DIM, DIM_PAD, True)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")

    row_lse = tl.load(lse + at * tokens + row + lines, mask=inside, other=0.0)
    larger = tl.maximum(row_lse, row_tail)
    total = larger + tl.log(tl.exp(row_lse - larger) + tl.exp(row_tail - larger))
    exact = tl.exp(row_lse - total)
    pointers = head_at(out, batch, head, out_batch, out_head) + row.to(tl.int64) * out_row + (lines[:, None] * out_row + dims[None, :])
    written = inside & some
    mask = written[:, None] & (dims < DIM)[None, :]
    merged = exact[:, None] * tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + tl.exp(row_tail - total)[:, None] * acc
    tl.store(pointers, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at * tokens + row + lines, total, mask=written)
    tl.store(share, tl.sum(tl.where(inside, tl.where(some, exact, 1.0), 0.0), 0) / size)


_launch_bias, _launch_error, _launch_lse, _launch_weights, _launch_combine = map(
    launcher, (_bias_kernel, _error_kernel, _lse_kernel, _weights_kernel, _combine_kernel))


def _of_lists(lists: Lists | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if lists is None else (lists.counts, lists.indices)


def _numbers(lists: Lists | None) -> tuple[int, int, int, int]:
    """Strides, heads that share a list, and capacity."""
    return (0, 0, 1, 0) if lists is None else (lists.batch, lists.head, lists.group, lists.capacity)


def block_lists(counts: Tensor, indices: Tensor, heads: int, blocks: int) -> Lists:
    """The first ``blocks`` of what lists for ``heads`` query heads name."""
    counts = counts.contiguous()
    return Lists(counts, indices.contiguous(), *shared_strides(counts, heads), indices.shape[-1], blocks)


def unit_bias(log_count: Tensor, half_variance: Tensor | None, lists: Lists | None, useful: Tensor | None, cap: float, bias: Tensor
              ) -> Tensor:
    """Writes ``bias``, float32 ``[B, H, N, U]``, in base 2: what a unit's logit has beside its mean key's.

    -inf where nothing is estimated: in units that hold nothing or what is not finite, in blocks that ``lists`` name, and in heads not
    ``useful``, bool ``[B, H]``.
    """
    batch, heads, blocks, units = bias.shape
    _launch_bias((blocks, batch * heads, 1), (log_count, half_variance, *_of_lists(lists), useful, bias),
                 (*_numbers(lists), heads, heads // log_count.shape[1], blocks, units), (),
                 dict(CAP=cap, PARTS=units // blocks, WIDTH=WIDTH), None)
    return bias


def errors(mass: Tensor, half_variance: Tensor, log_count: Tensor, scores: Tensor | None, error: Tensor | None) -> None:
    """Writes ``scores``, float32 ``[B, H, N, N]``: mass x h of each block's units over its tokens, -inf where nothing is estimated of any;
    and ``error``, float32 ``[B, H, N]``, the sum of mass x h over the blocks that are estimated."""
    batch, heads, blocks, units = mass.shape
    _launch_error((blocks, batch * heads, 1), (mass, half_variance, log_count, scores, error),
                  (heads, heads // log_count.shape[1], blocks, units), (), dict(PARTS=units // blocks, WIDTH=WIDTH), None)


def tail_lse(q: Tensor, k_mean: Tensor, bias: Tensor, offsets: Tensor, longest: int, scale: float, out: Tensor,
             whole: Whole | None = None, cap: float = 0.0) -> Tensor:
    """``out``, float32 ``[B, H, P]``: the log of the sum over units of exp(scale q . k_mean + bias), written where blocks are. With
    ``whole``, of which ``unit_bias`` made the biases with ``cap``, sooner: by what lists of a few blocks leave."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("lse", q)
    tiles = triton.cdiv(longest, sizes["M"])
    known, log_count, half_variance, lists, useful = (None,) * 5 if whole is None else whole
    _launch_lse((blocks * tiles, batch * heads, 1),
                (q, k_mean, bias, offsets, out, known, log_count, half_variance, *_of_lists(lists), useful),
                (*strides(q), *_numbers(lists), heads, heads // k_mean.shape[1], blocks, units, q.shape[2]), (scale * LOG2E,),
                dict(CAP=cap, PARTS=units // blocks, LEAST_LEFT=LEAST_LEFT, TILES=tiles, **sizes), config)
    return out


def mean_weights(q: Tensor, k_mean: Tensor, bias: Tensor, half_variance: Tensor | None, offsets: Tensor, longest: int, lse: Tensor,
                 scale: float, cap: float, out: Tensor) -> Tensor:
    """``out``, ``[B, H, N, U]`` with dense rows: each block's mean of exp(logit - lse), with ``half_variance`` damped."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    short = longest <= SHORT
    config, sizes = _config("short weights" if short else "weights", q)
    chunks, together = triton.cdiv(units, sizes["M"]), TOGETHER if short else 1
    _launch_weights((triton.cdiv(blocks, together) * chunks, batch * heads, 1), (q, k_mean, bias, half_variance, offsets, lse, out),
                    (*strides(q), heads, heads // k_mean.shape[1], blocks, units, q.shape[2], out.stride(2)), (scale * LOG2E,),
                    dict(CAP=cap, CHUNKS=chunks, TOGETHER=together, SHORT=longest <= sizes["N"], **sizes), config)
    return out


def combine(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, matrix: Tensor | None, z: Tensor,
            offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """Merges the tail, of log-sum-exp ``z``, into out and lse in place, and writes ``share``, float32 ``[B, H, N]``."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("combine", q)
    tiles = triton.cdiv(longest, sizes["M"])
    shares = torch.empty(batch, heads, blocks, tiles, dtype=torch.float32, device=q.device)
    _launch_combine((blocks * tiles, batch * heads, 1), (q, k_mean, v_mean, bias, matrix, z, out, lse, shares, offsets),
                    (*strides(q, out), heads, heads // k_mean.shape[1], blocks, units, q.shape[2]), (scale, scale * LOG2E),
                    dict(TILES=tiles, DEPTH=depth(sizes["DIM_PAD"], sizes["M"]), **sizes), config)
    torch.sum(shares, -1, out=share)


def depth(dim_pad: int, block_m: int) -> int:
    """Rows of a query block's matrix that are multiplied at once: all, but where tiles must be small."""
    return dim_pad if block_m > 32 else min(dim_pad, 32)


def _config(kernel: str, q: Tensor) -> tuple[LaunchConfig, dict[str, int]]:
    dim = q.shape[3]
    config = tail_config(kernel, dim, q.dtype, device_limits(q.device))
    return config, dict(M=config.block_m, N=config.block_n, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16))
