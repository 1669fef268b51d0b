"""How it is computed: block-sparse attention over any pattern of blocks; knows blocks, never videos."""

from .attention import block_sparse_attention, resolve_impl
from .blocks import BlockLists

__all__ = ["BlockLists", "block_sparse_attention", "resolve_impl"]
