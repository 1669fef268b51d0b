"""Portable kernel between projection and attention: RMS norm, rotary embedding and order of blocks in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, power_of_2

# Numbers that a program takes at once, over tokens, heads and channels, and of them heads: those of a token often share their angles. On an
# H200, in the sequence's order, half as many took 0.8 to 1.0 of the time, twice as many 1.0 to 1.2, other heads and warps as long.
NUMBERS = 4096
HEADS = 4
OPTIONS = dict(num_warps=4)


@triton.jit
def _materialized(x, weight, rstd, cos, sin, token, there, head, x_row, x_head, weight_head, angle_row, angle_head, eps,
                  NORM: tl.constexpr, CAST: tl.constexpr, ROPE: tl.constexpr, PER_HEAD: tl.constexpr,
                  ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Tokens of some heads, [ROWS, HEADS, DIM_PAD] in float32, but rounded to x's dtype; zeros where not ``there``."""
    kind: tl.constexpr = x.dtype.element_ty
    row, dim = token[:, None, None], tl.arange(0, DIM_PAD)[None, None, :]
    value = tl.load(x + row * x_row + head * x_head + dim, mask=there & (dim < DIM), other=0.0).to(tl.float32)
    if NORM != "none":
        if NORM == "head":
            value *= tl.rsqrt(tl.sum(value * value, 2, keep_dims=True) / DIM + eps)
        else:
            value *= tl.load(rstd + token, mask=token >= 0, other=0.0)[:, None, None]
        if CAST:
            value = value.to(kind).to(tl.float32)
        value *= tl.load(weight + head * weight_head + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    if ROPE:
        # An angle that stands there twice is loaded twice: wide loads of everything are faster than loads of every other number.
        number = tl.arange(0, DIM_PAD // 2 * ROPE)[None, None, :]
        angle = row * angle_row + number
        if PER_HEAD:
            angle += head * angle_head
            mask = there & (number < DIM // 2 * ROPE)
        else:
            mask = (row >= 0) & (number < DIM // 2 * ROPE)
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        if ROPE == 2:
            c, _ = tl.split(tl.reshape(c, [ROWS, HEADS if PER_HEAD else 1, DIM_PAD // 2, 2]))
            s, _ = tl.split(tl.reshape(s, [ROWS, HEADS if PER_HEAD else 1, DIM_PAD // 2, 2]))
        even, odd = tl.split(tl.reshape(value, [ROWS, HEADS, DIM_PAD // 2, 2]))
        value = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, HEADS, DIM_PAD]).to(kind).to(tl.float32)
    return value


@triton.jit
def _rotary_kernel(x, out, weight, rstd, cos, sin, source, offsets, means, x_batch, x_head, x_row, out_batch, out_head, out_row,
                   out_group, group_heads, weight_head, angle_batch, angle_head, angle_row, heads, tokens, begin, mean_blocks, eps,
                   ORDERED: tl.constexpr, GROUPS: tl.constexpr, MEANS: tl.constexpr, NORM: tl.constexpr, CAST: tl.constexpr,
                   ROPE: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
                   DIM_PAD: tl.constexpr):
    """ORDERED: the blocks whose tokens are among the ``tokens`` from ``begin`` on, with MEANS of the first of them; else as they come.
    GROUPS: in out every ``group_heads`` heads begin ``out_group`` after those before them.
    NORM: over each "head", by the given rstd of a "token", or "none". CAST: to x's dtype before the weight.
    ROPE: how often an angle stands in memory; 0 = none is applied. PER_HEAD: angles of each head's own."""
    groups = tl.cdiv(heads, HEADS)
    block = tl.program_id(0) // groups
    head = (tl.program_id(0) % groups).to(tl.int64) * HEADS + tl.arange(0, HEADS)[None, :, None]
    dim = tl.arange(0, DIM_PAD)[None, None, :]
    batch = tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    x += batch * x_batch
    out += batch * out_batch
    if NORM == "token":
        rstd += batch * tokens
    if ROPE:
        cos += batch * angle_batch
        sin += batch * angle_batch
    if ORDERED:
        first, last = tl.load(offsets + block), tl.load(offsets + block + 1)
        lead = tl.load(source + first, mask=first < last, other=-1) - begin
        last = tl.where((lead >= 0) & (lead < tokens), last, first)
    else:
        first = block * ROWS
        last = first + ROWS
    if GROUPS:
        head_place = head // group_heads * out_group + head % group_heads * out_head
    else:
        head_place = head * out_head
    # Summed over rows once, at the end.
    total = tl.zeros([ROWS, HEADS, DIM_PAD] if MEANS else [1, 1, 1], tl.float32)
    for start in range(first, last, ROWS):
        place = start + tl.arange(0, ROWS)
        if ORDERED:
            inside = place < last
            token = tl.load(source + place, mask=inside, other=-1)
            token = tl.where(token >= 0, token - begin, -1).to(tl.int64)
        else:
            inside = place < tokens
            token = tl.where(inside, place, -1).to(tl.int64)
        there = (token >= 0)[:, None, None] & (head < heads)
        value = _materialized(x, weight, rstd, cos, sin, token, there, tl.minimum(head, heads - 1), x_row, x_head, weight_head, angle_row,
                              angle_head, eps, NORM, CAST, ROPE, PER_HEAD, ROWS, HEADS, DIM, DIM_PAD)
        tl.store(out + place.to(tl.int64)[:, None, None] * out_row + head_place + dim, value.to(kind),
                 mask=inside[:, None, None] & (head < heads) & (dim < DIM))
        if MEANS:
            total += value
    if MEANS:
        if (block < mean_blocks) & (first < last):
            mean = (tl.sum(total, 0, keep_dims=True) / (last - first)).to(kind).to(tl.float32)
            tl.store(means + ((batch * heads + head) * mean_blocks + block) * DIM + dim, mean, mask=(head < heads) & (dim < DIM))


@triton.jit
def _rstd_kernel(x, rstd, x_batch, x_head, x_row, heads, tokens, eps, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    batch = tl.program_id(1).to(tl.int64)
    mask = (token < tokens)[:, None] & (dim < DIM)[None, :]
    rows = x + batch * x_batch + token[:, None] * x_row + dim[None, :]
    total = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for _ in range(heads):
        value = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        total += value * value
        rows += x_head
    tl.store(rstd + batch * tokens + token, tl.rsqrt(tl.sum(total, 1) / (heads * DIM) + eps), mask=token < tokens)


def materialize(x: Tensor, out: Tensor, weight: Tensor | None, rstd: Tensor | None, eps: float, casts: bool,
                angles: tuple[Tensor, Tensor] | None, order: tuple[Tensor, Tensor, Tensor, int] | None = None) -> None:
    """Writes x with norm and RoPE, as ``Projection`` has them, to ``out``.

    Args:
        out: ``[B, H, S, D]``, or ``[B, G, H / G, S, D]``, the heads in groups; its last stride is 1.
        weight, rstd, eps, casts: of the ``RMSNorm``; without a weight there is no norm.
        order: source, offsets and means of ``Deferred.gather_blocks``, and the number of x's first token. ``out`` is then all of the new
            order, of which only the blocks with x's tokens are written, and so are the means.
    """
    if not x.numel():
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight, rstd = (None if given is None else given.contiguous() for given in (weight, rstd))
    cos, sin = angles or (None, None)
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    source, offsets, means, begin = order or (None, None, None, 0)
    batch, heads, tokens, dim = x.shape
    dim_pad = power_of_2(dim)
    rope = 0
    strides: tuple[int, ...] = (0, 0, 0)
    if cos is not None:
        rope, strides = cos.shape[-1] // (dim // 2), cos.expand(batch, heads, tokens, -1).stride()[:3]
    together = min(HEADS, power_of_2(heads))
    rows = max(1, NUMBERS // (together * dim_pad))
    grouped = out.dim() == 5
    into = (out.stride(0), *out.stride()[2:4], out.stride(1), out.shape[2]) if grouped else (*out.stride()[:3], 0, heads)
    blocks, mean_blocks = (-(-tokens // rows), 0) if offsets is None or means is None else (len(offsets) - 1, means.shape[2])
    # Where nothing is there, nothing is read, and any pointer stands for it.
    tensors = [x if given is None else given for given in (x, out, weight, rstd, cos, sin, source, offsets, means)]
    launch(_rotary_kernel, (blocks * -(-heads // together), batch, 1), tensors,
           (*x.stride()[:3], *into, dim if weight is not None and weight.dim() == 2 else 0, *strides, heads, tokens, begin, mean_blocks,
            eps),
           dict(ORDERED=source is not None, GROUPS=grouped, MEANS=mean_blocks > 0,
                NORM="none" if weight is None else "head" if rstd is None else "token", CAST=casts, ROPE=rope,
                PER_HEAD=strides[1] != 0, ROWS=rows, HEADS=together, DIM=dim, DIM_PAD=dim_pad), OPTIONS)


def token_rstd(x: Tensor, eps: float) -> Tensor:
    """float32 ``[B, S]``: 1 / sqrt(mean(x ** 2) + eps) over the heads of each token of x ``[B, H, S, D]``."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    rstd = torch.empty(batch, tokens, dtype=torch.float32, device=x.device)
    dim_pad = power_of_2(dim)
    rows = max(1, NUMBERS // dim_pad)
    if rstd.numel():
        launch(_rstd_kernel, (-(-tokens // rows), batch, 1), (x, rstd), (*x.stride()[:3], heads, tokens, float(eps)),
               dict(ROWS=rows, DIM=dim, DIM_PAD=dim_pad), OPTIONS)
    return rstd
