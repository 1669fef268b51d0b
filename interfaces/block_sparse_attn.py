"""MIT's Block-Sparse-Attention, which programs import as ``block_sparse_attn``; MagiAttention has a function of that name.

Every head of a packed batch is dense, block sparse by a mask, or streaming: it keeps sinks and what is near. Its module ``bert_padding``
makes padded batches packed sequences and back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import block_sparse_attention, merge_attention
from ..kernels.checks import (
    INTEGERS,
    check_tensor,
    check_token_inputs,
    require_bool,
    require_int,
    require_number,
    require_values,
    resolve_scale,
)
from .packed import BlockSpans, packed_blocks
from .tokens import Packed, attention_within_blocks

# Tokens of a block, of queries and of keys.
BLOCK = 128
# Blocks of which a query block sees a part, where it streams by tokens: the sinks end in one; 128 windows, each a token further than the
# last, begin in two.
PARTLY_SEEN = 3


def block_sparse_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor | None,
    base_blockmask: Tensor | None, max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float, deterministic: bool = False,
    softmax_scale: float | None = None, is_causal: bool = False, exact_streaming: bool = False, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention on packed sequences in blocks of 128 x 128 tokens, each head with a pattern of its own;
    ``block_sparse_attn.block_sparse_attn_func``.

    Args:
        q: ``[Tq, Hq, D]``; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[Tk, Hkv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[Tk, Hkv, D]``.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[B + 1]``, where each sequence begins and the last one ends. What leads outside the
            tensors is cut, and tokens of no sequence see nothing. Blocks begin anew in every sequence.
        head_mask_type: int32 or int64 ``[Hq]``. 0: dense. 1: block sparse, the first such head by ``base_blockmask[:, 0]``, the second by
            ``base_blockmask[:, 1]`` and so on; n > 1: by ``base_blockmask[:, n - 1]``. Negative: streaming.
        streaming_info: int32 or int64 ``[2 * Hq]``, (sink, local) of each head; only those of streaming heads count. The first ``sink`` and
            the last ``local`` blocks of those that a query block sees. None: streaming heads see nothing.
        base_blockmask: bool or integers, not 0 where a block is kept, ``[B, heads, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)]``.
            None: block-sparse heads see nothing, nor does a head whose number is beyond the mask's heads.
        max_seqlen_q_, max_seqlen_k_: tokens of the longest sequence. Queries and keys past them are left out.
        p_dropout: 0.
        deterministic: as in ``block_sparse_attention``.
        softmax_scale: factor on the scores; default 1 / sqrt(D).
        is_causal: the last query of a sequence sees its last key, the one before it all but that, and so on.
        exact_streaming: sink and local are tokens, the last one being the query's own. Needs ``is_causal`` and ``streaming_info``; no
            gradient, as upstream: a backward raises a RuntimeError.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        ``[Tq, Hq, D]`` in q's dtype; 0 for a query that sees nothing. With ``return_attn_probs`` also the log-sum-exp of each query's
        scaled scores, float32 ``[B, Hq, max_seqlen_q_]`` (float64 for float64 inputs), natural logarithm, +inf where nothing is seen and
        past a sequence's end; and, in the place of upstream's probabilities, which exist with dropout alone, an empty tensor.
        Differentiable also through the log-sum-exp. Under a causal mask queries are copied to the rows of their keys and back unless
        ``cu_seqlens_q is cu_seqlens_k``.
    """
    for name, flag in (("deterministic", deterministic), ("is_causal", is_causal), ("exact_streaming", exact_streaming),
                       ("return_attn_probs", return_attn_probs)):
        require_bool(name, flag)
    if require_number("p_dropout", p_dropout) != 0:
        raise ValueError(f"p_dropout must be 0, got {p_dropout}")
    q, k, v = check_token_inputs(q, k, v)
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    packed = Packed.checked(cu_seqlens_q, cu_seqlens_k, len(q), len(k), q.device)
    batch, heads = packed.sequences, q.shape[1]
    check_tensor("head_mask_type", head_mask_type, INTEGERS, (heads,), "[heads]", q.device)
    longest = require_int("max_seqlen_q_", max_seqlen_q_, 1)
    rows, columns = -(-longest // BLOCK), -(-require_int("max_seqlen_k_", max_seqlen_k_, 1) // BLOCK)
    if base_blockmask is not None:
        check_tensor("base_blockmask", base_blockmask, (torch.bool, torch.uint8, torch.int8, *INTEGERS), (batch, None, rows, columns),
                     "[batch, heads, query blocks, key blocks]", q.device)
    if streaming_info is not None:
        check_tensor("streaming_info", streaming_info, INTEGERS, (2 * heads,), "[2 * heads]", q.device)
        streaming_info = streaming_info.view(heads, 2)

    sequences = _Sequences.of(packed, rows, columns, is_causal)
    streaming = (head_mask_type < 0)[:, None, None]
    kept = _masked(head_mask_type, base_blockmask) | (head_mask_type == 0)[:, None, None]
    partly = None
    if exact_streaming:
        if streaming_info is None or not is_causal:
            raise ValueError(f"exact_streaming must be False unless is_causal is True and streaming_info given, got is_causal={is_causal} "
                             f"and streaming_info {'None' if streaming_info is None else 'given'}")
        near, partly = sequences.near_tokens(streaming_info)
        kept, partly = torch.where(streaming, near, kept), partly & streaming
    elif streaming_info is not None:
        kept = torch.where(streaming, sequences.near(streaming_info, is_causal), kept)
    blocks = packed_blocks(kept.expand(batch, heads, rows, columns), sequences.q_cut, sequences.kv_cut, BLOCK)

    # Under a causal mask one diagonal is right for all sequences where queries lie beside their keys.
    moved = is_causal and (cu_seqlens_q is not cu_seqlens_k or len(q) != len(k)) and bool(q.numel() and k.numel())
    beside = q.index_select(0, sequences.queries(packed)) if moved else q
    inputs = beside.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    scale = resolve_scale(softmax_scale, q.shape[2])
    out, lse = block_sparse_attention(*inputs, blocks, scale=scale, causal=is_causal, return_lse=True, deterministic=deterministic)
    if partly is not None and streaming_info is not None:
        out, lse = _WithoutGradient.apply(*_attend_partly_seen(*inputs, out, lse, sequences, partly, streaming_info, scale), *inputs)
    out, lse = out[0].transpose(0, 1), lse[0].T
    if moved:
        row, there = sequences.rows_of_queries(packed)
        out = out.index_select(0, row).masked_fill(~there[:, None, None], 0)
        lse = lse.index_select(0, row).masked_fill(~there[:, None], float("-inf"))
    return (out, _by_sequence(lse, packed, longest), q.new_empty(0)) if return_attn_probs else out


def token_streaming_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor,
    max_seqlen_q_: int, max_seqlen_k_: int, deterministic: bool = False, softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Causal ``block_sparse_attn_func`` of dense heads and streaming ones, whose sink and local are tokens; no gradient, as upstream.

    Arguments, results and errors as there; ``block_sparse_attn.token_streaming_attn_func``.
    """
    return block_sparse_attn_func(q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
                                  0.0, deterministic, softmax_scale, True, True, return_attn_probs)


def block_streaming_attn_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor, streaming_info: Tensor,
    max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float, deterministic: bool = False, softmax_scale: float | None = None,
    is_causal: bool = True, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``block_sparse_attn_func`` of dense heads and streaming ones, whose sink and local are blocks.

    Arguments, results and errors as there; ``block_sparse_attn.block_streaming_attn_func``.
    """
    return block_sparse_attn_func(q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_,
                                  p_dropout, deterministic, softmax_scale, is_causal, False, return_attn_probs)


def _by_sequence(lse: Tensor, packed: Packed, longest: int) -> Tensor:
    """``[Tq, H]`` as ``[B, H, longest]``, upstream's way: +inf where nothing is seen."""
    position = packed.cu_q[:-1, None] + torch.arange(longest, device=lse.device)
    padded = torch.cat([lse, lse.new_full((1, lse.shape[1]), float("-inf"))])
    padded = padded[position.where(position < packed.cu_q[1:, None], len(lse))].transpose(1, 2)
    return padded.masked_fill(padded == float("-inf"), float("inf"))


class _Sequences(NamedTuple):
    """Packed sequences as rows of queries and keys. Under a causal mask a query's row is that of its key, which the last query has last."""

    first: Tensor  # int32 [B], the row of each sequence's first query
    keys: Tensor   # int32 [B + 1], its keys
    q_cut: BlockSpans   # the query blocks, which begin anew in each sequence
    kv_cut: BlockSpans  # the key blocks

    @classmethod
    def of(cls, packed: Packed, rows: int, columns: int, causal: bool) -> _Sequences:
        first, bounds = (packed.cu_k[1:] - packed.cu_q.diff(), packed.cu_k) if causal else (packed.cu_q[:-1], packed.cu_q)
        return cls(first, packed.cu_k, BlockSpans.of(first, bounds, BLOCK, rows),
                   BlockSpans.of(packed.cu_k[:-1], packed.cu_k, BLOCK, columns))

    def queries(self, packed: Packed) -> Tensor:
        """int64 ``[Tk]``: the query in the row of each key, under a causal mask; any one where there is none."""
        sequence, position, _ = Packed(packed.cu_k, packed.cu_q, packed.k_tokens, packed.q_tokens).places()
        query = packed.cu_q[sequence] + (packed.cu_k[sequence] + position - self.first[sequence])
        return query.clamp(0, packed.q_tokens - 1)

    def rows_of_queries(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """int64 and bool ``[Tq]``: the row of each query, under a causal mask, and whether it has one: not before its first key."""
        sequence, position, inside = packed.places()
        row = self.first[sequence] + position
        return row.clamp(0, packed.k_tokens - 1), inside & (row >= packed.cu_k[sequence])

    def near(self, streaming_info: Tensor, causal: bool) -> Tensor:
        """bool ``[B, H, rows, columns]``: the first and the last blocks that a query block sees, as many of both as ``streaming_info``
        ``[H, 2]`` says. Without a causal mask it sees the whole sequence."""
        sink, local = streaming_info.T[:, None, :, None, None]
        last = self._queries() + BLOCK if causal else self.keys.diff()[:, None, None, None]
        column, seen = _numbers(self.kv_cut), -(-last // BLOCK)
        return (column < sink) | (column < seen) & (column >= seen - local)

    def near_tokens(self, streaming_info: Tensor) -> tuple[Tensor, Tensor]:
        """bool ``[B, H, rows, columns]`` each: the blocks that hold the first tokens or the last ones that a causal query sees, as many of
        both as ``streaming_info`` ``[H, 2]`` says, first those of which it sees all but the future, then those of which it sees a part."""
        sink, local = streaming_info.T[:, None, :, None, None]
        key, query = _numbers(self.kv_cut) * BLOCK, self._queries()
        key_end, query_end = key + (BLOCK - 1), query + (BLOCK - 1)
        seen = (key <= query_end) & ((key < sink) | (key_end > query - local))
        whole = (key_end < sink) | (key > query_end - local)
        return seen & whole, seen & ~whole

    def _queries(self) -> Tensor:
        """int32 ``[B, 1, rows, 1]``: which of its sequence's keys stands beside the first query of each block, under a causal mask."""
        return ((self.first - self.keys[:-1])[:, None] + _numbers(self.q_cut) * BLOCK)[:, None, :, None]


def _numbers(cut: BlockSpans) -> Tensor:
    """int32: those of the blocks of the longest sequence."""
    return torch.arange(cut.starts.shape[1], dtype=torch.int32, device=cut.starts.device)


def _masked(head_mask_type: Tensor, base_blockmask: Tensor | None) -> Tensor:
    """bool ``[B or 1, H or 1, rows or 1, columns or 1]``: what heads of a positive number keep, the n-th 1 the mask n - 1, another number n
    too. A mask that is not there keeps nothing."""
    if base_blockmask is None or not base_blockmask.shape[1]:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=head_mask_type.device)
    ones = head_mask_type == 1
    number = torch.where(ones, ones.cumsum(0), head_mask_type) - 1
    there = (number >= 0) & (number < base_blockmask.shape[1])
    return base_blockmask.index_select(1, number.where(there, 0)).bool() & there[:, None, None]


def _attend_partly_seen(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: _Sequences, partly: Tensor,
                        streaming_info: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) and attention to the blocks ``partly`` ``[B, Hq, rows, columns]``, of which a query sees, up to its own, the first
    tokens and the last ones, (sink, local) of ``streaming_info`` ``[Hq, 2]``.

    q ``[1, Hq, Tk, D]``, each query in its key's row; k, v ``[1, Hkv, Tk, D]``. Takes 384 bytes for each query of each head, and three
    times as many while the masks are made.
    """
    blocks = packed_blocks(partly, sequences.q_cut, sequences.kv_cut, BLOCK, capacity=PARTLY_SEEN)
    sink, local = streaming_info.T[:, :, None, None, None, None]
    inside = torch.arange(BLOCK, dtype=torch.int32, device=q.device)
    # Both counted from their sequence's first key, [Hq, B * rows, 3, queries, keys].
    key = blocks.indices[0, ..., None, None] % partly.shape[3] * BLOCK + inside
    query = (sequences.q_cut.starts - sequences.keys[:-1, None]).flatten()[:, None, None, None] + inside[:, None]
    mask = (key <= query) & ((key < sink) | (key > query - local))
    entry = torch.arange(blocks.counts.numel(), dtype=torch.int32, device=q.device).view(blocks.counts.shape) * PARTLY_SEEN
    part, part_lse = attention_within_blocks(q, k, v, blocks, scale, mask=mask.flatten(0, 2), first_entry=entry)
    return merge_attention([out.detach(), part], [lse.detach(), part_lse])


class _WithoutGradient(torch.autograd.Function):
    """The first two tensors as they are; a backward through them to the others raises."""

    @staticmethod
    def forward(ctx, out, lse, *inputs):
        return out, lse

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("exact_streaming has no gradient: stream by blocks, exact_streaming=False")


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
