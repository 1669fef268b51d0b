"""Portable forward kernel: one program per block of query rows, online softmax over the chunks of keys that it attends to."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from ..device import device_limits
from ..lowering.chunks import chunk_lists, kv_cut, q_cut, shared_strides
from ..lowering.inputs import descriptor, readable
from ..lowering.outputs import empty_outputs
from ..lowering.primitives import (
    LN2,
    LOG2E,
    finite_or_zero,
    load_chunk,
    load_rows,
    of_head,
    own_rows,
    row_of_lists,
    softmax_step,
    store_rows,
    visible_keys,
)
from .config import LaunchConfig, forward_config


@triton.jit
def _attend(state, q, k, v, k_chunks, v_chunks, batch, kv_head, start, size, query, k_stride, v_stride, shift, scale_log2,
            M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CUT: tl.constexpr, CAUSAL: tl.constexpr):
    """Attends to one chunk of keys; returns the new (acc, top, total)."""
    acc, top, total = state
    if CUT:
        keys = load_rows(k, start, k_stride, size, N, DIM, DIM_PAD, True)
    else:
        keys = load_chunk(k_chunks, k, batch, kv_head, start, k_stride, N, DIM, DIM_PAD)
    scores = tl.dot(q, tl.trans(keys))
    if CUT:
        visible = visible_keys(query, start, size, shift, M, N, CAUSAL)
        scores = tl.where(visible, scores, float("-inf"))
    weights, factor, top, total = softmax_step(scores, top, total, scale_log2)
    acc = acc * factor[:, None]
    if CUT:
        values = load_rows(v, start, v_stride, size, N, DIM, DIM_PAD, True)
    else:
        values = load_chunk(v_chunks, v, batch, kv_head, start, v_stride, N, DIM, DIM_PAD)
    if CUT and CAUSAL:
        # A weight of zero times a NaN would be NaN: a value that is not finite reaches just the rows that see it.
        bad = (values != values) | (tl.abs(values) == float("inf"))
        seen = tl.dot(visible.to(values.dtype), bad.to(values.dtype)) > 0
        acc = tl.where(seen, float("nan"), acc)
        values = finite_or_zero(values)
    acc = tl.dot(weights.to(values.dtype), values, acc)
    return acc, top, total


@triton.jit
def _forward_kernel(q, k, v, k_chunks, v_chunks, out, lse, q_starts, q_sizes, chunk_starts, chunk_sizes, chunks_whole, chunks_cut,
                    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
                    bound_batch, bound_head, bound_group, list_batch, list_head, list_group, width,
                    heads, group, q_len, block_length, shift, scale_log2,
                    UNIFORM: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                    DIM: tl.constexpr, DIM_PAD: tl.constexpr, CAUSAL: tl.constexpr):
    # From the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head, block, row, rows = own_rows(place, q_starts, q_sizes, bound_batch, bound_head, bound_group, heads, block_length, q_len,
                                             M, PARTS, UNIFORM)
    if rows <= 0:
        return
    q = of_head(q, batch, head, q_batch, q_head)
    kv_head = head // group
    k = of_head(k, batch, kv_head, k_batch, k_head)
    v = of_head(v, batch, kv_head, v_batch, v_head)
    chunk_row = row_of_lists(batch, head, block, list_batch, list_head, list_group)
    number_whole, number_cut = tl.load(chunks_whole + chunk_row), tl.load(chunks_cut + chunk_row)
    chunk_starts += chunk_row * width
    chunk_sizes += chunk_row * width

    queries = load_rows(q, row, q_row, rows, M, DIM, DIM_PAD, True)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for i in range(number_whole):
        start = tl.load(chunk_starts + i)
        acc, top, total = _attend((acc, top, total), queries, k, v, k_chunks, v_chunks, batch.to(tl.int32), kv_head, start, N,
                                  row, k_row, v_row, shift, scale_log2, M, N, DIM, DIM_PAD, False, CAUSAL)
    for i in range(width - number_cut, width):
        start, size = tl.load(chunk_starts + i), tl.load(chunk_sizes + i)
        acc, top, total = _attend((acc, top, total), queries, k, v, k_chunks, v_chunks, batch.to(tl.int32), kv_head, start, size,
                                  row, k_row, v_row, shift, scale_log2, M, N, DIM, DIM_PAD, True, CAUSAL)

    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_rows(of_head(out, batch, head, out_batch, out_head), row, out_row, rows, acc, M, DIM, DIM_PAD)
    offsets = tl.arange(0, M)
    row_lse = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse + (batch * heads + head) * q_len + row + offsets, row_lse, mask=offsets < rows)


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, config: LaunchConfig | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; ``config`` overrides the launch table.

    ``in_place``: out may take q's memory. A program loads the rows that it is going to write, masked to its block, before anything else.
    """
    q, k, v = map(readable, (q, k, v))
    batch, heads, q_len, dim = q.shape
    kv_len = k.shape[2]
    config = config or forward_config(dim, blocks.max_q_length, blocks.max_kv_length, device_limits(q.device))
    rows = q_cut(blocks, q_len)
    out, lse = empty_outputs(q, rows, in_place)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    chunks = chunk_lists(blocks, rows, kv_cut(blocks, kv_len), config.block_n, kv_len - q_len if causal else None)
    parts = triton.cdiv(rows.length, config.block_m)
    dim_pad = max(triton.next_power_of_2(dim), 16)
    through_engine = (descriptor(x, config.block_n, dim_pad) for x in (k, v))
    _forward_kernel[(rows.number * parts, batch * heads)](
        q, k, v, *through_engine, out, lse, rows.starts, rows.sizes, *chunks,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *rows.strides(heads), *shared_strides(chunks.whole, heads), chunks.starts.shape[-1],
        heads, heads // k.shape[1], q_len, rows.length, kv_len - q_len, scale * LOG2E,
        UNIFORM=rows.uniform, PARTS=parts, M=config.block_m, N=config.block_n,
        DIM=dim, DIM_PAD=dim_pad, CAUSAL=causal, num_warps=config.num_warps, num_stages=config.num_stages)
    return out, lse
