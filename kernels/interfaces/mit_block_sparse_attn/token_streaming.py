"""Streaming by tokens: the blocks of which a query sees a part, where its window or the sinks end. Forward only, as upstream."""

from __future__ import annotations

import torch
from torch import Tensor

from ...blocks import BlockLists
from ...merge import merge_attention
from ..packed import BlockSpans
from ..within_blocks import attention_within_blocks
from .patterns import BLOCK, Sequences

# The sinks end in one block; 128 windows, each a token further than the last, begin in two.
PARTLY_SEEN = 3


def attend_partly_seen(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, partly: Tensor,
                       streaming_info: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) and attention to the blocks ``partly`` ``[B, Hq, rows, columns]``, of which a query sees, up to its own, the first
    tokens and the last ones, (sink, local) of ``streaming_info`` ``[Hq, 2]``.

    q ``[1, Hq, Tk, D]``, each query in its key's row; k, v ``[1, Hkv, Tk, D]``. Takes 384 bytes for each query of each head, and three
    times as many while the masks are made.
    """
    heads, kv_heads, tokens = q.shape[1], k.shape[1], k.shape[2]
    lists = BlockLists.from_mask(partly, BLOCK, BLOCK, capacity=PARTLY_SEEN)
    mask = _seen(lists.indices, sequences, streaming_info)
    # All heads as one whose sequences are those of every head, for each has masks of its own.
    q_cut, kv_cut = (_of_heads(cut, number, tokens) for cut, number in ((sequences.q_cut(), heads), (sequences.kv_cut(), kv_heads)))
    batch, rows, columns = len(partly), sequences.rows, sequences.columns
    place = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None] + (
        torch.arange(heads, dtype=torch.int32, device=q.device) // (heads // kv_heads) * batch)
    indices = lists.indices + place[:, :, None, None] * columns
    counts, indices, mask = (x.transpose(0, 1).flatten(0, 2) for x in (lists.counts, indices, mask))
    blocks = BlockLists(counts[None, None], indices[None, None], q_cut.offsets(), kv_cut.offsets(), q_cut.lengths.flatten(),
                        kv_cut.lengths.flatten(), max_q_length=BLOCK, max_kv_length=BLOCK)
    entry = torch.arange(heads * batch * rows, dtype=torch.int32, device=q.device) * PARTLY_SEEN
    one_head = q.reshape(1, 1, -1, q.shape[3]), k.reshape(1, 1, -1, k.shape[3]), v.reshape(1, 1, -1, v.shape[3])
    part, part_lse = attention_within_blocks(*one_head, blocks, scale, mask=mask.flatten(0, 1), first_entry=entry)
    return merge_attention([out.detach(), part.view(q.shape)], [lse.detach(), part_lse.view(q.shape[:3])])


def _seen(ids: Tensor, sequences: Sequences, streaming_info: Tensor) -> Tensor:
    """bool ``[*ids.shape, 128, 128]``: what each query of a block sees of the key blocks ``ids`` ``[B, H, rows, 3]``."""
    sink, local = streaming_info.T[:, None, :, None, None, None, None]
    inside = torch.arange(BLOCK, dtype=torch.int32, device=ids.device)
    key = ids[..., None, None] * BLOCK + inside
    query = (sequences.q_cut().starts - sequences.keys[:-1, None])[:, None, :, None, None, None] + inside[:, None]
    return (key <= query) & ((key < sink) | (key > query - local))


def _of_heads(cut: BlockSpans, heads: int, tokens: int) -> BlockSpans:
    """The blocks of sequences that every head has, the heads' tokens behind one another."""
    before = torch.arange(heads, dtype=torch.int32, device=cut.starts.device)[:, None, None] * tokens
    return BlockSpans((cut.starts + before).flatten(0, 1), cut.lengths.repeat(heads, 1))


class WithoutGradient(torch.autograd.Function):
    """The first two tensors as they are; a backward through them to the others raises."""

    @staticmethod
    def forward(ctx, out, lse, *inputs):
        return out, lse

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("exact_streaming has no gradient: stream by blocks, exact_streaming=False")
