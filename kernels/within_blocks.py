"""Block-sparse attention of which a row sees only part: soft cap, masks inside blocks, causal order among the listed keys. Forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from .block_forms import in_range, prefix_mask
from .blocks import BlockLists
from .checks import without_autocast
from .operators import NAMESPACE
from .routing import TOKEN_IMPLEMENTATIONS, choose_route, require_impl


def attention_within_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, *, soft_cap: float = 0.0, mask: Tensor | None = None,
    first_entry: Tensor | None = None, listed: tuple[Tensor, Tensor] | None = None, packed: int = 1, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, of scores and keys that are further limited. Arguments are not checked.

    Args:
        q: ``[B, Hq, Sq, D]``; k and v ``[B, Hkv, Skv, D]``; ``blocks`` as in ``block_sparse_attention``.
        soft_cap: c > 0 caps a scaled score x to c * tanh(x / c); 0 does not.
        mask: bool ``[entries, R, C]``: of its e-th listed block, token u of query block i sees token c where
            ``mask[first_entry[i] + e, u, c]``.
        first_entry: int32 ``[Nq]``, with ``mask``; lists shared by batch and heads.
        listed: ``listed_keys(blocks, Skv)``: of a query block of L tokens with n listed keys, in the order of the list, token u sees the
            first n - L + u + 1.
        packed: that many neighbouring rows of q are one token, seen by several heads; q's block sizes are in rows.
        impl: "auto" is "triton" on a GPU and "torch", a loop in plain torch, on a CPU. No other is there.
    """
    if require_impl(impl) not in TOKEN_IMPLEMENTATIONS:
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch' with a soft cap, masks inside blocks or causal order, got {impl!r}")
    if impl == "auto":
        impl = "torch" if q.device.type == "cpu" else "triton"
    if impl == "triton":
        choose_route(impl, q.device, q.dtype, q.shape[-1])
    order, total = listed or (None, None)
    with torch.no_grad():
        return _forward(q, k, v, *blocks.to_fields(), mask, first_entry, order, total, scale, soft_cap, packed, impl)


def listed_keys(blocks: BlockLists, kv_len: int) -> tuple[Tensor, Tensor]:
    """(listed keys before each listed block, int32 as the indices; listed keys, int32 as the counts). The lists' heads are those of the
    key blocks' bounds, where these have several."""
    sizes = blocks.kv_bounds(kv_len)[1].expand(*blocks.counts.shape[:2], -1)
    ids = blocks.indices
    known = in_range(ids, prefix_mask(blocks.counts, blocks.capacity), sizes.shape[-1])
    size = sizes.gather(2, ids.where(known, 0).flatten(2).long()).view(ids.shape).where(known, 0)
    behind = size.cumsum(-1, dtype=torch.int32)
    return behind - size, size.sum(-1, dtype=torch.int32)


@torch.library.custom_op(f"{NAMESPACE}::attention_within_blocks", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    mask: Tensor | None, first_entry: Tensor | None, order: Tensor | None, total: Tensor | None,
    scale: float, soft_cap: float, packed: int, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with without_autocast(q.device.type):
        if impl == "triton":
            from .portable.gathered import ElementMask, gathered_forward

            return gathered_forward(q, k, v, blocks, scale, False, ElementMask(soft_cap, mask, first_entry, order, total, packed))
        from .eager.within import torch_within

        return torch_within(q, k, v, blocks, scale, soft_cap, mask, first_entry, total, packed)


@_forward.register_fake
def _(q, k, v, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
