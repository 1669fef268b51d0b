"""Tensors as Hopper's copy engine walks them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .triton_chunks import aligned, readable


def reachable(x: Tensor) -> Tensor:
    """x, or a copy where the kernels or the copy engine cannot walk it."""
    x = readable(x)
    return x if aligned(x) else x.contiguous()


def tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D] in tiles of ``rows`` tokens of one head; x must be ``reachable``."""
    shape = x.shape
    return TensorDescriptor(x, shape, x.stride(), *_tile(rows, shape[3], x.dtype))


# Made once: a layout takes longer to compute than the launch of a kernel.
@lru_cache
def _tile(rows: int, dim: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    shape = [1, 1, rows, dim]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
