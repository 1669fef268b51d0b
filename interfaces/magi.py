"""MagiAttention: its uniform block-sparse attention by top-k indices, with the options of its tuning guide."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels import BlockLists
from ..kernels.checks import DTYPES, INTEGERS, check_tensor, require_int
from ..kernels.routing import SHORTEST_TILE
from .packed import ENOUGH_ROWS, pack_heads, require_groups, unpack_heads
from .tokens import block_attention


@dataclass(frozen=True)
class SparseArgs:
    """The options of MagiAttention's tuning guide. They change speed only; None chooses by the block sizes.

    Args:
        swap_ab: computes transposed score tiles in upstream's kernels, whose tiles have at least 64 rows otherwise. True is refused: tiles
            here start at 16 rows, which a block of one token fills with the packed heads of its group.
        pack_gqa: the query heads that share a key/value head become rows of one block. Default: where there are several and the query
            block has fewer than 128 tokens, which one head does not fill a program with.
        sparse_load: keys are gathered one by one, or copied together first where 512 query rows share a list or a gradient is wanted.
            Blocks of fewer than 16 keys always are and longer ones never, which come as tiles; the other value is refused.
        tile_shape: (query rows, keys) of a tile. Refused: the launch table, ``config.py``, chooses it by head_dim, block sizes and GPU.
    """

    swap_ab: bool | None = None
    pack_gqa: bool | None = None
    sparse_load: bool | None = None
    tile_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("swap_ab", "pack_gqa", "sparse_load"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool or None, got {type(getattr(self, name)).__name__}")
        if self.swap_ab:
            raise ValueError("swap_ab must be False or None: score tiles here start at 16 rows, which packed heads fill, got True")
        if self.tile_shape is not None:
            raise ValueError(f"tile_shape must be None: the launch table chooses it by head_dim, blocks and GPU, got {self.tile_shape}")


def block_sparse_attn(
    q: Tensor, k: Tensor, v: Tensor, q_block_size: int, k_block_size: int, topk_indices: Tensor, *, sparse_args: SparseArgs | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query block to its best key blocks; ``magi_attention.functional.block_sparse_attn``.

    Args:
        q: ``[Sq, Hq, D]``, any strides whose last is 1; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[Skv, Hkv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[Skv, Hkv, D]``.
        q_block_size, k_block_size: tokens of a block, from 1 on; the last block may be shorter.
        topk_indices: int32 or int64 ``[Hkv, ceil(Sq / q_block_size), topk]`` on q's device: the key blocks that a query block of all
            query heads of a key/value head attends to, in any order, each at most once. Ids out of range, such as -1, are absent,
            whatever the number. No error names them: reading ids would wait for the device.
        sparse_args: hints about speed.

    Returns:
        (out, lse): out ``[Sq, Hq, D]`` in q's dtype, scaled by 1 / sqrt(D); lse float32 ``[Sq, Hq]``, natural logarithm (float64 for
        float64 inputs). Differentiable through both.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, DTYPES, (None,) * 3, "[tokens, heads, head_dim]", None)
    (q_len, heads, _), kv_heads = q.shape, k.shape[1]
    group = require_groups(heads, kv_heads)
    q_block_size, k_block_size = require_int("q_block_size", q_block_size, 1), require_int("k_block_size", k_block_size, 1)
    sparse_args = SparseArgs() if sparse_args is None else sparse_args
    if not isinstance(sparse_args, SparseArgs):
        raise TypeError(f"sparse_args must be SparseArgs, got {type(sparse_args).__name__}")
    gathered, way = (True, "gathered one by one") if k_block_size < SHORTEST_TILE else (False, "loaded as tiles")
    if sparse_args.sparse_load not in (None, gathered):
        raise ValueError(f"sparse_load must be {gathered} or None: key blocks of {k_block_size} are {way}, got {sparse_args.sparse_load}")
    check_tensor("topk_indices", topk_indices, INTEGERS, (kv_heads, -(-q_len // q_block_size), None),
                 "[key/value heads, query blocks, topk]", q.device)

    pack = q_block_size < ENOUGH_ROWS if sparse_args.pack_gqa is None else sparse_args.pack_gqa
    packed = group if pack else 1
    blocks = BlockLists.from_topk(topk_indices, q_block_size * packed, k_block_size, num_kv_blocks=-(-k.shape[0] // k_block_size))
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    rows = pack_heads(q[None], kv_heads) if packed > 1 else q.transpose(0, 1)[None]
    out, lse = block_attention(rows, k, v, blocks)
    return unpack_heads(out, packed)[0], unpack_heads(lse, packed)[0]
