"""Gradients of models whose last trained layers come after their tokens were gathered: every rank computes those layers whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..terms import Call, Hooks


class _Weighted(torch.autograd.Function):
    """The same values, and ``factor`` times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def shared_gradients(model: nn.Module, call: Call, gather: str) -> Hooks:
    """Hooks after which the sum of all ranks' gradients is one process' in the layers that follow the module ``gather``, or the last of
    a list of that name, too.

    Gradients are parts that add up over W ranks, but every rank has the whole gradient of what follows the gather: there it counts 1 / W,
    and where it meets the gather, whose backward takes a rank's own tokens out of it, W times that.
    """
    module = model.get_submodule(gather)
    last = module[-1] if isinstance(module, nn.ModuleList) else module
    yield last.register_forward_hook(partial(_times_ranks, call, 1))
    yield model.register_forward_hook(partial(_times_ranks, call, -1))


def _times_ranks(call: Call, power: int, module: nn.Module, args: tuple, output: Any) -> Any:
    ranks = call().ranks
    if ranks is None or not torch.is_grad_enabled():
        return None
    factor = float(ranks.size) ** power
    return tree_map_only(Tensor, lambda x: _Weighted.apply(x, factor), output)
