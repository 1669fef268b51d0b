"""Attention to listed blocks that no tile fits: key blocks shorter than a tile, and blocks that a token sees in part.

A tile has at least 16 keys. ``kernels.block_sparse_attention`` takes a shorter key block as a tile that is mostly masked. Here its keys are
gathered one by one, or compacted: copied behind one another, then taken as tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import BlockLists, block_sparse_attention, choose_route
from ...kernels.attention import check_inputs
from ...kernels.block_forms import in_range, prefix_mask
from ...kernels.checks import autocast_inputs, require_bool, resolve_scale
from ...kernels.operators import on_device, operator, recorded, refuse_transforms
from ...kernels.routing import SHORTEST_TILE, require_impl
from .attention import TOKEN_IMPLEMENTATIONS, choose_token_impl
from .compacted import compacted_attention, like_results

# Where this many query rows share a list of short blocks, or a gradient is wanted, its keys are compacted.
COMPACTED_ROWS = 512


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, *, scale: float | None = None, causal: bool = False, deterministic: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, for key blocks of any length. Arguments and errors as there."""
    reading = "tiles"
    # Copies and gathered keys know no positions, and plain torch has no tiles.
    if isinstance(blocks, BlockLists) and blocks.max_kv_length < SHORTEST_TILE and impl in ("auto", "triton", "hopper"):
        require_bool("deterministic", deterministic)
        q, k, v = autocast_inputs(q=q, k=k, v=v)
        check_inputs(q, k, v, blocks)
        if not require_bool("causal", causal):
            reading = how_read(impl, q, k, blocks, recorded(q, k, v))
    if reading == "tiles":
        return block_sparse_attention(q, k, v, blocks, scale=scale, causal=causal, return_lse=True, deterministic=deterministic, impl=impl)
    scale = resolve_scale(scale, q.shape[3])
    if reading == "gathered":
        return attention_within_blocks(q, k, v, blocks, scale, impl="triton")
    refuse_transforms("block_sparse_attention", q=q, k=k, v=v)
    sizes = blocks.max_q_length, blocks.max_kv_length
    return compacted_attention(q, k, v, blocks.counts, blocks.indices, *sizes, scale, deterministic, impl)


def how_read(impl: str, q: Tensor, k: Tensor, blocks: BlockLists, differentiable: bool) -> str:
    """"gathered", "compacted" or "tiles": how the keys of short blocks are read without a causal mask."""
    rows = blocks.max_q_length * (q.shape[1] // max(k.shape[1], blocks.counts.shape[1]))
    few = rows < COMPACTED_ROWS and not differentiable and impl != "hopper"
    if few and choose_token_impl(impl, q.device, q.dtype, q.shape[3]) == "triton":
        return "gathered"
    # Copies are made for uniform blocks.
    uniform = isinstance(blocks.q_offsets, int) and isinstance(blocks.kv_offsets, int) and blocks.q_lengths is blocks.kv_lengths is None
    wanted = uniform and blocks.capacity and q.numel() and k.numel() and (impl != "auto" or q.device.type != "cpu")
    return "compacted" if wanted else "tiles"


def attention_within_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, *, soft_cap: float = 0.0, mask: Tensor | None = None,
    first_entry: Tensor | None = None, listed: tuple[Tensor, Tensor] | None = None, packed: int = 1, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, of scores and keys that are further limited. Arguments are not checked.

    Args:
        q: ``[B, Hq, Sq, D]``; k and v ``[B, Hkv, Skv, D]``; ``blocks`` as in ``block_sparse_attention``.
        soft_cap: c > 0 caps a scaled score x to c * tanh(x / c); 0 does not.
        mask: bool ``[entries, R, C]``: of its e-th listed block, token u of query block i sees token c where
            ``mask[first_entry[b, h, i] + e, u, c]``.
        first_entry: int32 in the shape of ``blocks.counts``, with ``mask``.
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
        return _within_blocks(q, k, v, *blocks.to_fields(), mask, first_entry, order, total, scale, soft_cap, packed, impl)


def listed_keys(blocks: BlockLists, kv_len: int) -> tuple[Tensor, Tensor]:
    """(listed keys before each listed block, int32 as the indices; listed keys, int32 as the counts). The lists' heads are those of the
    key blocks' bounds, where these have several."""
    sizes = blocks.kv_bounds(kv_len)[1].expand(*blocks.counts.shape[:2], -1)
    ids = blocks.indices
    known = in_range(ids, prefix_mask(blocks.counts, blocks.capacity), sizes.shape[-1])
    size = sizes.gather(2, ids.where(known, 0).flatten(2).long()).view(ids.shape).where(known, 0)
    behind = size.cumsum(-1, dtype=torch.int32)
    return behind - size, size.sum(-1, dtype=torch.int32)


@operator("attention_within_blocks", like_results)
def _within_blocks(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None,
    q_lengths: Tensor | None, kv_lengths: Tensor | None, num_kv_blocks: int | None, max_q_length: int, max_kv_length: int,
    mask: Tensor | None, first_entry: Tensor | None, order: Tensor | None, total: Tensor | None,
    scale: float, soft_cap: float, packed: int, impl: str,
) -> tuple[Tensor, Tensor]:
    blocks = BlockLists.from_fields(counts, indices, q_offsets, kv_offsets, q_lengths, kv_lengths, num_kv_blocks, max_q_length,
                                    max_kv_length)
    with on_device(q):
        if impl == "triton":
            from .triton.gathered import gathered_forward

            return gathered_forward(q, k, v, blocks, scale, soft_cap, mask, first_entry, order, total, packed)
        from .eager import torch_within

        return torch_within(q, k, v, blocks, scale, soft_cap, mask, first_entry, total, packed)
