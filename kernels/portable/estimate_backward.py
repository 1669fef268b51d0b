"""Gradients of the estimate: portable kernels by query rows, by units and by tokens. No atomics, so the same bits every time.

The formulas are those of ``merge_backward`` in eager/estimate.py, with W_qu = e^(l_qu - z), z the merged lse.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import DeviceLimits, device_limits, multiprocessors
from ..estimate import Blocks, by_kv_head
from ..launch import launch
from ..lowering.primitives import LOG2E, load_rows, lse_in_base_2, row_pointers, store_rows
from .config import LaunchConfig
from .estimate_config import strides
from .estimate_rows import part_shares
from .estimate_statistics import block_rows, head_at, lower_tokens, padded

# Not measured, but what compiles for sm_80 and sm_90 without spilling more than 120 bytes, head_dim 128, and lets two programs share a
# multiprocessor: 64 queries at once in the units' pass spill 750 bytes. Query rows by units in both.
_ROWS, _UNITS, _UNITS_BEFORE_HOPPER = LaunchConfig(64, 64, 4, 2), LaunchConfig(32, 64, 4, 2), LaunchConfig(32, 64, 8, 2)
# Tiles that fit any GPU, for head_dims above 128, and for float32, which is multiplied without tensor cores.
_WIDE = LaunchConfig(32, 32, 8, 1)


@triton.jit
def _patch(base, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first ``rows`` and ``columns`` of a matrix as [ROWS, COLUMNS], zeros past them."""
    mask = (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, COLUMNS) < columns)[None, :]
    return tl.load(row_pointers(base, 0, stride, ROWS, COLUMNS), mask=mask, other=0.0)


@triton.jit
def _with_moments(x, moments, acc):
    """acc + x moments. Float16 has not the range of second moments, which are bfloat16; float32 is no less exact here than elsewhere."""
    if x.dtype == tl.float32:
        return tl.dot(x, moments.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x.to(moments.dtype), moments, acc)


@triton.jit
def _estimate_rows_kernel(q, dout, exact, out, dexact, dq, k_mean, v_mean, exact_lse, lse, estimate_lse, dexact_lse, lse2, shift, bias2,
                      matrix, offsets, q_batch, q_head, q_row, dout_batch, dout_head, dout_row, exact_batch, exact_head, exact_row,
                      out_batch, out_head, out_row, dexact_batch, dexact_head, dexact_row, dq_batch, dq_head, dq_row,
                      heads, group, tokens, blocks, units, scale_log2, scale,
                      PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """dO_E, dz_E and dq of some rows of a query block; and what the units' pass wants to know of them: c, and z in base 2."""
    block, before = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * M
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    start, length = block_rows(offsets, block)
    row, rows = start + before, length - before
    if rows <= 0:
        return
    place = tl.arange(0, M)
    inside = place < rows
    at = (batch * heads + head) * tokens + row + place
    row_lse = tl.load(lse + at, mask=inside, other=0.0)
    row_exact = tl.load(exact_lse + at, mask=inside, other=0.0)
    row_estimate = tl.load(estimate_lse + at, mask=inside, other=float("-inf"))
    estimated = row_estimate != float("-inf")
    a, b, _ = part_shares(row_exact, row_estimate)
    # Rows of which nothing is estimated pass on what arrives.
    a, b = tl.where(estimated, a, 1.0), tl.where(estimated, b, 0.0)
    do_of = head_at(dout, batch, head, dout_batch, dout_head)
    do = load_rows(do_of, row, dout_row, rows, M, DIM, DIM_PAD, True)
    wide = do.to(tl.float32)
    merged = load_rows(head_at(out, batch, head, out_batch, out_head), row, out_row, rows, M, DIM, DIM_PAD, True).to(tl.float32)
    delta = tl.sum(merged * wide, 1)
    own = load_rows(head_at(exact, batch, head, exact_batch, exact_head), row, exact_row, rows, M, DIM, DIM_PAD, True).to(tl.float32)
    # Where the exact part has nothing, whatever its out holds.
    own_dot = tl.sum(tl.where((a == 0.0)[:, None], 0.0, own) * wide, 1)
    store_rows(head_at(dexact, batch, head, dexact_batch, dexact_head), row, dexact_row, rows, a[:, None] * wide, M, DIM, DIM_PAD)
    tl.store(dexact_lse + at, tl.where(estimated, a * (own_dot - delta), 0.0), mask=inside)

    queries = load_rows(head_at(q, batch, head, q_batch, q_head), row, q_row, rows, M, DIM, DIM_PAD, True)
    c = -delta
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    # M dO of each row, by columns of M.
    m = matrix + ((batch * heads + head) * blocks + block) * DIM * DIM
    for column in range(0, DIM, C):
        part = _patch(do_of + row.to(tl.int64) * dout_row + column, dout_row, rows, DIM - column, M, C)
        acc = _with_moments(part, tl.trans(_patch(m + column, DIM, DIM, DIM - column, DIM_PAD, C)), acc)
    c += scale * tl.sum(acc * queries.to(tl.float32), 1)
    acc = acc * b[:, None]
    # +inf makes every weight of a row 0.
    row_lse2 = lse_in_base_2(tl.where(estimated, row_lse, float("-inf")))
    # Keys and values that a row attends to exactly may hold NaN, and 0 times NaN is NaN.
    c = tl.where(estimated, c, 0.0)
    tl.store(lse2 + at, row_lse2, mask=inside)
    tl.store(shift + at, c, mask=inside)

    means = (batch * (heads // group) + head // group) * units * DIM
    bias_of = bias2 + ((batch * heads + head) * blocks + block) * units
    for first in range(0, units, N):
        unit = first + tl.arange(0, N)
        unit_bias = tl.load(bias_of + unit, mask=unit < units, other=float("-inf"))
        keys = load_rows(k_mean + means, first, DIM, units - first, N, DIM, DIM_PAD, True)
        values = load_rows(v_mean + means, first, DIM, units - first, N, DIM, DIM_PAD, True)
        logits2 = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2 + unit_bias[None, :]
        weights = tl.exp2(logits2 - row_lse2[:, None])
        dlogits = weights * (tl.dot(do, tl.trans(values), input_precision="ieee") + c[:, None])
        acc = tl.dot(dlogits.to(keys.dtype), keys, acc, input_precision="ieee")
    store_rows(head_at(dq, batch, head, dq_batch, dq_head), row, dq_row, rows, acc * scale, M, DIM, DIM_PAD)


@triton.jit
def _estimate_units_kernel(q, dout, k_mean, v_mean, dk_mean, dv_mean, lse2, shift, bias2, offsets, q_batch, q_head, q_row,
                       dout_batch, dout_head, dout_row, kv_heads, group, tokens, blocks, units, share, scale_log2, scale,
                       M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """dkb and dvb of N units, from the ``share`` query blocks of a split; logits stand transposed, [N units, M queries]."""
    first, split = tl.program_id(0) * N, tl.program_id(2)
    kv_head, batch = tl.program_id(1) % kv_heads, (tl.program_id(1) // kv_heads).to(tl.int64)
    unit = first + tl.arange(0, N)
    means = (batch * kv_heads + kv_head) * units * DIM
    keys = load_rows(k_mean + means, first, DIM, units - first, N, DIM, DIM_PAD, True)
    values = load_rows(v_mean + means, first, DIM, units - first, N, DIM, DIM_PAD, True)
    dk_acc = tl.zeros([N, DIM_PAD], tl.float32)
    dv_acc = tl.zeros([N, DIM_PAD], tl.float32)
    place = tl.arange(0, M)
    for head in range(kv_head * group, kv_head * group + group):
        queries_of, do_of = head_at(q, batch, head, q_batch, q_head), head_at(dout, batch, head, dout_batch, dout_head)
        before = (batch * kv_heads * group + head) * tokens
        bias_of = bias2 + (batch * kv_heads * group + head) * blocks * units
        for block in range(split * share, tl.minimum(split * share + share, blocks)):
            unit_bias = tl.load(bias_of + block * units + unit, mask=unit < units, other=float("-inf"))
            start, length = block_rows(offsets, block)
            for row in range(start, start + length, M):
                rows = start + length - row
                queries = load_rows(queries_of, row, q_row, rows, M, DIM, DIM_PAD, True)
                do = load_rows(do_of, row, dout_row, rows, M, DIM, DIM_PAD, True)
                row_lse2 = tl.load(lse2 + before + row + place, mask=place < rows, other=float("inf"))
                c = tl.load(shift + before + row + place, mask=place < rows, other=0.0)
                logits2 = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale_log2 + unit_bias[:, None]
                weights = tl.exp2(logits2 - row_lse2[None, :])
                dlogits = weights * (tl.dot(values, tl.trans(do), input_precision="ieee") + c[None, :])
                dv_acc = tl.dot(weights.to(do.dtype), do, dv_acc, input_precision="ieee")
                dk_acc = tl.dot(dlogits.to(queries.dtype), queries, dk_acc, input_precision="ieee")
    at = ((split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * units) * DIM
    store_rows(dk_mean + at, first, DIM, units - first, dk_acc * scale, N, DIM, DIM_PAD)
    store_rows(dv_mean + at, first, DIM, units - first, dv_acc, N, DIM, DIM_PAD)


@triton.jit
def _estimate_matrix_kernel(q, dout, dmatrix, exact_lse, estimate_lse, offsets, q_batch, q_head, q_row, dout_batch, dout_head, dout_row,
                        heads, tokens, blocks, scale,
                        M: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """C columns of a query block's dM."""
    block, column = tl.program_id(0), tl.program_id(2) * C
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    start, length = block_rows(offsets, block)
    queries_of, do_of = head_at(q, batch, head, q_batch, q_head), head_at(dout, batch, head, dout_batch, dout_head) + column
    before = (batch * heads + head) * tokens
    place = tl.arange(0, M)
    acc = tl.zeros([DIM_PAD, C], tl.float32)
    for row in range(start, start + length, M):
        rows = start + length - row
        queries = load_rows(queries_of, row, q_row, rows, M, DIM, DIM_PAD, True)
        do = _patch(do_of + tl.cast(row, tl.int64) * dout_row, dout_row, rows, DIM - column, M, C)
        row_exact = tl.load(exact_lse + before + row + place, mask=place < rows, other=0.0)
        row_estimate = tl.load(estimate_lse + before + row + place, mask=place < rows, other=float("-inf"))
        _, b, _ = part_shares(row_exact, row_estimate)
        b = tl.where(row_estimate == float("-inf"), 0.0, b)
        acc = tl.dot(tl.trans(queries), (do.to(tl.float32) * b[:, None]).to(queries.dtype), acc, input_precision="ieee")
    at = dmatrix + ((batch * heads + head) * blocks + block) * DIM * DIM + column
    mask = (tl.arange(0, DIM_PAD) < DIM)[:, None] & (tl.arange(0, C) < DIM - column)[None, :]
    tl.store(row_pointers(at, 0, DIM, DIM_PAD, C), (acc * scale).to(dmatrix.dtype.element_ty), mask=mask)


@triton.jit
def _estimate_tokens_kernel(k, v, dk, dv, k_mean, v_mean, dk_mean, dv_mean, dcovariance, log_count, order, offsets, k_batch, k_head, k_row,
                        v_batch, v_head, v_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, kv_heads, tokens, units, rows_of_dc,
                        PARTS: tl.constexpr, M: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """C columns of dk and dv of a unit's tokens, which stand at ``order`` where that is given; 0 where nothing is estimated of the unit."""
    unit, column = tl.program_id(0), tl.program_id(2) * C
    kv_head, batch = tl.program_id(1) % kv_heads, (tl.program_id(1) // kv_heads).to(tl.int64)
    start, length = block_rows(offsets, unit // PARTS)
    of_unit = tl.program_id(1).to(tl.int64) * units + unit
    first, last = 0, length
    if PARTS == 2:
        lower = lower_tokens(log_count + of_unit - unit, unit // 2)
        first = tl.where(unit % 2 == 1, lower, 0)
        last = tl.where(unit % 2 == 1, length, lower)
    sound = tl.load(log_count + of_unit) != float("-inf")
    factor = 1.0 / tl.maximum(last - first, 1).to(tl.float32)
    place, dims, columns = tl.arange(0, M), tl.arange(0, DIM_PAD), column + tl.arange(0, C)
    dkey = tl.load(dk_mean + of_unit * DIM + columns, mask=columns < DIM, other=0.0)
    dvalue = tl.load(dv_mean + of_unit * DIM + columns, mask=columns < DIM, other=0.0)
    k, v = head_at(k, batch, kv_head, k_batch, k_head), head_at(v, batch, kv_head, v_batch, v_head)
    dk, dv = head_at(dk, batch, kv_head, dk_batch, dk_head), head_at(dv, batch, kv_head, dv_batch, dv_head)
    dc = dcovariance + (tl.program_id(1).to(tl.int64) * rows_of_dc + unit) * DIM * DIM
    to_values = _patch(dc + column, DIM, DIM, DIM - column, DIM_PAD, C)
    to_keys = tl.trans(_patch(dc + column * DIM, DIM, DIM - column, DIM, C, DIM_PAD))
    key = tl.load(k_mean + of_unit * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    value = tl.load(v_mean + of_unit * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    for at in range(first, last, M):
        rows = at + place < last
        token = start + at + place
        if order is not None:
            token = tl.load(order + tl.program_id(1).to(tl.int64) * tokens + token, mask=rows, other=0)
        token = token[:, None].to(tl.int64)
        new_dk = tl.zeros([M, C], tl.float32) + dkey[None, :]
        new_dv = tl.zeros([M, C], tl.float32) + dvalue[None, :]
        mask = rows[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k + token * k_row + dims[None, :], mask=mask, other=0.0)
        values = tl.load(v + token * v_row + dims[None, :], mask=mask, other=0.0)
        keys, values = keys.to(tl.float32) - key[None, :], values.to(tl.float32) - value[None, :]
        new_dv = _with_moments(keys.to(k.dtype.element_ty), to_values, new_dv)
        new_dk = _with_moments(values.to(v.dtype.element_ty), to_keys, new_dk)
        mask = rows[:, None] & (columns < DIM)[None, :]
        new_dk, new_dv = tl.where(sound, new_dk * factor, 0.0), tl.where(sound, new_dv * factor, 0.0)
        tl.store(dk + token * dk_row + columns[None, :], new_dk.to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + token * dv_row + columns[None, :], new_dv.to(dv.dtype.element_ty), mask=mask)


def backward_launches(dim: int, dtype: torch.dtype, limits: DeviceLimits) -> dict[str, tuple[dict[str, int], LaunchConfig]]:
    """Sizes and options of the four kernels."""
    shape, wide = padded(dim), dim > 128 or dtype == torch.float32
    # A product takes as many columns of a D x D matrix at once as registers and shared memory have room for.
    columns = min(shape["DIM_PAD"], 128 if not wide else 32 if dtype == torch.float32 else 64)
    rows, units = (_WIDE, _WIDE) if wide else (_ROWS, _UNITS if limits.tma else _UNITS_BEFORE_HOPPER)
    matrix = LaunchConfig(32 if wide else 64, columns, 8, 1 if wide else 2)
    return dict(rows=(dict(M=rows.block_m, N=rows.block_n, C=min(columns, 64)) | shape, rows),
                units=(dict(M=units.block_m, N=units.block_n) | shape, units),
                matrix=(dict(M=matrix.block_m, C=columns) | shape, matrix),
                tokens=(dict(M=matrix.block_m, C=columns) | shape, replace(matrix, num_stages=1)))


def query_splits(device: torch.device, blocks: int, units: int, kv_heads: int, config: LaunchConfig) -> tuple[int, int]:
    """(How many sums over query blocks a unit's gradients are made of, of how many blocks each), so that so many key heads keep the device
    busy."""
    splits = max(1, min(blocks, 4 * multiprocessors(device) // (-(-units // config.block_n) * kv_heads)))
    share = -(-blocks // splits)
    return -(-blocks // share), share


def row_gradients(
    dexact: Tensor, dexact_lse: Tensor, dq: Tensor, dout: Tensor, exact: Tensor, exact_lse: Tensor, out: Tensor, lse: Tensor,
    estimate_lse: Tensor, q: Tensor, q_blocks: Blocks, bias2: Tensor, k_mean: Tensor, v_mean: Tensor, matrix: Tensor, mixture: Tensor,
    dcovariance: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:
    """Writes the gradients for the exact part's out and lse, and for q, where compensated blocks are, and those of the covariances; nothing
    of other rows. Returns what ``key_gradients`` wants to know of rows.

    Args:
        dexact, dq: take the gradients, shaped as exact and q; dexact_lse like exact_lse.
        dout: ``[B, H, P, D]``, what arrives for the merged out.
        exact, exact_lse: the exact part; out, lse: merged. Every lse is float32 ``[B, H, P]``, contiguous, as dexact_lse is.
        estimate_lse: the estimate's; -inf where nothing is estimated.
        q: ``[B, H, P, D]``; as of all that are shaped so the last stride is 1.
        q_blocks: those that are compensated.
        bias2: float32 ``[B, H, N, U]``, contiguous: in base 2 what a unit's logit has beside its mean key's; -inf where a query block
            estimates nothing of it.
        k_mean, v_mean: ``[B, Hkv, U, D]`` in q's dtype, finite, contiguous.
        matrix: M, ``[B, H, N, D * D]``, contiguous, and mixture, P with damping, ``[B, H, N, U]``, of one dtype. The gradient of M is
            written over it.
        dcovariance: takes the covariances' gradients, ``[B, Hkv, U, D * D]`` of that dtype, contiguous, of as many units as mixture has.
        scale: factor on the scores.
    """
    (batch, heads, tokens, dim), kv_heads, (blocks, units), (offsets, _, longest) = q.shape, k_mean.shape[1], bias2.shape[2:], q_blocks
    group, launches = heads // kv_heads, backward_launches(dim, q.dtype, device_limits(q.device))
    lse2, shift = (torch.empty(lse.shape, dtype=lse.dtype, device=lse.device) for _ in range(2))
    sizes, config = launches["rows"]
    parts = -(-longest // config.block_m)
    launch(_estimate_rows_kernel, (blocks * parts, batch * heads, 1),
           (q, dout, exact, out, dexact, dq, k_mean, v_mean, exact_lse, lse, estimate_lse, dexact_lse, lse2, shift, bias2, matrix, offsets),
           (*strides(q, dout, exact, out, dexact, dq), heads, group, tokens, blocks, units, scale * LOG2E, scale),
           dict(PARTS=parts) | sizes, config.options())

    sizes, config = launches["matrix"]
    launch(_estimate_matrix_kernel, (blocks, batch * heads, -(-dim // sizes["C"])), (q, dout, matrix, exact_lse, estimate_lse, offsets),
           (*strides(q, dout), heads, tokens, blocks, scale), sizes, config.options())
    # The query heads of a key head are rows of one product.
    torch.bmm(by_kv_head(mixture, kv_heads).mT, by_kv_head(matrix, kv_heads), out=dcovariance.flatten(0, 1))
    return lse2, shift


def key_gradients(
    dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_blocks: Blocks, kv_blocks: Blocks, bias2: Tensor,
    of_rows: tuple[Tensor, Tensor], log_count: Tensor, order: Tensor | None, k_mean: Tensor, v_mean: Tensor, dcovariance: Tensor,
    scale: float,
) -> None:
    """Writes the gradients for k and v, where compensated blocks are; nothing of other rows.

    Args:
        dk, dv: take the gradients, shaped as k and v, ``[B, Hkv, P', D]``, whose last strides are 1.
        of_rows: what ``row_gradients`` returned.
        log_count: float32 ``[B, Hkv, U]``, contiguous, -inf where nothing is estimated of a unit.
        order: int32 ``[B, Hkv, P']`` or None, as in ``Estimate``, contiguous.
        dcovariance: what ``row_gradients`` wrote.
        The others: as ``row_gradients`` takes them.
    """
    (batch, _, tokens, dim), kv_heads, (blocks, units), (kv_offsets, kv_number, _) = q.shape, k.shape[1], bias2.shape[2:], kv_blocks
    launches = backward_launches(dim, q.dtype, device_limits(q.device))
    sizes, config = launches["units"]
    chunks, (splits, share) = -(-units // config.block_n), query_splits(q.device, blocks, units, batch * kv_heads, config)
    some = [torch.empty(splits, *k_mean.shape, dtype=torch.float32, device=q.device) for _ in range(2)]
    launch(_estimate_units_kernel, (chunks, batch * kv_heads, splits), (q, dout, k_mean, v_mean, *some, *of_rows, bias2, q_blocks[0]),
           (*strides(q, dout), kv_heads, q.shape[1] // kv_heads, tokens, blocks, units, share, scale * LOG2E, scale), sizes,
           config.options())
    dmeans = [x.sum(0) for x in some]
    sizes, config = launches["tokens"]
    numbers = *strides(k, v, dk, dv), kv_heads, k.shape[2], units, dcovariance.shape[2]
    launch(_estimate_tokens_kernel, (units, batch * kv_heads, -(-dim // sizes["C"])),
           (k, v, dk, dv, k_mean, v_mean, *dmeans, dcovariance, log_count, order, kv_offsets),
           numbers, dict(PARTS=units // kv_number) | sizes, config.options())
