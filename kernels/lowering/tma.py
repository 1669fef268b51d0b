"""Tensors as Hopper's TMA takes them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .inputs import strided, tma_ok
from .quick_launch import launcher_known

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# What a descriptor keeps is private to Triton: under versions that are not checked each one is made the public way, in more time than it
# takes to launch a kernel.
FIELDS_KNOWN = launcher_known(triton.__version__)


def tma_ready(x: Tensor) -> Tensor:
    """x, or a copy where the kernels or TMA cannot take it."""
    # A copy even where x is contiguous, and just begins at an odd place.
    return x if tma_ok(x) and strided(x) is x else x.clone(memory_format=torch.contiguous_format)


def tma_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D], float16 or bfloat16, in tiles of ``rows`` tokens of one head; x must be ``tma_ready``.

    Raises:
        TypeError: another dtype.
    """
    if not FIELDS_KNOWN:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), *_tile(x.dtype, rows, x.shape[3]))
    # As copy.copy would, of a descriptor that has been checked; checking takes longer than the launch of a kernel.
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_checked(x.shape, x.stride(), x.dtype, rows))
    made.base = x
    return made


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
    shape, strides = (*x.shape[:2], x.shape[2] + 1, rows, x.shape[3]), (*x.stride()[:3], *x.stride()[2:])
    before = _Before(x, rows * x.stride(2) * x.element_size())
    if not FIELDS_KNOWN:
        return TensorDescriptor(before, list(shape), list(strides), *_tile(x.dtype, rows, x.shape[3], 5))
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_checked(shape, strides, x.dtype, rows))
    made.base = before
    return made


@lru_cache(maxsize=256)
def _checked(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict:
    """The fields of a descriptor of such a tensor, without the tensor."""
    # Nothing is read or written: it stands for a tensor of this shape somewhere in memory.
    example = torch.empty(0, dtype=dtype)
    fields = dict(TensorDescriptor(example, shape, strides, *_tile(dtype, rows, shape[-1], len(shape))).__dict__)
    del fields["base"]
    return fields
