"""How a compiled kernel of Triton is launched by address, without what Triton decides at every launch, which is most of its host time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

# How a compiled kernel's launcher is called is private to Triton. These are the versions that it is checked under (``make compat``); under
# others every launch goes the public way.
CHECKED_VERSIONS = ((3, 6), (3, 9))
# Kinds of tensors that a step has launches for.
KINDS_KEPT = 256


def launcher_known(version: str) -> bool:
    """Whether ``version`` of Triton is one whose launchers are called directly."""
    first, last = CHECKED_VERSIONS
    # The first two numbers of, for example, 3.6.0+git1234 or 3.10.0rc1.
    return first <= tuple(map(int, version.split(".")[:2])) <= last


class Tiles(NamedTuple):
    """A tensor that a kernel takes through a descriptor.

    Args:
        x: the tensor.
        make: x -> the descriptor, as Triton takes it.
    """

    x: Tensor
    make: Callable[[Tensor], Any]


# A product and a sum are one instruction, by which loops were measured: from Triton 3.10 on only where a launch asks for it.
FUSED = dict(enable_fp_fusion=True)


class Direct(NamedTuple):
    """The function in C that launches a compiled kernel on NVIDIA's GPUs, without Triton's two functions around it."""

    launch: Callable
    settled: tuple           # arguments between the stream and those of the kernel
    flat: bool               # whether the kernel's arguments come one by one
    metas: Sequence[dict]    # how each descriptor is to be encoded
    encode: Callable         # (descriptor, meta) -> the kernel's arguments

    @classmethod
    def of(cls, compiled: Any, descriptors: int) -> Direct | None:
        """That of ``compiled`` with so many descriptors; None where it has no such launcher, or one that does more than launch, and where
        Triton's interpreter has compiled nothing."""
        if compiled is None or not launcher_known(triton.__version__):
            return None
        run = compiled.run
        if type(run).__module__ != "triton.backends.nvidia.driver" or run.global_scratch_size or run.profile_scratch_size:
            return None
        if getattr(run, "gsan_enabled", False):
            return None
        launch, metas = run.launch, getattr(compiled.metadata, "tensordesc_meta", None) or ()
        if descriptors:
            if len(metas) != descriptors or None in metas:
                return None
            # Triton's function that encodes descriptors at every launch, around the one that launches.
            launch = launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents
        rest = metas, _encoder()
        options = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        if hasattr(run, "kernel_signature"):
            settled = (*options, compiled.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            return cls(launch, settled, False, *rest)
        return cls(launch, (*options, None, None, compiled.packed_metadata, None, None, None), True, *rest)

    def encoded(self, number: int, descriptor: Any) -> list:
        """The kernel's arguments for its ``number``-th descriptor."""
        return list(self.encode(descriptor, self.metas[number]))


@lru_cache
def _encoder() -> Callable:
    from triton.backends.nvidia import driver

    encode = driver.make_tensordesc_arg
    # From Triton 3.8 on it takes what the kernel is launched with, too, and needs nothing of it.
    return encode if len(signature(encode).parameters) == 2 else lambda descriptor, meta: encode(descriptor, meta, None)


def aligned(pointers: Sequence[int]) -> bool:
    """Whether all are multiples of 16 bytes, which Triton looks at when it compiles."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return together % 16 == 0


def hooked() -> bool:
    """Whether something listens to launches: Triton then launches, so that it is called."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int:
    """The current stream of ``device``, which is the current device."""
    return triton.runtime.driver.active.get_current_stream(device.index)


def power_of_2(number: int) -> int:
    """The least one that is not less: ``triton.next_power_of_2`` in a tenth of the time."""
    return 1 << (number - 1).bit_length()
