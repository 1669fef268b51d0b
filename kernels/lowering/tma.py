"""Tensors as Hopper's copy engine walks them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .inputs import strided, tma_ok


def tma_ready(x: Tensor) -> Tensor:
    """x, or a copy where the kernels or the copy engine cannot walk it."""
    # A copy even where x is contiguous, and just begins at an odd place.
    return x if tma_ok(x) and strided(x) is x else x.clone(memory_format=torch.contiguous_format)


def tma_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D] in tiles of ``rows`` tokens of one head; x must be ``tma_ready``."""
    # As copy.copy would, of a descriptor that has been checked; checking takes longer than the launch of a kernel.
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_checked(x.shape, x.stride(), x.dtype, rows))
    made.base = x
    return made


@lru_cache(maxsize=256)
def _checked(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict:
    """The fields of a descriptor of such a tensor, without the tensor."""
    block = [1, 1, rows, shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    # Nothing is read or written: it stands for a tensor of this shape somewhere in memory.
    example = torch.empty(0, dtype=dtype)
    fields = dict(TensorDescriptor(example, shape, strides, block, layout).__dict__)
    del fields["base"]
    return fields
