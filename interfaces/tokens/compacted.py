"""Attention to key blocks shorter than a tile: the listed keys are compacted (packed KV), then taken as tiles.

For some query blocks at a time, the keys and values of each list are copied behind one another, and kernels that read tiles attend to these
runs as to one long block each. A copy is read by all rows that share the list, so it costs little where they are many.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import BlockLists, PatternFacts, Route, choose_route
from ...kernels.block_forms import in_range, mask_lists, prefix_mask
from ...kernels.operators import NAMESPACE, differentiate_by, on_device
from ...kernels.routing import SHORTEST_TILE

# Bytes of the compacted keys and values, but at least one query block's.
COPIES = 512 << 20


@torch.library.custom_op(f"{NAMESPACE}::compacted_attention", mutates_args=())
def compacted_attention(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_size: int, kv_size: int, scale: float,
                        deterministic: bool, impl: str) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``block_sparse_attention`` describes them, of the fields of BlockLists of uniform blocks."""
    out, lse = like_results(q)
    with on_device(q):
        route, pairs, parts = _parts(q, k, v, counts, indices, q_size, kv_size, deterministic, impl)
        for rows, source, lists in parts:
            keys, values = pairs.index_select(0, source.flatten()).view(*source.shape, -1).chunk(2, 3)
            out[:, :, rows], lse[:, :, rows] = route.run(q[:, :, rows], keys, values, lists, scale)
            del keys, values
    return out, lse


@torch.library.custom_op(f"{NAMESPACE}::compacted_attention_backward", mutates_args=())
def _backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counts: Tensor,
              indices: Tensor, q_size: int, kv_size: int, scale: float, deterministic: bool, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q)
    with on_device(q):
        route, pairs, parts = _parts(q, k, v, counts, indices, q_size, kv_size, deterministic, impl)
        sums = torch.zeros_like(pairs, dtype=lse.dtype)
        for rows, source, lists in parts:
            keys, values = pairs.index_select(0, source.flatten()).view(*source.shape, -1).chunk(2, 3)
            dq[:, :, rows], *gradients = route.run_backward(
                dout[:, :, rows], None if dlse is None else dlse[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows],
                lse[:, :, rows].contiguous(), lists, scale, False, deterministic)
            del keys, values
            # It sums in the order of the copies; index_add_ would use atomics on a GPU.
            sums.index_put_((source.flatten(),), torch.cat(gradients, 3).flatten(0, 2).to(lse.dtype), accumulate=True)
    dk, dv = sums.view(*k.shape[:3], -1).chunk(2, 3)
    return dq, torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def like_results(q: Tensor, *_) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


compacted_attention.register_fake(like_results)
differentiate_by(_backward, compacted_attention, "block_sparse_attention")


def _parts(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor, q_size: int, kv_size: int, deterministic: bool, impl: str
           ) -> tuple[Route, Tensor, Iterator[tuple[slice, Tensor, BlockLists]]]:
    """(kernels for the copies; keys beside values ``[B * Hkv * Skv, 2 * D]``; parts). A part is some query blocks: their rows, the rows
    of the second that are copied, int64 ``[B, heads, n]``, and the lists of copies. Copies have k's heads, or the lists' where these are
    more."""
    (batch, heads, _, dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    copy_heads, capacity = max(kv_heads, counts.shape[1]), indices.shape[3]
    width = max(min(capacity * kv_size, kv_len), SHORTEST_TILE)
    route = choose_route(impl, q.device, q.dtype, dim, PatternFacts(q_size, width, shared=counts.shape[1] == 1), heads=heads,
                         kv_heads=copy_heads, deterministic=deterministic)
    known = in_range(indices, prefix_mask(counts, capacity), -(-kv_len // kv_size))
    # The first row of each key/value head.
    head = torch.arange(batch * copy_heads, device=q.device).view(batch, copy_heads, 1, 1) // (copy_heads // kv_heads) * kv_len
    at_once = max(1, COPIES // (2 * batch * copy_heads * width * dim * q.element_size()))

    def parts() -> Iterator[tuple[slice, Tensor, BlockLists]]:
        for first in range(0, counts.shape[2], at_once):
            some = slice(first, first + at_once)
            keys = (indices[:, :, some, :, None].where(known[:, :, some, :, None], 0) * kv_size
                    + torch.arange(kv_size, dtype=torch.int32, device=q.device))
            # A list that names a block twice may not lead out of its run.
            lengths, slots = mask_lists((known[:, :, some, :, None] & (keys < kv_len)).flatten(3), width)
            source = head + keys.flatten(3).gather(3, slots.long())
            run = torch.arange(lengths.shape[2], dtype=torch.int32, device=q.device)
            lists = BlockLists(torch.ones_like(run)[None, None], run[None, None, :, None], q_size, width, kv_lengths=lengths,
                               num_kv_blocks=len(run))
            yield slice(first * q_size, (first + at_once) * q_size), source.flatten(2), lists

    return route, torch.cat([k, v], 3).flatten(0, 2), parts()
