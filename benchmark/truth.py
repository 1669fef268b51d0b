"""The gate before every time: a sample of the result against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ssta.kernels import BlockLists
from ssta.kernels.reference import reference_attention


def first_block(x: Tensor, tokens: int) -> Tensor:
    """The sample: the first ``tokens`` rows of the last head, ``[B, 1, tokens, D]``."""
    return x[:, -1:, :tokens]


def exact_first_block(q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, dout: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(out, dq) of the last head's first query block in float64, each ``[B, 1, tokens, D]``; dq is None without ``dout``.

    A query block's dq depends on no other query block, so both need this block's rows alone. Synchronises.
    """
    tokens = int(blocks.q_bounds(q.shape[2])[1][0, -1, 0])
    one = BlockLists(
        blocks.counts[:, -1:, :1], blocks.indices[:, -1:, :1], tokens, _last_head(blocks.kv_offsets),
        kv_lengths=_last_head(blocks.kv_lengths), num_kv_blocks=blocks.num_kv_blocks, max_kv_length=blocks.max_kv_length)
    query, key, value = (x.detach().double() for x in (first_block(q, tokens), k[:, -1:], v[:, -1:]))
    out, _ = reference_attention(query.requires_grad_(dout is not None), key, value, one, q.shape[-1] ** -0.5)
    dq = None if dout is None else torch.autograd.grad(out, query, first_block(dout, tokens).double())[0]
    return out.detach(), dq


def check(name: str, got: Tensor, exact: Tensor) -> float:
    """The largest error of ``got`` over the largest value of ``exact``; ends the program where it is no rounding error.

    Allowed are four roundings of got's dtype and a long float32 sum.
    """
    error = float((got.double() - exact).abs().max() / exact.abs().max())
    allowed = 4 * torch.finfo(got.dtype).eps + 64 * torch.finfo(torch.float32).eps
    if not error <= allowed:  # NaN is not
        raise SystemExit(f"{name} is wrong: off by {error:.3e} of the largest value, {allowed:.3e} is allowed; no time is printed")
    return error


def _last_head(x):
    return x[:, -1:] if isinstance(x, Tensor) else x
