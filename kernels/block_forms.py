"""Lists of blocks as plain tensors: their checks, and their other forms, such as boolean masks, block-sparse rows and places of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import INTEGERS, check_tensor, require_int

_INT32 = (torch.int32,)


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


def settled_fields(
    counts: Tensor, indices: Tensor, q_offsets: int | Tensor, kv_offsets: int | Tensor, q_lengths: Tensor | None, kv_lengths: Tensor | None,
    num_kv_blocks: int | None, max_q_length: int | None, max_kv_length: int | None,
) -> dict[str, Any]:
    """The fields but ``counts`` and ``indices`` in their full form: three dimensions, numbers that are known. Raises as BlockLists says."""
    check_tensor("counts", counts, _INT32, (None,) * 3, "[batch, heads, query blocks]", None)
    check_tensor("indices", indices, _INT32, (*counts.shape, None), "[batch, heads, query blocks, capacity]", counts.device)
    number, longest_q, longest_kv = (None if value is None else require_int(name, value, least) for name, value, least in (
        ("num_kv_blocks", num_kv_blocks, 0), ("max_q_length", max_q_length, 1), ("max_kv_length", max_kv_length, 1)))
    if isinstance(kv_offsets, Tensor):
        if kv_offsets.dim() == 0 or kv_offsets.shape[-1] == 0:
            raise ValueError(f"kv_offsets must hold at least one entry, got shape {tuple(kv_offsets.shape)}")
        implied = kv_offsets.shape[-1] - 1
        if number is not None and number != implied:
            raise ValueError(f"num_kv_blocks must be {implied} for these kv_offsets, got {number}")
        number = implied
    settled = {**_settled_axis("q", q_offsets, q_lengths, longest_q, counts.shape[2], counts.device),
               **_settled_axis("kv", kv_offsets, kv_lengths, longest_kv, number, counts.device), "num_kv_blocks": number}
    # Axes that were given the same tensor keep sharing one.
    if kv_offsets is q_offsets:
        settled["kv_offsets"] = settled["q_offsets"]
    if kv_lengths is q_lengths:
        settled["kv_lengths"] = settled["q_lengths"]
    return settled


def _settled_axis(axis: str, offsets: int | Tensor, lengths: Tensor | None, longest: int | None, blocks: int | None, device: torch.device
                  ) -> dict[str, Any]:
    if isinstance(offsets, Tensor):
        assert blocks is not None
        offsets = _settled_tensor(f"{axis}_offsets", offsets, blocks + 1, device)
        if longest is None:
            if offsets.is_meta:
                raise ValueError(f"max_{axis}_length must be given with {axis}_offsets that hold no values, got a meta tensor and None")
            longest = max(int(offsets.diff(dim=-1).max()), 1) if blocks and offsets.numel() else 1
    else:
        offsets = require_int(f"{axis}_offsets", offsets, 1)
        if longest not in (None, offsets):
            raise ValueError(f"max_{axis}_length must be {axis}_offsets = {offsets} or None with uniform blocks, got {longest}")
        longest = offsets
    if lengths is not None:
        if blocks is None:
            raise ValueError(f"num_{axis}_blocks must be given with {axis}_lengths and a uniform block size")
        lengths = _settled_tensor(f"{axis}_lengths", lengths, blocks, device)
        if isinstance(offsets, Tensor) and any(a != b and 1 not in (a, b) for a, b in zip(offsets.shape[:2], lengths.shape[:2])):
            raise ValueError(f"{axis}_lengths must have {axis}_offsets' batch and heads {tuple(offsets.shape[:2])} or 1, "
                             f"got {tuple(lengths.shape[:2])}")
    return {f"{axis}_offsets": offsets, f"{axis}_lengths": lengths, f"max_{axis}_length": longest}


def _settled_tensor(name: str, tensor: Tensor, last: int, device: torch.device) -> Tensor:
    if isinstance(tensor, Tensor) and tensor.dim() == 1:
        tensor = tensor[None, None]
    check_tensor(name, tensor, _INT32, (None, None, last), "[batch, heads, entries]", device)
    return tensor


def check_list_values(counts: Tensor, indices: Tensor, blocks: int) -> None:
    """Refuses counts past the capacity, and ids that are out of ``blocks`` or repeated; reads them."""
    capacity = indices.shape[-1]
    if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= capacity:
        raise ValueError(f"counts must lie in [0, {capacity}], got {int(counts.min())} to {int(counts.max())}")
    used = prefix_mask(counts, capacity)
    ids = indices[used]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < blocks:
        raise ValueError(f"indices must lie in [0, {blocks}), got {int(ids.min())} to {int(ids.max())}")
    kept = scatter_mask(indices, used, blocks).sum(-1)
    if not torch.equal(kept, counts.to(kept.dtype)):
        raise ValueError("indices must name each key block at most once in a list, got a repeated id")


def check_axis_values(axis: str, offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, longest: int) -> None:
    """Refuses offsets and lengths whose values do not fit ``tokens``; reads them. Raises as ``BlockLists.check_values`` says."""
    sizes: int | Tensor
    if isinstance(offsets, int):
        if blocks != -(-tokens // offsets):
            raise ValueError(f"{axis}_offsets = {offsets} cuts {tokens} tokens into {-(-tokens // offsets)} blocks, got {blocks}")
        sizes = offsets
    else:
        sizes = offsets.diff(dim=-1)
        if bool((sizes < 0).any()) or bool((offsets[..., 0] != 0).any()) or bool((offsets[..., -1] != tokens).any()):
            raise ValueError(f"{axis}_offsets must ascend from 0 to {tokens}, got {offsets.tolist()}")
        if sizes.numel() and int(sizes.max()) > longest:
            raise ValueError(f"max_{axis}_length must be at least the longest block's {int(sizes.max())} tokens, got {longest}")
    if lengths is not None and (bool((lengths < 0).any()) or bool((lengths > sizes).any())):
        raise ValueError(f"{axis}_lengths must lie between 0 and the block's tokens, got {lengths.tolist()}")
