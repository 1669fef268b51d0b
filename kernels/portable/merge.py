"""Merges partial results of attention by their log-sum-exps, all parts of some rows in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lowering.arguments import view
from ..lowering.inputs import strided
from ..lowering.primitives import load_rows, merged_lse, of_head, part_weights, store_rows
from ..lowering.quick_launch import FUSED

# Elements of a part that one program takes.
ELEMENTS = 4096


@triton.jit
def _merge_kernel(parts, lses, out, lse, heads, tokens, PARTS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    row = tl.program_id(0) * ROWS
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    at = row + tl.arange(0, ROWS)
    inside = at < tokens
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        part_lse = tl.load(of_head(lses[i], batch, head) + at.to(tl.int64) * lses[i].row, mask=inside, other=float("-inf"))
        row_max = tl.maximum(row_max, part_lse)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for i in tl.static_range(PARTS):
        part_lse = tl.load(of_head(lses[i], batch, head) + at.to(tl.int64) * lses[i].row, mask=inside, other=float("-inf"))
        weights = part_weights(part_lse, row_max)
        x = load_rows(of_head(parts[i], batch, head), row, parts[i].row, tokens - row, ROWS, DIM, DIM_PAD, True).to(tl.float32)
        # A part's rows without keys may hold anything, NaN included, and are ignored.
        acc += tl.where((part_lse == float("-inf"))[:, None], 0.0, x) * weights[:, None]
        row_sum += weights
    divisor, row_lse = merged_lse(row_max, row_sum)
    store_rows(of_head(out, batch, head), row, out.row, tokens - row, acc / divisor[:, None], ROWS, DIM, DIM_PAD)
    tl.store(lse + (batch * heads + head) * tokens + at, row_lse, mask=inside)


def triton_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) as ``merge_attention`` describes them."""
    batch, heads, tokens, dim = outs[0].shape
    outs = [strided(x) for x in outs]
    out = torch.empty_like(outs[0])
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=out.device)
    if not lse.numel():
        return out, lse
    dim_pad = max(triton.next_power_of_2(dim), 1)
    rows = max(1, ELEMENTS // dim_pad)
    _merge_kernel[(triton.cdiv(tokens, rows), batch * heads)](
        tuple(map(view, outs)), tuple(map(view, lses)), view(out), lse, heads, tokens,
        PARTS=len(outs), ROWS=rows, DIM=dim, DIM_PAD=dim_pad, **FUSED)
    return out, lse
