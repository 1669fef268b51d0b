"""Portable forward kernel: one program per block of query rows, online softmax over the chunks of keys that it attends to."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BlockLists
from ..device import DeviceLimits, device_limits
from ..launch import launch, power_of_2
from ..lowering.arguments import view
from ..lowering.chunks import Listed, chunk_lists
from ..lowering.inputs import descriptor, strided
from ..lowering.outputs import empty_outputs, nothing_attended
from ..lowering.primitives import (
    LOG2E,
    LOWEST,
    finish_softmax,
    finite_or_zero,
    load_chunk,
    load_rows,
    next_start,
    of_head,
    optimistic_step,
    overflown,
    own_rows,
    row_of_lists,
    softmax_step,
    store_rows,
    visible_keys,
)
from .config import LaunchConfig, forward_config, forward_reads_ahead


@triton.jit
def _attend(state, follows, q, k, v, k_row, v_row, k_tiles, v_tiles, batch, kv_head, start, size, query, shift, scale_log2,
            M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr,
            FOLLOW: tl.constexpr):
    """Attends to one chunk of keys; returns the new (acc, row_max, row_sum). row_max follows the rows' largest scores under FOLLOW, and
    then in all rows or in those of ``follows``."""
    acc, row_max, row_sum = state
    if PARTIAL:
        keys = load_rows(k, start, k_row, size, N, DIM, DIM_PAD, True)
    else:
        keys = load_chunk(k_tiles, k, batch, kv_head, start, k_row, N, DIM, DIM_PAD)
    scores = tl.dot(q, tl.trans(keys))
    if PARTIAL:
        visible = visible_keys(query, start, size, shift, M, N, CAUSAL)
        scores = tl.where(visible, scores, float("-inf"))
    if FOLLOW:
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2, follows)
        acc = acc * alpha[:, None]
    else:
        weights, row_sum = optimistic_step(scores, row_max, row_sum, scale_log2)
    if PARTIAL:
        values = load_rows(v, start, v_row, size, N, DIM, DIM_PAD, True)
    else:
        values = load_chunk(v_tiles, v, batch, kv_head, start, v_row, N, DIM, DIM_PAD)
    if PARTIAL and CAUSAL:
        # A weight of zero times a NaN would be NaN: a value that is not finite reaches just the rows that see it.
        # Keys that a row sees are the first ones: it sees such a value of a column where it sees the first of them.
        first_bad = tl.min(tl.where((values != values) | (tl.abs(values) == float("inf")), tl.arange(0, N)[:, None], 1 << 30), 0)
        last_seen = query + tl.arange(0, M) + shift - start
        acc = tl.where(first_bad[None, :] <= last_seen[:, None], float("nan"), acc)
        values = finite_or_zero(values)
    acc = tl.dot(weights.to(values.dtype), values, acc)
    return acc, row_max, row_sum


@triton.jit
def _walk(follows, queries, k, v, k_row, v_row, k_tiles, v_tiles, batch, kv_head, starts, sizes, n_full, n_partial, width, row, shift,
          scale_log2, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CAUSAL: tl.constexpr,
          FOLLOW: tl.constexpr, AHEAD: tl.constexpr):
    """A program's rows through all chunks: (acc, row_max, row_sum). In the full chunks row_max follows as ``_attend`` says, or without
    FOLLOW stays what it is in the first of them, and so in rows without ``follows``."""
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    row_max = tl.full([M], LOWEST, tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    if follows is not None or not FOLLOW:
        # A product more; the step itself, outside of the loop, would make the assembler serialise all of them (C7515).
        if n_full > 0:
            keys = load_chunk(k_tiles, k, batch, kv_head, tl.load(starts), k_row, N, DIM, DIM_PAD)
            row_max = tl.maximum(row_max, tl.max(tl.dot(queries, tl.trans(keys)), 1) * scale_log2)
    following = tl.load(starts)
    for i in range(n_full):
        start, following = next_start(starts, i, following, AHEAD)
        acc, row_max, row_sum = _attend((acc, row_max, row_sum), follows, queries, k, v, k_row, v_row, k_tiles, v_tiles, batch, kv_head,
                                        start, N, row, shift, scale_log2, M, N, DIM, DIM_PAD, False, CAUSAL, FOLLOW)
    for i in range(width - n_partial, width):
        start, size = tl.load(starts + i), tl.load(sizes + i)
        acc, row_max, row_sum = _attend((acc, row_max, row_sum), None, queries, k, v, k_row, v_row, k_tiles, v_tiles, batch, kv_head,
                                        start, size, row, shift, scale_log2, M, N, DIM, DIM_PAD, True, CAUSAL, True)
    return acc, row_max, row_sum


@triton.jit
def _forward_kernel(q, k, v, k_tiles, v_tiles, out, lse, bounds, chunks, heads, group, shift, scale_log2,
                    PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CAUSAL: tl.constexpr,
                    AHEAD: tl.constexpr):
    """Optimistic where the weights' dtype allows: row_max follows through the first full chunk and the partial ones alone, and where that
    was too low for a row, which is seen at the end, the program walks its list again. float16 holds weights of no more than 2 ** 16."""
    OPTIMISTIC: tl.constexpr = q.ptr.dtype.element_ty != tl.float16
    # From the last block to the first: where the longest lists come last, as text behind a video, they do not end the launch.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head, block, row, rows = own_rows(place, bounds, heads, M, PARTS)
    if rows <= 0:
        return
    kv_head = head // group
    k_head, v_head = of_head(k, batch, kv_head), of_head(v, batch, kv_head)
    chunk_row = row_of_lists(chunks, batch, head, block)
    n_full, n_partial = tl.load(chunks.full + chunk_row), tl.load(chunks.partial + chunk_row)
    starts, sizes = chunks.starts + chunk_row * chunks.width, chunks.sizes + chunk_row * chunks.width

    queries = load_rows(of_head(q, batch, head), row, q.row, rows, M, DIM, DIM_PAD, True)
    offsets = tl.arange(0, M)
    acc, row_max, row_sum = _walk(None, queries, k_head, v_head, k.row, v.row, k_tiles, v_tiles, batch.to(tl.int32), kv_head, starts, sizes,
                                  n_full, n_partial, chunks.width, row, shift, scale_log2, M, N, DIM, DIM_PAD, CAUSAL, not OPTIMISTIC,
                                  AHEAD)
    if OPTIMISTIC:
        failed, some = overflown(acc, row_sum)
        if some:
            # Only the rows that overflowed are computed again, so that a row's result does not depend on its neighbours.
            acc, row_max, row_sum = _walk(failed, queries, k_head, v_head, k.row, v.row, k_tiles, v_tiles, batch.to(tl.int32), kv_head,
                                          starts, sizes, n_full, n_partial, chunks.width, row, shift, scale_log2, M, N, DIM, DIM_PAD,
                                          CAUSAL, True, AHEAD)

    acc, row_lse = finish_softmax(acc, row_max, row_sum)
    store_rows(of_head(out, batch, head), row, out.row, rows, acc, M, DIM, DIM_PAD)
    tl.store(lse + (batch * heads + head) * bounds.tokens + row + offsets, row_lse, mask=offsets < rows)


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool, config: LaunchConfig | None = None,
    in_place: bool = False, limits: DeviceLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them; ``config`` overrides the launch table, ``limits`` are the device's own.

    ``in_place``: out may take q's memory. A program loads the rows that it is going to write, masked to its block, before anything else.
    """
    q, k, v = map(strided, (q, k, v))
    listed = Listed.of(blocks, q.shape[2], k.shape[2])
    out, lse = empty_outputs(q, listed.rows, in_place)
    if q.numel() == 0 or k.numel() == 0:
        return nothing_attended(out, lse)
    (batch, heads, q_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    limits = limits or device_limits(q.device)
    config = config or forward_config(dim, blocks.max_q_length, blocks.max_kv_length, limits)
    chunks = chunk_lists(listed, heads, config.block_n, kv_len - q_len if causal else None)
    parts = -(-listed.rows.length // config.block_m)
    dim_pad = max(power_of_2(dim), 16)
    tiles = [descriptor(x, config.block_n, dim_pad, limits.tma) for x in (k, v)]
    launch(_forward_kernel, (listed.rows.number * parts, batch * heads, 1),
           (view(q), view(k), view(v), *tiles, view(out), lse, listed.rows.bounds(heads), chunks),
           (heads, heads // kv_heads, kv_len - q_len, scale * LOG2E),
           dict(PARTS=parts, M=config.block_m, N=config.block_n, DIM=dim, DIM_PAD=dim_pad, CAUSAL=causal,
                AHEAD=forward_reads_ahead(dim, config.block_m, limits)), config.options())
    return out, lse
