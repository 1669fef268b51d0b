"""Tensors as Hopper's TMA takes them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from functools import lru_cache

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


def _tile(dtype: torch.dtype, rows: int, dim: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    """(shape of a tile, its layout in shared memory)"""
    if dtype not in DTYPES:
        raise TypeError(f"a TMA descriptor is of a float16 or bfloat16 tensor here, got {dtype}")
    block = [1, 1, rows, dim]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


@lru_cache(maxsize=256)
def _checked(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict:
    """The fields of a descriptor of such a tensor, without the tensor."""
    # Nothing is read or written: it stands for a tensor of this shape somewhere in memory.
    example = torch.empty(0, dtype=dtype)
    fields = dict(TensorDescriptor(example, shape, strides, *_tile(dtype, rows, shape[3])).__dict__)
    del fields["base"]
    return fields
