"""Native sparse attention under the names of fla and tilelang: attention over selected blocks, and the selection of blocks."""

from .compressed import parallel_nsa_compression, parallel_nsa_topk
from .selected import NativeSparseAttention, native_sparse_attention, parallel_nsa, parallel_nsa_fwd, selected_attention

__all__ = ["NativeSparseAttention", "native_sparse_attention", "parallel_nsa", "parallel_nsa_compression", "parallel_nsa_fwd",
           "parallel_nsa_topk", "selected_attention"]
