"""How much memory a layer holds at once on a Hopper GPU, counted without one, on the device "meta"."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from unittest import mock

import hopper_emulator
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssta import SSTAConfig, TokenLayout
from ssta.inputs import described
from ssta.kernels import backend, device, routing
from ssta.kernels.hopper import forward_merge  # noqa: F401  the emulator would import a copy
from ssta.kernels.launch import launch
from ssta.kernels.lowering import dq_accum, dq_schedule, transposed  # noqa: F401
from ssta.layer import Layer

H200 = device.DeviceLimits(device.HOPPER_SHARED_MEMORY, True, "wgmma", 132)
# The estimate's steps are Triton's, which hold as much as Hopper's.
WHERE = routing.Where("cuda", (8, 0), False, torch.bfloat16, 128)


class Hopper:
    """A route by Hopper's kernels, as they load without a GPU."""

    def run(self, *arguments, in_place: bool) -> tuple[Tensor, Tensor]:
        return hopper_emulator.module("forward").hopper_forward(*arguments, False, in_place=in_place)

    def run_backward(self, *arguments, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        return hopper_emulator.module("backward").hopper_backward(*arguments, in_place=in_place)


class Counted(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active: ``now``, and at most (``peak``)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = function(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)}:
            if storage._cdata not in given:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


@contextmanager
def nothing_runs() -> Iterator[None]:
    """No kernel is launched, and each sees an H200."""
    instead: dict[Callable, Callable] = {launch: lambda *arguments: None, device.device_limits: lambda where: H200,
                                         device.multiprocessors: lambda where: H200.multiprocessors}
    hopper = hopper_emulator._loaded().values()
    modules = [module for name, module in sys.modules.items() if name.startswith("ssta.kernels.")]
    with ExitStack() as stack:
        for module in (*modules, *hopper):
            for word, value in list(vars(module).items()):
                # Modules that are imported meanwhile must find the real ones.
                if isinstance(value, FunctionType) and value in instead and module.__name__ != value.__module__:
                    stack.enter_context(mock.patch.object(module, word, instead[value]))
        # On a GPU it needs nothing beside its result.
        stack.enter_context(mock.patch("ssta.kernels.portable.estimate._wide_product", lambda a, b, out: None))
        yield


def layer_memory(layout: TokenLayout, config: SSTAConfig, heads: int, recorded: bool) -> tuple[float, float]:
    """The most that a run of the layer holds beside its inputs, as a multiple of q, k, v and the result, bfloat16 of 128 channels. And the
    most that its backward holds beside the tape, which is 0 if not ``recorded``."""
    shape = 1, layout.length, heads, 128
    like = torch.empty(1, dtype=torch.bfloat16).expand(shape).transpose(1, 2)
    layer = Layer(described(like, like, like, layout, config, recorded=recorded, impl="torch"))
    layer.backend = backend.choose("auto", WHERE)
    layer._route = lambda blocks: Hopper()
    q, k, v, dout = (torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(4))
    whole = 4 * q.numel() * q.element_size()
    with nothing_runs():
        with Counted() as forward:
            ran = layer.run(q, k, v)
        if not recorded:
            return forward.peak / whole, 0.0
        tape, blocks = ran.tape, ran.selection.blocks
        with Counted() as backward, torch.no_grad():
            layer.backward(tape, dout, blocks)
    return forward.peak / whole, backward.peak / whole
