"""Native sparse attention under the names of fla: attention over selected blocks, and the selection of blocks."""

from .compressed import parallel_nsa_compression, parallel_nsa_topk
from .selected import parallel_nsa, selected_attention

__all__ = ["parallel_nsa", "parallel_nsa_compression", "parallel_nsa_topk", "selected_attention"]
