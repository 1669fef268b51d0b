"""MIT's Block-Sparse-Attention, which programs import as ``block_sparse_attn``; MagiAttention has a function of that name."""

from .attention import block_sparse_attn_func, block_streaming_attn_func, token_streaming_attn_func
from .bert_padding import pad_input, unpad_input

__all__ = ["block_sparse_attn_func", "block_streaming_attn_func", "pad_input", "token_streaming_attn_func", "unpad_input"]
