"""Portable selection kernels: scores of blocks by their descriptors, lists of the best-scored blocks and of those forced, valid lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2
from ..lowering.primitives import load_rows, ordered, store_rows

# Side of a square of scores, and the part of the descriptors that is multiplied at once.
SIDE = 64
PART = 32
# Descriptor entries that the preparing kernel holds at once, 32 a thread. One program takes all blocks of a head, so it must be wide.
HELD = 16384
PREPARE_WARPS = 16
# Tokens of which a program counts at once how many are valid.
SEGMENT = 1024


@triton.jit
def _finite_rows(x, first, rows, COSINE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Rows ``first`` to ``first + ROWS`` of x [rows, WIDTH], those not finite as zeros, with COSINE of length 1; and which are finite."""
    x = load_rows(x, first, WIDTH, rows - first, ROWS, WIDTH, WIDTH_PAD, True)
    bad = (x != x) | (tl.abs(x) == float("inf"))
    finite = tl.max(bad.to(tl.int32), 1) == 0
    x = tl.where(finite[:, None], x, 0.0)
    if COSINE:
        norm = tl.sqrt(tl.sum(x * x, 1))
        x = x / tl.where(norm == 0, 1.0, norm)[:, None]
    return x, finite


@triton.jit
def _ready(ready, q_lists, k_lists, rows, columns, WIDTH: tl.constexpr):
    """(q [q_lists, rows, WIDTH], k [k_lists, columns, WIDTH], bias [k_lists, columns]), which lie one behind another."""
    width = tl.full([], WIDTH, tl.int64)
    k = ready + width * rows * q_lists
    return ready, k, k + width * columns * k_lists


@triton.jit
def _prepare_kernel(q, k, ready, q_lists, rows, columns, lambda_,
                    COSINE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """One head's q or k made ready to be multiplied, and what each key block's scores have in common."""
    place = tl.program_id(0).to(tl.int64)
    q_out, k_out, bias = _ready(ready, q_lists, tl.num_programs(0) - q_lists, rows, columns, WIDTH)
    if place < q_lists:
        q += place * rows * WIDTH
        q_out += place * rows * WIDTH
        for first in range(0, rows, ROWS):
            x, _ = _finite_rows(q, first, rows, COSINE, ROWS, WIDTH, WIDTH_PAD)
            store_rows(q_out, first, WIDTH, rows - first, x, ROWS, WIDTH, WIDTH_PAD)
        return
    place -= q_lists
    k += place * columns * WIDTH
    k_out += place * columns * WIDTH
    bias += place * columns
    total = tl.zeros([WIDTH_PAD], tl.float32)
    for first in range(0, columns, ROWS):
        x, finite = _finite_rows(k, first, columns, COSINE, ROWS, WIDTH, WIDTH_PAD)
        store_rows(k_out, first, WIDTH, columns - first, x, ROWS, WIDTH, WIDTH_PAD)
        if COSINE:
            total += tl.sum(x, 0)
        else:
            row = first + tl.arange(0, ROWS)
            tl.store(bias + row, tl.where(finite, 0.0, float("-inf")), mask=row < columns)
    if COSINE:
        for first in range(0, columns, ROWS):
            x, finite = _finite_rows(k, first, columns, COSINE, ROWS, WIDTH, WIDTH_PAD)
            # The sum of cosines with all blocks is one product with the sum of their directions, less the block's own.
            cosine = tl.sum((total[None, :] - x) * x, 1) / tl.maximum(columns - 1, 1)
            redundancy = tl.where(columns > 1, (cosine + 1) * 0.5, 0.0)
            row = first + tl.arange(0, ROWS)
            shared = lambda_ * 0.5 - (1 - lambda_) * redundancy
            tl.store(bias + row, tl.where(finite, shared, float("-inf")), mask=row < columns)


@triton.jit
def _score_kernel(ready, scores, rows, columns, group, factor, SIDE: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """A square of factor * q k^T + bias."""
    q, k, bias = _ready(ready, tl.num_programs(1), tl.num_programs(1) // group, rows, columns, WIDTH)
    across = tl.cdiv(columns, SIDE)
    row = tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)
    head = tl.program_id(1).to(tl.int64)
    q += head * rows * WIDTH
    k += head // group * columns * WIDTH
    acc = tl.zeros([SIDE, SIDE], tl.float32)
    for first in range(0, WIDTH, PART):
        part = first + tl.arange(0, PART)
        inside = (part < WIDTH)[None, :]
        q_part = tl.load(q + row.to(tl.int64)[:, None] * WIDTH + part[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
        k_part = tl.load(k + column.to(tl.int64)[:, None] * WIDTH + part[None, :], mask=(column < columns)[:, None] & inside, other=0.0)
        acc = tl.dot(q_part, tl.trans(k_part), acc, input_precision="ieee")
    shared = tl.load(bias + head // group * columns + column, mask=column < columns, other=0.0)
    at = (head * rows + row)[:, None] * columns + column[None, :]
    tl.store(scores + at, acc * factor + shared[None, :], mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _highest(scores, number, real):
    """True at the ``number`` highest of the ``real`` scores, of equal ones at the first; NaN counts as -inf.

    The lowest score that is taken is found bit by bit: it is the largest integer that at least ``number`` scores reach.
    """
    keys = tl.where(real, ordered(scores), -0x80000000)
    lowest = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= number, 0, -0x80000000)
    for i in range(31):
        tried = lowest + (1 << (30 - i))
        lowest = tl.where(tl.sum((keys >= tried).to(tl.int32), 0) >= number, tried, lowest)
    above, equal = keys > lowest, keys == lowest
    left = number - tl.sum(above.to(tl.int32), 0)
    return real & (above | equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))


@triton.jit
def _select_kernel(scores, active, k_per_row, forced, counts, indices, k_all, heads, blocks, room, scored_rows, scored, per_list,
                   WIDTH: tl.constexpr, SCORES: tl.constexpr, PER_ROW: tl.constexpr, ACTIVE: tl.constexpr, BEYOND: tl.constexpr):
    row, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    inside = column < blocks
    keep = tl.load(forced + row * blocks + column, mask=inside, other=0) != 0
    if SCORES:
        if row < scored_rows:
            line = (batch * heads + head) * scored_rows + row
            number = k_all
            if PER_ROW:
                number = tl.load(k_per_row + (batch * heads + head) * per_list + row)
            real = column < scored
            if BEYOND:
                real = real & (keep == 0)
            line_scores = tl.load(scores + line * scored + column, mask=real, other=0.0)
            keep = keep | _highest(line_scores, tl.minimum(number, scored), real)
    if ACTIVE:
        both = keep & (tl.load(active + batch * blocks + column, mask=inside, other=0) != 0)
        keep = tl.where(tl.load(active + batch * blocks + row) != 0, both, column == row)
    line = (batch * heads + head) * rows + row
    kept = keep.to(tl.int32)
    place = tl.cumsum(kept, 0) - 1
    tl.store(indices + line * room + place, column, mask=keep & (place < room))
    tl.store(counts + line, tl.minimum(tl.sum(kept, 0), room))


@triton.jit(do_not_specialize=("mask_batch", "mask_token", "blocks", "least"))
def _lengths_kernel(valid, runs, before, lengths, out, mask_batch, mask_token, blocks, least, SEGMENT: tl.constexpr):
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(runs + block), tl.load(runs + blocks + block)
    count = tl.zeros([SEGMENT], tl.int32)
    for start in range(first, last, SEGMENT):
        token = start + tl.arange(0, SEGMENT)
        count += (tl.load(valid + batch * mask_batch + token.to(tl.int64) * mask_token, mask=token < last, other=0) != 0).to(tl.int32)
    left = tl.maximum(tl.maximum(tl.sum(count, 0), least) - tl.load(before + block), 0)
    tl.store(out + batch * blocks + block, tl.minimum(left, tl.load(lengths + block)))


def score(q_means: Tensor, k_means: Tensor, lambda_: float | None) -> Tensor:
    """See ``Backend.score``."""
    q, k = q_means.contiguous(), k_means.contiguous()
    (batch, heads, rows, width), (kv_heads, columns) = q.shape, k.shape[1:3]
    scores = torch.empty(batch, heads, rows, columns, dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores
    ready = torch.empty(batch * (heads * rows * width + kv_heads * columns * (width + 1)), dtype=torch.float32, device=q.device)
    width_pad = power_of_2(width)
    constants = dict(COSINE=lambda_ is not None, ROWS=max(1, HELD // width_pad), WIDTH=width, WIDTH_PAD=width_pad)
    launch(_prepare_kernel, (batch * (heads + kv_heads), 1, 1), (q, k, ready), (batch * heads, rows, columns, float(lambda_ or 0)),
           constants, dict(num_warps=PREPARE_WARPS))
    launch(_score_kernel, (-(-rows // SIDE) * -(-columns // SIDE), batch * heads, 1), (ready, scores),
           (rows, columns, heads // kv_heads, 1.0 if lambda_ is None else lambda_ / 2), dict(SIDE=SIDE, PART=PART, WIDTH=width))
    return scores


def select(forced: Tensor, scores: Tensor | None, k_per_row: int | Tensor, active: Tensor | None, beyond: bool, room: int
           ) -> tuple[Tensor, Tensor]:
    """See ``Backend.select``."""
    per_row, k_all = (k_per_row, 0) if isinstance(k_per_row, Tensor) else (None, k_per_row)
    scores, active, per_row = (None if x is None else x.contiguous() for x in (scores, active, per_row))
    rows, blocks = forced.shape
    batch, heads = (1 if active is None else active.shape[0], 1) if scores is None else scores.shape[:2]
    counts = torch.empty(batch, heads, rows, dtype=torch.int32, device=forced.device)
    indices = torch.empty(batch, heads, rows, room, dtype=torch.int32, device=forced.device)
    if not indices.numel():
        return counts, indices
    width = power_of_2(blocks)
    scored_rows, scored = (0, 0) if scores is None else scores.shape[-2:]
    given = dict(SCORES=scores is not None, PER_ROW=per_row is not None, ACTIVE=active is not None, BEYOND=beyond)
    # Numbers that are shared by all lists are read by each.
    per_list = scored_rows if per_row is not None and per_row.numel() > scored_rows else 0
    # What is not there is not read, and stands for any pointer.
    tensors = *[forced if x is None else x for x in (scores, active, per_row)], forced, counts, indices
    launch(_select_kernel, (rows, heads, batch), tensors, (k_all, heads, blocks, room, scored_rows, scored, per_list),
           dict(WIDTH=width, **given), dict(num_warps=min(16, max(2, width // 512))))
    return counts, indices


def valid_lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
    """See ``Backend.valid_lengths``."""
    out = torch.empty(len(valid), 1, len(lengths), dtype=lengths.dtype, device=lengths.device)
    if out.numel():
        batch, _, blocks = out.shape
        launch(_lengths_kernel, (blocks, batch, 1), (valid, runs, before, lengths, out), (*valid.stride(), blocks, least),
               dict(SEGMENT=SEGMENT))
    return out
