"""Portable kernel that counts the valid tokens of runs and cuts blocks to them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..lowering.quick_launch import Launch, QuickLaunch

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


def lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int, out: Tensor) -> None:
    """Writes what ``kernels.prologue.lengths.valid_lengths`` returns."""
    if out.numel():
        launch_lengths(valid, least, out)(valid, runs, before, lengths, out)


def launch_lengths(valid: Tensor, least: int, out: Tensor) -> Launch:
    """Of tensors such as these."""
    batch, _, blocks = out.shape
    return _launch.settle((valid.get_device(),), (blocks, batch, 1), (*valid.stride(), blocks, least), dict(SEGMENT=SEGMENT), {})


_launch = QuickLaunch(_lengths_kernel)
