"""Operators for torch.compile that cost nothing outside of it, and where Triton's small kernels run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef

# Looked for, not loaded: importing the package must stay light.
TRITON = find_spec("triton") is not None
_NOTHING = nullcontext()
# Where operators are registered: "ssta", or what the package is called where it was loaded under another name, as Hugging Face's `kernels`
# loads a copy beside this one. No operator is then registered twice.
NAMESPACE = __name__.partition(".")[0]


def operator(name: str, fake: Callable) -> Callable:
    """Decorates a function of tensors and numbers that launches kernels: torch.compile sees it as the operator ``NAMESPACE::name``.

    A plain call runs the function itself, which spares the dispatcher's tens of microseconds. ``fake`` makes outputs of the right
    shape, dtype and strides from the same arguments. The outputs are new tensors; gradients are the caller's business.
    """

    def decorate(run: Callable) -> Callable:
        registered = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=())
        registered.register_fake(fake)

        def call(x: Tensor, *args):
            return registered(x, *args) if watched(x) else run(x, *args)

        return call

    return decorate


def differentiate_by(backward: CustomOpDef, operator: CustomOpDef) -> None:
    """Gradients of ``operator``, ``(q, k, v, *others) -> (out, lse)``, for q, k and v: by the operator ``backward``,
    ``(dout, dlse, q, k, v, out, lse, *others) -> (dq, dk, dv)``, which is given no dlse where none arrives."""

    def save(ctx, inputs, output) -> None:
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*output, *tensors)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.set_materialize_grads(False)

    def differentiate(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, *others = [other if x is None else x for x, other in zip(tensors, ctx.others)]
        if dout is None and dlse is None:
            return (None,) * len(tensors)
        dout = torch.zeros_like(out) if dout is None else dout
        return *backward(dout, dlse, q, k, v, out, lse, *others), *[None for _ in others]

    backward.register_fake(lambda dout, dlse, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
    operator.register_autograd(differentiate, setup_context=save)


def watched(*tensors: Tensor) -> bool:
    """Whether anything but the device's own code would see an operator called on these tensors: a compiler, a mode, a transform, a tracer
    or a subclass of tensors. If not, the operator can be bypassed: it costs more than everything else before a launch."""
    if torch.compiler.is_compiling():
        return True
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        keys |= torch._C._dispatch_keys(x).raw_repr()
    return bool(keys & ~_plain_keys(tensors[0].device.type)) or forward_ad._current_level >= 0


def on_device(x: Any) -> AbstractContextManager:
    """A context in which x's GPU is the current one, on which Triton launches, and in which autocast rounds nothing. x: a tensor, or what
    will be one."""
    device = x.device
    elsewhere = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return torch.cuda.device(device) if elsewhere else _NOTHING
    stack = ExitStack()
    stack.enter_context(torch.autocast(device.type, enabled=False))
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    return stack


def refuse_forward_mode(**tensors: Tensor) -> None:
    """Refuses tensors with a tangent: torch would give the operators' results none, that is a derivative of zero."""
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(f"{name} must have no tangent: only impl='reference' has a forward-mode derivative, got a dual tensor")


@lru_cache
def _plain_keys(device_type: str) -> int:
    """The bits of torch's dispatch keys that say nothing of the kind: device, autograd and autocast."""
    key, names = torch._C.DispatchKey, torch._C.DispatchKey.__members__
    plain = (name for name in (device_type.upper(), f"Autograd{device_type.upper()}", f"Autocast{device_type.upper()}") if name in names)
    keys = torch._C.DispatchKeySet(key.BackendSelect) | torch._C.DispatchKeySet(key.ADInplaceOrView)
    for name in plain:
        keys = keys | torch._C.DispatchKeySet(names[name])
    return keys.raw_repr()
