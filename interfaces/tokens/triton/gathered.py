"""A forward that gathers keys one by one: for key blocks shorter than a tile, and for blocks that a token sees in part.

The keys of a list stand in slots, ``length`` slots for every listed block; a tile is the next N slots, whichever blocks they belong to. So
blocks of one key fill a tile as well as long ones do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import BlockLists
from ....kernels.device import device_limits
from ....kernels.lowering.arguments import view
from ....kernels.lowering.chunks import block_lists, kv_partition, q_partition
from ....kernels.lowering.inputs import strided
from ....kernels.lowering.primitives import (
    LOG2E,
    block_bounds,
    finish_softmax,
    finite_or_zero,
    gather_rows,
    load_rows,
    of_head,
    own_rows,
    row_of_lists,
    softmax_step,
    store_rows,
    tanh,
)
from .config import gathered_config


class _Limits(NamedTuple):
    """Limits on the keys that a row sees; the strides of ``order`` and ``total`` are those of the lists."""

    mask: Tensor | None
    first_entry: Tensor | None
    rows: int           # rows of an entry of the mask
    columns: int
    order: Tensor | None
    total: Tensor | None
    packed: int


@triton.jit
def _forward_kernel(q, k, v, out, lse, lists, bounds, kv_bounds, limits, heads, group, scale_log2, cap_scale, soft_cap,
                    PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                    CAPPED: tl.constexpr):
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head, block, row, rows = own_rows(place, bounds, heads, M, PARTS)
    if rows <= 0:
        return
    kv_head = head // group
    k_head, v_head = of_head(k, batch, kv_head), of_head(v, batch, kv_head)
    list_row = row_of_lists(lists, batch, head, block)
    bound_at = batch * kv_bounds.batch + head // kv_bounds.group * kv_bounds.head
    count = tl.minimum(tl.load(lists.counts + list_row), lists.capacity)
    ids = lists.indices + list_row * lists.capacity
    in_tile = tl.arange(0, M)
    rows_before = place % PARTS * M
    token_of_row = (rows_before + in_tile) // limits.packed
    if limits.mask is not None:
        mask = limits.mask + tl.load(limits.first_entry + list_row).to(tl.int64) * limits.rows * limits.columns
    if limits.order is not None:
        order = limits.order + list_row * lists.capacity
        last_seen = tl.load(limits.total + list_row) - (rows_before + rows) // limits.packed + token_of_row

    queries = load_rows(of_head(q, batch, head), row, q.row, rows, M, DIM, DIM_PAD, True)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    for first in range(0, count * kv_bounds.length, N):
        slot = first + tl.arange(0, N)
        entry, token = slot // kv_bounds.length, slot % kv_bounds.length
        item = tl.load(ids + entry, mask=entry < count, other=-1)
        # Ids out of range count as absent.
        known = (item >= 0) & (item < lists.items)
        start, size = block_bounds(kv_bounds, bound_at, tl.where(known, item, 0))
        key, there = start + token, known & (token < size)
        keys = gather_rows(k_head, key.to(tl.int64), k.row, there, DIM, DIM_PAD)
        scores = tl.dot(queries, tl.trans(keys))
        if CAPPED:
            scores = soft_cap * tanh(scores * cap_scale)
        visible = there[None, :] & (in_tile >= 0)[:, None]
        if limits.order is not None:
            before = tl.load(order + entry, mask=there, other=0)
            visible = visible & ((before + token)[None, :] <= last_seen[:, None])
        if limits.mask is not None:
            at = (entry * limits.rows * limits.columns + token)[None, :] + (token_of_row * limits.columns)[:, None]
            visible = visible & (tl.load(mask + at, mask=visible & (in_tile < rows)[:, None], other=0) != 0)
        scores = tl.where(visible, scores, float("-inf"))
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        acc = acc * alpha[:, None]
        values = gather_rows(v_head, key.to(tl.int64), v.row, there, DIM, DIM_PAD)
        if limits.order is not None or limits.mask is not None:
            # A weight of zero times a NaN would be NaN: a value that is not finite reaches just the rows that see it.
            bad = ((values != values) | (tl.abs(values) == float("inf"))).to(values.dtype)
            if tl.max(tl.max(bad, 1), 0) > 0:
                acc = tl.where(tl.dot(visible.to(values.dtype), bad) > 0, float("nan"), acc)
                values = finite_or_zero(values)
        acc = tl.dot(weights.to(values.dtype), values, acc)

    acc, row_lse = finish_softmax(acc, row_max, row_sum)
    store_rows(of_head(out, batch, head), row, out.row, rows, acc, M, DIM, DIM_PAD)
    tl.store(lse + (batch * heads + head) * bounds.tokens + row + in_tile, row_lse, mask=in_tile < rows)


def gathered_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, soft_cap: float, mask: Tensor | None, first_entry: Tensor | None,
    order: Tensor | None, total: Tensor | None, packed: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``attention_within_blocks`` describes them; order and total are its ``listed``."""
    q, k, v = map(strided, (q, k, v))
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    rows, items = q_partition(blocks, q_len), kv_partition(blocks, kv_len)
    lists = block_lists(blocks.counts, blocks.indices, heads, items.number)
    # What no block covers keeps this.
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return out, lse
    assert order is None or order.shape == blocks.indices.shape
    limited = mask is not None or order is not None
    config = gathered_config(dim, blocks.max_q_length, limited, device_limits(q.device), ordered=order is not None)
    parts = triton.cdiv(rows.length, config.block_m)
    mask, first_entry, order, total = (None if x is None else x.contiguous() for x in (mask, first_entry, order, total))
    mask_rows, mask_columns = (1, 1) if mask is None else mask.shape[1:]
    limits = _Limits(None if mask is None else mask.view(torch.uint8), first_entry, mask_rows, mask_columns, order, total, packed)
    _forward_kernel[(rows.number * parts, batch * heads)](
        view(q), view(k), view(v), view(out), lse, lists, rows.bounds(heads), items.bounds(heads), limits,
        heads, heads // kv_heads, LOG2E if soft_cap else scale * LOG2E, scale / soft_cap if soft_cap else 0.0, soft_cap,
        PARTS=parts, M=config.block_m, N=config.block_n, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16), CAPPED=bool(soft_cap),
        **config.options())
    return out, lse
