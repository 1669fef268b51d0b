"""Move: the order of blocks that tokens are brought into, and what the tensors of a new order look like in memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Move(NamedTuple):
    """An order of blocks.

    Attributes:
        source: int64 ``[P]``, the token that each place of the order takes; -1 = zeros.
        offsets: int32 ``[T + 1]``: block i owns the places from ``offsets[i]`` up to ``offsets[i + 1]``; together they own all P.
        mean_blocks: of the first so many blocks means are wanted.
    """

    source: Tensor
    offsets: Tensor
    mean_blocks: int


def new_tokens(x: Tensor, tokens: int) -> Tensor:
    """Uninitialised ``[B, H, tokens, D]`` in x's memory order: where x's heads lie closer together than its tokens, as projections leave
    them, so do those of the result."""
    batch, heads, _, dim = x.shape
    if x.stride(1) < x.stride(2):
        row = heads * dim
        return x.new_empty_strided((batch, heads, tokens, dim), (tokens * row, dim, row, 1))
    return x.new_empty(batch, heads, tokens, dim)
