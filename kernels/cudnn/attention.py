"""Attention by cuDNN's kernels: blocks into slots, the package's call, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BlockLists
from ..cudnn_package import slot_of
from . import calls
from .slots import SlotLists, slot_lists


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    if _by_element(blocks):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for i in range(len(q)):
            one = slice(i, i + 1)
            out[one], lse[one] = cudnn_forward(q[one], k[one], v[one], _element(blocks, i), scale, causal)
        return out, lse
    q_, scale = _positive(q, scale)
    lists = _lists(q, k, blocks)
    out, lse = calls.forward(lists.rows.fill(q_), lists.items.fill(k), lists.items.fill(v), lists, scale)
    lse = lists.rows.empty(lse[..., None], q.new_empty(*q.shape[:3], 1, dtype=torch.float32), -torch.inf)[..., 0]
    return lists.rows.empty(out, q), lse


def cudnn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists,
    scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), added up in no fixed order."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if _by_element(blocks):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for i in range(len(q)):
            one = slice(i, i + 1)
            dq[one], dk[one], dv[one] = cudnn_backward(
                dout[one], None if dlse is None else dlse[one], q[one], k[one], v[one], out[one], lse[one], _element(blocks, i), scale,
                causal)
        return dq, dk, dv
    q_, positive = _positive(q, scale)
    lists = _lists(q, k, blocks)
    out, dout, lse = lists.rows.fill_results(out, dout, lse, dlse)
    dq, dk, dv = calls.backward(dout, lists.rows.fill(q_), lists.items.fill(k), lists.items.fill(v), out, lse, lists, positive)
    dq = lists.rows.empty(dq, q)
    return dq if scale == positive else dq * (scale / positive), lists.items.empty(dk, k), lists.items.empty(dv, v)


def _lists(q: Tensor, k: Tensor, blocks: BlockLists) -> SlotLists:
    return slot_lists(blocks, q, k, slot_of(blocks.max_q_length, blocks.max_kv_length))


def _by_element(blocks: BlockLists) -> bool:
    """Whether key blocks lie differently in each batch element, where the package knows one size of each."""
    return any([isinstance(x, Tensor) and x.shape[0] > 1 for x in (blocks.kv_offsets, blocks.kv_lengths)])


def _element(blocks: BlockLists, i: int) -> BlockLists:
    """The lists of one batch element."""
    return BlockLists.from_fields(*[x[i:i + 1] if isinstance(x, Tensor) and x.shape[0] > 1 else x for x in blocks.to_fields()])


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and scale with the same products, of which the second is above zero: maxima of scores are those of scaled scores."""
    return (q, scale) if scale > 0 else (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
