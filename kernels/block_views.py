"""The fields of BlockLists seen otherwise: where each block lies, by query head, in print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .blocks import BlockLists

# Blocks of a printed picture at most, and what stands for a kept one and for another.
PICTURE = (16, 48)
KEPT, LEFT_OUT = "#", "."


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
