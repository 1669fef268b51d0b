"""The order of tokens' channels in memory, which a patch embedding leaves far apart and every block hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ranks.split import splits


def first_blocks(model: nn.Module, sites: list[str]) -> list[nn.Module]:
    """The first block of each stack that has sites, by names such as blocks.0.attn1. A site without a dot has no block."""
    names = [name.rpartition(".")[0] for name in sites if "." in name]
    first = {name.rpartition(".")[0]: name for name in reversed(names)}
    return [model.get_submodule(name) for name in first.values()]


def channels_side_by_side(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of a stack's first block: tokens ``[B, S, C]`` with a token's channels next to one another in memory.

    A patch embedding by convolution leaves those of a channel so, and each block hands the order on: every norm would copy its input first,
    and every residual sum go through two tensors in different orders. On an H200 the copies alone are a twentieth of a step of
    HunyuanVideo 1.5 under SSTA. A compiler chooses orders itself, and what ranks split is put in order with each one's share.
    """
    if torch.compiler.is_compiling() or splits(block):
        return args, kwargs
    return tuple(map(_contiguous_tokens, args)), {name: _contiguous_tokens(value) for name, value in kwargs.items()}


def _contiguous_tokens(x: Any) -> Any:
    return x.contiguous() if isinstance(x, Tensor) and x.dim() == 3 and x.stride(-1) != 1 else x
