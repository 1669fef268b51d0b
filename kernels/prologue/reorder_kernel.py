"""Portable copy kernels: tokens into another order, for q, k and v in one pass with the mean of each block on the way."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2
from .projection import Deferred, Move, new_tokens

# Rows that a program moves at once, and its warps. On an H200 16 to 64 rows with 4 or 8 warps all run at 3.6 to 3.7 TB/s.
ROWS = 32
OPTIONS = dict(num_warps=4)


@triton.jit
def _copy_rows(x, out, index, first, last, x_row, out_row, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """out[i] = x[index[i]] for up to ROWS places i from ``first`` and below ``last``, zeros where the index is negative; returns them."""
    place, dims = first + tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    inside = (place < last)[:, None] & (dims < DIM)[None, :]
    token = tl.load(index + place, mask=place < last, other=-1).to(tl.int64)
    rows = tl.load(x + token[:, None] * x_row + dims[None, :], mask=inside & (token >= 0)[:, None], other=0.0)
    tl.store(out + place.to(tl.int64)[:, None] * out_row + dims[None, :], rows, mask=inside)
    return rows


@triton.jit
def _copy_block(x, out, mean, index, first, last, x_row, out_row, MEAN: tl.constexpr,
                ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Copies the rows of one block and, with MEAN, writes their mean."""
    if MEAN:
        total = tl.zeros([ROWS, DIM_PAD], tl.float32)
        for row in range(first, last, ROWS):
            total += _copy_rows(x, out, index, row, last, x_row, out_row, ROWS, DIM, DIM_PAD)
        dims = tl.arange(0, DIM_PAD)
        tl.store(mean + dims, (tl.sum(total, 0) / (last - first)).to(x.dtype.element_ty).to(tl.float32), mask=dims < DIM)
    else:
        for row in range(first, last, ROWS):
            _copy_rows(x, out, index, row, last, x_row, out_row, ROWS, DIM, DIM_PAD)


@triton.jit
def _gather_kernel(q, k, v, source, offsets, q_out, k_out, v_out, q_means, k_means,
                   q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
                   q_out_batch, q_out_head, q_out_row, k_out_batch, k_out_head, k_out_row, v_out_batch, v_out_head, v_out_row,
                   q_heads, kv_heads, mean_blocks, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    # The heads of a block are neighbours in the launch, as the heads of a token often are in memory.
    heads = q_heads + 2 * kv_heads
    head, block = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    batch = tl.program_id(1).to(tl.int64)
    first, last = tl.load(offsets + block), tl.load(offsets + block + 1)
    if head < q_heads:
        mean = q_means + ((batch * q_heads + head) * mean_blocks + block) * DIM
        q += batch * q_batch + head * q_head
        q_out += batch * q_out_batch + head * q_out_head
        if block < mean_blocks:
            _copy_block(q, q_out, mean, source, first, last, q_row, q_out_row, True, ROWS, DIM, DIM_PAD)
        else:
            _copy_block(q, q_out, mean, source, first, last, q_row, q_out_row, False, ROWS, DIM, DIM_PAD)
    elif head < q_heads + kv_heads:
        head -= q_heads
        mean = k_means + ((batch * kv_heads + head) * mean_blocks + block) * DIM
        k += batch * k_batch + head * k_head
        k_out += batch * k_out_batch + head * k_out_head
        if block < mean_blocks:
            _copy_block(k, k_out, mean, source, first, last, k_row, k_out_row, True, ROWS, DIM, DIM_PAD)
        else:
            _copy_block(k, k_out, mean, source, first, last, k_row, k_out_row, False, ROWS, DIM, DIM_PAD)
    else:
        head -= q_heads + kv_heads
        v += batch * v_batch + head * v_head
        v_out += batch * v_out_batch + head * v_out_head
        _copy_block(v, v_out, v_out, source, first, last, v_row, v_out_row, False, ROWS, DIM, DIM_PAD)


@triton.jit
def _take_kernel(x, index, out, x_batch, x_head, x_row, out_batch, out_head, out_row, heads, tokens,
                 ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    head, first = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads * ROWS
    batch = tl.program_id(1).to(tl.int64)
    _copy_rows(x + batch * x_batch + head * x_head, out + batch * out_batch + head * out_head, index, first, tokens, x_row, out_row,
               ROWS, DIM, DIM_PAD)


def take(x: Tensor, index: Tensor) -> Tensor:
    """See ``Backend.take``."""
    x = _rows(x)
    out = new_tokens(x, len(index))
    batch, heads, tokens, dim = out.shape
    if out.numel():
        launch(_take_kernel, (-(-tokens // ROWS) * heads, batch, 1), (x, index, out),
               (*x.stride()[:3], *out.stride()[:3], heads, tokens), _constants(dim), OPTIONS)
    return out


def gather(q: Tensor | Deferred, k: Tensor | Deferred, v: Tensor | Deferred, q_move: Move, kv_move: Move) -> tuple[Tensor, ...]:
    """See ``Backend.gather``."""
    if isinstance(q, Deferred):
        # The checks of a layer see to it that all three are.
        (q_out, q_means), (k_out, k_means) = q.gather_blocks(*q_move), k.gather_blocks(*kv_move)  # type: ignore[union-attr]
        return q_out, k_out, v.gather_blocks(*kv_move[:2], 0)[0], q_means, k_means  # type: ignore[union-attr]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    if q_move is kv_move:
        return _gather(q, k, v, q_move)
    q_out, q_means = one(q, q_move)
    # A tensor without heads takes no part.
    _, k_out, v_out, _, k_means = _gather(k[:, :0], k, v, kv_move)
    return q_out, k_out, v_out, q_means, k_means


def gather_into(q: Tensor, k: Tensor, v: Tensor, move: Move, k_out: Tensor, v_out: Tensor) -> tuple[Tensor, ...]:
    """See ``Backend.gather_into``."""
    q_out, _, _, q_means, k_means = _gather(q, k, v, move, k_out, v_out)
    return q_out, q_means, k_means


def one(x: Tensor, move: Move) -> tuple[Tensor, Tensor]:
    """One tensor by itself, as ``gather`` brings it into order, and its means."""
    out, _, _, means, _ = _gather(x, x[:, :0], x[:, :0], move)
    return out, means


def _gather(q: Tensor, k: Tensor, v: Tensor, move: Move, k_out: Tensor | None = None, v_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """q, k and v in the order of ``move``, written to k_out and v_out where these are given, and the means of q and k."""
    q, k, v, (source, offsets, mean_blocks) = _rows(q), _rows(k), _rows(v), move
    outs = [new_tokens(x, len(source)) if out is None else out for x, out in ((q, None), (k, k_out), (v, v_out))]
    means = [torch.empty(*x.shape[:2], mean_blocks, x.shape[3], dtype=torch.float32, device=x.device) for x in (q, k)]
    batch, heads, _, dim = q.shape
    kv_heads, blocks = k.shape[1], len(offsets) - 1
    if batch * (heads + kv_heads) * blocks:
        strides = [stride for x in (q, k, v, *outs) for stride in x.stride()[:3]]
        launch(_gather_kernel, (blocks * (heads + 2 * kv_heads), batch, 1), (q, k, v, source, offsets, *outs, *means),
               (*strides, heads, kv_heads, mean_blocks), _constants(dim), OPTIONS)
    return *outs, *means


def _rows(x: Tensor) -> Tensor:
    """x with rows that lie in one piece, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache
def _constants(dim: int) -> dict[str, int]:
    return dict(ROWS=ROWS, DIM=dim, DIM_PAD=power_of_2(dim))

