"""The only launcher: Triton's own ``kernel[grid](...)`` once for a kind of arguments, then the kernel that it has compiled.

Triton looks at every argument at every launch, which takes the host longer than the launch itself. The compiled kernel's own call is
public. It takes the same arguments, looks at none, and calls launch hooks as Triton does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .memo import Kept

# A product and a sum are one instruction, by which loops were measured: from Triton 3.10 on only where a launch asks for it.
FUSED = dict(enable_fp_fusion=True)
# By kind; with the kernel, so that no other has its id meanwhile. A kind is a few hundred bytes.
_compiled: dict[tuple, tuple[Any, Any]] = Kept(4096)


def launch(kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Any], numbers: Sequence[int | float], constants: dict[str, Any],
           options: dict[str, Any] | None = None, descriptors: Sequence[Any] = ()) -> None:
    """Launches ``kernel``, which takes ``*descriptors, *tensors, *numbers, **constants``, on the current stream of the tensors' device,
    which is the current one.

    Args:
        tensors: also None, and NamedTuples of tensors, None and numbers.
        constants: every constant of the kernel, which come after its other arguments.
        options: num_warps and the like.
        descriptors: TMA's, or None.
    """
    kinds: list[Hashable] = [id(kernel), *map(_kind, descriptors)]
    device, places = None, 0
    # Most arguments are plain tensors at multiples of 16 bytes on one device.
    for x in tensors:
        if type(x) is Tensor:
            kinds.append(x.dtype)
            places |= x.data_ptr()
            device = x.get_device() if device is None else device
        else:
            kinds.append(_kind(x))
    if places % 16:
        kinds += map(_kind, tensors)
    key = device, *kinds, *numbers, *map(type, numbers), *constants.values(), *(options.items() if options else ())
    known = _compiled.get(key)
    if known is not None:
        known[1][grid](*descriptors, *tensors, *numbers, *constants.values())
        return
    compiled = kernel[grid](*descriptors, *tensors, *numbers, **constants, **FUSED | (options or {}))
    # Triton's interpreter compiles nothing; on AMD's GPUs Triton also looks at how much memory a tensor is in.
    if compiled is not None and torch.version.hip is None:
        _compiled[key] = kernel, compiled


def _kind(x: Any) -> Hashable:
    """The part of an argument that Triton compiles for: dtype, device and alignment of a tensor, dtype and tiles of a descriptor. A number
    stands for itself, because Triton looks at its size and divisors."""
    if isinstance(x, Tensor):
        return x.dtype, x.get_device(), x.data_ptr() % 16
    if isinstance(x, tuple):
        return tuple([(type(member), _kind(member)) for member in x])
    if hasattr(x, "block_shape"):
        return x.base.dtype, x.base.get_device(), tuple(x.block_shape), getattr(x, "layout", None)
    return x


def power_of_2(number: int) -> int:
    """The least one that is not less: ``triton.next_power_of_2`` in a tenth of the time."""
    return 1 << (number - 1).bit_length()
