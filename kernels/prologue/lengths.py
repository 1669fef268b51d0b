"""How many tokens of each block are valid, by a mask of the runs that some blocks are cut from."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..operators import kernels_run, operator


def valid_lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int = 0) -> Tensor:
    """int32 ``[B, 1, T]``: what of each block is left where in its run only so many tokens count as are valid, the first ones.

    Args:
        valid: bool ``[B, L]``, of all runs one after another.
        runs: int32 ``[2, T]``: where in ``valid`` each block's run begins and ends; nowhere for a block that is of none.
        before: int32 ``[T]``: the run's tokens before the block; far below zero for a block of no run, which is left whole.
        lengths: int32 ``[T]``: the blocks' tokens.
        least: as many tokens of a run count at least, 0 or 1.

    Runs by Triton's kernel on a GPU, else in plain torch; the result is the same.
    """
    run = _lengths if kernels_run(valid) else _lengths_in_torch
    return run(valid, runs, before, lengths, least)


def _lengths_in_torch(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
    upto = torch.nn.functional.pad(valid.cumsum(1, dtype=torch.int32), (1, 0))
    first, last = (upto[:, end] for end in runs.long().unbind())
    return ((last - first).clamp(min=least) - before).clamp(min=0).minimum(lengths)[:, None]


@operator("valid_lengths", lambda valid, runs, before, lengths, least: lengths.new_empty(len(valid), 1, len(lengths)))
def _lengths(valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
    out = lengths.new_empty(len(valid), 1, len(lengths))
    _kernels().lengths(valid, runs, before, lengths, least, out)
    return out


@lru_cache
def _kernels() -> ModuleType:
    """Loaded when first asked for, because triton is."""
    return import_module(".lengths_kernel", __package__)
