"""Attention that is decided token by token, and attention to blocks that no tile fits: shorter than one, or seen in part.

``kernels.block_sparse_attention`` attends by lists of query blocks. ``token_attention`` attends by lists of single query tokens,
``block_attention`` to key blocks of any length, and ``attention_within_blocks`` to blocks that a token sees in part.
"""

from .attention import choose_token_impl, importance, pooling, token_attention
from .blocks import attention_within_blocks, block_attention, listed_keys
from .lists import Packed, PaddedCache, TokenLists, lists_from_ids, lists_from_mask, lists_from_rows

__all__ = ["Packed", "PaddedCache", "TokenLists", "attention_within_blocks", "block_attention", "choose_token_impl", "importance",
           "listed_keys", "lists_from_ids", "lists_from_mask", "lists_from_rows", "pooling", "token_attention"]
