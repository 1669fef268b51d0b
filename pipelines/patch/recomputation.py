"""Gradient checkpointing: a block that the backward computes again has the canvas and step of its own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..terms import CallState
from .context import ModelContext

# Where diffusers' models keep their function for checkpointing, and its name while nobody has given one of his own.
_ATTRIBUTE = "_gradient_checkpointing_func"
_DEFAULT = "ModelMixin.enable_gradient_checkpointing.<locals>._gradient_checkpointing_func"


def resume_recomputations(context: ModelContext, model: nn.Module, args: tuple) -> None:
    """Forward pre-hook of a transformer: has diffusers' default checkpointing resume each forward's own state in the backward, which may
    come after other forwards, and on a GPU runs in another thread. A function of the user's own is left alone."""
    if torch.compiler.is_compiling():
        return
    function = vars(model).get(_ATTRIBUTE)
    if function is not None and getattr(function, "__qualname__", "") == _DEFAULT:
        setattr(model, _ATTRIBUTE, _Checkpoint(context, function))


def forget_recomputations(model: nn.Module) -> None:
    """Takes back what ``resume_recomputations`` did."""
    function = vars(model).get(_ATTRIBUTE)
    if isinstance(function, _Checkpoint):
        setattr(model, _ATTRIBUTE, function.function)


class _Checkpoint:
    def __init__(self, context: ModelContext, function: Callable) -> None:
        self.context, self.function = context, function

    def __call__(self, block: Callable, *args: Any) -> Any:
        # A model that torch.compile compiles whole recomputes as it sees fit.
        return self.function(block if torch.compiler.is_compiling() else partial(_resumed, self.context, self.context.call, block), *args)


def _resumed(context: ModelContext, state: CallState, block: Callable, *args: Any) -> Any:
    """What a block gives with the state of one forward, whenever it is called."""
    with context.resumed(state):
        return block(*args)
