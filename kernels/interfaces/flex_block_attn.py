"""flex-block-attn: its attention over a boolean block mask. Its STA, MoBA and SSTA masks are in ssta/masks.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import BlockLists, block_sparse_attention
from ..checks import INTEGERS, require_int, require_mask, require_values


def flex_block_attn_func(q: Tensor, k: Tensor, v: Tensor, q_block_size: int, kv_block_size: int, block_mask: Tensor) -> Tensor:
    """Attention within the blocks that a mask keeps; ``flex_block_attn.flex_block_attn_func``.

    Args:
        q: ``[B, Hq, Sq, D]``, any strides whose last is 1; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[B, Hkv, Skv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[B, Hkv, Skv, D]``.
        q_block_size, kv_block_size: tokens of a block, in any ratio.
        block_mask: bool on q's device, ``[Nq, Nk]`` for all batch elements and heads, or ``[B or 1, H or 1, Nq, Nk]`` with H the query or
            the key/value heads, or ``[H or 1, Nq, Nk]`` as the mask builders return it. Nq = ceil(Sq / q_block_size), Nk likewise. True
            attends to the whole block. ``[B, 1, 1, Nq, Nk]`` counts as ``[B, 1, Nq, Nk]``: so HunyuanVideo 1.5 and xDiT hand over a mask
            that heads share, which upstream refuses.

    Returns:
        ``[B, Hq, Sq, D]`` in q's dtype, scaled by 1 / sqrt(D). Differentiable in q, k and v, bitwise deterministic. Never waits
        for the device (synchronises), and fits into CUDA graphs and compiled graphs.

    What differs from upstream: any head dimension, dtype and GPU; block sizes need not be multiples of 16 and 64 nor divide one another or
    the sequence; query blocks longer than key blocks mean what they say, as does Sq != Skv in the backward; rows without any block give
    zeros and zero gradients, whatever the block sizes.
    """
    sizes = require_int("q_block_size", q_block_size, 1), require_int("kv_block_size", kv_block_size, 1)
    blocks = BlockLists.from_mask(_mask(block_mask), *sizes)
    return block_sparse_attention(q, k, v, blocks)


def create_sparse_mask(Q: Tensor, block_size: int, selected_blocks: Iterable[tuple[int, int]]) -> Tensor:
    """The mask that keeps the given blocks; ``create_sparse_mask`` of flex-block-attn's benchmarks.

    Args:
        Q: ``[B, H, S, D]``; its length and device count.
        block_size: tokens of a block.
        selected_blocks: pairs (query block, key block), in an iterable or as an integer tensor ``[n, 2]``, which is read.

    Returns:
        bool ``[N, N]`` on Q's device, N = S // block_size.

    Raises:
        ValueError: also a pair outside the N x N blocks.
    """
    if not isinstance(Q, Tensor) or Q.dim() != 4:
        raise ValueError(f"Q must be a tensor [batch, heads, tokens, head_dim], got {getattr(Q, 'shape', type(Q).__name__)}")
    number = Q.shape[2] // require_int("block_size", block_size, 1)
    mask = torch.zeros(number, number, dtype=torch.bool, device="cpu")
    pairs = _pairs(selected_blocks)
    outside = (pairs < 0) | (pairs >= number)
    if outside.any():
        raise ValueError(f"selected_blocks must lie in {number} x {number} blocks, got {tuple(pairs[outside.any(1)][0].tolist())}")
    mask[pairs[:, 0], pairs[:, 1]] = True
    return mask.to(Q.device)


def _pairs(selected: Iterable[tuple[int, int]] | Tensor) -> Tensor:
    """int64 [n, 2] on the CPU."""
    if isinstance(selected, Tensor):
        if selected.is_floating_point() or selected.is_complex() or selected.dtype == torch.bool:
            raise TypeError(f"selected_blocks must be pairs of ints, got a tensor of {selected.dtype}")
        if selected.dim() != 2 or selected.shape[1] != 2:
            raise ValueError(f"selected_blocks must be [n, 2] as a tensor, got shape {tuple(selected.shape)}")
        return require_values("selected_blocks", selected).long().cpu()
    if isinstance(selected, (str, bytes)) or not isinstance(selected, Iterable):
        raise TypeError(f"selected_blocks must be pairs (query block, key block), got {type(selected).__name__}")
    pairs = []
    for number, pair in enumerate(selected):
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Iterable):
            raise TypeError(f"selected_blocks[{number}] must be a pair (query block, key block), got {pair!r}")
        pair = [int(x) if isinstance(x, Tensor) and x.dim() == 0 and x.dtype in INTEGERS else x for x in pair]
        if len(pair) != 2:
            raise ValueError(f"selected_blocks[{number}] must be a pair (query block, key block), got {len(pair)} entries")
        pairs.append([require_int(f"selected_blocks[{number}][{at}]", x, 0) for at, x in enumerate(pair)])
    return torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _mask(block_mask: Tensor) -> Tensor:
    require_mask("block_mask", block_mask)
    if block_mask.dim() == 5 and block_mask.shape[1] == block_mask.shape[2] == 1:
        return block_mask[:, 0]
    if not 2 <= block_mask.dim() <= 4:
        raise ValueError(f"block_mask must be [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], got shape {tuple(block_mask.shape)}")
    return block_mask
