"""Tensors as Hopper's TMA takes them: [1, 1, rows, D] tiles of [B, H, tokens, D], swizzled in shared memory."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .inputs import loaded

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def tma_descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """x [B, H, tokens, D], float16 or bfloat16, in tiles of ``rows`` tokens of one head, or of ``columns`` of their D; x must be
    ``loadable``.

    Raises:
        TypeError: another dtype.
    """
    return TensorDescriptor(x, list(x.shape), list(x.stride()), *_tile(x.dtype, rows, columns or x.shape[3]))


def _tile(dtype: torch.dtype, rows: int, dim: int, axes: int = 4) -> tuple[list[int], gl.NVMMASharedLayout]:
    """(shape of a tile, its layout in shared memory)"""
    if dtype not in DTYPES:
        raise TypeError(f"a TMA descriptor is of a float16 or bfloat16 tensor here, got {dtype}")
    block = [*[1] * (axes - 2), rows, dim]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])


# A coordinate that no tensor reaches, by which chunks end: see tma_chunks.
FAR = gl.constexpr(2**30)


def batch_tokens(x: Tensor) -> int | None:
    """How many tokens lie from one batch element of x [B, H, tokens, D] to the next, as tma_chunks counts them; None where that is no
    whole number, or fewer than an element has: of such windows into one another no result has the same strides."""
    batch, row = x.stride(0), x.stride(2)
    if x.shape[0] == 1:
        return 0
    return batch // row if batch % row == 0 and batch >= x.shape[2] * row else None


def chunks_ready(x: Tensor) -> Tensor:
    """``loaded(x)``, or a copy where ``tma_chunks`` cannot count its tokens."""
    x = loaded(x)
    return x if batch_tokens(x) is not None else x.clone(memory_format=torch.contiguous_format)


def tma_chunks(x: Tensor, rows: int) -> TensorDescriptor:
    """x [B, H, tokens, D] in chunks of up to ``rows`` tokens, each a [1, 1, 1, rows, D] tile; x must be ``chunks_ready``.

    Coordinates of ``size`` tokens from ``start`` on are (FAR, head, batch * batch_tokens(x) + start + size, FAR - size, 0). The tile's
    further rows are zeros when loaded and are not stored, whatever follows in x: tokens are counted along two axes of the same stride, of
    which the second ends at FAR. The first axis takes FAR tokens away again, as addresses are 64-bit numbers that wrap around: so Triton's
    own ragged descriptors do it (triton/tools/ragged_tma.py).
    """
    token = x.stride(2)
    shape, strides = [2**31 - 2**16, x.shape[1], 2**31 - 2**16, FAR.value, x.shape[3]], [2**34 - token, x.stride(1), token, token, 1]
    return TensorDescriptor(x, shape, strides, *_tile(x.dtype, rows, x.shape[3], 5))
