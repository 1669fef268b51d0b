"""BlockLists seen otherwise: where each block lies, in parts, on another device, in print, and with their values checked."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .block_masks import compact_lists, in_range, prefix_mask
from .checks import require_int

if TYPE_CHECKING:
    from .blocks import BlockLists

# Blocks of a printed picture at most, and what stands for a kept one and for another.
PICTURE = (16, 48)
KEPT, LEFT_OUT = "#", "."
TENSORS = ("counts", "indices", "q_offsets", "kv_offsets", "q_lengths", "kv_lengths")


def bounds(offsets: int | Tensor, lengths: Tensor | None, blocks: int, tokens: int, longest: int, device: torch.device
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


def bounds_of(blocks: BlockLists, offsets: int | Tensor, lengths: Tensor | None, number: int, tokens: int, longest: int
              ) -> tuple[Tensor, Tensor]:
    """``bounds`` of one axis of ``blocks``; where ``relisted`` says that nobody writes to its tensors, found once: five small launches,
    which would be a third of a layer's host time. Axes that share their offsets and lengths share these."""
    kept = blocks._bounds
    if kept is None or torch.compiler.is_compiling():
        return bounds(offsets, lengths, number, tokens, longest, blocks.device)
    key = (offsets is blocks.q_offsets and lengths is blocks.q_lengths, number, tokens, longest)
    found = kept.get(key)
    if found is None:
        found = bounds(offsets, lengths, number, tokens, longest, blocks.device)
        # What a mode's own tensors gave holds in the mode alone, and what a graph captures is the graph's.
        if type(found[0]) is Tensor and not (found[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            kept[key] = found
    return found


def tensor_fields(blocks: BlockLists) -> dict[str, Tensor]:
    """The fields that are tensors, by name."""
    return {name: x for name in TENSORS if isinstance(x := getattr(blocks, name), Tensor)}


def to_device(blocks: BlockLists, device: torch.device, non_blocking: bool) -> BlockLists:
    moved: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in tensor_fields(blocks).items()}
    return blocks if moved["counts"] is blocks.counts else replace(blocks, **moved)


def slice_heads(blocks: BlockLists, key: int | slice | tuple) -> BlockLists:
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) > 2:
        raise ValueError(f"blocks[...] must be given a batch and a head at most, got {len(keys)}")
    fields: dict[str, Any] = tensor_fields(blocks)
    for dim, (name, part) in enumerate(zip(("batch", "head"), keys)):
        number = max(x.shape[dim] for x in fields.values())
        first, last = _range(name, part, number)
        for field, x in fields.items():
            have = x.shape[dim]
            if have == 1:
                continue
            group = number // have if have else 1
            if last - first != 1 and (first % group or last % group):
                raise ValueError(f"{name} must take whole groups of {group}, of which {field} have one entry each, got {first} to {last}")
            fields[field] = x.narrow(dim, first // group, -(-last // group) - first // group)
    return replace(blocks, **fields)


def _range(name: str, part: int | slice, number: int) -> tuple[int, int]:
    """The entries (first, behind the last) of ``number`` that an index or a slice takes; all of what is shared."""
    if isinstance(part, slice):
        if part.step not in (None, 1):
            raise ValueError(f"{name} must be a slice without a step, got a step of {part.step}")
        ends = (None if x is None else require_int(name, x, -sys.maxsize) for x in (part.start, part.stop))
        first, last, _ = slice(*ends).indices(number)
        return (0, 1) if number == 1 else (first, max(first, last))
    index = require_int(name, part, -number)
    if number == 1 and index >= 0:
        return 0, 1
    if index >= number:
        raise ValueError(f"{name} must lie in [{-number}, {number}), got {index}")
    return index % number, index % number + 1


def slice_keys(blocks: BlockLists, first: int, last: int) -> BlockLists:
    number = blocks.num_kv_blocks
    if last < first or number is not None and last > number:
        raise ValueError(f"first and last must ascend within the {'' if number is None else f'{number} '}key blocks, got {first} to {last}")
    ids = blocks.indices - first
    keep = in_range(ids, prefix_mask(blocks.counts, blocks.capacity), last - first)
    counts, indices = compact_lists(ids, keep, min(blocks.capacity, last - first))
    offsets, lengths = blocks.kv_offsets, blocks.kv_lengths
    if isinstance(offsets, Tensor):
        offsets = offsets[..., first:last + 1] - offsets[..., first:first + 1]
    return replace(blocks, counts=counts, indices=indices, kv_offsets=offsets, num_kv_blocks=last - first,
                   kv_lengths=None if lengths is None else lengths[..., first:last].contiguous())


def describe(blocks: BlockLists, values: bool) -> str:
    """A few lines; with ``values`` also what has to be read, where reading does not wait for a GPU."""
    batch, heads, rows = blocks.counts.shape
    number = blocks.num_kv_blocks
    shared = [f"{name} {size}" if size != 1 else f"any {name}" for name, size in (("batch", batch), ("heads", heads))]
    listed = f"{blocks.capacity} key blocks" if number is None else f"{blocks.capacity} of {number} key blocks"
    text = (f"BlockLists({', '.join(shared)}: {rows} query blocks of {_size(blocks.q_offsets, blocks.max_q_length)}, up to {listed} of "
            f"{_size(blocks.kv_offsets, blocks.max_kv_length)} each, on {blocks.device})")
    # A tensor that is fake or traced has no values.
    if not values or number is None or blocks.device.type != "cpu" or type(blocks.counts) is not Tensor or not blocks.counts.numel():
        return text
    text = f"{text[:-1]}, density {float(blocks.density()):.3f})" if number else text
    picture = blocks[:1, :1].to_mask()[0, 0, :PICTURE[0], :PICTURE[1]].tolist()
    lines = ["".join(KEPT if kept else LEFT_OUT for kept in row) + (" ..." if number > PICTURE[1] else "") for row in picture]
    return "\n".join([text, *lines, *["..."][:rows > PICTURE[0]]])


def _size(offsets: int | Tensor, longest: int) -> str:
    return f"up to {longest} tokens" if isinstance(offsets, Tensor) else f"{longest} tokens"


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
