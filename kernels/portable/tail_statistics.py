"""Portable kernels of what is known of units: their mean keys and values, second moments, covariances, and the order that halves blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..lowering.arguments import view
from ..lowering.inputs import strided
from ..lowering.primitives import of_head
from .tail_config import TailConfig, tail_config

# Tokens that are compared with as many others at once where they are ranked.
RANKED = 64


@triton.jit
def _unit_rows(offsets, unit, PARTS: tl.constexpr):
    """(first place, places) of a unit."""
    block, part = unit // PARTS, unit % PARTS
    start = tl.load(offsets + block)
    length = tl.load(offsets + block + 1) - start
    low = length * part // PARTS
    return start + low, length * (part + 1) // PARTS - low


@triton.jit
def _load_tokens(x, order, place, stride, size, column, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, COLS] from ``column`` on of the tokens at ``place`` and behind, zeros from the ``size``-th on; ``order`` names them."""
    rows, dims = tl.arange(0, ROWS), column + tl.arange(0, COLS)
    if order is None:
        pointers = x + place.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    else:
        token = tl.load(order + place + rows, mask=rows < size, other=0).to(tl.int64)
        pointers = x + (token[:, None] * stride + dims[None, :])
    return tl.load(pointers, mask=(rows < size)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _mean(x, order, first, stride, size, column, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr):
    """float32 [COLS]; not finite if a token is not."""
    total = tl.zeros([ROWS, COLS], tl.float32)
    for row in range(0, size, ROWS):
        total += _load_tokens(x, order, first + row, stride, size - row, column, ROWS, COLS, DIM).to(tl.float32)
    return tl.sum(total, 0) / tl.maximum(size, 1)


@triton.jit
def _finite(x, y):
    """Whether all of two means are: a NaN stays one, and infinity times zero is one."""
    return (tl.sum(x * 0.0, 0) + tl.sum(y * 0.0, 0)) == 0.0


@triton.jit
def _centred(x, mean, size, ROWS: tl.constexpr):
    """x less its mean, 0 from row ``size`` on; without a mean, 0 in rows that are not finite."""
    if mean is None:
        return tl.where((tl.sum(x.to(tl.float32) * 0.0, 1) == 0.0)[:, None], x, 0.0).to(x.dtype)
    else:
        return tl.where((tl.arange(0, ROWS) < size)[:, None], x.to(tl.float32) - mean[None, :], 0.0).to(x.dtype)


@triton.jit
def _product(x, y, order, first, x_row, y_row, size, x_mean, y_mean, column, SAME: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """float32 [DIM_PAD, COLS]: the sum over tokens of x y^T, both centred; with SAME y is x."""
    acc = tl.zeros([DIM_PAD, COLS], tl.float32)
    for row in range(0, size, ROWS):
        left = _centred(_load_tokens(x, order, first + row, x_row, size - row, 0, ROWS, DIM_PAD, DIM), x_mean, size - row, ROWS)
        if SAME:
            acc = tl.dot(tl.trans(left), left, acc, input_precision="ieee")
        else:
            right = _load_tokens(y, order, first + row, y_row, size - row, column, ROWS, COLS, DIM)
            acc = tl.dot(tl.trans(left), _centred(right, y_mean, size - row, ROWS), acc, input_precision="ieee")
    return acc


@triton.jit
def _store_columns(out, x, column, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    rows, columns = tl.arange(0, DIM_PAD), column + tl.arange(0, COLS)
    inside = (rows < DIM)[:, None] & (columns < DIM)[None, :]
    tl.store(out + rows[:, None] * DIM + columns[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keys_kernel(k, v, order, offsets, k_mean, v_mean, log_count, moments, heads, units, tokens, PARTS: tl.constexpr, SAME: tl.constexpr,
                 ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A unit's means, log of its tokens (where an order is given, that is there already) and, unless it is None, moment."""
    unit, column = tl.program_id(0), tl.program_id(2) * COLS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = (batch * heads + head) * units + unit
    first, size = _unit_rows(offsets, unit, PARTS)
    k_head, v_head = of_head(k, batch, head), of_head(v, batch, head)
    if order is not None:
        order += (batch * heads + head) * tokens
    key = _mean(k_head, order, first, k.row, size, 0, ROWS, DIM_PAD, DIM)
    value = _mean(v_head, order, first, v.row, size, 0, ROWS, DIM_PAD, DIM)
    if order is None:
        sound = _finite(key, value) & (size > 0)
        tl.store(log_count + at, tl.where(sound, tl.log(size.to(tl.float32)), float("-inf")), mask=column == 0)
    else:
        # Its block's other half may hold what is not finite.
        sound = tl.load(log_count + at) > float("-inf")
    key, value = tl.where(sound, key, 0.0), tl.where(sound, value, 0.0)
    dims = tl.arange(0, DIM_PAD)
    mine = (dims < DIM) & (column == 0)
    tl.store(k_mean + at * DIM + dims, key.to(k_mean.dtype.element_ty), mask=mine)
    tl.store(v_mean + at * DIM + dims, value.to(v_mean.dtype.element_ty), mask=mine)
    if moments is not None:
        size = tl.where(sound, size, 0)
        if SAME:
            right = key
        else:
            right = tl.where(sound, _mean(k_head, order, first, k.row, size, column, ROWS, COLS, DIM), 0.0)
        acc = _product(k_head, k_head, order, first, k.row, k.row, size, key, right, column, SAME, ROWS, COLS, DIM, DIM_PAD)
        _store_columns(moments + at * DIM * DIM, acc / tl.maximum(size, 1), column, COLS, DIM, DIM_PAD)


@triton.jit
def _queries_kernel(q, offsets, moments, heads, blocks, SAME: tl.constexpr,
                    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A block's mean of q q^T, queries that are not finite counted as zero."""
    block, column = tl.program_id(0), tl.program_id(2) * COLS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    first, size = _unit_rows(offsets, block, 1)
    q_head = of_head(q, batch, head)
    acc = _product(q_head, q_head, None, first, q.row, q.row, size, None, None, column, SAME, ROWS, COLS, DIM, DIM_PAD)
    at = (batch * heads + head) * blocks + block
    _store_columns(moments + at * DIM * DIM, acc / tl.maximum(size, 1), column, COLS, DIM, DIM_PAD)


@triton.jit
def _covariances_kernel(k, v, order, offsets, k_mean, v_mean, log_count, useful, out, heads, units, tokens, PARTS: tl.constexpr,
                        ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A unit's mean of (k - its mean) (v - its mean)^T; 0 where nothing is estimated."""
    unit, column = tl.program_id(0), tl.program_id(2) * COLS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = (batch * heads + head) * units + unit
    first, size = _unit_rows(offsets, unit, PARTS)
    sound = tl.load(log_count + at) > float("-inf")
    if useful is not None:
        sound = sound & (tl.load(useful + batch * heads + head) != 0)
    size = tl.where(sound, size, 0)
    if order is not None:
        order += (batch * heads + head) * tokens
    dims, columns = tl.arange(0, DIM_PAD), column + tl.arange(0, COLS)
    key = tl.load(k_mean + at * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    value = tl.load(v_mean + at * DIM + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    acc = _product(of_head(k, batch, head), of_head(v, batch, head), order, first, k.row, v.row, size, key, value, column, False,
                   ROWS, COLS, DIM, DIM_PAD)
    _store_columns(out + at * DIM * DIM, acc / tl.maximum(size, 1), column, COLS, DIM, DIM_PAD)


@triton.jit
def _of_length_1(x):
    return x / tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1e-20)


@triton.jit
def _order_kernel(k, v, offsets, projections, order, log_count, heads, blocks, tokens, PARTS: tl.constexpr, ITERATIONS: tl.constexpr,
                  RANKED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A block's tokens by their projection on its first principal key direction, and the log of its units' tokens."""
    block = tl.program_id(0)
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = batch * heads + head
    first, size = _unit_rows(offsets, block, 1)
    k_head, v_head = of_head(k, batch, head), of_head(v, batch, head)
    key = _mean(k_head, None, first, k.row, size, 0, ROWS, DIM_PAD, DIM)
    sound = _finite(key, _mean(v_head, None, first, v.row, size, 0, ROWS, DIM_PAD, DIM))
    acc = _product(k_head, k_head, None, first, k.row, k.row, tl.where(sound, size, 0), key, key, 0, True, ROWS, DIM_PAD, DIM, DIM_PAD)
    # From the diagonal, so that nothing is drawn; 1 keeps blocks of one key apart from 0 / 0. The matrix is its transpose, so that every
    # second product may be over the other axis, on which the direction lies then.
    dims = tl.arange(0, DIM_PAD)
    direction = 1.0 + tl.sum(tl.where(dims[:, None] == dims[None, :], acc, 0.0), 0)
    for _step in range(ITERATIONS // 2):
        across = _of_length_1(tl.sum(acc * direction[None, :], 1))
        direction = _of_length_1(tl.sum(acc * across[:, None], 0))
    projections += at * tokens + first
    order += at * tokens + first
    rows = tl.arange(0, ROWS)
    for row in range(0, size, ROWS):
        x = _load_tokens(k_head, None, first + row, k.row, size - row, 0, ROWS, DIM_PAD, DIM).to(tl.float32)
        # Where something is not finite the order is the tokens' own.
        projected = tl.where(sound, tl.sum((x - key[None, :]) * direction[None, :], 1), 0.0)
        tl.store(projections + row + rows, projected, mask=row + rows < size)
    # Other threads read them.
    tl.debug_barrier()
    places = tl.arange(0, RANKED)
    for i in range(0, size, RANKED):
        own = i + places
        mine = tl.load(projections + own, mask=own < size, other=0.0)
        rank = tl.zeros([RANKED], tl.int32)
        for j in range(0, size, RANKED):
            another = j + places
            theirs = tl.load(projections + another, mask=another < size, other=float("inf"))
            before = (theirs[None, :] < mine[:, None]) | (theirs[None, :] == mine[:, None]) & (another[None, :] < own[:, None])
            rank += tl.sum(before.to(tl.int32), 1)
        tl.store(order + rank, first + own, mask=own < size)
    for part in tl.static_range(PARTS):
        count = size * (part + 1) // PARTS - size * part // PARTS
        known = tl.where(sound & (count > 0), tl.log(tl.maximum(count, 1).to(tl.float32)), float("-inf"))
        tl.store(log_count + (at * blocks + block) * PARTS + part, known)


def principal_order(k: Tensor, v: Tensor, offsets: Tensor, num_blocks: int, parts: int, iterations: int, order: Tensor, log_count: Tensor
                    ) -> None:
    """Writes order and log_count of ``BlockEstimates``; ``iterations`` are even."""
    k, v = strided(k), strided(v)
    batch, heads, tokens, dim = k.shape
    projections = torch.empty(batch, heads, tokens, dtype=torch.float32, device=k.device)
    config = _config("order", k)
    _order_kernel[(num_blocks, batch * heads)](
        view(k), view(v), offsets, projections, order, log_count, heads, num_blocks, tokens, PARTS=parts, ITERATIONS=iterations,
        RANKED=RANKED, ROWS=config.block_n, **_dims(dim), **config.options())


def key_statistics(k: Tensor, v: Tensor, offsets: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor, order: Tensor | None,
                   parts: int, with_moments: bool) -> Tensor | None:
    """Writes k_mean, v_mean and, unless ``order`` is given, log_count; returns bfloat16 ``[B, Hkv, U, D * D]``, the keys' covariances."""
    k, v = strided(k), strided(v)
    batch, heads, units, dim = k_mean.shape
    moments = _new_squares(k_mean, units) if with_moments else None
    config = _config("moments", k)
    _keys_kernel[(units, batch * heads, _columns(config, dim) if with_moments else 1)](
        view(k), view(v), order, offsets, k_mean, v_mean, log_count, moments, heads, units, k.shape[2], PARTS=parts,
        **_tile(config, dim), **config.options())
    return moments


def query_moments(q: Tensor, offsets: Tensor, num_blocks: int) -> Tensor:
    """bfloat16 ``[B, H, N, D * D]``: the mean of q q^T of each block."""
    q = strided(q)
    batch, heads, _, dim = q.shape
    moments = _new_squares(q, num_blocks)
    config = _config("moments", q)
    _queries_kernel[(num_blocks, batch * heads, _columns(config, dim))](
        view(q), offsets, moments, heads, num_blocks, **_tile(config, dim), **config.options())
    return moments


def covariances(k: Tensor, v: Tensor, offsets: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor, order: Tensor | None,
                useful: Tensor | None, parts: int) -> Tensor:
    """bfloat16 ``[B, Hkv, U, D * D]``, of keys with values; 0 in units of which nothing is estimated and in heads not ``useful``, bool
    ``[B, Hkv]``."""
    k, v = strided(k), strided(v)
    batch, heads, units, dim = k_mean.shape
    out = _new_squares(k_mean, units)
    config = _config("covariances", k)
    tile = _tile(config, dim)
    tile.pop("SAME")
    _covariances_kernel[(units, batch * heads, _columns(config, dim))](
        view(k), view(v), order, offsets, k_mean, v_mean, log_count, useful, out, heads, units, k.shape[2], PARTS=parts,
        **tile, **config.options())
    return out


def _new_squares(x: Tensor, number: int) -> Tensor:
    """``[B, H, number, D * D]`` for x's heads; bfloat16, whose range is that of float32: the entries are squares."""
    batch, heads, _, dim = x.shape
    return torch.empty(batch, heads, number, dim * dim, dtype=torch.bfloat16, device=x.device)


def _config(kernel: str, x: Tensor) -> TailConfig:
    return tail_config(kernel, x.shape[3], x.dtype, device_limits(x.device))


def _dims(dim: int) -> dict[str, int]:
    return dict(DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16))


def _tile(config: TailConfig, dim: int) -> dict[str, int]:
    dims = _dims(dim)
    cols = min(config.block_m, dims["DIM_PAD"])
    return dict(SAME=cols == dims["DIM_PAD"], ROWS=config.block_n, COLS=cols, **dims)


def _columns(config: TailConfig, dim: int) -> int:
    return triton.cdiv(dim, config.block_m)
