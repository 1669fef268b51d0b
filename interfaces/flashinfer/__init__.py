"""FlashInfer's block-sparse attention under FlashInfer's names."""

from .wrappers import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper, convert_bsr_mask_layout

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]
