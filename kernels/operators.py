"""Operators for torch.compile that cost nothing outside of it, and where Triton's small kernels run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

# Looked for, not loaded: importing the package must stay light.
TRITON = find_spec("triton") is not None


def operator(name: str, fake: Callable) -> Callable:
    """Decorates a function of tensors and numbers that launches kernels: torch.compile sees it as the operator ``ssta::name``.

    A plain call runs the function itself, which spares the dispatcher's tens of microseconds. ``fake`` makes outputs of the right
    shape, dtype and strides from the same arguments. The outputs are new tensors; gradients are the caller's business.
    """

    def decorate(run: Callable) -> Callable:
        registered = torch.library.custom_op(f"ssta::{name}", run, mutates_args=())
        registered.register_fake(fake)

        def call(x: Tensor, *args):
            return registered(x, *args) if _watched(x) else run(x, *args)

        return call

    return decorate


def _watched(x: Tensor) -> bool:
    """Whether someone wants to see the operator: a compiler, a dispatch mode, or a tensor of their own kind."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0


def kernels_run(x: Tensor) -> bool:
    """Whether Triton's kernels move and choose blocks for ``x``: on a GPU, but for float64, where Triton is installed. Else torch does."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and TRITON
