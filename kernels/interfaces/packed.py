"""Query heads packed into rows of blocks."""

from __future__ import annotations

from torch import Tensor

# From this many rows on a block fills a program by itself, without the other heads of its group.
ENOUGH_ROWS = 128


def heads_packed(q_block_size: int, heads: int, kv_heads: int) -> int:
    """How many query heads of a token become rows of a block: where blocks are short, all that share a key/value head."""
    if heads < 1:
        raise ValueError(f"query heads must be at least 1, got {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of the {kv_heads} key/value heads, got {heads}")
    return heads // kv_heads if q_block_size < ENOUGH_ROWS else 1


def pack_heads(q: Tensor, kv_heads: int) -> Tensor:
    """``[B, S, Hq, D]`` -> ``[B, Hkv, S * g, D]``: the g query heads that share a key/value head become g neighbouring rows of a token.

    A block of n tokens is then a block of n * g rows with the key/value head's list. Differentiable; a copy where Hkv > 1.
    """
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def unpack_heads(x: Tensor, group: int) -> Tensor:
    """``[B, Hkv, S * g, ...]`` -> ``[B, S, Hq, ...]``, what ``pack_heads`` did taken back."""
    return x.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
