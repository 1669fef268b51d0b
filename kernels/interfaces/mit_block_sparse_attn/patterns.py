"""Which blocks the heads of Block-Sparse-Attention keep: all, those of a mask, or sinks and what is near."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...blocks import BlockLists
from ...token_lists import Packed

# Tokens of a block, of queries and of keys.
BLOCK = 128


class Sequences(NamedTuple):
    """Packed sequences as rows of queries and keys. Under a causal mask a query's row is that of its key, which the last query has last."""

    first: Tensor    # int32 [B], the row of each sequence's first query
    bounds: Tensor   # int32 [B + 1], the rows of each sequence
    keys: Tensor     # int32 [B + 1], its keys
    rows: int        # query blocks of the longest sequence
    columns: int     # key blocks of the longest sequence

    @classmethod
    def of(cls, packed: Packed, rows: int, columns: int, causal: bool) -> Sequences:
        if causal:
            return cls(packed.cu_k[1:] - packed.cu_q.diff(), packed.cu_k, packed.cu_k, rows, columns)
        return cls(packed.cu_q[:-1], packed.cu_q, packed.cu_k, rows, columns)

    def queries(self, packed: Packed) -> Tensor:
        """int64 ``[Tk]``: the query in the row of each key, under a causal mask; any one where there is none."""
        sequence, position, _ = Packed(packed.cu_k, packed.cu_q, packed.k_tokens, packed.q_tokens).places()
        query = packed.cu_q[sequence] + (packed.cu_k[sequence] + position - self.first[sequence])
        return query.clamp(0, packed.q_tokens - 1)

    def rows_of_queries(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """int64 and bool ``[Tq]``: the row of each query, under a causal mask, and whether it has one: not before its first key."""
        sequence, position, inside = packed.places()
        row = self.first[sequence] + position
        return row.clamp(0, packed.k_tokens - 1), inside & (row >= packed.cu_k[sequence])

    def lists(self, kept: Tensor) -> BlockLists:
        """The blocks that a bool mask ``[B, H, rows, columns]`` keeps of each sequence, sequence after sequence: ``[1, H, B * rows]``."""
        lists = BlockLists.from_mask(kept, BLOCK, BLOCK)
        before = self._numbers(len(kept))[:, None, None, None] * self.columns
        counts, indices = (x.transpose(0, 1).flatten(1, 2)[None] for x in (lists.counts, lists.indices + before))
        (q_offsets, q_lengths), (kv_offsets, kv_lengths) = (
            self._blocks(*axis) for axis in ((self.first, self.bounds, self.rows), (self.keys[:-1], self.keys, self.columns)))
        return BlockLists(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, max_q_length=BLOCK, max_kv_length=BLOCK)

    def near(self, streaming_info: Tensor, causal: bool) -> Tensor:
        """bool ``[B, H, rows, columns]``: the first and the last blocks that a query block sees, as many of both as ``streaming_info``
        ``[H, 2]`` says. Without a causal mask it sees the whole sequence."""
        sink, local = streaming_info.T[:, None, :, None, None]
        column, last = self._numbers(self.columns), self.keys.diff()[:, None, None, None]
        if causal:
            # One more than the key beside the last query of each block.
            last = ((self.first - self.keys[:-1])[:, None] + (self._numbers(self.rows) + 1) * BLOCK)[:, None, :, None]
        seen = -(-last // BLOCK)
        return (column < sink) | (column < seen) & (column >= seen - local)

    def _blocks(self, first: Tensor, bounds: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """(offsets int32 ``[B * number + 1]``, lengths int32 ``[B * number]``) of so many blocks of each sequence, from ``first [B]`` on;
        what lies outside of its ``bounds [B + 1]`` is cut."""
        begins = first[:, None] + self._numbers(number) * BLOCK
        starts, ends = (x.clamp(bounds[:-1, None], bounds[1:, None]) for x in (begins, begins + BLOCK))
        return torch.cat([starts.flatten(), ends[-1:, -1]]), (ends - starts).flatten()

    def _numbers(self, number: int) -> Tensor:
        return torch.arange(number, dtype=torch.int32, device=self.keys.device)


def masked(head_mask_type: Tensor, base_blockmask: Tensor | None) -> Tensor:
    """bool ``[B or 1, H or 1, rows or 1, columns or 1]``: what heads of a positive number keep, the n-th 1 the mask n - 1, another number n
    too. A mask that is not there keeps nothing."""
    if base_blockmask is None or not base_blockmask.shape[1]:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=head_mask_type.device)
    ones = head_mask_type == 1
    number = torch.where(ones, ones.cumsum(0), head_mask_type) - 1
    there = (number >= 0) & (number < base_blockmask.shape[1])
    return base_blockmask.index_select(1, number.where(there, 0)).bool() & there[:, None, None]
