"""SeerAttention's functions under SeerAttention's names: prefill and pooling, and decoding."""

from .decode import (
    block_sparse_flash_decode_gqa_indice,
    block_sparse_flash_decode_gqa_mask,
    block_sparse_flash_decode_leftpad_gqa_indice,
    block_sparse_flash_decode_leftpad_gqa_mask,
)
from .prefill import (
    attn_pooling,
    attn_pooling_qk_varlen,
    attn_pooling_qkv_varlen,
    block_1d_gqa_sparse_attn_varlen_func,
    block_1d_gqa_sparse_attn_varlen_sim_func,
    block_2d_sparse_attn_varlen_func,
)

__all__ = [
    "attn_pooling", "attn_pooling_qk_varlen", "attn_pooling_qkv_varlen", "block_1d_gqa_sparse_attn_varlen_func",
    "block_1d_gqa_sparse_attn_varlen_sim_func", "block_2d_sparse_attn_varlen_func", "block_sparse_flash_decode_gqa_indice",
    "block_sparse_flash_decode_gqa_mask", "block_sparse_flash_decode_leftpad_gqa_indice", "block_sparse_flash_decode_leftpad_gqa_mask",
]
