"""The two calls of the package.

Their contract is that of nvidia-cudnn-frontend 1.32.0, docs/fe-oss-apis/bsa.md and cudnn/block_sparse_attention/api.py: tensors
[B, H, S, D] with a last stride of 1, the others multiples of 16 bytes, the address of 128; blocks of 64 or 128 tokens, of which key blocks
may hold fewer; ids that are unique in a row and in range, up to its count; sizes of at least 1 in every block that is listed; no causal
mask.
"""

from __future__ import annotations

from torch import Tensor

from .slots import SlotLists


def forward(q: Tensor, k: Tensor, v: Tensor, lists: SlotLists, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse float32 [B, H, S], natural) of tensors in slots; rows without a list give 0 and -inf."""
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    found = block_sparse_attention_forward(q, k, v, lists.indices, block_sizes=lists.sizes, q2k_block_nums=lists.counts,
                                           sparse_block_size=lists.rows.slot, allow_empty_block_nums=True, softmax_scale=scale,
                                           pack_gqa=False)
    return found["o_tensor"], found["lse_tensor"]


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: SlotLists, scale: float
             ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of tensors in slots."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward

    found = block_sparse_attention_backward(dout, q, k, v, out, lse, lists.indices, block_sizes=lists.sizes, q2k_block_nums=lists.counts,
                                            sparse_block_size=lists.rows.slot, softmax_scale=scale)
    return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]
