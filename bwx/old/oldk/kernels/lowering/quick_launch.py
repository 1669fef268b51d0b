"""Launches Triton kernels without deciding at every call which compiled kernel is meant, which is most of a launch's host time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

# How a compiled kernel's launcher is called is private to Triton. These are the versions that it is checked under (``make compat``); under
# others every launch goes the public way.
CHECKED_VERSIONS = ((3, 6), (3, 9))
# Keys may hold the numbers of a shape; a server's shapes must not pile up.
KEYS_KEPT = 4096


def launcher_known(version: str) -> bool:
    """Whether ``version`` of Triton is one whose launchers are called directly."""
    first, last = CHECKED_VERSIONS
    # Of 3.6.0+git1234 or 3.10.0rc1 the first two numbers.
    return first <= tuple(map(int, version.split(".")[:2])) <= last


class QuickLaunch:
    """``kernel[grid](*descriptors, *tensors, *numbers, **constants, **options)`` in a fifth of the time, from a key's second launch on.

    For kernels whose numbers are not specialised (``do_not_specialize``), or whose keys hold them. Settings of Triton that change what is
    compiled (its debug mode, say) hold for the keys that are launched after they are made; its launch hooks are called at every launch.
    Under a version of Triton that is not among ``CHECKED_VERSIONS`` every launch is a plain one.
    """

    def __init__(self, kernel) -> None:
        from triton import knobs
        from triton.runtime import driver

        self.driver, self.knobs = driver, knobs.runtime
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}
        self.known = launcher_known(triton.__version__)

    def __call__(self, key: tuple, grid: tuple[int, int, int], descriptors: Sequence, tensors: Sequence[Tensor | None],
                 numbers: Sequence[int | float], constants: dict, options: dict) -> None:
        """Launches on the current device and stream.

        Args:
            key: tells apart all that the kernel is compiled for: the device, the dtypes, which tensors are None, the layouts of the
                descriptors, the constants, and which numbers do not ``fit``. That pointers are multiples of 16 bytes is seen to here.
            grid: number of programs along three axes.
            descriptors, tensors, numbers, constants: the kernel's parameters, in this order.
            options: num_warps and the like.
        """
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        together = 0
        for pointer in pointers:
            together |= pointer
        aligned = together % 16 == 0
        compiled = self.compiled.get(key) if aligned else None
        if compiled is not None:
            arguments = (*descriptors, *pointers, *numbers, *constants.values())
            enter, leave = self.knobs.launch_enter_hook, self.knobs.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                compiled[grid](*arguments)
            else:
                # The same without gathering what a hook would be told, which takes as long as all else.
                driver = self.driver.active
                stream = driver.get_current_stream(driver.get_current_device())
                compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
            return
        compiled = self.kernel[grid](*descriptors, *tensors, *numbers, **constants, **options)
        # Triton's interpreter gives back nothing, and compiles nothing.
        if self.known and aligned and compiled is not None:
            if len(self.compiled) >= KEYS_KEPT:
                # Triton keeps what it compiled; only the way to it is found anew.
                self.compiled.clear()
            self.compiled[key] = compiled


def fit(numbers: Sequence[int]) -> tuple[bool, ...] | bool:
    """Part of a key: whether Triton passes all numbers in 32 bits, and if not, which."""
    return True if max(numbers) < 1 << 31 else tuple(number < 1 << 31 for number in numbers)
