"""Tensors as Hopper's TMA takes them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .inputs import strided, tma_ok
from .quick_launch import Tiles

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def tma_ready(x: Tensor) -> Tensor:
    """x, or a copy where the kernels or TMA cannot take it."""
    # A copy even where x is contiguous, and just begins at an odd place.
    return x if tma_ok(x) and strided(x) is x else x.clone(memory_format=torch.contiguous_format)


def tma_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D], float16 or bfloat16, in tiles of ``rows`` tokens of one head; x must be ``tma_ready``.

    Raises:
        TypeError: another dtype.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"a TMA descriptor is of a float16 or bfloat16 tensor here, got {x.dtype}")
    block = [1, 1, rows, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype]))


def tma_tiles(x: Tensor, rows: int) -> Tiles:
    """``tma_descriptor`` for a QuickLaunch, which makes it where it knows none."""
    return Tiles(x, (rows, x.dtype, x.shape, x.stride()), descriptor_of(rows))


@lru_cache
def descriptor_of(rows: int) -> Callable[[Tensor], TensorDescriptor]:
    """``tma_descriptor`` with so many rows."""
    return partial(tma_descriptor, rows=rows)
