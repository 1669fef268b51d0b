"""Portable kernels that compare queries with units: biases, log-sum-exps, mean weights of a block, the merge with the exact part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..lowering.arguments import Lists, view
from ..lowering.chunks import shared_strides
from ..lowering.inputs import strided
from ..lowering.primitives import LN2, LOG2E, finish_softmax, load_rows, of_head, row_of_lists, softmax_step
from .tail_config import TailConfig, tail_config

# Units, and ids of a list, that a program of the bias kernel takes at once.
WIDTH = 512


@triton.jit
def _bias_kernel(log_count, half_variance, lists, useful, bias, heads, group, blocks, units,
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
    if lists is not None:
        # Other threads wrote what is written over.
        tl.debug_barrier()
        row = row_of_lists(lists, batch, head, block)
        count = tl.minimum(tl.load(lists.counts + row), lists.capacity)
        for start in range(0, count, WIDTH):
            place = start + tl.arange(0, WIDTH)
            item = tl.load(lists.indices + row * lists.capacity + place, mask=place < count, other=-1)
            for part in tl.static_range(PARTS):
                known = (item >= 0) & (item < lists.items)
                tl.store(bias + at + item * PARTS + part, tl.full([WIDTH], float("-inf"), tl.float32), mask=known)


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
def _lse_kernel(q, k_mean, bias, offsets, lse, heads, group, blocks, units, tokens, scale_log2, TILES: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    block, before = tl.program_id(0) // TILES, tl.program_id(0) % TILES * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row, rows, size = _block_rows(offsets, block, before)
    if rows <= 0:
        return
    at = batch * heads + head
    bias += (at * blocks + block) * units
    k_mean += (batch * (heads // group) + head // group) * units * DIM
    queries = load_rows(of_head(q, batch, head), row, q.row, rows, M, DIM, DIM_PAD, True)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    columns, lines = tl.arange(0, N), tl.arange(0, M)
    for start in range(0, units, N):
        keys = load_rows(k_mean, start, DIM, units - start, N, DIM, DIM_PAD, True)
        more = tl.load(bias + start + columns, mask=start + columns < units, other=float("-inf"))
        scores = _logits(queries, keys, more[None, :], scale_log2)
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, 1.0)
    empty, row_lse = finish_softmax(tl.zeros([M, 1], tl.float32), row_max, row_sum)
    tl.store(lse + at * tokens + row + lines, row_lse, mask=lines < rows)


@triton.jit
def _weights_kernel(q, k_mean, bias, half_variance, offsets, lse, weights, heads, group, blocks, units, tokens, weights_row, scale_log2,
                    CAP: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The mean over a block's rows of exp(logit - lse) of M units; damped where h is given. Products lie with units along their rows, so
    that the sum over queries is one within rows."""
    block, start = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    first, rows, size = _block_rows(offsets, block, 0)
    at = batch * heads + head
    unit, lines = start + tl.arange(0, M), tl.arange(0, N)
    more = tl.load(bias + (at * blocks + block) * units + unit, mask=unit < units, other=float("-inf"))
    total = tl.zeros([M], tl.float32)
    # Not one of these units is estimated where a head does without.
    if tl.max(more, 0) > float("-inf"):
        k_mean += (batch * (heads // group) + head // group) * units * DIM
        keys = load_rows(k_mean, start, DIM, units - start, M, DIM, DIM_PAD, True)
        q_head = of_head(q, batch, head)
        lse += at * tokens + first
        dims = tl.arange(0, DIM_PAD)
        for row in range(0, size, N):
            row_lse = tl.load(lse + row + lines, mask=row + lines < size, other=float("inf"))
            # Neither a query that is not finite nor one that estimates nothing has weights: both count as queries of zeros and exp(-inf).
            counts = tl.abs(row_lse) < float("inf")
            pointers = q_head + (first + row).to(tl.int64) * q.row + (lines[:, None] * q.row + dims[None, :])
            queries = tl.load(pointers, mask=counts[:, None] & (dims < DIM)[None, :], other=0.0)
            row_lse = tl.where(counts, row_lse * (1 / LN2), float("inf"))
            total += tl.sum(tl.exp2(_logits(keys, queries, more[:, None], scale_log2) - row_lse[None, :]), 1)
        total /= tl.maximum(size, 1)
        if half_variance is not None:
            h = tl.load(half_variance + (at * blocks + block) * units + unit, mask=unit < units, other=0.0)
            total *= tl.sqrt(tl.minimum(CAP / tl.maximum(h, 1e-6), 1.0))
    tl.store(weights + (at * blocks + block) * weights_row + unit, total.to(weights.dtype.element_ty), mask=unit < units)


@triton.jit
def _combine_kernel(q, k_mean, v_mean, bias, matrix, tail_lse, out, lse, share, offsets, heads, group, blocks, units, tokens,
                    scale, scale_log2, TILES: tl.constexpr, DEPTH: tl.constexpr,
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
    queries = load_rows(of_head(q, batch, head), row, q.row, rows, M, DIM, DIM_PAD, True)
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
                x = tl.load(of_head(q, batch, head) + row.to(tl.int64) * q.row + (lines[:, None] * q.row + depth[None, :]),
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
    pointers = of_head(out, batch, head) + row.to(tl.int64) * out.row + (lines[:, None] * out.row + dims[None, :])
    written = inside & some
    mask = written[:, None] & (dims < DIM)[None, :]
    merged = exact[:, None] * tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + tl.exp(row_tail - total)[:, None] * acc
    tl.store(pointers, merged.to(out.ptr.dtype.element_ty), mask=mask)
    tl.store(lse + at * tokens + row + lines, total, mask=written)
    tl.store(share, tl.sum(tl.where(inside, tl.where(some, exact, 1.0), 0.0), 0) / size)


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
    _bias_kernel[(blocks, batch * heads)](
        log_count, half_variance, lists, useful, bias, heads, heads // log_count.shape[1], blocks, units,
        CAP=cap, PARTS=units // blocks, WIDTH=WIDTH)
    return bias


def tail_lse(q: Tensor, k_mean: Tensor, bias: Tensor, offsets: Tensor, longest: int, scale: float, out: Tensor) -> Tensor:
    """``out``, float32 ``[B, H, P]``: the log of the sum over units of exp(scale q . k_mean + bias), written where blocks are."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("lse", q)
    tiles = triton.cdiv(longest, sizes["M"])
    _lse_kernel[(blocks * tiles, batch * heads)](
        view(q), k_mean, bias, offsets, out, heads, heads // k_mean.shape[1], blocks, units, q.shape[2], scale * LOG2E, TILES=tiles,
        **sizes, **config.options())
    return out


def mean_weights(q: Tensor, k_mean: Tensor, bias: Tensor, half_variance: Tensor | None, offsets: Tensor, lse: Tensor, scale: float,
                 cap: float, out: Tensor) -> Tensor:
    """``out``, ``[B, H, N, U]`` with dense rows: each block's mean of exp(logit - lse), with ``half_variance`` damped."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("weights", q)
    chunks = triton.cdiv(units, sizes["M"])
    _weights_kernel[(blocks * chunks, batch * heads)](
        view(q), k_mean, bias, half_variance, offsets, lse, out, heads, heads // k_mean.shape[1], blocks, units, q.shape[2],
        out.stride(2), scale * LOG2E, CAP=cap, CHUNKS=chunks, **sizes, **config.options())
    return out


def combine(out: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor, v_mean: Tensor, bias: Tensor, matrix: Tensor | None, z: Tensor,
            offsets: Tensor, longest: int, scale: float, share: Tensor) -> None:
    """Merges the tail, of log-sum-exp ``z``, into out and lse in place, and writes ``share``, float32 ``[B, H, N]``."""
    q = strided(q)
    batch, heads, blocks, units = bias.shape
    config, sizes = _config("combine", q)
    tiles = triton.cdiv(longest, sizes["M"])
    shares = torch.empty(batch, heads, blocks, tiles, dtype=torch.float32, device=q.device)
    _combine_kernel[(blocks * tiles, batch * heads)](
        view(q), k_mean, v_mean, bias, matrix, z, view(out), lse, shares, offsets, heads, heads // k_mean.shape[1], blocks, units,
        q.shape[2], scale, scale * LOG2E, TILES=tiles, DEPTH=depth(sizes["DIM_PAD"], sizes["M"]), **sizes, **config.options())
    torch.sum(shares, -1, out=share)


def depth(dim_pad: int, block_m: int) -> int:
    """Rows of a query block's matrix that are multiplied at once: all, but where tiles must be small."""
    return dim_pad if block_m > 32 else min(dim_pad, 32)


def _config(kernel: str, q: Tensor) -> tuple[TailConfig, dict[str, int]]:
    dim = q.shape[3]
    config = tail_config(kernel, dim, q.dtype, device_limits(q.device))
    return config, dict(M=config.block_m, N=config.block_n, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16))
