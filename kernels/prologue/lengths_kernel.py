"""Portable kernel that counts the valid tokens of runs and cuts blocks to them."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..lowering.plans import Plan, Plans
from ..lowering.quick_launch import QuickLaunch

# Tokens that a program looks at at once.
SEGMENT = 1024


@triton.jit(do_not_specialize=("mask_batch", "mask_token", "blocks", "least"))
def _lengths_kernel(valid, runs, before, lengths, out, mask_batch, mask_token, blocks, least, SEGMENT: tl.constexpr):
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(runs + block), tl.load(runs + blocks + block)
    count = tl.zeros([SEGMENT], tl.int32)
    for start in range(first, last, SEGMENT):
        token = start + tl.arange(0, SEGMENT)
        count += (tl.load(valid + batch * mask_batch + token.to(tl.int64) * mask_token, mask=token < last, other=0) != 0).to(tl.int32)
    left = tl.maximum(tl.maximum(tl.sum(count, 0), least) - tl.load(before + block), 0)
    tl.store(out + batch * blocks + block, tl.minimum(left, tl.load(lengths + block)))


def valid_lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
    """See ``Backend.valid_lengths``."""
    return _lengths((valid,), (runs, before, lengths), least)[0]


def _write(plan: Plan, xs: Sequence[Tensor], others: Sequence[Tensor], least: int) -> None:
    (valid,), lengths = xs, others[2]
    out = plan.result(len(valid), 1, len(lengths), dtype=lengths.dtype)
    if out.numel():
        batch, _, blocks = out.shape
        plan.launch(_launch, (plan.device,), (blocks, batch, 1), (), (valid, *others, out), (*valid.stride(), blocks, least),
                    dict(SEGMENT=SEGMENT), {})


_launch = QuickLaunch(_lengths_kernel)
_lengths = Plans(_write)
