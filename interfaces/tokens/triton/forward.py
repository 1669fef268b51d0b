"""Forward kernel for lists of one query token: the query heads of a key/value head are the rows of a tile.

Blocks that the token sees wholly come as tiles of keys, through TMA where there is one; the keys of the others are gathered.
Where tokens are few, as in decoding, several programs share a list and a second kernel merges their parts by lse (flash-decoding,
Dao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....kernels.device import device_limits, multiprocessors
from ....kernels.launch import FUSED
from ....kernels.lowering.inputs import tma_ok
from ....kernels.lowering.primitives import LOG2E, finish_softmax, gather_rows, load_rows, merged_lse, part_weights, softmax_step
from ..lists import PaddedCache, TokenLists
from .config import token_config, token_splits


@triton.jit
def token_span(spans, token, pitch, cache_rows, CACHE: tl.constexpr):
    """(origin, low, high) of a token, as TokenLists has it; CACHE is 0 for spans that are spelled out, 1 for left-padded caches, else 2."""
    if CACHE == 0:
        return tl.load(spans + token * 3), tl.load(spans + token * 3 + 1), tl.load(spans + token * 3 + 2)
    else:
        length = tl.minimum(tl.maximum(tl.load(spans + token), 0), cache_rows).to(tl.int32)
        first = cache_rows - length if CACHE == 1 else 0
        return token * pitch, first, first + length


@triton.jit
def list_parts(counts, full, at, capacity, TILED: tl.constexpr):
    """(entries at the front whose blocks are taken as tiles, further entries)."""
    count, tiled = capacity, 0
    if counts is not None:
        count = tl.minimum(tl.load(counts + at), capacity)
    if full is not None and TILED:
        tiled = tl.minimum(tl.load(full + at), count)
    return tiled, count - tiled


@triton.jit
def listed_block(ids, entry, capacity):
    """The block of an entry, of the last one for those behind it: loops read it an iteration ahead (see ``next_start``)."""
    return tl.load(ids + tl.minimum(entry, capacity - 1))


@triton.jit
def listed_keys(ids, entries, origin, low, high, step, N: tl.constexpr, BLOCK: tl.constexpr):
    """(rows int64 [N], seen bool [N]): the keys of one step through ``entries`` ids, and which the token sees."""
    lane = step * N + tl.arange(0, N)
    block = tl.load(ids + lane // BLOCK, mask=lane // BLOCK < entries, other=-1)
    # Before it is multiplied: an id may be anything.
    known = (block >= 0) & (block < tl.cdiv(high, BLOCK))
    key = tl.where(known, block, 0) * BLOCK + lane % BLOCK
    return (origin + key).to(tl.int64), known & (key >= low) & (key < high)


@triton.jit
def load_tile(tiles, base, head, row, stride, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """N neighbouring rows, [N, DIM_PAD]: through TMA where there is a descriptor of the [tokens, H, DIM] tensor."""
    if tiles is None:
        return load_rows(base, row, stride, N, N, DIM, DIM_PAD, False)
    else:
        return tiles.load([row, head, 0]).reshape(N, DIM_PAD)


def key_tiles(k: Tensor, v: Tensor, lists: TokenLists, rows: int) -> list[TensorDescriptor | None]:
    """For loading ``rows`` neighbouring keys, or values, of a head through TMA; None where there is none, or nothing that is loaded so."""
    tma = lists.full is not None and device_limits(k.device).tma
    return [TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, max(triton.next_power_of_2(x.shape[2]), 16)])
            if tma and tma_ok(x[None]) else None for x in (k, v)]


# Not specialised on any of these: a new batch must not compile anew, and launches are quicker. Numbers and pointers stay flat here: four
# tuples in place of nine arguments make a launch 4 us slower on the host (21 to 26 in Triton 3.6), and decoding waits for it.
_NUMBERS = ["tokens", "kv_heads", "capacity", "pitch", "cache_rows"]


@triton.jit(do_not_specialize=_NUMBERS)
def _forward_kernel(q, k, v, k_tiles, v_tiles, out, lse, ids, counts, full, spans, q_row, q_head, k_row, k_head, v_row, v_head,
                    tokens, kv_heads, capacity, pitch, cache_rows, scale_log2,
                    CACHE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VDIM: tl.constexpr, VDIM_PAD: tl.constexpr):
    token, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = token.to(tl.int64) * kv_heads + kv_head
    origin, low, high = token_span(spans, token, pitch, cache_rows, CACHE)
    TILED: tl.constexpr = BLOCK % N == 0
    tiled, gathered = list_parts(counts, full, at, capacity, TILED)
    ids += at * capacity
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    in_group = tl.arange(0, M)
    heads = kv_head * GROUP + in_group
    queries = gather_rows(q + token.to(tl.int64) * q_row, heads.to(tl.int64), q_head, in_group < GROUP, DIM, DIM_PAD)

    acc = tl.zeros([M, VDIM_PAD], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    if TILED:
        PARTS: tl.constexpr = BLOCK // N
        share = tl.cdiv(tiled * PARTS, SPLITS)
        following = listed_block(ids, split * share // PARTS, capacity)
        for step in range(split * share, tl.minimum(split * share + share, tiled * PARTS)):
            row = origin + following * BLOCK + step % PARTS * N
            following = listed_block(ids, (step + 1) // PARTS, capacity)
            keys = load_tile(k_tiles, k, kv_head, row, k_row, N, DIM, DIM_PAD)
            weights, alpha, row_max, row_sum = softmax_step(tl.dot(queries, tl.trans(keys)), row_max, row_sum, scale_log2)
            values = load_tile(v_tiles, v, kv_head, row, v_row, N, VDIM, VDIM_PAD)
            acc = tl.dot(weights.to(values.dtype), values, acc * alpha[:, None])
    steps = tl.cdiv(gathered * BLOCK, N)
    share = tl.cdiv(steps, SPLITS)
    for step in range(split * share, tl.minimum(split * share + share, steps)):
        rows, seen = listed_keys(ids + tiled, gathered, origin, low, high, step, N, BLOCK)
        keys = gather_rows(k, rows, k_row, seen, DIM, DIM_PAD)
        scores = tl.where(seen[None, :], tl.dot(queries, tl.trans(keys)), float("-inf"))
        weights, alpha, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        values = gather_rows(v, rows, v_row, seen, VDIM, VDIM_PAD)
        acc = tl.dot(weights.to(values.dtype), values, acc * alpha[:, None])

    acc, row_lse = finish_softmax(acc, row_max, row_sum)
    # Rows of out and of lse: [splits, tokens, query heads].
    places = (split.to(tl.int64) * tokens + token) * (kv_heads * GROUP) + heads
    dims = tl.arange(0, VDIM_PAD)
    tl.store(out + places[:, None] * VDIM + dims[None, :], acc.to(out.dtype.element_ty),
             mask=(in_group < GROUP)[:, None] & (dims < VDIM)[None, :])
    tl.store(lse + places, row_lse, mask=in_group < GROUP)


@triton.jit
def _merge_kernel(parts, part_lse, out, lse, rows, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, VDIM: tl.constexpr,
                  VDIM_PAD: tl.constexpr):
    """One row of out: the parts' mean weighted by exp(lse)."""
    row = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, VDIM_PAD)
    at = split.to(tl.int64) * rows + row
    row_lse = tl.load(part_lse + at, mask=split < SPLITS, other=float("-inf"))
    row_max = tl.max(row_lse, 0)
    weights = part_weights(row_lse, row_max)
    divisor, merged = merged_lse(row_max, tl.sum(weights, 0))
    x = tl.load(parts + at[:, None] * VDIM + dims[None, :], mask=(split < SPLITS)[:, None] & (dims < VDIM)[None, :], other=0.0)
    x = tl.sum(x * weights[:, None], 0) / divisor
    tl.store(out + row * VDIM + dims, x.to(out.dtype.element_ty), mask=dims < VDIM)
    tl.store(lse + row, merged)


def triton_token_forward(
    q: Tensor, k: Tensor, v: Tensor, lists: TokenLists, scale: float, splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``token_attention`` describes them; ``splits`` overrides how many programs share a list."""
    tokens, heads, dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[2]
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    capacity = lists.ids.shape[2]
    if q.numel() == 0 or k.numel() == 0 or capacity == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    config = token_config(heads // kv_heads, dim, v_dim, device_limits(q.device), lists.full is not None)
    if splits is None:
        splits = token_splits(tokens * kv_heads, -(-capacity * lists.block_size // config.block_n), multiprocessors(q.device))
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, *lse.shape, dtype=torch.float32, device=q.device)
    dim_pad, v_dim_pad = (max(triton.next_power_of_2(size), 16) for size in (dim, v_dim))
    cache, kind = (lists.cache, 1 if lists.cache.left else 2) if lists.cache else (PaddedCache(0, 0, False), 0)
    _forward_kernel[(tokens, kv_heads, splits)](
        q, k, v, *key_tiles(k, v, lists, config.block_n), parts, part_lse, lists.ids, lists.counts, lists.full, lists.spans,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], tokens, kv_heads, capacity, cache.pitch, cache.capacity, scale * LOG2E,
        CACHE=kind, SPLITS=splits, GROUP=heads // kv_heads, M=config.block_m, N=config.block_n,
        BLOCK=lists.block_size, DIM=dim, DIM_PAD=dim_pad, VDIM=v_dim, VDIM_PAD=v_dim_pad,
        **config.options())
    if splits > 1:
        _merge_kernel[(tokens * heads,)](parts, part_lse, out, lse, tokens * heads, SPLITS=splits,
                                         SPLITS_PAD=triton.next_power_of_2(splits), VDIM=v_dim, VDIM_PAD=v_dim_pad, **FUSED)
    return out, lse
