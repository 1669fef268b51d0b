"""Before and after the one-pass backward kernel: its preprocess (lse, dPsum, where to add) and postprocess (dQ out of dQaccum).

Query tokens are divided into chunks of at most QUERIES inside their block, and chunk p of block b, which starts at token s, owns the slot
s // QUERIES + b: no two chunks share one, whatever the blocks look like, and there are fewer than tokens / QUERIES + blocks + 1 of them.
lse, dPsum and dQaccum, the float32 sums of dQ, stand slot by slot, so that every access of the kernel is whole and aligned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from .arguments import Bounds
from .chunks import Partition
from .primitives import load_rows, own_rows, store_rows

QUERIES = 64
# Keys of a program of the backward kernel.
KEYS = 128


class Accum(NamedTuple):
    """For each query chunk, by batch, head and slot."""

    lse_dpsum: Tensor   # bfloat16 [B, H, slots, QUERIES, 16], an operand of the tensor core: in columns 0 to 2 three terms whose sum is
    #                     -lse / scale, or -1e30 for empty rows and for rows past the chunk's end; in columns 8 to 10 three whose sum is
    #                     dlse - rowsum(dO * O), minus dPsum; zeros elsewhere
    dq_accum: Tensor    # float32 [B, H, slots, QUERIES * D], in the order in which the threads that add hold a product of 64 rows
    #                     and 64 columns: [D / 64, 8 of 8 columns, 4 of 16 rows, 8 rows, 4 of 2 columns, 2 of 8 rows, 2 columns]
    dq_semaphore: Tensor | None     # int32 [B, H, slots, D / 64], zeros: how many tiles have added to each 64 columns. Where it is given,
    #                     the first of them stores and dq_accum is undefined before; else dq_accum is zeros.

    @property
    def number(self) -> int:
        """Slots of a head."""
        return self.dq_accum.shape[2]


@triton.jit
def _preprocess_kernel(out, dout, dlse, lse, lse_dpsum, dq_accum, dq_semaphore, q_starts, q_sizes, out_batch, out_head, out_row,
                       do_batch, do_head, do_row, dlse_batch, dlse_head, dlse_row, bound_batch, bound_head, bound_group,
                       heads, q_len, block_length, slots, scale,
                       PARTS: tl.constexpr, HAS_DLSE: tl.constexpr, ORDERED: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr):
    bounds = Bounds(q_starts, q_sizes, bound_batch, bound_head, bound_group, block_length, q_len)
    batch, head, block, row, rows = own_rows(tl.program_id(0), bounds, heads, M, PARTS)
    if rows <= 0:
        return
    slot = row // M + block
    o = load_rows(out + batch * out_batch + head.to(tl.int64) * out_head, row, out_row, rows, M, DIM, DIM, True)
    do = load_rows(dout + batch * do_batch + head.to(tl.int64) * do_head, row, do_row, rows, M, DIM, DIM, True)
    lines = tl.arange(0, M)
    mask = lines < rows
    row_lse = tl.load(lse + (batch * heads + head) * q_len + row + lines, mask=mask, other=float("-inf"))
    neg_dpsum = -tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    empty = row_lse == float("-inf")
    if HAS_DLSE:
        row_dlse = tl.load(dlse + batch * dlse_batch + head * dlse_head + (row + lines).to(tl.int64) * dlse_row, mask=mask, other=0.0)
        neg_dpsum += row_dlse
    at = (batch * heads + head) * slots + slot
    # An empty row has no gradient, whatever arrives for it: its weights must be 0, and so must dPsum be. Not by -inf: the kernel
    # multiplies the other three columns by zero.
    bias = tl.where(empty, -1e30, -row_lse / scale)
    neg_dpsum = tl.where(empty, 0.0, neg_dpsum)
    columns = tl.arange(0, 16)[None, :]
    value = tl.where(columns < 8, bias[:, None], neg_dpsum[:, None])
    # Three bfloat16 terms hold the 24 bits of a float32; what is not finite stands in the first.
    high = value.to(tl.bfloat16)
    rest = tl.where(tl.abs(value) < float("inf"), value - high.to(tl.float32), 0.0)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    term = columns % 8
    zero = tl.zeros_like(high)
    tl.store(lse_dpsum + at * (M * 16) + lines[:, None] * 16 + columns,
             tl.where(term == 0, high, tl.where(term == 1, middle, tl.where(term == 2, low, zero))))
    if ORDERED:
        tl.store(dq_semaphore + at * (DIM // 64) + tl.arange(0, DIM // 64), tl.zeros([DIM // 64], tl.int32))
    else:
        tl.store(dq_accum + at * (M * DIM) + tl.arange(0, M * DIM), tl.zeros([M * DIM], tl.float32))


@triton.jit
def _postprocess_kernel(dq_accum, dq_semaphore, dq, q_starts, q_sizes, dq_batch, dq_head, dq_row, bound_batch, bound_head, bound_group,
                        heads, q_len, block_length, slots, scale,
                        PARTS: tl.constexpr, ORDERED: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr):
    bounds = Bounds(q_starts, q_sizes, bound_batch, bound_head, bound_group, block_length, q_len)
    batch, head, block, row, rows = own_rows(tl.program_id(0), bounds, heads, M, PARTS)
    if rows <= 0:
        return
    slot = row // M + block
    at = (batch * heads + head) * slots + slot
    mask = tl.full([M * DIM], True, tl.int1)
    if ORDERED:
        # To rows that attend to nothing nobody has added.
        mask = mask & (tl.load(dq_semaphore + at * (DIM // 64)) > 0)
    x = tl.load(dq_accum + at * (M * DIM) + tl.arange(0, M * DIM), mask=mask, other=0.0)
    x = tl.reshape(tl.permute(tl.reshape(x, [DIM // 64, 8, 4, 8, 4, 2, 2]), (2, 5, 3, 0, 1, 4, 6)), [M, DIM])
    store_rows(dq + batch * dq_batch + head.to(tl.int64) * dq_head, row, dq_row, rows, x * scale, M, DIM, DIM)


def backward_preprocess(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, scale: float, queries: Partition,
                        ordered: bool) -> Accum:
    """The rows that the backward kernel reads, and where it adds; ``ordered``: with a semaphore for every chunk."""
    batch, heads, q_len, dim = out.shape
    slots = q_len // QUERIES + queries.number + 1
    lse_dpsum = torch.empty(batch, heads, slots, QUERIES, 16, dtype=torch.bfloat16, device=out.device)
    dq_accum = torch.empty(batch, heads, slots, QUERIES * dim, dtype=torch.float32, device=out.device)
    dq_semaphore = torch.empty(batch, heads, slots, dim // 64, dtype=torch.int32, device=out.device) if ordered else None
    parts = -(-queries.length // QUERIES)
    given = lse if dlse is None else dlse
    numbers = (*out.stride()[:3], *dout.stride()[:3], *given.stride(), *queries.strides(heads), heads, q_len, queries.length, slots)
    launch(_preprocess_kernel, (queries.number * parts, batch * heads, 1),
           (out, dout, given, lse, lse_dpsum, dq_accum, dq_semaphore, *queries.tensors), (*numbers, scale),
           dict(PARTS=parts, HAS_DLSE=dlse is not None, ORDERED=ordered, M=QUERIES, DIM=dim))
    return Accum(lse_dpsum, dq_accum, dq_semaphore)


def backward_postprocess(dq_accum: Tensor, dq_semaphore: Tensor | None, dq: Tensor, scale: float, queries: Partition) -> None:
    """Writes the sums, times ``scale``, to dq [B, H, tokens, D] in its dtype. The first two are an ``Accum``'s."""
    batch, heads, q_len, dim = dq.shape
    parts = -(-queries.length // QUERIES)
    numbers = (*dq.stride()[:3], *queries.strides(heads), heads, q_len, queries.length, dq_accum.shape[2])
    launch(_postprocess_kernel, (queries.number * parts, batch * heads, 1),
           (dq_accum, dq_semaphore, dq, *queries.tensors), (*numbers, scale),
           dict(PARTS=parts, ORDERED=dq_semaphore is not None, M=QUERIES, DIM=dim))
