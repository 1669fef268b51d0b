"""Merges the partial results that the Hopper forward leaves where it split a tile's list, by their log-sum-exps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..lowering.primitives import merged_lse, part_weights, store_rows

# Rows that a program merges.
ROWS = 16
# Numbers of a part in ``partial_rows``.
FIELDS = tl.constexpr(4)


_NUMBERS = ["out_batch", "out_head", "out_row", "heads", "tokens", "splits", "tile_rows"]


@triton.jit(do_not_specialize=_NUMBERS)
def _merge_kernel(partial_rows, partial_out, partial_lse, out, lse, out_batch, out_head, out_row, heads, tokens, splits, tile_rows,
                  ROWS: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        # Launched before the forward ends.
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * splits
    before = tl.program_id(1) * ROWS
    at_head = tl.load(partial_rows + first * FIELDS)
    row = tl.load(partial_rows + first * FIELDS + 1) + before
    size = tl.load(partial_rows + first * FIELDS + 2) - before
    if size <= 0:
        return
    at = first.to(tl.int64) * tile_rows + before + tl.arange(0, ROWS)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(splits):
        row_max = tl.maximum(row_max, tl.load(partial_lse + at + part * tile_rows), propagate_nan=tl.PropagateNan.ALL)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for part in range(splits):
        weights = part_weights(tl.load(partial_lse + at + part * tile_rows), row_max)
        acc += tl.load(partial_out + (at + part * tile_rows)[:, None] * DIM + tl.arange(0, DIM)[None, :]) * weights[:, None]
        row_sum += weights
    divisor, row_lse = merged_lse(row_max, row_sum)
    head, batch = (at_head % heads).to(tl.int64), (at_head // heads).to(tl.int64)
    store_rows(out + batch * out_batch + head * out_head, row, out_row, size, acc / divisor[:, None], ROWS, DIM, DIM)
    offsets = tl.arange(0, ROWS)
    tl.store(lse + at_head.to(tl.int64) * tokens + row + offsets, row_lse, mask=offsets < size)


def partial_results(parts: int, rows: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for ``parts`` parts of ``rows`` rows: (int32 [parts, 4] with batch * heads + head, first row and rows of each; out, float32
    [parts, rows, dim]; lse, float32 [parts, rows])."""
    return (torch.empty(parts, FIELDS.value, dtype=torch.int32, device=device),
            torch.empty(parts, rows, dim, dtype=torch.float32, device=device),
            torch.empty(parts, rows, dtype=torch.float32, device=device))


def merge_parts(parts: tuple[Tensor, Tensor, Tensor], splits: int, out: Tensor, lse: Tensor) -> None:
    """Writes the rows of tiles that were split, ``splits`` of the ``partial_results`` of each standing behind one another, to out and
    lse."""
    (_, heads, tokens, dim), (number, rows, _) = out.shape, parts[1].shape
    launch(_merge_kernel, (number // splits, rows // ROWS, 1), (*parts, out, lse), (*out.stride()[:3], heads, tokens, splits, rows),
           dict(ROWS=ROWS, DIM=dim, EARLY=out.is_cuda), dict(launch_pdl=True) if out.is_cuda else {})
