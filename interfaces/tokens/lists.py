"""TokenLists: for every query token and key/value head, the key blocks that it attends to; and the way back, from key blocks to tokens.

BlockLists cuts the queries into blocks too. Here each token has a list of its own, shared by the query heads of a key/value head,
and a span of keys that it may see at all: its sequence in a packed batch, what lies before it, a window, the filled part of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.block_forms import prefix_mask
from ...kernels.checks import INTEGERS, check_tensor


class KeyLists(NamedTuple):
    """For every key block and key/value head, the query tokens that attend to it. Made by the backward pass of the Triton kernels."""

    starts: Tensor   # int32 [Nk], first row of a key block
    sizes: Tensor    # int32 [Nk], its rows; 0 for spare entries
    tokens: Tensor   # int32 [n], query tokens, ascending within a list
    firsts: Tensor   # int64 [Hkv, Nk], where in ``tokens`` a list begins
    counts: Tensor   # int32 [Hkv, Nk], how long it is


class PaddedCache(NamedTuple):
    """Caches of one size, one for each token, in which a token's keys are the first or, if ``left`` is padded, the last."""

    pitch: int      # rows from one cache to the next
    capacity: int   # rows of a cache
    left: bool


@dataclass(frozen=True, eq=False)
class TokenLists:
    """For every (query token, key/value head), the key blocks that it attends to.

    Args:
        ids: int32 ``[T, Hkv, capacity]``, block numbers, counted from the token's origin. Ids below 0 or past the span are absent.
        counts: int32 ``[T, Hkv]``, how many entries of ``ids`` count, from the front on; None: all.
        spans: int32 ``[T, 3]``: (origin, low, high). Block n of the token holds the keys n * block_size up to (n + 1) * block_size from row
            ``origin`` on; of these the token sees the ones from ``low`` up to ``high``, both counted from the origin.
        block_size: tokens of a key block.
        full: int32 ``[T, Hkv]``: the first so many entries are blocks that the token sees wholly. None where nothing is known of them.
        cache: where given, ``spans`` is instead int32 or int64 ``[T]``, the keys of each token's own padded cache.
        packed: where the sequences lie, which ``invert`` wants to know; None where there is no gradient.
        mask: what the lists were made of by kernels, which invert that instead.
    """

    ids: Tensor
    counts: Tensor | None
    spans: Tensor
    block_size: int
    full: Tensor | None = None
    cache: PaddedCache | None = None
    packed: Packed | None = None
    mask: Tensor | None = None

    def used(self) -> Tensor:
        """bool as ids: which entries count."""
        if self.counts is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return prefix_mask(self.counts, self.ids.shape[2])

    def token_spans(self) -> Tensor:
        """``spans`` in its full form, int32 [T, 3]."""
        if self.cache is None:
            return self.spans
        length = self.spans.clamp(0, self.cache.capacity).int()
        origin = torch.arange(len(length), dtype=torch.int32, device=length.device) * self.cache.pitch
        first = self.cache.capacity - length if self.cache.left else torch.zeros_like(length)
        return torch.stack([origin, first, first + length], 1)

    def invert(self) -> KeyLists:
        """The way back. Sorts all entries by key block; the sort is stable, so tokens stay in order."""
        assert self.packed is not None, "no gradient through these lists"
        if self.mask is not None:
            return self._inverted_mask(self.packed, self.mask)
        ids = self.ids
        tokens, heads, capacity = ids.shape
        firsts, starts, sizes = self.packed.key_blocks(self.block_size)
        number = len(starts)
        used = self.used() & (ids >= 0)
        block = (firsts[self.packed.places()[0], None, None] + ids).where(used, number)
        rows = torch.arange(heads, device=ids.device)[:, None] * (number + 1)
        keys, order = (block.transpose(0, 1) + rows[:, :, None]).flatten().sort(stable=True)
        bounds = torch.searchsorted(keys, rows + torch.arange(number + 1, device=ids.device))
        entries = order % max(tokens * capacity, 1) // max(capacity, 1)
        return KeyLists(starts, sizes, entries.int(), bounds[:, :-1].contiguous(), bounds.diff(dim=1).int())

    def _inverted_mask(self, packed: Packed, mask: Tensor) -> KeyLists:
        """Every sequence has the mask's number of key blocks, full or not."""
        from .triton.lists import row_lists

        (longest, number), (cu_q, cu_k) = mask.shape[2:], (packed.cu_q.long(), packed.cu_k.long())
        block = torch.arange(packed.sequences * number, device=mask.device)
        sequence, first = block // number, block % number * self.block_size
        starts, sizes = cu_k[sequence] + first, (cu_k.diff()[sequence] - first).clamp(0, self.block_size)
        # A block is seen by the tokens from its own first one on.
        begins = sequence * mask.stride(0) + block % number * mask.stride(3)
        rows = torch.stack([begins, first, cu_q.diff()[sequence].clamp(max=longest), cu_q[sequence]], 1)
        tokens, counts = row_lists(mask[:, :, :, 0], rows)
        firsts = torch.arange(counts.numel(), device=mask.device).view(counts.shape) * longest
        return KeyLists(starts.int(), sizes.int(), tokens.flatten(), firsts.T.contiguous(), counts.T.contiguous())


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences that lie behind one another in [T, H, D] tensors, as ``cu_seqlens`` [B + 1] (int32) cut them."""

    cu_q: Tensor
    cu_k: Tensor
    q_tokens: int
    k_tokens: int

    @classmethod
    def checked(cls, cu_q: Tensor, cu_k: Tensor, q_tokens: int, k_tokens: int, device: torch.device, *,
                names: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k"), dims: str = "[B + 1]") -> Packed:
        """From offsets of 32 or 64 bits, which errors call ``names``, and any values; those that lead outside the tensors are cut. Does not
        synchronise."""
        check_tensor(names[0], cu_q, INTEGERS, (None,), dims, device)
        if len(cu_q) < 2:
            raise ValueError(f"{names[0]} must hold at least two entries, got {len(cu_q)}")
        check_tensor(names[1], cu_k, INTEGERS, cu_q.shape, dims, device)
        return cls(cu_q.clamp(0, q_tokens).int(), cu_k.clamp(0, k_tokens).int(), q_tokens, k_tokens)

    @property
    def sequences(self) -> int:
        return self.cu_q.shape[0] - 1

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """(sequence int64 [T], position in it int64 [T], whether it lies in any, bool [T]) of every query token."""
        token = torch.arange(self.q_tokens, dtype=self.cu_q.dtype, device=self.cu_q.device)
        sequence = torch.searchsorted(self.cu_q[1:].contiguous(), token, right=True)
        inside = sequence < self.sequences
        sequence = sequence.clamp(max=self.sequences - 1)
        position = token.long() - self.cu_q[sequence]
        return sequence, position, inside & (position >= 0)

    def spans(self, window: int | None = None, whole_blocks_of: int = 1) -> Tensor:
        """Causal spans, int32 [T, 3]: the last query of a sequence stands at its last key.

        With ``window`` a token sees just the last so many keys; with ``whole_blocks_of`` the rest of the last block that begins
        at or before it as well. Offsets that lead outside the tensors are cut.
        """
        sequence, position, inside = self.places()
        origin = self.cu_k[sequence].long().clamp(0, self.k_tokens)
        length = (self.cu_k[sequence + 1].long() - origin).clamp(min=0).minimum(self.k_tokens - origin)
        asked = self.cu_q[sequence + 1].long() - self.cu_q[sequence]
        place = position + length - asked
        high = ((place // whole_blocks_of + 1) * whole_blocks_of).minimum(length).clamp(min=0).where(inside, 0)
        low = torch.zeros_like(high) if window is None else (place + 1 - window).clamp(min=0)
        return torch.stack([origin, low, high], 1).int()

    def key_blocks(self, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(first key block of each sequence int64 [B], starts int32 [Nk], sizes int32 [Nk]): just as many blocks as the sequences fill, and
        spare ones at the end."""
        cu = self.cu_k.long().clamp(0, self.k_tokens)
        lengths = cu.diff().clamp(min=0)
        ends = ((lengths + block_size - 1) // block_size).cumsum(0)
        block = torch.arange(self.k_tokens // block_size + self.sequences, device=cu.device)
        sequence = torch.searchsorted(ends, block, right=True)
        known = sequence < self.sequences
        sequence = sequence.clamp(max=self.sequences - 1)
        firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
        before = (block - firsts[sequence]) * block_size
        sizes = (lengths[sequence] - before).clamp(0, block_size).where(known, 0)
        return firsts, (cu[sequence] + before).where(known, 0).int(), sizes.int()


def lists_from_ids(ids: Tensor, counts: Tensor | None, packed: Packed, spans: Tensor, block_size: int, impl: str) -> TokenLists:
    """TokenLists from block ids ``[T, Hkv, S]`` of any integer dtype and any values, unsorted.

    Ids below 0, past the token's span or at a slot from ``counts`` [T, Hkv] on are left out, and an id that is repeated counts once.
    Does not synchronise. ``impl`` is "triton" or "torch", as the attention's; the first takes blocks that a token sees wholly as tiles.
    """
    low, high = spans[:, 1:, None, None].unbind(1)
    nowhere = torch.iinfo(torch.int32).max
    known = (ids >= 0) & (ids < (high + (block_size - 1)) // block_size)
    if counts is not None:
        known &= prefix_mask(counts, ids.shape[2])
    ids = ids.where(known, nowhere).int().sort(-1).values
    once = ids != nowhere
    once[..., 1:] &= ids[..., 1:] != ids[..., :-1]
    whole = once & (ids * block_size >= low) & (ids * block_size <= high - block_size)
    order = (once.byte() + whole.byte()).argsort(dim=-1, descending=True, stable=True)
    full = whole.sum(-1, dtype=torch.int32) if impl == "triton" else None
    return TokenLists(ids.gather(-1, order), once.sum(-1, dtype=torch.int32), spans, block_size, full, packed=packed)


def lists_from_mask(mask: Tensor, packed: Packed, spans: Tensor, block_size: int, impl: str) -> TokenLists:
    """TokenLists from a causal bool mask ``[B, Hkv, L, N]``: query token of each sequence by key block of it.

    Tokens past L attend to nothing. Takes 4 bytes for each entry of the mask, and as much again for a gradient. Does not synchronise.
    ``impl`` is "triton" or "torch", as the attention's; it changes nothing but speed.
    """
    sequence, position, inside = packed.places()
    inside = inside & (position < mask.shape[2])
    if impl == "triton":
        from .triton.lists import row_lists

        own, nothing = position // block_size, torch.zeros_like(position)
        end = (own + 1).clamp(max=mask.shape[3]).where(inside, 0)
        start = sequence * mask.stride(0) + position * mask.stride(2)
        ids, counts = row_lists(mask[:, :, 0], torch.stack([start, nothing, end, nothing], 1))
        # A token sees its own block, which is the last of a list, up to itself.
        last = ids.gather(2, (counts - 1).clamp(min=0)[..., None].long())[..., 0]
        full = counts - ((last == own[:, None]) & (counts > 0)).int()
        return TokenLists(ids, counts, spans, block_size, full, packed=packed, mask=mask)
    rows = mask[sequence, :, position.clamp(0, max(mask.shape[2] - 1, 0))] & inside[:, None, None]
    rows = rows & (torch.arange(mask.shape[3], device=mask.device) * block_size < spans[:, 2:, None])
    return TokenLists(*_sorted_rows(rows), spans, block_size, packed=packed)


def lists_from_rows(mask: Tensor, lengths: Tensor, cache: PaddedCache, block_size: int, impl: str) -> TokenLists:
    """TokenLists without a gradient from a bool mask ``[T, Hkv, N]``: a row and a cache for every token. Does not synchronise."""
    if impl == "triton":
        from .triton.lists import row_lists

        return TokenLists(*row_lists(mask), lengths, block_size, cache=cache)
    return TokenLists(*_sorted_rows(mask), lengths, block_size, cache=cache)


def _sorted_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(ids int32, counts int32) of the True entries along the last dimension, ascending."""
    return mask.logical_not().argsort(dim=-1, stable=True).int(), mask.sum(-1, dtype=torch.int32)
