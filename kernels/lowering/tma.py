"""Tensors as Hopper's TMA takes them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

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
    return TensorDescriptor(x, list(x.shape), list(x.stride()), *_tile(x.dtype, rows, x.shape[3]))


def tma_tiles(x: Tensor, rows: int) -> Tiles:
    """``tma_descriptor`` for a QuickLaunch, which makes it where it knows none."""
    return Tiles(x, (rows, x.dtype, x.shape, x.stride()), _descriptor_of(rows))


@lru_cache
def _descriptor_of(rows: int) -> Callable[[Tensor], TensorDescriptor]:
    return partial(tma_descriptor, rows=rows)


def _tile(dtype: torch.dtype, rows: int, dim: int, axes: int = 4) -> tuple[list[int], gl.NVMMASharedLayout]:
    """(shape of a tile, its layout in shared memory)"""
    if dtype not in DTYPES:
        raise TypeError(f"a TMA descriptor is of a float16 or bfloat16 tensor here, got {dtype}")
    block = [*[1] * (axes - 2), rows, dim]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


class _Before(NamedTuple):
    """Stands in a descriptor for the memory ``rows`` tokens before a tensor, of which nothing is read."""

    tensor: Tensor
    bytes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.bytes


def tma_chunks(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D] as ``tma_descriptor`` takes it, in chunks of up to ``rows`` tokens, each a [1, 1, 1, rows, D] tile.

    Coordinates of ``size`` tokens from ``start`` on are (batch, head, start + size, rows - size, 0); the tile's further rows are zeros,
    whatever follows in x. For that tokens are counted along two axes of the same stride, of which the second ends after ``rows``.
    """
    shape, strides = [*x.shape[:2], x.shape[2] + 1, rows, x.shape[3]], [*x.stride()[:3], *x.stride()[2:]]
    before = _Before(x, rows * x.stride(2) * x.element_size())
    return TensorDescriptor(before, shape, strides, *_tile(x.dtype, rows, x.shape[3], 5))
