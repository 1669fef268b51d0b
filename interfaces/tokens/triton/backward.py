"""Backward kernels for lists of one query token: dQ along the lists, dK and dV along their inverse. No atomics, so the same bits.

The formulas are those of kernels/portable/backward.py. A row of the dK and dV kernel is one query head of one listed token, so that
tokens with few heads fill a tile together. A key block that very many tokens list, as the first of a sequence often is, would keep one
program busy long after the others are done: such lists are split into pieces, whose sums are added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.device import device_limits
from ....kernels.launch import FUSED
from ....kernels.lowering.arguments import view
from ....kernels.lowering.primitives import LOG2E, finite_or_zero, gather_rows, load_rows, store_rows
from ....kernels.portable.backward import DELTA_ROWS, delta_kernel
from ..lists import KeyLists, TokenLists
from .config import token_config, token_dkv_config
from .forward import key_tiles, list_parts, listed_block, listed_keys, load_tile

# Pieces that the lists of all key blocks together are split into, on top of one for each list. Twice as many blocks of dK and of dV are
# allocated in float32: 128 MiB for blocks of 64 tokens at head_dim 128.
PIECES = 1024
# Tokens of a piece at least.
SHORTEST_PIECE = 256


@triton.jit
def _dq_kernel(q, k, v, k_tiles, v_tiles, dout, dq, lse2, delta, ids, counts, full, spans, q_row, q_head, k_row, k_head,
               v_row, v_head, do_row, do_head, dq_row, dq_head, kv_heads, capacity, scale_log2, scale,
               GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
               DIM: tl.constexpr, DIM_PAD: tl.constexpr, VDIM: tl.constexpr, VDIM_PAD: tl.constexpr):
    token, kv_head = tl.program_id(0), tl.program_id(1)
    at = token.to(tl.int64) * kv_heads + kv_head
    origin, low, high = tl.load(spans + token * 3), tl.load(spans + token * 3 + 1), tl.load(spans + token * 3 + 2)
    TILED: tl.constexpr = BLOCK % N == 0
    tiled, gathered = list_parts(counts, full, at, capacity, TILED)
    ids += at * capacity
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    in_group = tl.arange(0, M)
    heads = (kv_head * GROUP + in_group).to(tl.int64)
    queries = gather_rows(q + token.to(tl.int64) * q_row, heads, q_head, in_group < GROUP, DIM, DIM_PAD)
    do = gather_rows(dout + token.to(tl.int64) * do_row, heads, do_head, in_group < GROUP, VDIM, VDIM_PAD)
    row_lse2 = tl.load(lse2 + at * GROUP + in_group, mask=in_group < GROUP, other=float("inf"))
    row_delta = tl.load(delta + at * GROUP + in_group, mask=in_group < GROUP, other=0.0)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    if TILED:
        PARTS: tl.constexpr = BLOCK // N
        following = listed_block(ids, 0, capacity)
        for step in range(tiled * PARTS):
            row = origin + following * BLOCK + step % PARTS * N
            following = listed_block(ids, (step + 1) // PARTS, capacity)
            keys = load_tile(k_tiles, k, kv_head, row, k_row, N, DIM, DIM_PAD)
            values = load_tile(v_tiles, v, kv_head, row, v_row, N, VDIM, VDIM_PAD)
            weights = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale_log2 - row_lse2[:, None])
            dscores = weights * (tl.dot(do, tl.trans(values)) - row_delta[:, None])
            acc = tl.dot(dscores.to(keys.dtype), keys, acc)
    for step in range(tl.cdiv(gathered * BLOCK, N)):
        rows, seen = listed_keys(ids + tiled, gathered, origin, low, high, step, N, BLOCK)
        keys = gather_rows(k, rows, k_row, seen, DIM, DIM_PAD)
        values = gather_rows(v, rows, v_row, seen, VDIM, VDIM_PAD)
        weights = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale_log2 - row_lse2[:, None])
        dscores = weights * (tl.dot(do, tl.trans(values)) - row_delta[:, None])
        dscores = tl.where(seen[None, :], dscores, 0.0)
        acc = tl.dot(dscores.to(keys.dtype), keys, acc)
    dims = tl.arange(0, DIM_PAD)
    tl.store(dq + token.to(tl.int64) * dq_row + heads[:, None] * dq_head + dims[None, :], (acc * scale).to(dq.dtype.element_ty),
             mask=(in_group < GROUP)[:, None] & (dims < DIM)[None, :])


@triton.jit
def _dkv_kernel(q, k, v, dout, dk, dv, dk_parts, dv_parts, lse2, delta, spans, starts, sizes, listed, firsts, counts,
                piece_list, piece_ends, pieces, slots, share,
                q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head, dv_row, dv_head,
                kv_heads, blocks, rows_padded, scale_log2, scale,
                PARTS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                DIM: tl.constexpr, DIM_PAD: tl.constexpr, VDIM: tl.constexpr, VDIM_PAD: tl.constexpr):
    """Scores stand transposed, [N keys, M rows], so that dV and dK accumulate without a transpose."""
    piece, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    at_list = tl.load(piece_list + piece)
    if at_list >= kv_heads * blocks:
        return
    block, kv_head = at_list % blocks, at_list // blocks
    row = tl.load(starts + block) + part * N
    size = tl.load(sizes + block) - part * N
    if size <= 0:
        return
    number = tl.load(pieces + at_list)
    piece -= tl.load(piece_ends + at_list) - number
    key = row + tl.arange(0, N)
    real = tl.arange(0, N) < size
    keys = gather_rows(k + kv_head.to(tl.int64) * k_head, key.to(tl.int64), k_row, real, DIM, DIM_PAD)
    values = gather_rows(v + kv_head.to(tl.int64) * v_head, key.to(tl.int64), v_row, real, VDIM, VDIM_PAD)
    before = piece * tl.load(share)
    listed += tl.load(firsts + at_list) + before
    total = tl.minimum(tl.load(counts + at_list) - before, tl.load(share)) * GROUP
    dk_acc = tl.zeros([N, DIM_PAD], tl.float32)
    dv_acc = tl.zeros([N, VDIM_PAD], tl.float32)
    for first in range(0, total, M):
        entry = first + tl.arange(0, M)
        known = entry < total
        token = tl.load(listed + entry // GROUP, mask=known, other=0)
        origin = tl.load(spans + token * 3, mask=known, other=0)
        low = tl.load(spans + token * 3 + 1, mask=known, other=0) + origin
        high = tl.load(spans + token * 3 + 2, mask=known, other=0) + origin
        head = (kv_head * GROUP + entry % GROUP).to(tl.int64)
        queries = gather_rows(q, token.to(tl.int64) * q_row + head * q_head, 1, known, DIM, DIM_PAD)
        do = gather_rows(dout, token.to(tl.int64) * do_row + head * do_head, 1, known, VDIM, VDIM_PAD)
        at = token.to(tl.int64) * (kv_heads * GROUP) + head
        row_lse2 = tl.load(lse2 + at, mask=known, other=float("inf"))
        row_delta = tl.load(delta + at, mask=known, other=0.0)
        seen = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
        weights = tl.exp2(tl.dot(keys, tl.trans(queries)) * scale_log2 - row_lse2[None, :])
        weights = tl.where(seen, weights, 0.0)
        dv_acc = tl.dot(weights.to(do.dtype), do, dv_acc)
        dscores = weights * (tl.dot(values, tl.trans(do)) - row_delta[None, :])
        dscores = tl.where(seen, dscores, 0.0)
        # Zero times a NaN is NaN: where the token sees the key, the weight is NaN already.
        dk_acc = tl.dot(dscores.to(queries.dtype), finite_or_zero(queries), dk_acc)
    if number == 1:
        store_rows(dk + kv_head.to(tl.int64) * dk_head, row, dk_row, size, dk_acc * scale, N, DIM, DIM_PAD)
        store_rows(dv + kv_head.to(tl.int64) * dv_head, row, dv_row, size, dv_acc, N, VDIM, VDIM_PAD)
    else:
        at_part = (tl.load(slots + at_list) + piece).to(tl.int64) * rows_padded + part * N
        store_rows(dk_parts, at_part, DIM, size, dk_acc * scale, N, DIM, DIM_PAD)
        store_rows(dv_parts, at_part, VDIM, size, dv_acc, N, VDIM, VDIM_PAD)


@triton.jit
def _add_kernel(parts, total, starts, sizes, pieces, slots, row_stride, head_stride, blocks, rows_padded,
                PARTS: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The gradient of a key block whose list was split: its pieces' parts, added in order."""
    at_list, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    block, kv_head = at_list % blocks, at_list // blocks
    number = tl.load(pieces + at_list)
    size = tl.load(sizes + block) - part * N
    if (number == 1) | (size <= 0):
        return
    at_part = tl.load(slots + at_list).to(tl.int64) * rows_padded + part * N
    acc = tl.zeros([N, DIM_PAD], tl.float32)
    for _ in range(number):
        acc += load_rows(parts, at_part, DIM, size, N, DIM, DIM_PAD, True)
        at_part += rows_padded
    store_rows(total + kv_head.to(tl.int64) * head_stride, tl.load(starts + block) + part * N, row_stride, size, acc, N, DIM, DIM_PAD)


class _Pieces(NamedTuple):
    """How the lists of all key blocks are split; made on the device, because only it knows how long they are."""

    lists: Tensor   # int32 [pieces], to which list a piece belongs; the number of lists for spare ones
    ends: Tensor    # int32 [lists], up to which piece a list goes
    number: Tensor  # int32 [lists], its pieces
    slots: Tensor   # int32 [lists], where its parts begin if it has more than one
    share: Tensor   # int32 [1], tokens of a piece


def _pieces(inverse: KeyLists) -> tuple[_Pieces, int]:
    """Pieces of equal length, so long that a bounded number comes on top of the lists themselves; and how many slots their parts need."""
    counts, most = inverse.counts.flatten(), min(PIECES, len(inverse.tokens) // SHORTEST_PIECE)
    share = ((counts.sum() + PIECES - 1) // PIECES).clamp(min=SHORTEST_PIECE)
    number = ((counts + share - 1) // share).clamp(min=1)
    ends = number.cumsum(0)
    lists = torch.searchsorted(ends, torch.arange(len(counts) + most, device=counts.device), right=True)
    shared = torch.where(number > 1, number, 0)
    # A list of more than one piece has at most 2 * count / share of them.
    return _Pieces(lists.int(), ends.int(), number.int(), (shared.cumsum(0) - shared).int(), share[None].int()), 2 * most


def triton_token_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: TokenLists, inverse: KeyLists,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    (tokens, heads, dim), (kv_heads, v_dim), capacity = q.shape, v.shape[1:], lists.ids.shape[2]
    group = heads // kv_heads
    # Keys outside every sequence are in no block.
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.numel() == 0 or k.numel() == 0 or capacity == 0:
        return dq.zero_(), dk, dv
    shape = dict(GROUP=group, DIM=dim, DIM_PAD=max(triton.next_power_of_2(dim), 16), VDIM=v_dim,
                 VDIM_PAD=max(triton.next_power_of_2(v_dim), 16))
    strides = [stride for x in (q, k, v, dout) for stride in x.stride()[:2]]

    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    by_head = [None if x is None else view(x.transpose(0, 1)[None]) for x in (out, dout, dlse, lse)]
    delta_kernel[(triton.cdiv(tokens, DELTA_ROWS), heads)](
        *by_head, delta, lse2, heads, tokens, M=DELTA_ROWS, DIM=v_dim, DIM_PAD=shape["VDIM_PAD"], **FUSED)

    config = token_config(group, dim, v_dim, device_limits(q.device), lists.full is not None)
    _dq_kernel[(tokens, kv_heads)](
        q, k, v, *key_tiles(k, v, lists, config.block_n), dout, dq, lse2, delta, lists.ids, lists.counts, lists.full, lists.spans, *strides,
        *dq.stride()[:2], kv_heads, capacity, scale * LOG2E, scale, M=config.block_m, N=config.block_n, BLOCK=lists.block_size, **shape,
        **config.options())

    config = token_dkv_config(dim, v_dim, lists.block_size)
    parts, blocks = triton.cdiv(lists.block_size, config.block_n), len(inverse.starts)
    (pieces, number), rows = _pieces(inverse), parts * config.block_n
    dk_parts, dv_parts = (torch.empty(number * rows, size, dtype=torch.float32, device=q.device) for size in (dim, v_dim))
    _dkv_kernel[(len(pieces.lists) * parts,)](
        q, k, v, dout, dk, dv, dk_parts, dv_parts, lse2, delta, lists.spans, inverse.starts, inverse.sizes, inverse.tokens, inverse.firsts,
        inverse.counts, *pieces, *strides, *dk.stride()[:2], *dv.stride()[:2], kv_heads, blocks, rows, scale * LOG2E, scale,
        PARTS=parts, M=config.block_m, N=config.block_n, **shape, **config.options())
    for x, x_parts, size in ((dk, dk_parts, dim), (dv, dv_parts, v_dim)):
        _add_kernel[(blocks * kv_heads * parts,)](
            x_parts, x, inverse.starts, inverse.sizes, pieces.number, pieces.slots, *x.stride()[:2], blocks, rows,
            PARTS=parts, N=config.block_n, DIM=size, DIM_PAD=max(triton.next_power_of_2(size), 16), **FUSED)
    return dq, dk, dv
