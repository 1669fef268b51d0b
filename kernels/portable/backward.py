"""Portable backward kernels: dQ by blocks of query rows, dK and dV by blocks of key rows. No atomics, so the same bits every time.

With P the attention weights, dP = dO V^T, delta = rowsum(dO * O) - dlse and dS = P * (dP - delta):
dV = P^T dO, dQ = scale * dS K, dK = scale * dS^T Q (Dao et al. 2022, FlashAttention, appendix B.2; the lse term by d lse / d S = P).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from ..device import DeviceLimits, device_limits
from ..launch import launch, power_of_2
from ..lowering.arguments import view
from ..lowering.chunks import Listed, chunk_lists
from ..lowering.inputs import descriptor, strided
from ..lowering.primitives import (
    LOG2E,
    finite_or_zero,
    load_chunk,
    load_rows,
    lse_in_base_2,
    next_start,
    of_head,
    own_rows,
    row_of_lists,
    store_rows,
    visible_keys,
)
from ..lowering.transposed import transposed
from .config import LaunchConfig, dkv_config, dq_config

DELTA_ROWS = 64


@triton.jit
def delta_kernel(out, dout, dlse, lse, delta, lse2, heads, q_len,
                 M: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """delta, and lse in base 2, which lie as lse does; dlse None where no gradient arrives through lse."""
    row = tl.program_id(0) * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    o = load_rows(of_head(out, batch, head), row, out.row, q_len - row, M, DIM, DIM_PAD, True)
    do = load_rows(of_head(dout, batch, head), row, dout.row, q_len - row, M, DIM, DIM_PAD, True)
    offsets = row + tl.arange(0, M)
    mask = offsets < q_len
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = batch * lse.batch + tl.cast(head, tl.int64) * lse.head + offsets.to(tl.int64) * lse.row
    row_lse = tl.load(lse.ptr + at, mask=mask, other=0.0)
    if dlse is not None:
        row_dlse = tl.load(of_head(dlse, batch, head) + offsets.to(tl.int64) * dlse.row, mask=mask, other=0.0)
        # An empty row has no gradient, whatever arrives for its lse of -inf.
        row_delta -= tl.where(row_lse == float("-inf"), 0.0, row_dlse)
    tl.store(delta + at, row_delta, mask=mask)
    tl.store(lse2 + at, lse_in_base_2(row_lse), mask=mask)


@triton.jit
def _dq_step(dq, q, do, lse2, delta, k, v, k_row, v_row, k_tiles, v_tiles, batch, kv_head, start, size, query, shift, scale_log2,
             M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr):
    if PARTIAL:
        keys = load_rows(k, start, k_row, size, N, DIM, DIM_PAD, True)
        values = load_rows(v, start, v_row, size, N, DIM, DIM_PAD, True)
    else:
        keys = load_chunk(k_tiles, k, batch, kv_head, start, k_row, N, DIM, DIM_PAD)
        values = load_chunk(v_tiles, v, batch, kv_head, start, v_row, N, DIM, DIM_PAD)
    scores = tl.dot(q, tl.trans(keys))
    weights = tl.exp2(scores * scale_log2 - lse2[:, None])
    if PARTIAL:
        visible = visible_keys(query, start, size, shift, M, N, CAUSAL)
        weights = tl.where(visible, weights, 0.0)
    dweights = tl.dot(do, tl.trans(values))
    dscores = weights * (dweights - delta[:, None])
    if PARTIAL and CAUSAL:
        # As in the forward: zero times a NaN is NaN. Where a pair sees one, its score is NaN already.
        dscores = tl.where(visible, dscores, 0.0)
        keys = finite_or_zero(keys)
    return tl.dot(dscores.to(keys.dtype), keys, dq)


@triton.jit
def _dq_kernel(q, k, v, dout, k_tiles, v_tiles, dq, lse2, delta, bounds, chunks, heads, group, shift, scale_log2, scale,
               PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CAUSAL: tl.constexpr):
    batch, head, block, row, rows = own_rows(tl.program_id(0), bounds, heads, M, PARTS)
    if rows <= 0:
        return
    kv_head = head // group
    k_head, v_head = of_head(k, batch, kv_head), of_head(v, batch, kv_head)
    chunk_row = row_of_lists(chunks, batch, head, block)
    n_full, n_partial = tl.load(chunks.full + chunk_row), tl.load(chunks.partial + chunk_row)
    starts, sizes = chunks.starts + chunk_row * chunks.width, chunks.sizes + chunk_row * chunks.width

    queries = load_rows(of_head(q, batch, head), row, q.row, rows, M, DIM, DIM_PAD, True)
    do = load_rows(of_head(dout, batch, head), row, dout.row, rows, M, DIM, DIM_PAD, True)
    offsets = tl.arange(0, M)
    at = (batch * heads + head) * bounds.tokens + row + offsets
    row_lse2 = tl.load(lse2 + at, mask=offsets < rows, other=float("inf"))
    row_delta = tl.load(delta + at, mask=offsets < rows, other=0.0)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    following = tl.load(starts)
    for i in range(n_full):
        start, following = next_start(starts, i, following, True)
        acc = _dq_step(acc, queries, do, row_lse2, row_delta, k_head, v_head, k.row, v.row, k_tiles, v_tiles, batch.to(tl.int32), kv_head,
                       start, N, row, shift, scale_log2, M, N, DIM, DIM_PAD, False, CAUSAL)
    for i in range(chunks.width - n_partial, chunks.width):
        start, size = tl.load(starts + i), tl.load(sizes + i)
        acc = _dq_step(acc, queries, do, row_lse2, row_delta, k_head, v_head, k.row, v.row, k_tiles, v_tiles, batch.to(tl.int32), kv_head,
                       start, size, row, shift, scale_log2, M, N, DIM, DIM_PAD, True, CAUSAL)
    store_rows(of_head(dq, batch, head), row, dq.row, rows, acc * scale, M, DIM, DIM_PAD)


@triton.jit
def _dkv_step(dk, dv, keys, values, q, dout, q_row, do_row, q_tiles, do_tiles, batch, head, lse2, delta, start, size,
              key, shift, scale_log2,
              M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr):
    """Adds one chunk of M queries; scores stand transposed, [N keys, M queries], so that dV and dK accumulate without a transpose."""
    offsets = tl.arange(0, M)
    if PARTIAL:
        queries = load_rows(q, start, q_row, size, M, DIM, DIM_PAD, True)
    else:
        queries = load_chunk(q_tiles, q, batch, head, start, q_row, M, DIM, DIM_PAD)
    scores = tl.dot(keys, tl.trans(queries))
    # Both products before the exponentials: 9 % faster on an H200 than P dO between them.
    if PARTIAL:
        do = load_rows(dout, start, do_row, size, M, DIM, DIM_PAD, True)
    else:
        do = load_chunk(do_tiles, dout, batch, head, start, do_row, M, DIM, DIM_PAD)
    dweights = tl.dot(values, tl.trans(do))
    if PARTIAL:
        row_lse2 = tl.load(lse2 + start + offsets, mask=offsets < size, other=float("inf"))
    else:
        row_lse2 = tl.load(lse2 + start + offsets)
    weights = tl.exp2(scores * scale_log2 - row_lse2[None, :])
    if PARTIAL and CAUSAL:
        visible = tl.trans(visible_keys(start, key, N, shift, M, N, CAUSAL))
        weights = tl.where(visible, weights, 0.0)
    dv = tl.dot(weights.to(do.dtype), do, dv)
    if PARTIAL:
        row_delta = tl.load(delta + start + offsets, mask=offsets < size, other=0.0)
    else:
        row_delta = tl.load(delta + start + offsets)
    dscores = weights * (dweights - row_delta[None, :])
    if PARTIAL and CAUSAL:
        dscores = tl.where(visible, dscores, 0.0)
        queries = finite_or_zero(queries)
    dk = tl.dot(dscores.to(queries.dtype), queries, dk)
    return dk, dv


@triton.jit
def _dkv_kernel(k, v, q, dout, q_tiles, do_tiles, lse2, delta, chunks, bounds, dk, dv, kv_heads, group, q_len, shift, scale_log2, scale,
                PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CAUSAL: tl.constexpr):
    batch, kv_head, block, row, rows = own_rows(tl.program_id(0), bounds, kv_heads, N, PARTS)
    if rows <= 0:
        return
    keys = load_rows(of_head(k, batch, kv_head), row, k.row, rows, N, DIM, DIM_PAD, True)
    values = load_rows(of_head(v, batch, kv_head), row, v.row, rows, N, DIM, DIM_PAD, True)
    dk_acc = tl.zeros([N, DIM_PAD], tl.float32)
    dv_acc = tl.zeros([N, DIM_PAD], tl.float32)
    # The query heads that share this key/value head, in order.
    for head in range(kv_head * group, kv_head * group + group):
        q_head, do_head = of_head(q, batch, head), of_head(dout, batch, head)
        rows_before = (batch * kv_heads * group + head) * q_len
        head_lse2, head_delta = lse2 + rows_before, delta + rows_before
        chunk_row = row_of_lists(chunks, batch, head, block)
        n_full, n_partial = tl.load(chunks.full + chunk_row), tl.load(chunks.partial + chunk_row)
        starts, sizes = chunks.starts + chunk_row * chunks.width, chunks.sizes + chunk_row * chunks.width
        following = tl.load(starts)
        for i in range(n_full):
            start, following = next_start(starts, i, following, True)
            dk_acc, dv_acc = _dkv_step(dk_acc, dv_acc, keys, values, q_head, do_head, q.row, dout.row, q_tiles, do_tiles,
                                       batch.to(tl.int32), head, head_lse2, head_delta, start, M, row, shift, scale_log2,
                                       M, N, DIM, DIM_PAD, False, CAUSAL)
        for i in range(chunks.width - n_partial, chunks.width):
            start, size = tl.load(starts + i), tl.load(sizes + i)
            dk_acc, dv_acc = _dkv_step(dk_acc, dv_acc, keys, values, q_head, do_head, q.row, dout.row, q_tiles, do_tiles,
                                       batch.to(tl.int32), head, head_lse2, head_delta, start, size, row, shift, scale_log2,
                                       M, N, DIM, DIM_PAD, True, CAUSAL)
    store_rows(of_head(dk, batch, kv_head), row, dk.row, rows, dk_acc * scale, N, DIM, DIM_PAD)
    store_rows(of_head(dv, batch, kv_head), row, dv.row, rows, dv_acc, N, DIM, DIM_PAD)


def triton_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    scale: float, causal: bool, configs: tuple[LaunchConfig, LaunchConfig] | None = None,
    limits: DeviceLimits | None = None, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). ``configs`` (dq's, dkv's) override the launch table, ``limits`` are the device's own.

    ``in_place``: dq may take dout's memory. A program loads the rows of dout that it is going to write before anything else.
    """
    q, k, v, dout = map(strided, (q, k, v, dout))
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    listed = Listed.of(blocks, q_len, kv_len)
    q_blocks, kv_blocks = listed[2:]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    limits = limits or device_limits(q.device)
    for_dq, for_dkv = configs or (dq_config(dim, blocks.max_q_length, blocks.max_kv_length, limits),
                                  dkv_config(dim, blocks.max_q_length, blocks.max_kv_length, limits))
    dim_pad = max(power_of_2(dim), 16)
    shape = dict(DIM=dim, DIM_PAD=dim_pad, CAUSAL=causal)
    shift = kv_len - q_len if causal else None

    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    q_view, k_view, v_view, do_view = map(view, (q, k, v, dout))
    launch(delta_kernel, (-(-q_len // DELTA_ROWS), batch * heads, 1),
           (view(out), do_view, None if dlse is None else view(dlse), view(lse), delta, lse2), (heads, q_len),
           dict(M=DELTA_ROWS, DIM=dim, DIM_PAD=dim_pad))

    # Ragged blocks need not cover every row.
    dk, dv = (torch.empty_like(x) if kv_blocks.covers else torch.zeros_like(x) for x in (k, v))
    chunks = chunk_lists(transposed(listed), heads, for_dkv.block_m, shift, rows_are_queries=False)
    parts = -(-kv_blocks.length // for_dkv.block_n)
    q_tiles, do_tiles = (descriptor(x, for_dkv.block_m, dim_pad, limits.tma) for x in (q, dout))
    launch(_dkv_kernel, (kv_blocks.number * parts, batch * kv_heads, 1),
           (k_view, v_view, q_view, do_view, q_tiles, do_tiles, lse2, delta, chunks, kv_blocks.bounds(kv_heads), view(dk), view(dv)),
           (kv_heads, heads // kv_heads, q_len, kv_len - q_len, scale * LOG2E, scale),
           dict(PARTS=parts, M=for_dkv.block_m, N=for_dkv.block_n) | shape, for_dkv.options())

    # Nothing reads dout after this one.
    own = in_place and q_blocks.covers and dout.stride() == q.stride()
    dq = dout if own else torch.empty_like(q) if q_blocks.covers else torch.zeros_like(q)
    chunks = chunk_lists(listed, heads, for_dq.block_n, shift)
    parts = -(-q_blocks.length // for_dq.block_m)
    k_tiles, v_tiles = (descriptor(x, for_dq.block_n, dim_pad, limits.tma) for x in (k, v))
    launch(_dq_kernel, (q_blocks.number * parts, batch * heads, 1),
           (q_view, k_view, v_view, do_view, k_tiles, v_tiles, view(dq), lse2, delta, q_blocks.bounds(heads), chunks),
           (heads, heads // kv_heads, kv_len - q_len, scale * LOG2E, scale),
           dict(PARTS=parts, M=for_dq.block_m, N=for_dq.block_n) | shape, for_dq.options())
    return dq, dk, dv
