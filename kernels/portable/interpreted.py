"""What Triton's interpreter computes otherwise than a GPU."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..launch import launch


@triton.jit
def _product_kernel(out, N: tl.constexpr):
    """N x N ones times themselves, in bfloat16."""
    ones = tl.full([N, N], 1.0, tl.float32).to(tl.bfloat16)
    tl.store(out + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(ones, ones))


@lru_cache
def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 are those of numbers: Triton 3.6's interpreter keeps these as their bits, and multiplies the bits."""
    out = torch.empty(16, 16, dtype=torch.float32, device="cpu")
    launch(_product_kernel, (1, 1, 1), (out,), (), dict(N=16))
    return bool((out == 16).all())
