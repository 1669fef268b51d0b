"""Inputs of the kernels: tensors with strides that they can follow, and TMA descriptors of them."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def strided(x: Tensor) -> Tensor:
    """x, or a copy where its strides will not do for the kernels: a last one other than 1, or rows so far apart that 256 of them leave 32
    bits."""
    return x if x.stride(-1) == 1 and x.stride(-2) < 1 << 23 else x.contiguous()


def tma_ok(x: Tensor) -> bool:
    """Whether TMA can load from x [B, H, tokens, dim]: its address and strides are positive multiples of 16 bytes."""
    batch, head, row, _ = x.stride()
    # A multiple of a power of two has no bits below it.
    return (batch | head | row) % (16 // x.element_size()) == 0 and bool(batch and head and row) and x.data_ptr() % 16 == 0


def loadable(x: Tensor) -> bool:
    """Whether TMA can load rows of x [B, H, tokens, dim] one after another as they lie in memory."""
    return tma_ok(x) and strided(x) is x


def loaded(x: Tensor) -> Tensor:
    """x, or a copy where it is not ``loadable``, even if x is contiguous and just begins at an odd place."""
    return x if loadable(x) else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int, dim_pad: int, tma: bool) -> TensorDescriptor | None:
    """For loading [rows, dim_pad] of x [B, H, tokens, dim] through ``tma``; None where the GPU has none or x is not ``tma_ok``."""
    if not (tma and tma_ok(x)):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, dim_pad])
