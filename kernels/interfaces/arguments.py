"""Shared by the interfaces: checks of arguments, and query heads packed into rows."""

from __future__ import annotations

from torch import Tensor

# From this many rows on a block fills a program by itself, without the other heads of its group.
ENOUGH_ROWS = 128


def require_values(name: str, x: Tensor) -> Tensor:
    """``x``, a tensor that holds values."""
    if x.is_meta:
        raise ValueError(f"{name} must hold values, got a meta tensor")
    return x


def require_groups(heads: int, kv_heads: int) -> int:
    """How many query heads share a key/value head."""
    if heads < 1:
        raise ValueError(f"query heads must be at least 1, got {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of the {kv_heads} key/value heads, got {heads}")
    return heads // kv_heads


def pack_heads(q: Tensor, kv_heads: int) -> Tensor:
    """``[B, S, Hq, D]`` -> ``[B, Hkv, S * g, D]``: the g query heads that share a key/value head become g neighbouring rows of a token.

    A block of n tokens is then a block of n * g rows with the key/value head's list. Differentiable; a copy where Hkv > 1.
    """
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def unpack_heads(x: Tensor, group: int) -> Tensor:
    """``[B, Hkv, S * g, ...]`` -> ``[B, S, Hq, ...]``, what ``pack_heads`` did taken back."""
    return x.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
