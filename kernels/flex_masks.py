"""FlexAttention's BlockMask and what BlockLists can say of it, both ways."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, noop_mask

from .blocks import BlockLists


def kept_blocks(block_mask: BlockMask) -> Tensor:
    """bool ``[B, H, Nq, Nk]``, True where ``block_mask`` keeps the block; what is raised as in ``BlockLists.from_block_mask``."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    mask = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.mask_mod is not noop_mask and bool(mask.any()):
        masked = int((mask & ~_whole_blocks(block_mask)).sum())
        if masked:
            raise ValueError(f"block_mask must not mask inside a block, got {masked} such blocks under mask_mod "
                             f"{getattr(block_mask.mask_mod, '__name__', block_mask.mask_mod)!r}")
    if block_mask.full_kv_num_blocks is not None:
        mask |= _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return mask


def _listed(block_mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    # It may come without batch and heads.
    counts, indices = (x[(None,) * (dims - x.dim())].int() for x, dims in ((counts, 3), (indices, 4)))
    return BlockLists(counts, indices, *block_mask.BLOCK_SIZE, num_kv_blocks=indices.shape[-1]).to_mask()


def _whole_blocks(block_mask: BlockMask) -> Tensor:
    """bool ``[B, H, Nq, Nk]``: the mask_mod keeps every pair of real tokens in the block."""
    batch, heads, nq, nk = (*block_mask.kv_indices.shape[:3], block_mask.kv_indices.shape[-1])
    (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    seen = create_mask(block_mask.mask_mod, batch, heads, q_len, kv_len, device=block_mask.kv_indices.device)
    seen = torch.nn.functional.pad(seen, (0, nk * kv_size - kv_len, 0, nq * q_size - q_len), value=True)
    return seen.unflatten(3, (nk, kv_size)).unflatten(2, (nq, q_size)).all(5).all(3)


def block_mask_of(blocks: BlockLists, q_len: int, kv_len: int) -> BlockMask:
    """A BlockMask of full blocks; what is raised as in ``BlockLists.to_block_mask``."""
    if any(isinstance(x, Tensor) for x in (blocks.q_offsets, blocks.kv_offsets, blocks.q_lengths, blocks.kv_lengths)):
        raise ValueError("to_block_mask requires uniform blocks without valid lengths; FlexAttention has no ragged blocks")
    q_size, kv_size = blocks.q_offsets, blocks.kv_offsets
    nk = -(-kv_len // kv_size)
    full = torch.zeros(*blocks.counts.shape, nk, dtype=torch.int32, device=blocks.device)
    width = min(nk, blocks.capacity)
    full[..., :width] = blocks.to_topk(fill=0)[..., :width]
    none = torch.zeros_like(blocks.counts)
    kept = replace(blocks, num_kv_blocks=nk).to_mask()
    batch, heads = kept.shape[:2]

    def mask_mod(b, h, i, j):
        # Compiled kernels skip it in full blocks; FlexAttention without torch.compile masks by nothing else.
        return kept[b % batch, h % heads, i // q_size, j // kv_size]

    return BlockMask.from_kv_blocks(none, torch.zeros_like(full), blocks.counts, full, BLOCK_SIZE=(q_size, kv_size), mask_mod=mask_mod,
                                    seq_lengths=(q_len, kv_len))
