"""Which blocks the heads of Block-Sparse-Attention keep: all, those of a mask, or sinks and what is near."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...token_lists import Packed
from ..packed import BlockSpans

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

    def q_cut(self) -> BlockSpans:
        """The query blocks, which begin anew in each sequence."""
        return BlockSpans.of(self.first, self.bounds, BLOCK, self.rows)

    def kv_cut(self) -> BlockSpans:
        """The key blocks."""
        return BlockSpans.of(self.keys[:-1], self.keys, BLOCK, self.columns)

    def near(self, streaming_info: Tensor, causal: bool) -> Tensor:
        """bool ``[B, H, rows, columns]``: the first and the last blocks that a query block sees, as many of both as ``streaming_info``
        ``[H, 2]`` says. Without a causal mask it sees the whole sequence."""
        sink, local = streaming_info.T[:, None, :, None, None]
        column, last = self._blocks(self.columns), self.keys.diff()[:, None, None, None]
        if causal:
            last = self._queries() + BLOCK
        seen = -(-last // BLOCK)
        return (column < sink) | (column < seen) & (column >= seen - local)

    def near_tokens(self, streaming_info: Tensor) -> tuple[Tensor, Tensor]:
        """bool ``[B, H, rows, columns]`` each: the blocks that hold the first tokens or the last ones that a causal query sees, as many of
        both as ``streaming_info`` ``[H, 2]`` says, first those of which it sees all but the future, then those of which it sees a part."""
        sink, local = streaming_info.T[:, None, :, None, None]
        key, query = self._blocks(self.columns) * BLOCK, self._queries()
        key_end, query_end = key + (BLOCK - 1), query + (BLOCK - 1)
        seen = (key <= query_end) & ((key < sink) | (key_end > query - local))
        whole = (key_end < sink) | (key > query_end - local)
        return seen & whole, seen & ~whole

    def _blocks(self, number: int) -> Tensor:
        return torch.arange(number, dtype=torch.int32, device=self.keys.device)

    def _queries(self) -> Tensor:
        """int32 ``[B, 1, rows, 1]``: which of its sequence's keys stands beside the first query of each block, under a causal mask."""
        return ((self.first - self.keys[:-1])[:, None] + self._blocks(self.rows) * BLOCK)[:, None, :, None]


def masked(head_mask_type: Tensor, base_blockmask: Tensor | None) -> Tensor:
    """bool ``[B or 1, H or 1, rows or 1, columns or 1]``: what heads of a positive number keep, the n-th 1 the mask n - 1, another number n
    too. A mask that is not there keeps nothing."""
    if base_blockmask is None or not base_blockmask.shape[1]:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=head_mask_type.device)
    ones = head_mask_type == 1
    number = torch.where(ones, ones.cumsum(0), head_mask_type) - 1
    there = (number >= 0) & (number < base_blockmask.shape[1])
    return base_blockmask.index_select(1, number.where(there, 0)).bool() & there[:, None, None]
