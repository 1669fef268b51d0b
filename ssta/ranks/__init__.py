"""Ranks that share a sequence out: how heads are exchanged for tokens around a layer, and that all ranks were given the same.

``Shards`` and ``check_ranks`` are for code of one's own around ``ssta_attention(group=...)``.
"""

from .agreement import check_ranks
from .runs import SPLITS, Run, deal
from .shards import Sent, Shards

__all__ = ["SPLITS", "Run", "Sent", "Shards", "check_ranks", "deal"]
