"""What native sparse attention does with blocks as a whole: their mean keys and values, attention to those, and the choice of blocks by it.

``parallel_nsa_compression`` and ``parallel_nsa_topk`` have fla's names and arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import INTEGERS, check_tensor, check_token_inputs, require_int, resolve_scale
from ...routing import choose_token_impl
from ...tokens import Packed, importance, lists_from_ids, token_attention

DIMS = "[batch, tokens, heads, head_dim]"
# Means that the compressed branch takes as one block.
MEANS_AT_ONCE = 64
# Scores, or sums of them, of tokens with blocks that are held at once: 32 MiB of float32, and three times as much to rank them.
CHOICE_ELEMENTS = 1 << 23


def parallel_nsa_compression(
    q: Tensor, k: Tensor, v: Tensor, TK: int, block_size: int = 64, scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None, *, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of every token to one key and value for each block that ends at it or before; ``fla.ops.nsa.compression``'s function.

    Args:
        q: ``[B, T, HQ, D]``, float16 or bfloat16; in plain torch also float32 and float64.
        k: ``[B, TC, H, D]``, TC = ceil(TK / block_size), a key for each block; HQ a multiple of H. With cu_seqlens ``[1, TC, H, D]``, the
            blocks of all sequences behind one another, a sequence of n tokens having ceil(n / block_size).
        v: ``[B, TC, H, Dv]``.
        TK: tokens that the keys stand for; with cu_seqlens of all sequences together. With TK > T the queries are the last T positions.
        block_size: tokens of a block.
        scale: factor on the scores; default 1 / sqrt(D).
        cu_seqlens: int32 or int64 ``[N + 1]``, of the tokens, or a pair of such, of the queries and of the keys; B is then 1. Values are
            not read; what leads outside the tokens is cut.
        impl: as in ``selected_attention``.

    Returns:
        out ``[B, T, HQ, Dv]`` in q's dtype and lse, float32 ``[B, T, HQ]``, natural logarithm. Both are 0 for a token that no block ends
        at or before, lse too, as upstream.

    Differentiable in q, k and v, also through lse; bitwise deterministic; never synchronises. Groups of any size.
    """
    q, k, v = check_token_inputs(q, k, v, dims=DIMS)
    TK, block_size = require_int("TK", TK, 1), require_int("block_size", block_size, 1)
    packed = _packed_blocks(q, k, TK, block_size, cu_seqlens)
    firsts, origin, position = _places(packed, block_size)
    rows = k.shape[0] * k.shape[1]
    seen = ((position + 1) // block_size).minimum(rows - origin).clamp(min=0)
    spans = torch.stack([origin, torch.zeros_like(origin), seen], 1).int()
    ends = torch.cat([firsts, firsts.new_full((1,), rows)]).int()
    ids = torch.arange(-(-(TK // block_size) // MEANS_AT_ONCE), device=q.device).expand(len(spans), k.shape[2], -1)
    out, lse = attend_to_blocks(q, k, v, ids, None, Packed(packed.cu_q, ends, packed.q_tokens, rows), spans, MEANS_AT_ONCE, scale, impl)
    return out, torch.where((seen > 0).unflatten(0, q.shape[:2])[..., None], lse, 0.0)


def attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, counts: Tensor | None, packed: Packed, spans: Tensor, block_size: int,
                     scale: float | None, impl: str) -> tuple[Tensor, Tensor]:
    """``token_attention`` of q, k and v ``[B, T, H, D]`` to the blocks ``ids``, which ``lists_from_ids`` takes with what follows them."""
    impl = choose_token_impl(impl, q.device, q.dtype, q.shape[-1], v.shape[-1])
    lists = lists_from_ids(ids, counts, packed, spans, block_size, impl)
    out, lse = token_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), lists, scale=scale, impl=impl)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


@torch.no_grad()
def parallel_nsa_topk(
    q: Tensor, k: Tensor, TK: int, lse: Tensor | None, block_counts: Tensor | int, block_size: int = 64, scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None, *, impl: str = "auto",
) -> Tensor:
    """The blocks that every token selects; ``fla.ops.nsa.parallel.parallel_nsa_topk``.

    The first block, the token's own and the one before come first. The others that end before the token follow by their probability under
    the compressed branch, summed over the query heads of a key/value head; of equal ones the earlier block goes first.

    Args:
        q, k, TK, block_size, scale, cu_seqlens, impl: as in ``parallel_nsa_compression``.
        lse: float32 or float64 ``[B, T, HQ]``, what that returned for them; None computes it.
        block_counts: how many blocks a token selects: an int of at least 1, or int32 or int64 ``[B, T, H]``, whose largest is read back.

    Returns:
        int32 ``[B, T, H, S]``, S the largest count: block numbers within the sequence, -1 where there are no more or a count is smaller.

    No gradient. In float32, for some tokens at a time; synchronises just to read a tensor of block_counts.
    Differs from fla on purpose: S is not rounded up to a power of two, and may be more than half of block_size.
    """
    q, k, _ = check_token_inputs(q, k, k, dims=DIMS)
    TK, block_size = require_int("TK", TK, 1), require_int("block_size", block_size, 1)
    packed = _packed_blocks(q, k, TK, block_size, cu_seqlens)
    scale, impl = resolve_scale(scale, q.shape[-1]), choose_token_impl(impl, q.device, q.dtype, q.shape[-1])
    limits = None
    if isinstance(block_counts, Tensor):
        check_tensor("block_counts", block_counts, INTEGERS, (*q.shape[:2], k.shape[2]), "[B, T, H]", q.device)
        limits, block_counts = block_counts, max(int(block_counts.max()), 1) if block_counts.numel() else 1
    block_counts = require_int("block_counts", block_counts, 1)
    if lse is None:
        lse = parallel_nsa_compression(q, k, k, TK, block_size, scale, cu_seqlens, impl=impl)[1]
    check_tensor("lse", lse, (torch.float32, torch.float64), q.shape[:3], "[B, T, HQ]", q.device)
    _, origin, position = _places(packed, block_size)
    chosen = torch.full((*q.shape[:2], k.shape[2], block_counts), -1, dtype=torch.int32, device=q.device)
    at_once = max(1, CHOICE_ELEMENTS // max((k if impl == "triton" else q).shape[2] * k.shape[1], 1))
    # A sum in float32 must stay one under autocast.
    with torch.autocast(q.device.type, enabled=False):
        for b in range(q.shape[0]):
            number = torch.arange(k.shape[1], device=q.device)
            first_row, place = (x.view(q.shape[:2])[b] for x in (origin - b * k.shape[1], position))
            seen, log_sums = (place + 1) // block_size, lse[b].float().contiguous()
            for first in range(0, q.shape[1], at_once):
                some = slice(first, first + at_once)
                # In a single sequence these tokens see blocks up to that of the last of them.
                last = TK - q.shape[1] + min(first + at_once, q.shape[1]) - 1
                number_seen = k.shape[1] if cu_seqlens is not None else last // block_size + 1
                weights = importance(q[b, some], k[b, :number_seen], log_sums[some], first_row[some], seen[some], scale, impl)
                ids = _topk_blocks(weights, number[:number_seen] - first_row[some, None], place[some, None], block_size, block_counts)
                chosen[b, some, :, :ids.shape[2]] = ids
    if limits is not None:
        chosen.masked_fill_(torch.arange(block_counts, device=q.device) >= limits[..., None], -1)
    return chosen


def _topk_blocks(weights: Tensor, block: Tensor, position: Tensor, block_size: int, count: int) -> Tensor:
    """int32 [t, H, min(count, rows)] of weights [H, t, rows], of which only that of seen blocks is defined, and which is written over.

    block [t, rows] is the number of a row in the token's sequence, and may lie outside of it; position [t, 1] the token's place there, or
    -1.
    """
    own = position // block_size
    seen, allowed = block < (position + 1) // block_size, (block >= 0) & (block <= own)
    # NaN counts as nothing: the blocks that every token takes must not lose to it.
    weights = weights.masked_fill_(~(seen & (weights >= 0)), 0.0).masked_fill_((block == 0) | (block >= own - 1), float("inf"))
    # Floats of at least 0 are ordered as their bits are. The row breaks ties, which topk alone would by chance.
    rank = weights.view(torch.int32).long().mul_(2**32).sub_(torch.arange(block.shape[1], device=block.device))
    best, row = rank.masked_fill_(~allowed, -2**62).topk(min(count, block.shape[1]), dim=-1)
    ids = block.expand(row.shape[0], -1, -1).gather(2, row)
    return ids.masked_fill_(best == -2**62, -1).transpose(0, 1).int()


def block_means(x: Tensor, packed: Packed, block_size: int) -> Tensor:
    """[B, TC, H, D], or [1, TC and spare rows, H, D] of packed sequences: the mean of every block of x [B, T, H, D], in x's dtype."""
    _, starts, sizes = packed.key_blocks(block_size)
    # Blocks of a batch element: with a single cu_seqlens the spare ones stay.
    number = -(-x.shape[1] // block_size) if packed.sequences == x.shape[0] else len(starts)
    starts, sizes = (part[:x.shape[0] * number] for part in (starts, sizes))
    places = torch.arange(block_size, device=x.device)
    rows, real = starts[:, None] + places, (places < sizes[:, None])[..., None, None]
    blocks = x.flatten(0, 1)[rows.clamp(max=max(x.shape[0] * x.shape[1] - 1, 0))].masked_fill(~real, 0)
    total = blocks.sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    return (total / sizes.clamp(min=1)[:, None, None]).to(x.dtype).unflatten(0, (x.shape[0], number))


def packed_sequences(q: Tensor, k: Tensor, k_tokens: int, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> Packed:
    """How the sequences lie in q [B, T, H, D] and in the k_tokens that k [B, ...] stands for, with B and the tokens made one dimension."""
    batch, q_tokens = q.shape[:2]
    if k.shape[0] != batch:
        raise ValueError(f"k must have q's batch {batch}, got {k.shape[0]}")
    if cu_seqlens is None:
        if k_tokens < q_tokens:
            raise ValueError(f"k must have at least q's {q_tokens} tokens, got {k_tokens}")
        # As columns of one range, whose step may be 0 tokens.
        number = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        return Packed(number * q_tokens, number * k_tokens, batch * q_tokens, batch * k_tokens)
    if batch != 1:
        raise ValueError(f"q must have batch 1 with cu_seqlens, got {batch}")
    if not isinstance(cu_seqlens, (tuple, list)):
        if k_tokens != q_tokens:
            raise ValueError(f"k must have q's {q_tokens} tokens with one cu_seqlens for both, got {k_tokens}")
        cu_seqlens = cu_seqlens, cu_seqlens
    if len(cu_seqlens) != 2:
        raise ValueError(f"cu_seqlens must be a tensor or a pair of them, got {len(cu_seqlens)}")
    return Packed.checked(*cu_seqlens, q_tokens, k_tokens, q.device, names=("cu_seqlens", "cu_seqlens"), dims="[N + 1]")


def _packed_blocks(q: Tensor, k: Tensor, TK: int, block_size: int, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> Packed:
    """The tokens' sequences, with k checked to have a row for each block of theirs."""
    if cu_seqlens is None and k.shape[1] != -(-TK // block_size):
        raise ValueError(f"k must have ceil(TK / block_size) = {-(-TK // block_size)} blocks, got {k.shape[1]}")
    return packed_sequences(q, k, TK, cu_seqlens)


def _places(packed: Packed, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first row of every sequence's blocks, int64 [N]; that of every token's, int64 [T]; its position among the keys, or -1)."""
    firsts = packed.key_blocks(block_size)[0]
    return firsts, firsts[packed.places()[0]], packed.spans()[:, 2].long() - 1
