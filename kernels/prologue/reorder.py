"""Tokens in another order: gather_blocks brings q, k and v into the order of blocks and takes their means, take_tokens moves one tensor."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..operators import kernels_run, operator, refuse_forward_mode


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """``x[:, :, index]``, zeros where the index is -1.

    By Triton's kernel where it runs and no gradient is asked for, else differentiable and in plain torch.

    Args:
        x: ``[B, H, S, D]``, any strides.
        index: int64 ``[P]``, -1 or a token below S, which is not checked.

    Raises:
        ValueError: x has a forward-mode tangent, which the kernel would lose.

    Returns:
        ``[B, H, P, D]`` in x's memory order: where x's heads lie closer together than its tokens, as projections leave them, so do those
        of the result.
    """
    if not kernels_run(x) or torch.is_grad_enabled() and x.requires_grad:
        return _take_in_torch(x, index)
    refuse_forward_mode(x=x)
    return _take(x, index)


def gather_blocks(q: Tensor, k: Tensor, v: Tensor, source: Tensor, offsets: Tensor, mean_blocks: int) -> tuple[Tensor, ...]:
    """q, k and v in the order of blocks, with the means of the first ``mean_blocks`` blocks of q and k, in one pass by Triton's kernel.

    Args:
        q: ``[B, Hq, S, D]``, any strides; ``kernels_run(q)`` must be true.
        k, v: ``[B, Hkv, S, D]``, q's dtype and device.
        source: int64 ``[P]``, the token that each place of the new order takes; -1 = zeros.
        offsets: int32 ``[N + 1]``: block i owns the places from ``offsets[i]`` up to ``offsets[i + 1]``; together they own all P.

    Returns:
        q ``[B, Hq, P, D]``, k and v ``[B, Hkv, P, D]``, each in its memory order as ``take_tokens`` says; and float32 means
        ``[B, Hq, mean_blocks, D]`` and ``[B, Hkv, mean_blocks, D]``, summed in float32 and rounded to q's dtype, over all places of a
        block, zeros among them. Not differentiable by itself.
    """
    refuse_forward_mode(q=q, k=k, v=v)
    return _gather(q, k, v, source, offsets, mean_blocks)


@lru_cache
def _kernels() -> ModuleType:
    """Loaded when first asked for, because triton is; an import in place of it would take half a microsecond of every call."""
    return import_module(".reorder_kernel", __package__)


def new_tokens(x: Tensor, tokens: int) -> Tensor:
    """Uninitialised ``[B, H, tokens, D]`` in x's memory order."""
    batch, heads, _, dim = x.shape
    if x.stride(1) < x.stride(2):
        row = heads * dim
        return x.new_empty_strided((batch, heads, tokens, dim), (tokens * row, dim, row, 1))
    return x.new_empty(batch, heads, tokens, dim)


def _take_in_torch(x: Tensor, index: Tensor) -> Tensor:
    if x.stride(1) < x.stride(2):
        taken = x.transpose(1, 2).index_select(1, index.clamp(min=0))
        return taken.masked_fill((index < 0)[:, None, None], 0).transpose(1, 2)
    return x.index_select(2, index.clamp(min=0)).masked_fill((index < 0)[:, None], 0)


@operator("take_tokens", lambda x, index: new_tokens(x, len(index)))
def _take(x: Tensor, index: Tensor) -> Tensor:
    out = new_tokens(x, len(index))
    _kernels().take(x, index, out)
    return out


def _new_outputs(
    q: Tensor, k: Tensor, v: Tensor, source: Tensor, offsets: Tensor, mean_blocks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q_means, k_means = (x.new_empty(*x.shape[:2], mean_blocks, x.shape[3], dtype=torch.float32) for x in (q, k))
    places = len(source)
    return new_tokens(q, places), new_tokens(k, places), new_tokens(v, places), q_means, k_means


@operator("gather_blocks", _new_outputs)
def _gather(
    q: Tensor, k: Tensor, v: Tensor, source: Tensor, offsets: Tensor, mean_blocks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _new_outputs(q, k, v, source, offsets, mean_blocks)
    _kernels().gather_blocks(q, k, v, source, offsets, *outputs)
    return outputs
