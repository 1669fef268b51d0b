"""Launches Triton kernels without deciding at every call which compiled kernel is meant, which is most of a launch's host time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from ..memo import Kept

# How a compiled kernel's launcher is called is private to Triton. These are the versions that it is checked under (``make compat``); under
# others every launch goes the public way.
CHECKED_VERSIONS = ((3, 6), (3, 9))
# Keys may hold the numbers of a shape; a server's shapes must not pile up.
KEYS_KEPT = 4096
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


class QuickLaunch:
    """``kernel[grid](*descriptors, *tensors, *numbers, **constants, **options)`` in a fifth of the time, from a key's second launch on.

    Descriptors are made at every launch, by Triton; a plan, which makes them once for an address, launches by address. For kernels whose
    numbers are not specialised (``do_not_specialize``), or whose keys hold them. Settings of Triton that change what is
    compiled (its debug mode, say) hold for the keys that are launched after they are made; its launch hooks are called at every launch.
    Under a version of Triton that is not among ``CHECKED_VERSIONS`` every launch is a plain one.
    """

    def __init__(self, kernel) -> None:
        from triton.runtime import driver

        self.driver = driver
        self.kernel = kernel
        # Triton still keeps what it compiled for an entry that goes from here; only the way to it is found anew.
        self.compiled: dict[tuple, tuple[Any, _Direct | None]] = Kept(KEYS_KEPT)
        self.known = launcher_known(triton.__version__)

    def __call__(self, key: tuple, grid: tuple[int, int, int], descriptors: Sequence[Tiles | None], tensors: Sequence[Tensor | None],
                 numbers: Sequence[int | float], constants: dict, options: dict) -> None:
        """Launches on the current device and stream.

        Args:
            key: tells apart all that the kernel is compiled for: the device, the dtypes, which tensors are None, the layouts of the
                descriptors, the constants, and which numbers do not ``fit``. Which pointers are multiples of 16 bytes is seen to here.
            grid: number of programs along three axes.
            descriptors, tensors, numbers, constants: the kernel's parameters, in this order.
            options: num_warps and the like.
        """
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        key = _with_alignment(key, pointers)
        found = self.compiled.get(key)
        if found is None:
            return self._first(key, grid, descriptors, tensors, numbers, constants, options)
        compiled, direct = found
        arguments = [*_made(descriptors), *pointers, *numbers, *constants.values()]
        if hooked():
            compiled[grid](*arguments)
        # The same without gathering what a hook would be told, which takes as long as all else.
        elif direct is None or descriptors:
            driver = self.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        elif direct.flat:
            direct.launch(*grid, direct.stream(direct.device()), *direct.settled, *arguments)
        else:
            direct.launch(*grid, direct.stream(direct.device()), *direct.settled, arguments)

    def direct(self, key: tuple, pointers: Sequence[int]) -> _Direct | None:
        """The launcher of what was compiled for a key and pointers such as these; None where there is none that is called directly."""
        return self.compiled.get(_with_alignment(key, pointers), (None, None))[1]

    def _first(self, key: tuple, grid: tuple[int, int, int], descriptors: Sequence[Tiles | None],
               tensors: Sequence[Tensor | None], numbers: Sequence[int | float], constants: dict, options: dict) -> None:
        """A plain launch, after which the key is known."""
        compiled = self.kernel[grid](*_made(descriptors), *tensors, *numbers, **constants, **FUSED | options)
        # Triton's interpreter gives back nothing, and compiles nothing.
        if self.known and compiled is not None:
            self.compiled[key] = compiled, _Direct.of(compiled, sum([tiles is not None for tiles in descriptors]))


def _made(descriptors: Sequence[Tiles | None]) -> list:
    return [None if tiles is None else tiles.make(tiles.x) for tiles in descriptors]


class _Direct(NamedTuple):
    """The function in C that launches a compiled kernel on NVIDIA's GPUs, without Triton's two functions around it."""

    launch: Callable
    settled: tuple           # arguments between the stream and those of the kernel
    flat: bool               # whether the kernel's arguments come one by one
    metas: Sequence[dict]    # how each descriptor is to be encoded
    encode: Callable         # (descriptor, meta) -> the kernel's arguments
    device: Callable         # () -> number of the current device
    stream: Callable         # (device) -> its current stream

    @classmethod
    def of(cls, compiled, descriptors: int) -> _Direct | None:
        """That of ``compiled`` with so many descriptors; None where it has no such launcher, or one that does more than launch."""
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
        from triton.runtime import driver

        # Triton's own function for this first checks each time whether CUDA is there.
        device = getattr(torch._C, "_cuda_getDevice", driver.active.get_current_device)
        rest = metas, _encoder(), device, driver.active.get_current_stream
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


def _with_alignment(key: tuple, pointers: Sequence[int]) -> tuple:
    return key if aligned(pointers) else (*key, tuple([pointer % 16 == 0 for pointer in pointers]))


def hooked() -> bool:
    """Whether something listens to launches: Triton then launches, so that it is called."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int:
    """The current stream of ``device``, which is the current device."""
    return triton.runtime.driver.active.get_current_stream(device.index)


def fit(numbers: Sequence[int]) -> tuple[bool, ...] | bool:
    """Part of a key: whether Triton passes all numbers in 32 bits, and if not, which."""
    return True if max(numbers) < 1 << 31 else tuple(number < 1 << 31 for number in numbers)


def power_of_2(number: int) -> int:
    """The least one that is not less: ``triton.next_power_of_2`` in a tenth of the time."""
    return 1 << (number - 1).bit_length()
