"""Portable kernels of covariances in two bits an entry, as a cache keeps them: what writes them, and the two products that read them.

An entry is one of four levels -3, -1, 1 and 3, the nearest to what it is beside its row and its column:

    covariance of keys, ij          s_i s_j r level, and s_i s_i on the diagonal; s_i is the deviation of key channel i
    of keys i with values j         a_i b_j level; b_j is the deviation of column j

a, and r, which each slab of rows has for itself, are such that what is kept has the share in the whole that the whole has: so errors vanish
in sums over many units. ``scales``, bfloat16 ``[..., 3 D + 8]``, has s, a, b and r. Of the first, which is symmetric, as much is kept as
``packed_size`` says. A byte has four entries, those in one column and every eighth row of SLAB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2
from .config import LaunchConfig
from .estimate_statistics import SLAB

# Numbers of deviation 1 are coded in equal steps, which are least off in the mean square if the numbers are normally distributed. From here
# on 3 is nearer than 1.
BETWEEN = tl.constexpr(0.9957)
# Rows of products and units that a program has at most. On an H200, us, of 12 heads with 147 units, 40 with 63, and 40 with 450:
_TABLE = {
    "write": LaunchConfig(1, 1, 2, 1),              # 20, 60 and 89 of one chunk's units; 4 warps 40, 118 and 167
    "half_variances": LaunchConfig(64, 64, 4, 1),   # 30, 31, 165; 8 warps 30, 30, 234
    # 23, 35, 210; 8 warps 33, 51, 387. Not 16 units: Triton 3.6 multiplies what is made of bytes in runs of four or eight units a lane, so
    # that four lanes would have some units twice, and others that they have would not be multiplied.
    "mixtures": LaunchConfig(64, 32, 4, 3),
}
# Rows of SLAB that share their bytes with others.
GROUP = tl.constexpr(SLAB // 4)


def code_sizes(dim: int) -> tuple[int, int, int]:
    """(bytes of the covariance of a unit's keys, bytes of theirs with values, numbers of the unit's scales)."""
    return sum([GROUP.value * (dim - begin) for begin in range(0, dim, SLAB)]), slabs(dim) * GROUP.value * dim, 3 * dim + 8


def slabs(dim: int) -> int:
    """How many slabs of rows a unit's matrices have."""
    return -(-dim // SLAB)


@triton.jit
def _code(x):
    """The number of the level that is nearest to x."""
    return tl.where(x > 0, tl.where(x > BETWEEN, 3, 2), tl.where(x < -BETWEEN, 0, 1))


@triton.jit
def _beside(codes, place: tl.constexpr, deviation):
    """The levels whose numbers stand at a place of bytes, times a deviation in bfloat16."""
    twice = (codes.to(tl.int16) << 1 >> 2 * place) & 6
    # 128 and more, as its bits: faster than a conversion. As each step is rounded, it takes two numbers at once.
    level = ((twice | 0x4300).to(tl.bfloat16, bitcast=True).to(tl.float32) - 131.0).to(tl.bfloat16)
    return (level.to(tl.float32) * deviation.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _bytes(code, DIM_PAD: tl.constexpr):
    """Those of a slab's numbers."""
    return tl.sum((code << (tl.arange(0, 4 * GROUP) // GROUP * 2)[:, None]).reshape(4, GROUP, DIM_PAD), 0).to(tl.uint8)


@triton.jit
def _inverse(x):
    """0 of what is not positive."""
    return tl.where(x > 0.0, 1.0 / tl.where(x > 0.0, x, 1.0), 0.0)


@triton.jit
def _slab_row(begin, r, place, DIM: tl.constexpr):
    """(row of a symmetric matrix, where it begins among what is kept, less its slab's first column) of the ``place``-th in byte row r of
    the slab that begins at ``begin``."""
    row = begin + r + place * GROUP
    at = begin * DIM - begin * (begin - 4 * GROUP) // 2 + (r + place * GROUP) * (DIM - begin) - begin
    return row, at


@triton.jit
def _byte_row(begin, r, DIM: tl.constexpr):
    """Where a row of bytes begins, likewise."""
    return (begin * DIM - begin * (begin - 4 * GROUP) // 2) // 4 + r * (DIM - begin) - begin


@triton.jit
def _deviations(moments, channel, DIM: tl.constexpr):
    """Those of key channels, as they are kept."""
    slab = channel // (4 * GROUP) * (4 * GROUP)
    _row, diagonal = _slab_row(slab, channel - slab, 0, DIM)
    variance = tl.load(moments + diagonal + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    return tl.sqrt(tl.maximum(variance, 0.0)).to(tl.bfloat16)


@triton.jit
def _write_moments(moments, out, scales, slab, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A slab of a covariance of keys; its rows' s, and its r."""
    begin, columns, rows = slab * (4 * GROUP), tl.arange(0, DIM_PAD), tl.arange(0, GROUP)
    row, at = _slab_row(begin, tl.arange(0, 4 * GROUP), 0, DIM)
    of_rows = _deviations(moments, row, DIM)
    tl.store(scales + row, of_rows, mask=row < DIM)
    beside = _inverse(of_rows.to(tl.float32))[:, None] * _inverse(_deviations(moments, columns, DIM).to(tl.float32))[None, :]
    there = ((columns >= begin) & (columns < DIM))[None, :]
    kept = (row < DIM)[:, None] & there & (row[:, None] != columns[None, :])
    x = tl.load(moments + at[:, None] + columns[None, :], mask=kept, other=0.0).to(tl.float32) * beside
    whole, number = tl.sum(tl.sum(x * x, 0), 0), tl.sum(tl.sum(kept.to(tl.float32), 0), 0)
    code = _code(x * _inverse(tl.sqrt(whole / tl.maximum(number, 1.0))))
    along = tl.sum(tl.sum(x * (2 * code - 3).to(tl.float32), 0), 0)
    tl.store(scales + 3 * DIM + slab, (whole * _inverse(along)).to(tl.bfloat16))
    tl.store(out + _byte_row(begin, rows, DIM)[:, None] + columns[None, :], _bytes(code, DIM_PAD), mask=there & (rows >= 0)[:, None])


@triton.jit
def _write_covariances(covariances, out, scales, slab, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Some rows of a covariance of keys with values; their a; b."""
    rows, columns = slab * (4 * GROUP) + tl.arange(0, 4 * GROUP), tl.arange(0, DIM_PAD)
    squares = tl.zeros([DIM_PAD], tl.float32)
    for begin in tl.static_range(0, DIM, 4 * GROUP):
        row = begin + tl.arange(0, 4 * GROUP)
        x = tl.load(covariances + row[:, None] * DIM + columns[None, :], mask=(row < DIM)[:, None] & (columns < DIM)[None, :], other=0.0)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)
    deviation = tl.sqrt(squares / DIM).to(tl.bfloat16)
    tl.store(scales + 2 * DIM + columns, deviation, mask=(columns < DIM) & (slab == 0))
    there = (rows < DIM)[:, None] & (columns < DIM)[None, :]
    x = tl.load(covariances + rows[:, None] * DIM + columns[None, :], mask=there, other=0.0).to(tl.float32)
    beside = x * _inverse(deviation.to(tl.float32))[None, :]
    code = _code(beside * _inverse(tl.sqrt(tl.sum(beside * beside, 1) / DIM))[:, None])
    along = tl.sum(x * (2 * code - 3).to(tl.float32) * deviation.to(tl.float32)[None, :], 1)
    tl.store(scales + DIM + rows, (tl.sum(x * x, 1) * _inverse(along)).to(tl.bfloat16), mask=rows < DIM)
    at = slab * GROUP + tl.arange(0, GROUP)
    tl.store(out + at[:, None] * DIM + columns[None, :], _bytes(code, DIM_PAD), mask=(at >= 0)[:, None] & (columns < DIM)[None, :])


@triton.jit
def _write_kernel(log_count, k_mean, v_mean, moments, covariances, places, out_log_count, out_k_mean, out_v_mean, out_moments,
                  out_covariances, out_scales, units, room, first, SIZE: tl.constexpr, BYTES: tl.constexpr, MIXED_BYTES: tl.constexpr,
                  DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Codes one unit: programs have a slab of its keys' covariance each, others as many rows of the one with values."""
    head, dims = tl.program_id(1).to(tl.int64), tl.arange(0, DIM_PAD)
    source, place = head * units + tl.program_id(0), (first + tl.program_id(0)).to(tl.int64)
    if places is not None:
        place = tl.load(places + tl.program_id(0))
    place += head * room
    scales = out_scales + place * (3 * DIM + 8)
    slab = tl.program_id(2) // 2
    if tl.program_id(2) % 2 == 0:
        _write_moments(moments + source * SIZE, out_moments + place * BYTES, scales, slab, DIM, DIM_PAD)
        return
    mine = (dims < DIM) & (slab == 0)
    tl.store(out_log_count + place, tl.load(log_count + source), mask=slab == 0)
    tl.store(out_k_mean + place * DIM + dims, tl.load(k_mean + source * DIM + dims, mask=mine, other=0.0), mask=mine)
    tl.store(out_v_mean + place * DIM + dims, tl.load(v_mean + source * DIM + dims, mask=mine, other=0.0), mask=mine)
    _write_covariances(covariances + source * DIM * DIM, out_covariances + place * MIXED_BYTES, scales, slab, DIM, DIM_PAD)


@triton.jit
def _slab_product(queries, moments, scales, begin, first, unit, units, row, rows, DIM: tl.constexpr, SIZE: tl.constexpr,
                  BYTES: tl.constexpr, COLS: tl.constexpr):
    """The products of a slab, whose columns begin no earlier than at ``first``, [M, N]."""
    mine, there, columns = (row < rows)[:, None], unit < units, first + tl.arange(0, COLS)
    queries += row.to(tl.int64)[:, None] * SIZE
    moments += unit.to(tl.int64)[:, None] * BYTES
    scales += unit.to(tl.int64) * (3 * DIM + 8)
    kept = (columns >= begin) & (columns < DIM)
    spread = tl.load(scales + 3 * DIM + begin // (4 * GROUP), mask=there, other=0.0).to(tl.float32)
    deviation = tl.load(scales[:, None] + columns[None, :], mask=there[:, None] & kept[None, :], other=0.0)
    # The diagonal, where products of codes are to come to nothing: there stands -1.
    lines, ats = _slab_row(begin, tl.arange(0, 4 * GROUP), 0, DIM)
    owns = tl.load(scales[:, None] + lines[None, :], mask=there[:, None] & (lines < DIM)[None, :], other=0.0).to(tl.float32)
    diagonal = tl.load(queries + (ats + lines)[None, :], mask=mine & (lines < DIM)[None, :], other=0.0)
    acc = tl.dot(diagonal, tl.trans((owns * owns * (1.0 + spread)[:, None]).to(tl.bfloat16)))
    for r in range(0, GROUP):
        codes = tl.load(moments + (_byte_row(begin, r, DIM) + columns)[None, :], mask=there[:, None] & kept[None, :], other=0)
        for place in tl.static_range(4):
            line, at = _slab_row(begin, r, place, DIM)
            known = tl.load(queries + (at + columns)[None, :], mask=mine & (kept & (line < DIM))[None, :], other=0.0)
            own = tl.load(scales + line, mask=there & (line < DIM), other=0.0).to(tl.float32) * spread
            acc += tl.dot(known, tl.trans(_beside(codes, place, deviation))) * own[None, :]
    return acc


@triton.jit
def _half_variance_kernel(queries, moments, scales, out, heads, rows, units, SIZE: tl.constexpr, BYTES: tl.constexpr, M: tl.constexpr,
                          N: tl.constexpr, SLABS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr):
    """The products of moments of queries, and of N units' keys, by their slabs, of which the first, with most to do, begin first."""
    row, unit = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) // heads * N + tl.arange(0, N)
    head, slab = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(2)
    queries += head * rows * SIZE
    moments += head * units * BYTES
    scales += head * units * (3 * DIM + 8)
    begin = slab * (4 * GROUP)
    # The last rows of a symmetric matrix keep nothing in the first half of their columns.
    if begin < HALF:
        acc = _slab_product(queries, moments, scales, begin, 0, unit, units, row, rows, DIM, SIZE, BYTES, DIM_PAD)
    else:
        acc = _slab_product(queries, moments, scales, begin, HALF, unit, units, row, rows, DIM, SIZE, BYTES, HALF)
    tl.store(out + ((head * rows + row)[:, None] * SLABS + slab) * units + unit[None, :], acc,
             mask=(row < rows)[:, None] & (unit < units)[None, :])


@triton.jit
def _mixed(acc, weights, codes, place: tl.constexpr, deviation, own, there, line, DIM: tl.constexpr):
    """With a line of some units' matrices added, by ``weights [M, N]``."""
    beside = tl.load(own + line, mask=there & (line < DIM), other=0.0).to(tl.float32)
    return tl.dot((weights * beside[None, :]).to(tl.bfloat16), _beside(codes, place, deviation), acc)


@triton.jit
def _put(out, acc, line, mask, DIM: tl.constexpr):
    tl.store(out + line * DIM, acc.to(out.dtype.element_ty), mask=mask & (line < DIM))


@triton.jit
def _mixture_kernel(mixture, covariances, scales, out, rows, units, mixture_row, BYTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                    DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Four lines, which share their bytes, of M matrices, each of which mixes all units'."""
    row, columns = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64), tl.arange(0, DIM_PAD)
    head, group = tl.program_id(2).to(tl.int64), tl.program_id(0)
    first = group // GROUP * (4 * GROUP) + group % GROUP
    mixture += head * rows * mixture_row
    covariances += head * units * BYTES + group * DIM
    scales += head * units * (3 * DIM + 8) + DIM
    acc_0, acc_1 = tl.zeros([M, DIM_PAD], tl.float32), tl.zeros([M, DIM_PAD], tl.float32)
    acc_2, acc_3 = tl.zeros([M, DIM_PAD], tl.float32), tl.zeros([M, DIM_PAD], tl.float32)
    for start in range(0, units, N):
        unit = (start + tl.arange(0, N)).to(tl.int64)
        there = unit < units
        weights = tl.load(mixture + row[:, None] * mixture_row + unit[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0)
        weights, kept, own = weights.to(tl.float32), there[:, None] & (columns < DIM)[None, :], scales + unit * (3 * DIM + 8)
        codes = tl.load(covariances + unit[:, None] * BYTES + columns[None, :], mask=kept, other=0)
        deviation = tl.load(own[:, None] + DIM + columns[None, :], mask=kept, other=0.0)
        acc_0 = _mixed(acc_0, weights, codes, 0, deviation, own, there, first, DIM)
        acc_1 = _mixed(acc_1, weights, codes, 1, deviation, own, there, first + GROUP, DIM)
        acc_2 = _mixed(acc_2, weights, codes, 2, deviation, own, there, first + 2 * GROUP, DIM)
        acc_3 = _mixed(acc_3, weights, codes, 3, deviation, own, there, first + 3 * GROUP, DIM)
    out += (head * rows + row)[:, None] * (DIM * DIM) + columns[None, :]
    mask = (row < rows)[:, None] & (columns < DIM)[None, :]
    _put(out, acc_0, first, mask, DIM)
    _put(out, acc_1, first + GROUP, mask, DIM)
    _put(out, acc_2, first + 2 * GROUP, mask, DIM)
    _put(out, acc_3, first + 3 * GROUP, mask, DIM)


def write(found: Sequence[Tensor], into: Sequence[Tensor], places: Tensor | int) -> None:
    """Codes what is known of units.

    Args:
        found: log_count, k_mean, v_mean, moments and covariances of some units.
        into: the same of those that there is room for, the last two coded, and scales.
        places: int64, which of these the units become; an int = those from there on.
    """
    (batch, heads, units, size), dim, (room, moments) = found[3].shape, found[1].shape[3], into[3].shape[2:]
    listed, first = (None, places) if isinstance(places, int) else (places, 0)
    launch(_write_kernel, (units, batch * heads, 2 * slabs(dim)), (*found, listed, *into), (units, room, first),
           dict(SIZE=size, BYTES=moments, MIXED_BYTES=into[4].shape[3], DIM=dim, DIM_PAD=_pad(dim)), _TABLE["write"].options())


def half_variances(queries: Tensor, moments: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``out``, float32 ``[B, H, N, slabs * U]``: the products of ``queries``, what ``query_moments`` writes, with coded ``moments``,
    whose sums over slabs are what is wanted."""
    batch, heads, rows, size = queries.shape
    kv_heads, units = moments.shape[1:3]
    rows, dim = rows * (heads // kv_heads), _dim(scales)
    config = _config("half_variances", rows)
    m, n = config.block_m, config.block_n
    launch(_half_variance_kernel, (-(-units // n) * batch * kv_heads, -(-rows // m), slabs(dim)), (queries, moments, scales, out),
           (batch * kv_heads, rows, units),
           dict(SIZE=size, BYTES=moments.shape[3], M=m, N=n, SLABS=slabs(dim), DIM=dim, DIM_PAD=_pad(dim),
                HALF=max(_pad(dim) // 2, SLAB)), config.options())


def mixtures(mixture: Tensor, covariances: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes ``out``, bfloat16 ``[B, H, N, D * D]``: the products of ``mixture [B, H, N, U]``, of dense rows, with coded ``covariances``.
    """
    (batch, heads, rows, units), kv_heads = mixture.shape, covariances.shape[1]
    rows *= heads // kv_heads
    dim, config = _dim(scales), _config("mixtures", rows)
    m, n = config.block_m, config.block_n
    launch(_mixture_kernel, (slabs(dim) * GROUP.value, -(-rows // m), batch * kv_heads), (mixture, covariances, scales, out),
           (rows, units, mixture.stride(2)), dict(BYTES=covariances.shape[3], M=m, N=n, DIM=dim, DIM_PAD=_pad(dim)),
           config.options())


def _dim(scales: Tensor) -> int:
    return (scales.shape[3] - 8) // 3


def _pad(dim: int) -> int:
    return max(power_of_2(dim), SLAB)


def _config(kernel: str, rows: int) -> LaunchConfig:
    """The one of ``kernel``, a key of the table, for products of so many rows."""
    config = _TABLE[kernel]
    return replace(config, block_m=min(config.block_m, max(power_of_2(rows), 16)))
