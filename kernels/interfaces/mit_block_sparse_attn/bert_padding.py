"""Padded batches to packed sequences and back: the module ``bert_padding`` of Block-Sparse-Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import require_int, require_values


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The valid tokens of a batch, behind one another; ``block_sparse_attn.bert_padding.unpad_input``.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask: bool or int ``[B, S]``, 1 where a token is valid.

    Returns:
        (tokens ``[n, ...]``, their places int64 ``[n]`` in the batch seen as ``[B * S, ...]``, cu_seqlens int32 ``[B + 1]``, tokens of the
        longest sequence). Differentiable in hidden_states. Reads the mask back, as upstream: n is a shape.
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ValueError(f"attention_mask must be [B, S] = {list(hidden_states.shape[:2])}, got shape {tuple(attention_mask.shape)}")
    lengths = require_values("attention_mask", attention_mask).sum(-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1).index_select(0, places), places, cu_seqlens, int(lengths.max()) if len(lengths) else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens ``[n, ...]`` back at their places int64 ``[n]`` of a batch ``[batch, seqlen, ...]``, zeros elsewhere;
    ``block_sparse_attn.bert_padding.pad_input``. Differentiable in hidden_states.
    """
    batch, seqlen = require_int("batch", batch, 0), require_int("seqlen", seqlen, 0)
    if indices.shape != hidden_states.shape[:1]:
        raise ValueError(f"indices must be [n] = {list(hidden_states.shape[:1])}, got shape {tuple(indices.shape)}")
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
