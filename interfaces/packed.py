"""Query heads packed into rows, and packed sequences whose blocks begin anew in each of them as one sequence of ragged blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import BlockLists

# From this many rows on a block fills a program by itself, without the other heads of its group.
ENOUGH_ROWS = 128


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


class BlockSpans(NamedTuple):
    """Where the blocks of every sequence lie in the whole, int32 ``[B, number]`` each."""

    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, first: Tensor, bounds: Tensor, size: int, number: int) -> BlockSpans:
        """``number`` blocks of ``size`` tokens for each of B sequences, the first block beginning at ``first [B]``; what lies outside of
        the sequence's tokens, ``bounds [B + 1]``, is cut. int32 both. Does not synchronise."""
        begins = first[:, None] + torch.arange(number, dtype=torch.int32, device=first.device) * size
        low, high = bounds[:-1, None], bounds[1:, None]
        starts = begins.clamp(low, high)
        return cls(starts, (begins + size).clamp(low, high) - starts)

    def offsets(self) -> Tensor:
        """int32 ``[B * number + 1]``, as BlockLists takes them."""
        return torch.cat([self.starts.flatten(), (self.starts + self.lengths)[-1:, -1]])


def packed_blocks(mask: Tensor, q_cut: BlockSpans, kv_cut: BlockSpans, size: int, capacity: int | None = None) -> BlockLists:
    """The blocks of up to ``size`` tokens that a bool mask ``[B, H, Nq, Nk]`` keeps of each sequence: lists of ``[1, H, B * Nq]``.
    The ids of the n-th sequence's blocks begin at n * Nk. ``capacity`` as in ``BlockLists.from_mask``."""
    lists = BlockLists.from_mask(mask, size, size, capacity=capacity)
    before = torch.arange(len(mask), dtype=torch.int32, device=mask.device)[:, None, None, None] * mask.shape[-1]
    counts, indices = (x.transpose(0, 1).flatten(1, 2)[None] for x in (lists.counts, lists.indices + before))
    return BlockLists(counts, indices, q_cut.offsets(), kv_cut.offsets(), q_cut.lengths.flatten(), kv_cut.lengths.flatten(),
                      max_q_length=size, max_kv_length=size)
