"""Lists of blocks and their fields in other forms: boolean masks, top-k ids, block-sparse rows, FlexAttention's BlockMask; where each block
lies; by query head; in print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import INTEGERS, check_tensor

if TYPE_CHECKING:
    from .blocks import BlockLists

# Blocks of a printed picture at most, and what stands for a kept one and for another.
PICTURE = (16, 48)
KEPT, LEFT_OUT = "#", "."


def prefix_mask(counts: Tensor, width: int) -> Tensor:
    """True in the first ``counts`` of ``width`` entries."""
    return torch.arange(width, device=counts.device) < counts[..., None]


def in_range(indices: Tensor, used: Tensor, blocks: int) -> Tensor:
    """The used entries that name a block; ids out of range count as absent."""
    return used & (indices >= 0) & (indices < blocks)


def scatter_mask(indices: Tensor, used: Tensor, blocks: int) -> Tensor:
    """bool [..., blocks], True at the ids of the used entries; the others land in one extra column, which is cut off."""
    mask = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, torch.where(in_range(indices, used, blocks), indices, blocks).long(), True)[..., :blocks]


def mask_lists(keep: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """(counts int32 [...], indices int32 [..., capacity]) of the blocks that ``keep`` [..., n] marks, ascending; those past the capacity,
    which is n where None, are lost."""
    capacity = keep.shape[-1] if capacity is None else capacity
    ids = torch.arange(keep.shape[-1], dtype=torch.int32, device=keep.device).expand(keep.shape)
    position = keep.cumsum(-1, dtype=torch.int32)
    counts = position[..., -1] if keep.shape[-1] else position.sum(-1, dtype=torch.int32)
    # Entries that are not kept all land in one slot past the end, which is cut off.
    slot = torch.where(keep & (position <= capacity), position - 1, capacity).long()
    indices = torch.zeros(*keep.shape[:-1], capacity + 1, dtype=torch.int32, device=keep.device)
    return counts.clamp(max=capacity).contiguous(), indices.scatter(-1, slot, ids)[..., :capacity].contiguous()


def four_dimensional(name: str, x: Tensor, last: str) -> Tensor:
    """x with dimensions of 1 for those that are left out, of ``[B, H, Nq, last]``."""
    if not 2 <= x.dim() <= 4:
        raise ValueError(f"{name} must be [Nq, {last}], [H, Nq, {last}] or [B, H, Nq, {last}], got {tuple(x.shape)}")
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def bsr_lists(indptr: Tensor, indices: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(counts, indices) as ``BlockLists.from_bsr`` wants them."""
    check_tensor("indptr", indptr, INTEGERS, (None,), "[Nq + 1]", None)
    check_tensor("indices", indices, INTEGERS, (None,), "[nnz]", indptr.device)
    if len(indptr) < 1:
        raise ValueError("indptr must hold at least one entry, got none")
    nnz = len(indices)
    indptr = indptr.clamp(0, nnz)
    counts = indptr.diff().clamp(0, capacity).int()
    where = (indptr[:-1, None] + torch.arange(capacity, device=indptr.device)).clamp(max=max(nnz - 1, 0))
    rows = to_int32(indices)[where] if nnz else torch.zeros_like(where, dtype=torch.int32)
    return counts[None, None], rows[None, None]


def to_int32(ids: Tensor) -> Tensor:
    """Ids in 32 bits; those that do not fit stay out of range."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-1, 2**31 - 1).int()


def kept_blocks(block_mask) -> Tensor:
    """bool [B, H, Nq, Nk], True where FlexAttention's ``block_mask`` keeps the block; raises as ``BlockLists.from_block_mask`` says."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    nk = block_mask.kv_indices.shape[-1]
    mask = scatter_mask(block_mask.kv_indices, prefix_mask(block_mask.kv_num_blocks, nk), nk)
    if block_mask.mask_mod is not noop_mask and bool(mask.any()):
        masked = int((mask & ~_full_blocks(block_mask)).sum())
        if masked:
            raise ValueError(f"block_mask must not mask inside a block, got {masked} such blocks under mask_mod "
                             f"{getattr(block_mask.mask_mod, '__name__', block_mask.mask_mod)!r}")
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        mask |= scatter_mask(block_mask.full_kv_indices, prefix_mask(block_mask.full_kv_num_blocks, nk), nk)
    return mask


def _full_blocks(block_mask) -> Tensor:
    """bool [B, H, Nq, Nk] of a FlexAttention BlockMask: its mask_mod keeps every pair of real tokens in the block."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, nq, nk = block_mask.kv_indices.shape
    (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    seen = create_mask(block_mask.mask_mod, batch, heads, q_len, kv_len, device=block_mask.kv_indices.device)
    seen = torch.nn.functional.pad(seen, (0, nk * kv_size - kv_len, 0, nq * q_size - q_len), value=True)
    return seen.unflatten(3, (nk, kv_size)).unflatten(2, (nq, q_size)).all(5).all(3)


def full_block_mask(counts: Tensor, indices: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]):
    """A FlexAttention BlockMask of full blocks of ``sizes`` tokens, queries first, for sequences of ``lengths`` tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    nk, (q_size, kv_size) = -(-lengths[1] // sizes[1]), sizes
    used = prefix_mask(counts, indices.shape[-1])
    full = torch.zeros(*counts.shape, nk, dtype=torch.int32, device=counts.device)
    width = min(nk, indices.shape[-1])
    full[..., :width] = indices.masked_fill(~used, 0)[..., :width]
    kept = scatter_mask(indices, used, nk)
    batch, heads = kept.shape[:2]
    # Memory of its own, as all else of a BlockMask.
    counts = counts.clone()

    def mask_mod(b, h, i, j):
        # Compiled kernels skip it in full blocks; FlexAttention without torch.compile masks by nothing else.
        return kept[b % batch, h % heads, i // q_size, j // kv_size]

    return BlockMask.from_kv_blocks(torch.zeros_like(counts), torch.zeros_like(full), counts, full, BLOCK_SIZE=sizes, mask_mod=mask_mod,
                                    seq_lengths=lengths)


def block_bounds(offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, longest: int, device: torch.device
                 ) -> tuple[Tensor, Tensor]:
    """(first token, number of real tokens) of each block, as ``BlockLists.q_bounds`` gives them."""
    if isinstance(offsets, Tensor):
        # Kernels follow these without a further look: whatever the values, a block lies inside the tensors and within ``longest``.
        offsets = offsets.clamp(0, tokens)
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    else:
        starts = torch.arange(blocks, dtype=torch.int32, device=device)[None, None] * offsets
        ends = (starts + offsets).clamp(max=tokens)
    sizes = ends - starts
    if lengths is not None:
        sizes = torch.minimum(sizes, lengths)
    sizes = sizes.clamp_(0, longest)
    # Two tensors of one shape, so that one pair of strides serves both.
    starts, sizes = torch.broadcast_tensors(starts, sizes)
    return starts.contiguous(), sizes.contiguous()


def per_query_head(x: Tensor, heads: int, batch: int | None = None) -> Tensor:
    """``[B, H|1, ...]`` with its shared or key/value heads spelled out, ``[B, heads, ...]``, and its shared batch where that is given."""
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
    return x if batch is None else x.expand(batch, *(-1,) * (x.dim() - 1))


def describe(blocks: BlockLists, values: bool) -> str:
    """A few lines; with ``values`` also what has to be read, where reading does not wait for a GPU."""
    counts, number = blocks.counts, blocks.num_kv_blocks
    q_size, kv_size = _size(blocks.q_offsets, blocks.max_q_length), _size(blocks.kv_offsets, blocks.max_kv_length)
    (batch, heads, rows), capacity = counts.shape, blocks.capacity
    shared = [f"{name} {size}" if size != 1 else f"any {name}" for name, size in (("batch", batch), ("heads", heads))]
    listed = f"{capacity} key blocks" if number is None else f"{capacity} of {number} key blocks"
    text = f"BlockLists({', '.join(shared)}: {rows} query blocks of {q_size}, up to {listed} of {kv_size} each, on {counts.device})"
    # A tensor that is fake or traced has no values.
    if not values or number is None or counts.device.type != "cpu" or type(counts) is not Tensor or not counts.numel():
        return text
    if number:
        text = f"{text[:-1]}, density {float(blocks.density()):.3f})"
    picture = blocks.to_mask()[0, 0, :PICTURE[0], :PICTURE[1]].tolist()
    lines = ["".join(KEPT if kept else LEFT_OUT for kept in row) + (" ..." if number > PICTURE[1] else "") for row in picture]
    return "\n".join([text, *lines, *["..."][:rows > PICTURE[0]]])


def _size(offsets: int | Tensor, longest: int) -> str:
    return f"up to {longest} tokens" if isinstance(offsets, Tensor) else f"{longest} tokens"
