"""MagiAttention: its uniform block-sparse attention by top-k indices."""

from __future__ import annotations

from torch import Tensor

from ..attention import block_sparse_attention
from ..blocks import BlockLists
from ..checks import DTYPES, INTEGERS, check_tensor, require_int
from .packed import heads_packed, pack_heads, unpack_heads


def block_sparse_attn(q: Tensor, k: Tensor, v: Tensor, q_block_size: int, k_block_size: int, topk_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of every query block to its best key blocks; ``magi_attention.functional.block_sparse_attn``.

    Args:
        q: ``[Sq, Hq, D]``, any strides whose last is 1; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[Skv, Hkv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[Skv, Hkv, D]``.
        q_block_size, k_block_size: tokens of a block, from 1 on; the last block may be shorter.
        topk_indices: int32 or int64 ``[Hkv, ceil(Sq / q_block_size), topk]`` on q's device: the key blocks that a query block of all
            query heads of a key/value head attends to, in any order, each at most once. Ids out of range, such as -1, are absent,
            whatever the number.

    Returns:
        (out, lse): out ``[Sq, Hq, D]`` in q's dtype, scaled by 1 / sqrt(D); lse float32 ``[Sq, Hq]``, natural logarithm (float64 for
        float64 inputs). A row without keys gives out = 0 and lse = -inf. Differentiable in q, k and v through both, bitwise
        deterministic. Never waits for the device (synchronises), and fits into CUDA graphs and compiled graphs.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.

    What differs from upstream: any GPU and CPUs too; lengths need not be multiples of the blocks; a list is a set, so an id named twice is
    a mistake (which is not checked: it would synchronise). Tiles and how keys are loaded follow from the blocks and the GPU.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, DTYPES, (None,) * 3, "[tokens, heads, head_dim]", None)
    (q_len, heads, _), kv_heads = q.shape, k.shape[1]
    q_block_size, k_block_size = require_int("q_block_size", q_block_size, 1), require_int("k_block_size", k_block_size, 1)
    packed = heads_packed(q_block_size, heads, kv_heads)
    check_tensor("topk_indices", topk_indices, INTEGERS, (kv_heads, -(-q_len // q_block_size), None),
                 "[key/value heads, query blocks, topk]", q.device)

    blocks = BlockLists.from_topk(topk_indices, q_block_size * packed, k_block_size, num_kv_blocks=-(-k.shape[0] // k_block_size))
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    rows = pack_heads(q[None], kv_heads) if packed > 1 else q.transpose(0, 1)[None]
    out, lse = block_sparse_attention(rows, k, v, blocks, return_lse=True)
    return unpack_heads(out, packed)[0], unpack_heads(lse, packed)[0]
