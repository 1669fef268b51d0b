"""Checks of arguments that every entry point shares. An error names the argument, what was required and what came."""

from __future__ import annotations

import math
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def require_int(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``; numpy's integers count, a bool does not."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        # An array of numpy's has __index__ too.
        if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__") or getattr(value, "shape", ()) != ():
            # The tracer of torch.jit makes tensors of all sizes.
            traced = "; torch.jit.trace cannot trace this package, torch.export can" if torch._C._get_tracing_state() else ""
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}){traced}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def require_number(name: str, value: float) -> float:
    """``value``, an int or a float; numpy's numbers as Python's."""
    if type(value) in (int, float) or isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    numpy = hasattr(value, "__float__") and getattr(value, "shape", None) == ()
    if isinstance(value, (bool, Tensor)) or not (isinstance(value, (int, float)) or numpy):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return float(value)


def require_dtype(name: str, value: torch.dtype) -> torch.dtype:
    """``value``, a torch.dtype."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype such as torch.bfloat16, got {value!r} ({type(value).__name__})")
    return value


def device_of(name: str, value: torch.device | str | int) -> torch.device:
    """``value`` as a torch.device: one, a string, or a GPU's number."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{name} must be a torch.device, a string or a GPU's number, got {value!r} ({type(value).__name__})")
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError(f"{name} must be a device that torch knows, such as 'cpu' or 'cuda:0', got {value!r}") from None


def require_bool(name: str, value: bool) -> bool:
    """``value``, a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def require_strided(name: str, x: Tensor) -> None:
    """Refuses tensors whose memory strides do not describe: sparse, nested, mkldnn."""
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense, strided tensor, got {'a nested tensor' if x.is_nested else x.layout}")


def require_mask(name: str, x: Tensor | None) -> Tensor:
    """``x``, a bool tensor."""
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {_kind(x)}")
    require_strided(name, x)
    return x


def require_integers(name: str, x: Tensor | None) -> Tensor:
    """``x``, an int32 or int64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {_kind(x)}")
    require_strided(name, x)
    return x


def _kind(x: Any) -> str:
    """A tensor's dtype; of anything else its type, and of what has a dtype without being a tensor both."""
    if isinstance(x, Tensor):
        return str(x.dtype)
    named = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return f"{named} of {x.dtype}, of which torch.as_tensor makes one" if hasattr(x, "dtype") else named


def require_values(name: str, x: Tensor) -> Tensor:
    """``x``, a tensor that holds values."""
    if x.is_meta:
        raise ValueError(f"{name} must hold values, got a meta tensor")
    return x


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the scores that ``scale`` stands for: 1 / sqrt(head_dim) for None."""
    require_int("head_dim", head_dim, 1)
    if scale is None:
        return head_dim ** -0.5
    scale = require_number("scale", scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def autocast_inputs(**inputs: Any) -> tuple[Tensor, ...]:
    """The inputs in autocast's dtype where autocast is on for their device, float64 left alone; checked to be dense floating-point tensors.
    """
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        require_strided(name, x)
    device = next(iter(inputs.values())).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tuple(inputs.values())
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs.values())


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which what is summed in float32 stays so; meta tensors know no autocast."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def check_token_inputs(q: Tensor, k: Tensor, v: Tensor, *, dims: str = "[tokens, heads, head_dim]", key_name: str = "k",
                       value_name: str = "v") -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) in autocast's dtype where that is on, with a last stride of 1; ``dims`` says what their dimensions are."""
    names, wanted = {"q": q, key_name: k, value_name: v}, dims.count(",") + 1
    q, k, v = autocast_inputs(**names)
    for name, x in zip(names, (q, k, v)):
        if x.dim() != wanted:
            raise ValueError(f"{name} must be {dims}, got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{value_name} must have {key_name}'s shape {tuple(k.shape)} but for the head_dim, got {tuple(v.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{key_name} must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q's heads must be a multiple of {key_name}'s {k.shape[-2]}, got {q.shape[-2]}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def check_tensor(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] | None, shape: tuple[int | None, ...], what: str,
                 device: torch.device | None) -> None:
    """Refuses what is not a tensor of such a dtype, shape and device, of which None is any; ``what`` names the dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if dtypes is not None and x.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        convert = "; .int() converts it" if dtypes == (torch.int32,) and x.dtype in INTEGERS else ""
        raise TypeError(f"{name} must be {', '.join(others)}{' or ' if others else ''}{last}, got {x.dtype}{convert}")
    require_strided(name, x)
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        wanted = what if all(size is None for size in shape) else f"{what} = [{sizes}]"
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
