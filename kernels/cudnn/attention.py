"""Attention by NVIDIA's cuDNN frontend (``cudnn.BSA``): blocks into slots, the package's call, and back.

Its contract is that of nvidia-cudnn-frontend 1.32.0, docs/fe-oss-apis/bsa.md and cudnn/block_sparse_attention/api.py: tensors
[B, H, S, D] with a last stride of 1, the others multiples of 16 bytes, the address of 128; blocks of 64 or 128 tokens, of which key blocks
may hold fewer; ids that are unique in a row and in range, up to its count; sizes of at least 1 in every block that is listed; no causal
mask. Rows without a list give 0 and -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..blocks import BlockLists
from .package import slot_of
from .slots import SlotLists, slot_lists


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), lse.fill_(-torch.inf)
    if _by_element(blocks):
        return _each(partial(cudnn_forward, scale=scale, causal=causal), blocks, (torch.empty_like(q), lse), q, k, v)
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    lists = _lists(q, k, blocks)
    found = block_sparse_attention_forward(lists.rows.fill(q), lists.items.fill(k), lists.items.fill(v), lists.indices,
                                           allow_empty_block_nums=True, softmax_scale=scale, pack_gqa=False, **_options(lists))
    lse = lists.rows.empty(found["lse_tensor"][..., None], lse[..., None], -torch.inf)[..., 0]
    return lists.rows.empty(found["o_tensor"], q), lse


def cudnn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: BlockLists, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), added up in no fixed order."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if _by_element(blocks):
        return _each(partial(cudnn_backward, scale=scale, causal=causal), blocks,
                     (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)), dout, dlse, q, k, v, out, lse)
    from cudnn.block_sparse_attention import block_sparse_attention_backward

    lists = _lists(q, k, blocks)
    out, dout, lse = lists.rows.fill_results(out, dout, lse, dlse)
    found = block_sparse_attention_backward(dout, lists.rows.fill(q), lists.items.fill(k), lists.items.fill(v), out, lse, lists.indices,
                                            softmax_scale=scale, **_options(lists))
    return (lists.rows.empty(found["dq_tensor"], q), lists.items.empty(found["dk_tensor"], k),
            lists.items.empty(found["dv_tensor"], v))


def _lists(q: Tensor, k: Tensor, blocks: BlockLists) -> SlotLists:
    return slot_lists(blocks, q, k, slot_of(blocks.max_q_length, blocks.max_kv_length))


def _options(lists: SlotLists) -> dict[str, Any]:
    return dict(block_sizes=lists.sizes, q2k_block_nums=lists.counts, sparse_block_size=lists.rows.slot)


def _by_element(blocks: BlockLists) -> bool:
    """Whether key blocks lie differently in each batch element, where the package knows one size of each."""
    return any([isinstance(x, Tensor) and x.shape[0] > 1 for x in (blocks.kv_offsets, blocks.kv_lengths)])


def _each(attend: Callable[..., tuple], blocks: BlockLists, results: tuple, *tensors: Tensor | None) -> tuple:
    """``results``, written by a call for each batch element of its lists and tensors."""
    for i in range(len(results[0])):
        one = slice(i, i + 1)
        lists = BlockLists.from_fields(*[x[one] if isinstance(x, Tensor) and x.shape[0] > 1 else x for x in blocks.to_fields()])
        for whole, part in zip(results, attend(*[None if x is None else x[one] for x in tensors], blocks=lists)):
            whole[one] = part
    return results
