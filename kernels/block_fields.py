"""Checks of the fields of BlockLists: types, shapes and devices always, values where a caller asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .block_forms import prefix_mask, scatter_mask
from .checks import check_tensor, require_int

_INT32 = (torch.int32,)


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
