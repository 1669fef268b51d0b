"""How a canvas (t, h, w) follows from a forward's arguments: from the latents' shape, from numbers, or from coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# The canvas that a tensor of coordinates was found to hold, and the tensor's version then. Pipelines make it once for all steps.
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def from_bcfhw(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of latents ``[batch, channels, frames, height, width]``."""
    return _patched(model, arguments, (2, 3, 4), "[batch, channels, frames, height, width]")


def from_bfchw(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of latents ``[batch, frames, channels, height, width]``."""
    return _patched(model, arguments, (1, 3, 4), "[batch, frames, channels, height, width]")


def from_bfhwc(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of latents ``[batch, frames, height, width, channels]``."""
    return _patched(model, arguments, (1, 2, 3), "[batch, frames, height, width, channels]")


def _patched(model: nn.Module, arguments: Mapping[str, Any], axes: tuple[int, int, int], wanted: str) -> tuple[int, int, int]:
    shape = tuple(arguments["hidden_states"].shape)
    if len(shape) != 5:
        raise ValueError(f"hidden_states must be {wanted}, got shape {shape}")
    config: Any = model.config
    size = config.patch_size
    patch = tuple(size) if isinstance(size, (tuple, list)) else (getattr(config, "patch_size_t", None) or 1, size, size)
    # The models round frames up where they patch them (CogVideoX 1.5), and require the rest to be whole.
    t, h, w = (shape[axis] for axis in axes)
    return -(-t // patch[0]), h // patch[1], w // patch[2]


def from_numbers(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a model that is called with ``num_frames``, ``height`` and ``width`` of its latents; without them, of its ``video_coords``."""
    frames, height, width = (arguments.get(name) for name in ("num_frames", "height", "width"))
    if frames is not None and height is not None and width is not None:
        return frames, height, width
    coords = arguments.get("video_coords")
    if coords is None:
        raise ValueError("num_frames, height and width, or video_coords, must be given so that SSTA knows the canvas, got neither")
    if coords.dim() != 3:
        # LTX-2's, [batch, 3, tokens, 2], may go on behind the video with tokens of key frames: where it ends, they do not say.
        raise ValueError(f"num_frames, height and width must be given beside video_coords that are not [batch, 3, tokens], so that SSTA "
                         f"knows the canvas, got video_coords of shape {tuple(coords.shape)}")
    return from_coordinates(coords, lambda: coords[0].T)


def from_coordinates(key: Tensor, points: Any) -> tuple[int, int, int]:
    """Of the grid that a sequence of (t, h, w) coordinates ends with.

    Args:
        key: the tensor that holds the coordinates. It is read, which waits for the device, when it is first seen or was changed; one that
            was made under ``torch.inference_mode`` does not say whether it was changed, and is read in every forward.
        points: called for the coordinates as ``[S, 3]``.

    Raises:
        ValueError: the sequence does not end with the last frame of a grid; under torch.export, which knows no values.
    """
    if torch.compiler.is_exporting():
        raise ValueError("the canvas must be in shapes or numbers under torch.export, which knows no values of tensors, got coordinates, "
                         "from whose values SSTA takes it in this model; torch.compile works")
    if key.is_inference():
        return _last_grid(points().detach().cpu())
    known = _KNOWN.get(key)
    if known is None or known[1] != key._version:
        known = _last_grid(points().detach().cpu()), key._version
        _KNOWN[key] = known
    return known[0]


def _last_grid(points: Tensor) -> tuple[int, int, int]:
    """Backwards from the end: tokens of the same row are the width, of the same frame the area; then whole frames, each earlier in time
    than the one after it and otherwise alike."""
    width = _trailing((points[:, :2] == points[-1, :2]).all(1))
    area = _trailing(points[:, 0] == points[-1, 0])
    if area % width:
        raise ValueError(f"the coordinates must end with a frame of whole rows, got {area} tokens in it and {width} in its last row")
    whole = points[len(points) % area:].unflatten(0, (-1, area))
    alike = (whole[:, :, 1:] == whole[-1, :, 1:]).all(-1).all(-1) & (whole[:, :, 0] == whole[:, :1, 0]).all(-1)
    earlier = torch.cat([whole[:-1, 0, 0] < whole[1:, 0, 0], torch.ones(1, dtype=torch.bool)])
    return _trailing(alike & earlier), area // width, width


def _trailing(flags: Tensor) -> int:
    """How many of the last ``flags`` are True in a row."""
    return int(flags.flip(0).cumprod(0).sum())
