"""Portable kernels of what is known of units: their mean keys and values, second moments and covariances."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import device_limits
from ..launch import launch, power_of_2
from ..lowering.primitives import sampled_rows
from .config import LaunchConfig
from .estimate_config import estimate_config, strides

# Rows of a symmetric matrix that are kept from the same column on.
SLAB = 32


@triton.jit
def head_at(x, batch, head, batch_stride, head_stride):
    """Where a head of [B, H, P, D] begins; ``batch`` is int64."""
    return x + (batch * batch_stride + tl.cast(head, tl.int64) * head_stride)


@triton.jit
def own_block(heads):
    """(block, head, batch) of a program, batch int64. Programs that run at once are of the heads of a few blocks, whose tokens often lie
    side by side in memory."""
    return tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)


@triton.jit
def block_rows(offsets, block):
    """(first row, rows) of a block."""
    first = tl.load(offsets + block)
    return first, tl.load(offsets + block + 1) - first


@triton.jit
def lower_tokens(log_count, block):
    """How many tokens the first of a block's two units has, where it is estimated. log_count: of a head."""
    return (tl.exp(tl.load(log_count + 2 * block)) + 0.5).to(tl.int32)


@triton.jit
def unit_rows(offsets, log_count, unit, PARTS: tl.constexpr):
    """(first place, places) of a unit, where it is estimated. log_count: of a head."""
    first, size = block_rows(offsets, unit // PARTS)
    if PARTS == 2:
        lower = lower_tokens(log_count, unit // 2)
        upper = unit % 2 == 1
        first += tl.where(upper, lower, 0)
        size = tl.where(upper, size - lower, lower)
    return first, size


@triton.jit
def _tokens_at(order, place, size, ROWS: tl.constexpr):
    """int32 [ROWS], which tokens are at ``place`` and behind; any from the ``size``-th on. Of ``order`` they are loaded an iteration before
    they are needed, so that nothing waits for two loads in a row."""
    rows = tl.arange(0, ROWS)
    if order is None:
        return place + rows
    else:
        return tl.load(order + place + rows, mask=rows < size, other=0)


@triton.jit
def load_tokens(x, order, place, tokens, stride, size, column, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr):
    """[ROWS, COLS] from ``column`` on of ``tokens``, which are at ``place`` and behind; zeros from the ``size``-th on."""
    rows, dims = tl.arange(0, ROWS), column + tl.arange(0, COLS)
    if order is None:
        pointers = x + place.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    else:
        pointers = x + (tokens.to(tl.int64)[:, None] * stride + dims[None, :])
    return tl.load(pointers, mask=(rows < size)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _store_symmetric(out, x, column, TWICE: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SLAB: tl.constexpr):
    """What is kept of a symmetric matrix: SLAB rows after SLAB rows, each from the first column of theirs on the diagonal. With TWICE what
    is dropped is added to its mirror image, so that the product with another such matrix is that of the whole ones."""
    rows, columns = tl.arange(0, DIM_PAD), (column + tl.arange(0, COLS))[None, :]
    slab = rows // SLAB
    begin = slab * SLAB
    # Where the row's column 0 would be if it were kept.
    at = slab * (SLAB * DIM) - slab * (slab - 1) // 2 * (SLAB * SLAB) + (rows - begin) * (DIM - begin) - begin
    if TWICE:
        x = tl.where(columns >= begin[:, None] + SLAB, x * 2, x)
    mask = (rows < DIM)[:, None] & (columns < DIM) & (columns >= begin[:, None])
    tl.store(out + at[:, None] + columns, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _first_token(x, order, first, size, stride, column, COLS: tl.constexpr, DIM: tl.constexpr):
    """float32 [COLS] of the token at ``first``, zeros where there is none."""
    if order is not None:
        first = tl.load(order + first, mask=size > 0, other=0)
    dims = column + tl.arange(0, COLS)
    return tl.load(x + first.to(tl.int64) * stride + dims, mask=dims < tl.where(size > 0, DIM, 0), other=0.0).to(tl.float32)


@triton.jit
def _less(x, origin, size, ROWS: tl.constexpr):
    """Tokens less ``origin``, zeros from the ``size``-th on."""
    return tl.where((tl.arange(0, ROWS) < size)[:, None], x.to(tl.float32) - origin[None, :], 0.0).to(x.dtype)


@triton.jit
def _folded(x, FOLD: tl.constexpr):
    """Sums of every FOLD-th row in float32, [FOLD, columns]: as many rows as threads stand side by side need no exchange."""
    return tl.sum(x.to(tl.float32).reshape(x.shape[0] // FOLD, FOLD, x.shape[1]), 0)


@triton.jit
def centred_moments(k, v, order, first, size, k_row, v_row, column, SHIFTED: tl.constexpr, SAME: tl.constexpr,
                    ROWS: tl.constexpr, FOLD: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """(mean key, COLS columns of the sum of (k - mean) (k - mean)^T, mean value) of some tokens in float32, each read once: that of k k^T
    less the sum of k times its mean, with SHIFTED of keys less the first. Without v its mean is 0."""
    key = tl.zeros([FOLD, DIM_PAD], tl.float32)
    value = tl.zeros([FOLD, DIM_PAD], tl.float32)
    acc = tl.zeros([DIM_PAD, COLS], tl.float32)
    another = tl.zeros([FOLD, COLS], tl.float32)
    if SHIFTED:
        origin = _first_token(k, order, first, size, k_row, 0, DIM_PAD, DIM)
        other_origin = _first_token(k, order, first, size, k_row, column, COLS, DIM)
    next_tokens = _tokens_at(order, first, size, ROWS)
    for row in range(0, size, ROWS):
        place, rest, tokens = first + row, size - row, next_tokens
        next_tokens = _tokens_at(order, place + ROWS, rest - ROWS, ROWS)
        left = load_tokens(k, order, place, tokens, k_row, rest, 0, ROWS, DIM_PAD, DIM)
        if v is not None:
            values = load_tokens(v, order, place, tokens, v_row, rest, 0, ROWS, DIM_PAD, DIM)
        if SHIFTED:
            left = _less(left, origin, rest, ROWS)
        if SAME:
            acc = tl.dot(tl.trans(left), left, acc, input_precision="ieee")
        else:
            right = load_tokens(k, order, place, tokens, k_row, rest, column, ROWS, COLS, DIM)
            if SHIFTED:
                right = _less(right, other_origin, rest, ROWS)
            another += _folded(right, FOLD)
            acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
        key += _folded(left, FOLD)
        if v is not None:
            value += _folded(values, FOLD)
    # A division of every entry would take four instructions.
    inverse = 1.0 / tl.maximum(size, 1)
    total = tl.sum(key, 0)
    mean = total * inverse
    if SAME:
        of_columns = mean
    else:
        of_columns = tl.sum(another, 0) * inverse
    acc -= total[:, None] * of_columns[None, :]
    if SHIFTED:
        mean += origin
    return mean, acc, tl.sum(value, 0) * inverse


@triton.jit
def _keys_kernel(k, v, order, offsets, k_mean, v_mean, log_count, moments, k_batch, k_head, k_row, v_batch, v_head, v_row, heads, units,
                 tokens, size_of_moments, rows_of_moments, PARTS: tl.constexpr, SHIFTED: tl.constexpr, SAME: tl.constexpr,
                 SLAB: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """What is known of the units of a block: means, the log of the tokens, which of two units is there before, and the keys' covariance."""
    block, head, batch = own_block(heads)
    column = tl.program_id(2) * COLS
    at = (batch * heads + head) * units + block * PARTS
    moments += ((batch * heads + head) * rows_of_moments + block * PARTS) * size_of_moments
    k, v = head_at(k, batch, head, k_batch, k_head), head_at(v, batch, head, v_batch, v_head)
    log_count += (batch * heads + head) * units
    if order is not None:
        order += (batch * heads + head) * tokens
    dims = tl.arange(0, DIM_PAD)
    # No scalar mask is spread over a vector: Triton 3.9's interpreter makes integers of it.
    mine = dims < tl.where(column == 0, DIM, 0)
    # A NaN stays one, and infinity times zero is one.
    unsound = tl.full([], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        first, size = unit_rows(offsets, log_count, block * PARTS + part, PARTS)
        key, covariance, value = centred_moments(k, v, order, first, size, k_row, v_row, column, SHIFTED, SAME,
                                                 ROWS, FOLD, COLS, DIM, DIM_PAD)
        covariance *= 1.0 / tl.maximum(size, 1)
        _store_symmetric(moments + part * size_of_moments, covariance, column, False, COLS, DIM, DIM_PAD, SLAB)
        tl.store(k_mean + (at + part) * DIM + dims, key.to(k_mean.dtype.element_ty), mask=mine)
        tl.store(v_mean + (at + part) * DIM + dims, value.to(v_mean.dtype.element_ty), mask=mine)
        unsound += tl.sum(key * 0.0, 0) + tl.sum(value * 0.0, 0)
    if unsound != 0.0:
        # Other threads wrote what is written over.
        tl.debug_barrier()
        for part in tl.static_range(PARTS):
            zeros = tl.zeros([DIM_PAD], k_mean.dtype.element_ty)
            tl.store(k_mean + (at + part) * DIM + dims, zeros, mask=mine)
            tl.store(v_mean + (at + part) * DIM + dims, zeros, mask=mine)
            zeros = tl.zeros([DIM_PAD, COLS], tl.float32)
            _store_symmetric(moments + part * size_of_moments, zeros, column, False, COLS, DIM, DIM_PAD, SLAB)
    for part in tl.static_range(PARTS):
        if PARTS == 1:
            first, size = unit_rows(offsets, log_count, block, PARTS)
            known = tl.where((unsound == 0.0) & (size > 0), tl.log(tl.maximum(size, 1).to(tl.float32)), float("-inf"))
            tl.store(log_count + block, known, mask=column == 0)
        else:
            tl.store(log_count + block * PARTS + part, float("-inf"), mask=(column == 0) & (unsound != 0.0))


@triton.jit
def _queries_kernel(q, offsets, moments, q_batch, q_head, q_row, heads, blocks, size_of_moments, factor,
                    SAMPLE: tl.constexpr, SAME: tl.constexpr, SLAB: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr,
                    DIM_PAD: tl.constexpr):
    """``factor`` times the mean of q q^T of the queries that speak for a block, those that are not finite counted as zero."""
    block, head, batch = own_block(heads)
    column = tl.program_id(2) * COLS
    row, there = sampled_rows(offsets, block, blocks, tl.arange(0, SAMPLE), SAMPLE)
    dims, columns = tl.arange(0, DIM_PAD), column + tl.arange(0, COLS)
    pointers = head_at(q, batch, head, q_batch, q_head) + row.to(tl.int64)[:, None] * q_row
    left = tl.load(pointers + dims[None, :], mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    sound = there & (tl.sum(left.to(tl.float32) * 0.0, 1) == 0.0)
    left = tl.where(sound[:, None], left, 0.0).to(left.dtype)
    right = left
    if not SAME:
        right = tl.load(pointers + columns[None, :], mask=sound[:, None] & (columns < DIM)[None, :], other=0.0)
    acc = tl.dot(tl.trans(left), right, input_precision="ieee") * (factor / tl.maximum(tl.sum(there.to(tl.int32), 0), 1))
    at = (batch * heads + head) * blocks + block
    _store_symmetric(moments + at * size_of_moments, acc, column, True, COLS, DIM, DIM_PAD, SLAB)


@triton.jit
def _covariances_kernel(k, v, order, offsets, k_mean, v_mean, log_count, useful, out, k_batch, k_head, k_row, v_batch, v_head, v_row,
                        heads, group, units, rows, tokens, PARTS: tl.constexpr,
                        ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A unit's mean of (k - its mean) (v - its mean)^T; 0 where nothing is estimated, and in rows beyond the units."""
    row, head, batch = own_block(heads)
    column = tl.program_id(2) * COLS
    unit = tl.minimum(row, units - 1)
    at = (batch * heads + head) * units + unit
    out += ((batch * heads + head) * rows + row) * DIM * DIM
    log_count += at - unit
    first, size = unit_rows(offsets, log_count, unit, PARTS)
    sound = (row < units) & (tl.load(log_count + unit) > float("-inf"))
    if useful is not None:
        some = tl.full([], 0, tl.int32)
        for of_group in range(0, group):
            some += (tl.load(useful + (batch * heads + head) * group + of_group) != 0).to(tl.int32)
        sound = sound & (some > 0)
    size = tl.where(sound, size, 0)
    if order is not None:
        order += (batch * heads + head) * tokens
    dims, columns = tl.arange(0, DIM_PAD), column + tl.arange(0, COLS)
    key = tl.load(k_mean + at * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    value = tl.load(v_mean + at * DIM + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    k, v = head_at(k, batch, head, k_batch, k_head), head_at(v, batch, head, v_batch, v_head)
    acc = tl.zeros([DIM_PAD, COLS], tl.float32)
    next_tokens = _tokens_at(order, first, size, ROWS)
    for start in range(0, size, ROWS):
        place, rest, own = first + start, size - start, next_tokens
        next_tokens = _tokens_at(order, place + ROWS, rest - ROWS, ROWS)
        left = _less(load_tokens(k, order, place, own, k_row, rest, 0, ROWS, DIM_PAD, DIM), key, rest, ROWS)
        right = load_tokens(v, order, place, own, v_row, rest, column, ROWS, COLS, DIM)
        # Where there is no token, left is 0.
        right = (right.to(tl.float32) - value[None, :]).to(right.dtype)
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
    acc *= 1.0 / tl.maximum(size, 1)
    inside = (dims < DIM)[:, None] & (columns < DIM)[None, :]
    tl.store(out + dims[:, None] * DIM + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


def key_statistics(k: Tensor, v: Tensor, offsets: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor,
                   order: Tensor | None, parts: int, moments: Tensor) -> None:
    """Writes k_mean, v_mean, log_count and ``moments``, bfloat16 ``[B, Hkv, U, packed_size(D)]``, the keys' covariances;
    that may have room for more units."""
    batch, heads, units, dim = k_mean.shape
    config, across, columns = _columns("keys", k)
    constants = dict(PARTS=parts, SHIFTED=shifted(k), SAME=across == 1, SLAB=SLAB, ROWS=config.block_n, FOLD=fold(config, dim), **columns)
    launch(_keys_kernel, (units // parts * heads, batch, across), (k, v, order, offsets, k_mean, v_mean, log_count, moments),
           (*strides(k, v), heads, units, k.shape[2], packed_size(dim), moments.shape[2]), constants, config.options())


def shifted(k: Tensor) -> bool:
    """Whether keys must lose what they have in common before they are squared.

    What E[k k^T] and E[k] E[k]^T share cancels. Of bfloat16 products, which have 16 bits, tensor cores' float32 sums lose less than storing
    the result does, even where a mean is 100 times the deviation; of float16, whose products have 22, they lose 13 % of h there.
    """
    return k.dtype != torch.bfloat16


def query_moments(q: Tensor, offsets: Tensor, num_blocks: int, sample: int, factor: float, moments: Tensor) -> None:
    """Writes ``moments``, bfloat16 ``[B, H, N, packed_size(D)]``: ``factor`` times the mean of q q^T of ``sample`` of each block's queries,
    what is not kept added to what is: so that products with keys' covariances are those of whole matrices."""
    batch, heads, _, dim = q.shape
    config, across, columns = _columns("moments", q)
    launch(_queries_kernel, (num_blocks * heads, batch, across), (q, offsets, moments),
           (*strides(q), heads, num_blocks, packed_size(dim), factor), dict(SAMPLE=sample, SAME=across == 1, SLAB=SLAB, **columns),
           config.options())


def covariances(k: Tensor, v: Tensor, offsets: Tensor, k_mean: Tensor, v_mean: Tensor, log_count: Tensor,
                order: Tensor | None, useful: Tensor | None, parts: int, out: Tensor) -> None:
    """Writes ``out``, bfloat16 ``[B, Hkv, U, D * D]``, covariances of keys with values; 0 in units of which nothing is estimated, and where
    no query head is ``useful``, bool ``[B, H]``. Rows for more units are 0."""
    batch, heads, units, dim = k_mean.shape
    config, across, columns = _columns("covariances", k)
    group = 0 if useful is None else useful.shape[1] // heads
    rows = out.shape[2]
    launch(_covariances_kernel, (rows * heads, batch, across), (k, v, order, offsets, k_mean, v_mean, log_count, useful, out),
           (*strides(k, v), heads, group, units, rows, k.shape[2]), dict(PARTS=parts, ROWS=config.block_n, **columns), config.options())


def packed_size(dim: int) -> int:
    """Entries of a symmetric matrix that are kept."""
    slabs, rest = divmod(dim, SLAB)
    return slabs * SLAB * dim - slabs * (slabs - 1) // 2 * SLAB**2 + rest**2


def padded(dim: int) -> dict[str, int]:
    return dict(DIM=dim, DIM_PAD=max(power_of_2(dim), 16))


def fold(config: LaunchConfig, dim: int) -> int:
    """Rows of 16-bit numbers that the threads of a program load at once."""
    return min(config.block_n, config.num_warps * 32 * 8 // padded(dim)["DIM_PAD"])


def _columns(kernel: str, x: Tensor) -> tuple[LaunchConfig, int, dict[str, int]]:
    """(configuration, programs that share a matrix' columns out, what they are told of these)."""
    dim = x.shape[3]
    config, dims = estimate_config(kernel, dim, x.dtype, device_limits(x.device)), padded(dim)
    return config, -(-dim // config.block_m), dict(COLS=min(config.block_m, dims["DIM_PAD"]), **dims)
