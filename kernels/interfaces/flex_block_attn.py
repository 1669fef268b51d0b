"""flex-block-attn: its attention over a boolean block mask."""

from __future__ import annotations

from torch import Tensor

from ..attention import block_sparse_attention
from ..blocks import BlockLists
from ..checks import require_int, require_mask


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

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.

    What differs from upstream: any head dimension, dtype and GPU; block sizes need not be multiples of 16 and 64 nor divide one another or
    the sequence; query blocks longer than key blocks mean what they say, as does Sq != Skv in the backward; rows without any block give
    zeros and zero gradients, whatever the block sizes.
    """
    sizes = require_int("q_block_size", q_block_size, 1), require_int("kv_block_size", kv_block_size, 1)
    blocks = BlockLists.from_mask(_mask(block_mask), *sizes)
    return block_sparse_attention(q, k, v, blocks)


def _mask(block_mask: Tensor) -> Tensor:
    require_mask("block_mask", block_mask)
    if block_mask.dim() == 5 and block_mask.shape[1] == block_mask.shape[2] == 1:
        return block_mask[:, 0]
    if not 2 <= block_mask.dim() <= 4:
        raise ValueError(f"block_mask must be [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], got shape {tuple(block_mask.shape)}")
    return block_mask
