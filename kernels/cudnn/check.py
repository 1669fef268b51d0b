"""The self-check: cuDNN's kernels against this package's in Triton on a small ragged pattern, once in a process for a kind of tensors."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import BlockLists
from ..memo import captured, traced
from ..operators import on_device
from . import package

# Lengths of the blocks, in slots: partial, of many slots, empty, of few tokens, whole.
LENGTHS = (1.0, 2.4, 0.0, 0.1, 1.0, 0.6, 3.0, 1.7)
# Which blocks each attends to. One has no list, and some are in one list only.
LISTED = ((0, 1, 7), (1, 6), (0,), (2, 5, 6, 7), (), (7,), (0, 1, 4, 5, 6, 7), (3, 6))
HEADS = 4
# The token that is furthest off may be off by so many roundings of the dtype, relative to a token's length. Both implementations round
# weights and results; a block that is left out or taken twice is further off.
ROUNDINGS = 8
TENSORS = ("out", "lse", "dq", "dk", "dv")


class Verdict(NamedTuple):
    """What a self-check found.

    Attributes:
        why_not: what is wrong; None where it passed.
        said: a sentence of what was seen where it passed.
    """

    why_not: str | None
    said: str = ""


_verdicts: dict[tuple, Verdict] = {}


def self_check(capability: tuple[int, int], dtype: torch.dtype, head_dim: int, slot: int, grouped: bool, backward: bool) -> Verdict:
    """The verdict on such tensors on GPUs of this capability; ``grouped``: of several query heads to a key head, ``backward``: also on
    gradients.

    The first call compiles, runs and waits for the GPU, for up to a minute. While a graph is traced or captured nothing can run: what is
    not known by then counts as not passed.
    """
    key = (capability, dtype, head_dim, slot, grouped, backward)
    found = _verdicts.get(key)
    if found is None:
        if traced() or captured():
            return Verdict("has not passed its self-check, which cannot run while a graph is recorded")
        found = _verdicts[key] = _verdict(_gpu(capability), *key[1:])
    return found


def _gpu(capability: tuple[int, int]) -> torch.device:
    """One of this capability, the current one if it can be."""
    current = torch.cuda.current_device()
    every = (current, *range(torch.cuda.device_count()))
    return torch.device("cuda", next(index for index in every if torch.cuda.get_device_capability(index) == capability))


def _verdict(device: torch.device, dtype: torch.dtype, *kind) -> Verdict:
    try:
        with on_device(torch.empty(0, device=device)), torch.no_grad():
            found = errors(device, dtype, *kind)
    except Exception as error:  # whatever a library that does not load or compile raises, attention runs without it
        return Verdict(f"failed its self-check: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    wrong = [f"{name} by {off:.1e}" for name, off in found.items() if not off <= allowed]
    if wrong:
        return Verdict(f"failed its self-check: off by more than {allowed:.1e} of a token's length: {', '.join(wrong)}")
    return Verdict(None, f"its self-check passed: of {', '.join(found)}, the token furthest off is so by {max(found.values()):.1e} of a "
                         f"token's length, allowed {allowed:.1e}")


def errors(device: torch.device, dtype: torch.dtype, head_dim: int, slot: int, grouped: bool, backward: bool) -> dict[str, float]:
    """By name of a result, how far the token that differs most is from Triton's, over the length that tokens have; of lse, in nats."""
    from ..portable.backward import triton_backward
    from ..portable.forward import triton_forward
    from .attention import cudnn_backward, cudnn_forward

    blocks = pattern(slot, device)
    tokens = sum(lengths(slot))
    cpu: dict[str, Any] = dict(generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    heads = HEADS, HEADS // 2 if grouped else HEADS, HEADS // 2 if grouped else HEADS, HEADS
    q, k, v, dout = (torch.randn(1, number, tokens, head_dim, **cpu).to(device, dtype) for number in heads)
    dlse = torch.randn(1, HEADS, tokens, **cpu).to(device)
    scale = head_dim ** -0.5
    out, lse = triton_forward(q, k, v, blocks, scale, False)
    pairs = [*zip(cudnn_forward(q, k, v, blocks, scale, False), (out, lse))]
    if backward:
        given = dout, dlse, q, k, v, out, lse, blocks
        pairs += zip(cudnn_backward(*given, scale, False), triton_backward(*given, scale, False))
    return {name: _furthest(*pair) for name, pair in zip(TENSORS, pairs)}


def lengths(slot: int) -> list[int]:
    """Tokens of the blocks. Blocks of more than one slot have the longest slots."""
    return [int((part if slot == package.SLOTS[-1] else min(part, 1)) * slot) for part in LENGTHS]


def pattern(slot: int, device: torch.device) -> BlockLists:
    mask = torch.zeros(len(LENGTHS), len(LENGTHS), dtype=torch.bool, device="cpu")
    for row, listed in enumerate(LISTED):
        mask[row, list(listed)] = True
    offsets = torch.tensor([0, *accumulate(lengths(slot))], dtype=torch.int32, device="cpu")
    return BlockLists.from_mask(mask.to(device), offsets.to(device), offsets.to(device), max_q_length=max(lengths(slot)),
                                max_kv_length=max(lengths(slot)))


def _furthest(mine: Tensor, right: Tensor) -> float:
    """Infinity where one is not finite and the other is."""
    mine, right = mine.double(), right.double()
    if mine.dim() == 3:
        difference = torch.where(mine == right, 0, mine - right).abs()
    else:
        difference = (mine - right).norm(dim=-1) / right.norm(dim=-1).square().mean().sqrt()
    return float(difference.max().nan_to_num(nan=torch.inf))
