"""Native sparse attention (Yuan et al. 2025): every token attends to the key blocks selected for it, with the names of fla and tilelang.

``selected_attention`` is the selected branch itself, ``parallel_nsa`` fla's function, and ``native_sparse_attention`` tilelang's kernel.
``parallel_nsa_compression`` attends to blocks' means, by which ``parallel_nsa_topk`` selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.checks import DTYPES, INTEGERS, check_tensor, check_token_inputs, require_bool, require_int, resolve_scale
from .tokens import Packed, choose_token_impl, importance, lists_from_ids, token_attention

DIMS = "[batch, tokens, heads, head_dim]"
# Keys that the window branch takes as one block.
WINDOW_BLOCK = 64
# Blocks that a token selects where nothing else is asked for; fla's default, and tilelang's.
SELECTED_BLOCKS = 16
# Dtypes of gates with which no result is wider than float32.
GATES = (torch.float16, torch.bfloat16, torch.float32)
# Means that the compressed branch takes as one block.
MEANS_AT_ONCE = 64
# Scores, or sums of them, of tokens with blocks that are held at once: 32 MiB of float32, and three times as much to rank them.
CHOICE_ELEMENTS = 1 << 23


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | int | None = None, block_size: int = 64,
    scale: float | None = None, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None, *, return_lse: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of every token to the key blocks selected for it; a block that is not yet over is seen up to the token.

    Args:
        q: ``[B, T, HQ, D]``, float16 or bfloat16; in plain torch also float32 and float64.
        k: ``[B, Tk, H, D]``, HQ a multiple of H. With Tk > T the queries are the last T positions.
        v: ``[B, Tk, H, Dv]``.
        block_indices: int32 or int64 ``[B, T, H, S]``, block numbers within the sequence, shared by the query heads of a key/value head.
            Unsorted is fine. Numbers below 0 and blocks that begin after the token or past the keys are skipped, whatever the number.
        block_counts: how many of the S count: None for all, an int, or int32 or int64 ``[B, T, H]``.
        block_size: tokens of a block.
        scale: factor on the scores; default 1 / sqrt(D).
        cu_seqlens: int32 or int64 ``[N + 1]``: B is 1 and sequences lie behind one another; blocks and block_indices begin anew in each.
            Or a pair of such, of the queries and of the keys: the queries of a sequence are then its last positions. Values are not read;
            what leads outside the tokens is cut.
        return_lse: also return the log-sum-exp of each row's scaled scores.
        impl: "auto", "triton" (GPUs; float16 or bfloat16; head dimensions 16 to 256) or "torch" (plain torch, any device).

    Returns:
        out ``[B, T, HQ, Dv]`` in q's dtype, and with ``return_lse`` lse, float32 ``[B, T, HQ]``, natural logarithm.

    An index that is listed twice counts once, forward and backward.
    """
    require_bool("return_lse", return_lse)
    q, k, v = check_token_inputs(q, k, v, dims=DIMS)
    check_tensor("block_indices", block_indices, INTEGERS, (*q.shape[:2], k.shape[2], None), "[B, T, H, S]", q.device)
    block_size = require_int("block_size", block_size, 1)
    packed = _packed_sequences(q, k, k.shape[1], cu_seqlens)
    if isinstance(block_counts, Tensor):
        check_tensor("block_counts", block_counts, INTEGERS, block_indices.shape[:3], "[B, T, H]", q.device)
        block_counts = block_counts.flatten(0, 1)
    elif block_counts is not None:
        block_indices, block_counts = block_indices[..., :require_int("block_counts", block_counts, 0)], None
    out, lse = _attend_to_blocks(q, k, v, block_indices.flatten(0, 1), block_counts, packed, packed.spans(), block_size, scale, impl)
    return (out, lse) if return_lse else out


def parallel_nsa(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor | None = None, g_slc: Tensor | None = None, g_swa: Tensor | None = None,
    block_indices: Tensor | None = None, block_counts: Tensor | int | None = None, block_size: int = 64, window_size: int = 0,
    scale: float | None = None, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None, *, impl: str = "auto",
) -> Tensor:
    """fla's parallel_nsa: ``selected_attention * g_slc``, plus ``compressed * g_cmp`` where that gate is given, plus ``sliding window *
    g_swa`` where window_size > 0.

    Args:
        q, k, v, block_size, cu_seqlens, impl: as in ``selected_attention``.
        g_cmp: ``[B, T, HQ]`` gate of the compressed branch, in which every token attends to the mean key and mean value of each block
            that is over at it; None for no such branch. Gates are floating-point, and float64 just where q is.
        g_slc: such a gate of the selected branch, or None for 1.
        g_swa: such a gate of the window branch, or None for 1. Without effect where there is no window, as upstream.
        block_indices: as in ``selected_attention``, and taken whether or not g_cmp is given. None: ``parallel_nsa_topk`` selects them by
            the mean keys; no gradient flows through the selection.
        block_counts: as in ``selected_attention``; where blocks are selected here, how many, None being 16, and the largest of a tensor
            is read back.
        window_size: keys that the window branch sees, the token's own included; 0 for no such branch.
        scale: factor on the scores of the selected and the compressed branch; default 1 / sqrt(D), which the window branch always has, as
            upstream, where flash-attn is called without it.

    Returns:
        ``[B, T, HQ, Dv]`` in the dtype that torch promotes q's and the gates' to. Differentiable in the gates too.
    """
    window_size, block_size = require_int("window_size", window_size, 0), require_int("block_size", block_size, 1)
    q, k, v = check_token_inputs(q, k, v, dims=DIMS)
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is not None:
            check_tensor(name, gate, DTYPES if q.dtype == torch.float64 else GATES, q.shape[:3], "[B, T, HQ]", q.device)
    compressed = lse = None
    if g_cmp is not None or block_indices is None:
        if not k.shape[1]:
            raise ValueError(f"k must have at least 1 token, of which blocks are made, got shape {tuple(k.shape)}")
        packed = _packed_sequences(q, k, k.shape[1], cu_seqlens)
        blocks: dict[str, Any] = dict(TK=k.shape[1], block_size=block_size, scale=scale, cu_seqlens=cu_seqlens, impl=impl)
        keys = _block_means(k, packed, block_size)
        if g_cmp is not None:
            compressed, lse = parallel_nsa_compression(q, keys, _block_means(v, packed, block_size), **blocks)
        if block_indices is None:
            counts = SELECTED_BLOCKS if block_counts is None else block_counts
            block_indices, block_counts = parallel_nsa_topk(q, keys, lse=None if lse is None else lse.detach(), block_counts=counts,
                                                            **blocks), None
    out = selected_attention(q, k, v, block_indices, block_counts, block_size, scale, cu_seqlens, return_lse=True, impl=impl)[0]
    if g_slc is not None:
        out = out * g_slc[..., None]
    if compressed is not None and g_cmp is not None:
        out = out + compressed * g_cmp[..., None]
    if window_size:
        near = _window_attention(q, k, v, window_size, cu_seqlens, impl)
        out = out + (near if g_swa is None else near * g_swa[..., None])
    return out


def parallel_nsa_fwd(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor | int | None, block_size: int, scale: float | None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, token_indices_q: Tensor | None = None, *, impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """fla's forward alone, ``fla.ops.nsa.parallel.parallel_nsa_fwd``: ``selected_attention`` with the log-sum-exp.

    Args:
        cu_seqlens_q, cu_seqlens_k: the two of ``cu_seqlens``, or None.
        token_indices_q: upstream's table of every token's sequence and place; both follow from cu_seqlens_q here, so it is not read.
        The others, and the result: as in ``selected_attention``, whose gradient this has too.
    """
    cu_seqlens = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens = cu_seqlens_q, cu_seqlens_k
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together, got one of them")
    out, lse = selected_attention(q, k, v, block_indices, block_counts, block_size, scale, cu_seqlens, return_lse=True, impl=impl)
    return out, lse


def native_sparse_attention(*problem, **options):
    """tilelang's kernel, in both forms that its examples have had: a factory of the callable for one problem size, ``(batch, heads,
    seq_len, dim, is_causal=True, scale=None, block_size=64, groups=1, selected_blocks=16)``, or the attention of tensors at once,
    ``(Q, K, V, BlockIndices, dim, ...)``.

    Args:
        batch, seq_len: B and T of the tensors. Q and BlockIndices may also have one token, the last one of a sequence of T, as in
            tilelang's decode example.
        heads: query heads; ``groups`` of them share a key/value head.
        Q, K, V, BlockIndices: the tensors, in place of batch, heads and seq_len.
        dim: head dimension.
        is_causal: False lets a token see the whole of a selected block that begins at or before it, as tilelang's kernel does.
        scale: factor on the scores; default 1 / sqrt(dim).
        block_size: tokens of a block.
        selected_blocks: S of the block indices.

    Returns:
        From sizes a callable ``(Q [B, T, heads, dim], K and V [B, T, heads / groups, dim], BlockIndices int [B, T, heads / groups, S]) ->
        Output``; from tensors the output. Nothing is compiled for the sizes.
    """
    with_tensors = "Q" in options or problem and isinstance(problem[0], Tensor)
    return (_attend_tensors if with_tensors else NativeSparseAttention)(*problem, **options)


def _attend_tensors(Q: Tensor, K: Tensor, V: Tensor, BlockIndices: Tensor, dim: int, is_causal: bool = True, scale: float | None = None,
                    block_size: int = 64, groups: int = 1, selected_blocks: int = 16, *, impl: str = "auto") -> Tensor:
    q, k, v = check_token_inputs(Q, K, V, dims=DIMS, key_name="K", value_name="V")
    if require_int("dim", dim, 1) != q.shape[3]:
        raise ValueError(f"dim must be the head dimension of Q, {q.shape[3]}, got {dim}")
    kernel = NativeSparseAttention(q.shape[0], q.shape[2], k.shape[1], dim, is_causal, scale, block_size, groups, selected_blocks)
    return kernel(q, k, v, BlockIndices, impl=impl)


@dataclass(frozen=True)
class NativeSparseAttention:
    """What ``native_sparse_attention`` returns: selected-blocks attention for tensors of one size."""

    batch: int
    heads: int
    seq_len: int
    dim: int
    is_causal: bool = True
    scale: float | None = None
    block_size: int = 64
    groups: int = 1
    selected_blocks: int = SELECTED_BLOCKS

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "seq_len", "dim", "block_size", "groups", "selected_blocks"):
            object.__setattr__(self, name, require_int(name, getattr(self, name), 1))
        require_bool("is_causal", self.is_causal)
        if self.heads % self.groups:
            raise ValueError(f"heads must be a multiple of groups = {self.groups}, got {self.heads}")

    def __call__(self, Q: Tensor, K: Tensor, V: Tensor, BlockIndices: Tensor, *, impl: str = "auto") -> Tensor:
        """Output in Q's shape and dtype; shapes as ``native_sparse_attention`` says, ValueError for others."""
        q, k, v = check_token_inputs(Q, K, V, dims=DIMS, key_name="K", value_name="V")
        kv_heads = self.heads // self.groups
        tokens = 1 if q.shape[1] == 1 else self.seq_len
        for name, x, dtypes, *shape in (
                ("Q", q, (q.dtype,), tokens, self.heads, self.dim),
                ("K", k, (q.dtype,), self.seq_len, kv_heads, self.dim),
                ("V", v, (q.dtype,), self.seq_len, kv_heads, self.dim),
                ("BlockIndices", BlockIndices, INTEGERS, tokens, kv_heads, self.selected_blocks)):
            check_tensor(name, x, dtypes, (self.batch, *shape), "the size that it was made for", q.device)
        packed = _packed_sequences(q, k, k.shape[1], None)
        spans = packed.spans(whole_blocks_of=1 if self.is_causal else self.block_size)
        return _attend_to_blocks(q, k, v, BlockIndices.flatten(0, 1), None, packed, spans, self.block_size, self.scale, impl)[0]


def _window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None, impl: str
                      ) -> Tensor:
    """Attention of every token to the last ``window`` keys up to its own."""
    packed = _packed_sequences(q, k, k.shape[1], cu_seqlens)
    spans = packed.spans(window=window)
    # As many blocks as a window can touch, from the one that it begins in.
    ids = spans[:, 1:2] // WINDOW_BLOCK + torch.arange((window - 2) // WINDOW_BLOCK + 2, device=q.device)
    return _attend_to_blocks(q, k, v, ids[:, None].expand(-1, k.shape[2], -1), None, packed, spans, WINDOW_BLOCK, None, impl)[0]


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
        at or before, lse too, as upstream. Differentiable also through lse.
    """
    q, k, v = check_token_inputs(q, k, v, dims=DIMS)
    TK, block_size = require_int("TK", TK, 1), require_int("block_size", block_size, 1)
    packed, firsts, origin, position = _rows_of_blocks(q, k, TK, block_size, cu_seqlens)
    rows = k.shape[0] * k.shape[1]
    seen = ((position + 1) // block_size).minimum(rows - origin).clamp(min=0)
    spans = torch.stack([origin, torch.zeros_like(origin), seen], 1).int()
    ends = torch.cat([firsts, firsts.new_full((1,), rows)]).int()
    ids = torch.arange(-(-(TK // block_size) // MEANS_AT_ONCE), device=q.device).expand(len(spans), k.shape[2], -1)
    out, lse = _attend_to_blocks(q, k, v, ids, None, Packed(packed.cu_q, ends, packed.q_tokens, rows), spans, MEANS_AT_ONCE, scale, impl)
    return out, torch.where((seen > 0).unflatten(0, q.shape[:2])[..., None], lse, 0.0)


def _attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, counts: Tensor | None, packed: Packed, spans: Tensor, block_size: int,
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
    """
    q, k, _ = check_token_inputs(q, k, k, dims=DIMS)
    TK, block_size = require_int("TK", TK, 1), require_int("block_size", block_size, 1)
    _, _, origin, position = _rows_of_blocks(q, k, TK, block_size, cu_seqlens)
    scale, impl = resolve_scale(scale, q.shape[-1]), choose_token_impl(impl, q.device, q.dtype, q.shape[-1])
    limits = None
    if isinstance(block_counts, Tensor):
        check_tensor("block_counts", block_counts, INTEGERS, (*q.shape[:2], k.shape[2]), "[B, T, H]", q.device)
        limits, block_counts = block_counts, max(int(block_counts.max()), 1) if block_counts.numel() else 1
    block_counts = require_int("block_counts", block_counts, 1)
    if lse is None:
        lse = parallel_nsa_compression(q, k, k, TK, block_size, scale, cu_seqlens, impl=impl)[1]
    check_tensor("lse", lse, (torch.float32, torch.float64), q.shape[:3], "[B, T, HQ]", q.device)
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


def _block_means(x: Tensor, packed: Packed, block_size: int) -> Tensor:
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


def _packed_sequences(q: Tensor, k: Tensor, k_tokens: int, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> Packed:
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


def _rows_of_blocks(q: Tensor, k: Tensor, TK: int, block_size: int, cu_seqlens: Tensor | tuple[Tensor, Tensor] | None
                    ) -> tuple[Packed, Tensor, Tensor, Tensor]:
    """(the tokens' sequences, with k checked to have a row for each block of theirs; first row of every sequence's blocks, int64 [N]; that
    of every token's, int64 [T]; its position among the keys, or -1)."""
    if cu_seqlens is None and k.shape[1] != -(-TK // block_size):
        raise ValueError(f"k must have ceil(TK / block_size) = {-(-TK // block_size)} blocks, got {k.shape[1]}")
    packed = _packed_sequences(q, k, TK, cu_seqlens)
    firsts = packed.key_blocks(block_size)[0]
    return packed, firsts, firsts[packed.places()[0]], packed.spans()[:, 2].long() - 1
