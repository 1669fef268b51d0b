"""Operators for torch.compile that cost nothing outside of it, and where Triton's small kernels run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef

from .memo import traced

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


def differentiable_once(name: str) -> Callable:
    """Decorates ``backward(ctx, saved, *grads)`` of a function of autograd, ``saved`` being its saved tensors: differentiating the
    gradients again raises a RuntimeError that names the function ``name``.

    The error of torch's ``once_differentiable`` depends on no input. ``torch.autograd.grad`` then passes it by and takes the second
    derivative for 0, so here every gradient depends on all that it is made of.
    """

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def once(ctx, *grads: Tensor | None) -> tuple:
            # Unpacked once: a checkpoint recomputes for the first time only.
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            # Every gradient that arrives, because one that torch maps over does not say whether it has a graph.
            first, *more = [_once(x, name) for x in (*grads, *[x for x in saved if x is not None and x.requires_grad]) if x is not None]
            tie = sum(more, first)
            return tuple([None if x is None else x + tie for x in found])

        return once

    return decorate


@torch.library.custom_op(f"{NAMESPACE}::once", mutates_args=())
def _once(x: Tensor, name: str) -> Tensor:
    """-0.0, which depends on x and changes no bit of what it is added to; a backward through it raises."""
    return x.new_full((), -0.0)


@_once.register_fake
def _(x, name):
    return x.new_empty(())


def _refuse(ctx, grad: Tensor) -> None:
    raise _no_second_derivative(ctx.name)


def _note_name(ctx, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.name = inputs[1]


_once.register_autograd(_refuse, setup_context=_note_name)


def differentiated_once(backward: CustomOpDef, name: str) -> None:
    """Differentiating the operator ``backward``, which makes gradients of the function ``name``, raises as ``differentiable_once``."""

    def refuse(ctx, *_: Tensor | None) -> None:
        raise _no_second_derivative(name)

    backward.register_autograd(refuse)


def _no_second_derivative(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} and what is built on it must be differentiated at most once, got a gradient of their gradient. Take the first gradient "
        "without create_graph where it may be a constant. block_sparse_attention(impl='reference') has second derivatives.")


def differentiate_by(backward: CustomOpDef, operator: CustomOpDef, name: str) -> None:
    """Gradients of ``operator``, ``(q, k, v, *others) -> (out, lse)``, for q, k and v: by the operator ``backward``,
    ``(dout, dlse, q, k, v, out, lse, *others) -> (dq, dk, dv)``, which is given no dlse where none arrives. ``name``: the function whose
    operators they are."""

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
    differentiated_once(backward, name)


def watched(*tensors: Tensor) -> bool:
    """Whether anything but the device's own code would see an operator called on these tensors: a compiler, a mode, a transform, a tracer
    or a subclass of tensors. If not, the operator can be bypassed: it costs more than everything else before a launch."""
    if torch.compiler.is_compiling():
        return True
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for x in tensors:
        keys |= torch._C._dispatch_keys(x).raw_repr()
    return bool(keys & ~_plain_keys(tensors[0].device.type)) or forward_ad._current_level >= 0


def at_hand(x: Tensor) -> bool:
    """Whether x's values can be read without a wait: those of a plain tensor on a CPU that nobody watches."""
    return x.device.type == "cpu" and not watched(x)


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


def refuse_transforms(function: str, **tensors: Tensor) -> None:
    """Refuses tensors with a tangent, for torch would give the operators' results none, that is a derivative of zero; and those of which
    torch.func.grad and its like want a gradient, which torch refuses in words that do not say what to do."""
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if forward_ad.unpack_dual(x).tangent is not None:
                raise ValueError(f"{name} must have no tangent: only impl='reference' has a forward-mode derivative, got a dual tensor")
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if any([torch._C._functorch.is_gradtrackingtensor(level) and level.requires_grad for level in _levels(x)]):
            raise RuntimeError(f"{function} and what is built on it must not be differentiated by torch.func, got {name} under one of its "
                               "grad, vjp, jacrev and hessian; torch.autograd.grad gives the gradient of the same call")


def recorded(*xs: Any) -> bool:
    """Whether a gradient is wanted of one of these, or of what torch.func has wrapped into it."""
    return torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) or any([level.requires_grad for level in _levels(x)])
                                            for x in xs])


def _levels(x: Any) -> list[Tensor]:
    """x and what transforms of torch.func have wrapped into it, one in another; nothing where none is active, or a compiler sees to it."""
    levels: list[Tensor] = []
    if torch._C._are_functorch_transforms_active() and isinstance(x, Tensor) and not traced():
        levels.append(x)
        while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
            levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


@lru_cache
def _plain_keys(device_type: str) -> int:
    """The bits of torch's dispatch keys that say nothing of the kind: device, autograd and autocast."""
    key, names = torch._C.DispatchKey, torch._C.DispatchKey.__members__
    plain = (name for name in (device_type.upper(), f"Autograd{device_type.upper()}", f"Autocast{device_type.upper()}") if name in names)
    keys = torch._C.DispatchKeySet(key.BackendSelect) | torch._C.DispatchKeySet(key.ADInplaceOrView)
    for name in plain:
        keys = keys | torch._C.DispatchKeySet(names[name])
    return keys.raw_repr()
