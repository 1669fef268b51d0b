"""Portable kernel between projection and attention: RMS norm and rotary embedding of q or k in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rotary import RMSNorm

# Numbers that a program takes at once, over tokens, heads and channels, and of them heads: those of a token often share their angles.
NUMBERS = 4096
HEADS = 4
OPTIONS = dict(num_warps=4)


@triton.jit
def _rotary_kernel(x, out, weight, scales, cos, sin, x_batch, x_head, x_row, out_batch, out_head, out_row, weight_head,
                   angle_batch, angle_head, angle_row, heads, tokens, eps, NORM: tl.constexpr, TWICE: tl.constexpr, TURN: tl.constexpr,
                   ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """NORM: over each "head", over all heads of a "token" by the given scales, or "none". TURN: how often an angle stands in memory."""
    groups = tl.cdiv(heads, HEADS)
    rows = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = rows[:, None, None]
    head = (tl.program_id(0) % groups).to(tl.int64) * HEADS + tl.arange(0, HEADS)[None, :, None]
    dim = tl.arange(0, DIM_PAD)[None, None, :]
    batch = tl.program_id(1).to(tl.int64)
    there = (token < tokens) & (head < heads)
    mask = there & (dim < DIM)
    kind: tl.constexpr = out.dtype.element_ty
    value = tl.load(x + batch * x_batch + token * x_row + head * x_head + dim, mask=mask, other=0.0).to(tl.float32)
    if NORM != "none":
        if NORM == "head":
            value *= tl.rsqrt(tl.sum(value * value, 2, keep_dims=True) / DIM + eps)
        else:
            value *= tl.load(scales + batch * tokens + rows, mask=rows < tokens, other=0.0)[:, None, None]
        if TWICE:
            value = value.to(kind).to(tl.float32)
        value *= tl.load(weight + head * weight_head + dim, mask=(head < heads) & (dim < DIM), other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    if TURN:
        # An angle that stands there twice is loaded twice: wide loads of everything are faster than loads of every other number.
        number = tl.arange(0, DIM_PAD // 2 * TURN)[None, None, :]
        angle = batch * angle_batch + token * angle_row + head * angle_head + number
        c = tl.load(cos + angle, mask=there & (number < DIM // 2 * TURN), other=0.0)
        s = tl.load(sin + angle, mask=there & (number < DIM // 2 * TURN), other=0.0)
        if TURN == 2:
            c, _ = tl.split(tl.reshape(c, [ROWS, HEADS, DIM_PAD // 2, 2]))
            s, _ = tl.split(tl.reshape(s, [ROWS, HEADS, DIM_PAD // 2, 2]))
        even, odd = tl.split(tl.reshape(value, [ROWS, HEADS, DIM_PAD // 2, 2]))
        value = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, HEADS, DIM_PAD])
    tl.store(out + batch * out_batch + token * out_row + head * out_head + dim, value.to(kind), mask=mask)


@triton.jit
def _scale_kernel(x, scales, x_batch, x_head, x_row, heads, tokens, eps, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """1 / sqrt(mean + eps) of the squares of all heads of a token."""
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
    tl.store(scales + batch * tokens + token, tl.rsqrt(tl.sum(total, 1) / (heads * DIM) + eps), mask=token < tokens)


def norm_and_turn(x: Tensor, out: Tensor, norm: RMSNorm | None, angles: tuple[Tensor, Tensor] | None) -> None:
    """``kernels.rotary.norm_and_turn``."""
    if not x.numel():
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    sizes = dict(DIM=dim, DIM_PAD=triton.next_power_of_2(dim))
    # A pointer that is not used is x.
    kind, weight, weight_head, eps, scales = "none", x, 0, 0.0, x
    if norm is not None:
        kind, weight, eps = "head", norm.weight.contiguous(), norm.eps
        if len(weight) != dim:
            kind, weight_head, scales = "token", dim, torch.empty(batch, tokens, device=x.device, dtype=torch.float32)
            rows = max(1, NUMBERS // sizes["DIM_PAD"])
            _scale_kernel[(triton.cdiv(tokens, rows), batch)](x, scales, *x.stride()[:3], heads, tokens, eps, ROWS=rows, **sizes, **OPTIONS)
    turn, cos, sin, strides = 0, x, x, (0, 0, 0)
    if angles is not None:
        cos, sin = angles
        if cos.stride() != sin.stride() or cos.stride(-1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        turn, strides = cos.shape[-1] // (dim // 2), cos.expand(batch, heads, tokens, -1).stride()[:3]
    together = min(HEADS, triton.next_power_of_2(heads))
    rows = max(1, NUMBERS // (together * sizes["DIM_PAD"]))
    _rotary_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(heads, together), batch)](
        x, out, weight, scales, cos, sin, *x.stride()[:3], *out.stride()[:3], weight_head, *strides, heads, tokens, eps,
        NORM=kind, TWICE=norm is not None and norm.rounds_twice, TURN=turn, ROWS=rows, HEADS=together, **sizes, **OPTIONS)
