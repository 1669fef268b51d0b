"""How a canvas (t, h, w) follows from a forward's arguments: from the latents' shape, from numbers, or from coordinates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ssta import DenseRun, VideoGrid

# By tensor of coordinates: what was read from it, its version then, and the value. Most pipelines make the tensor once for all steps.
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _patched(names: str, axes: tuple[int, int, int], model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """The canvas of latents with such axes, of which three are frames, height and width."""
    shape = tuple(arguments["hidden_states"].shape)
    if len(shape) != 5:
        raise ValueError(f"hidden_states must be [{names}], got shape {shape}")
    patch = _patch(model)
    # The models round frames up where they patch them (CogVideoX 1.5), and require the rest to be whole.
    t, h, w = (shape[axis] for axis in axes)
    return -(-t // patch[0]), h // patch[1], w // patch[2]


from_bcfhw = partial(_patched, "batch, channels, frames, height, width", (2, 3, 4))
from_bfchw = partial(_patched, "batch, frames, channels, height, width", (1, 3, 4))
from_bfhwc = partial(_patched, "batch, frames, height, width, channels", (1, 2, 3))


def _patch(model: nn.Module) -> tuple[int, ...]:
    """Latents of a token along (t, h, w)."""
    config: Any = model.config
    size = config.patch_size
    return tuple(size) if isinstance(size, (tuple, list)) else (getattr(config, "patch_size_t", None) or 1, size, size)


def from_numbers(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """The canvas by ``num_frames``, ``height`` and ``width`` of the latents, or where these are not given by ``video_coords``.

    Where all three are 1 and there are ``video_coords`` of more tokens, as LTXI2VLongMultiPromptPipeline has it, the coordinates are those
    of frames that follow one another, whatever times these have.
    """
    frames, height, width = (arguments.get(name) for name in ("num_frames", "height", "width"))
    coords = arguments.get("video_coords")
    if frames is not None and height is not None and width is not None:
        if coords is not None and coords.dim() == 3 and coords.shape[2] > 1 == frames == height == width:
            return from_frames(coords, lambda: coords[0].T)
        return frames, height, width
    if coords is None:
        raise ValueError("num_frames, height and width, or video_coords, must be given so that SSTA knows the canvas, got neither")
    if coords.dim() != 3:
        # LTX-2's, [batch, 3, tokens, 2], may go on behind the video with tokens of key frames: where it ends, they do not say.
        raise ValueError(f"num_frames, height and width must be given beside video_coords that are not [batch, 3, tokens], so that SSTA "
                         f"knows the canvas, got video_coords of shape {tuple(coords.shape)}")
    return from_coordinates(coords, lambda: coords[0].T)


def from_frames(key: Tensor, points: Callable[[], Tensor]) -> tuple[int, int, int]:
    """The canvas of a sequence of frames alike in height and width, whatever times they have; the rest as of ``from_coordinates``."""
    return _value_of(key, "frames", _frames, points)


def from_coordinates(key: Tensor, points: Callable[[], Tensor]) -> tuple[int, int, int]:
    """The canvas of the grid that a sequence of (t, h, w) coordinates ends with.

    Args:
        key: the tensor that holds the coordinates. It is read, which waits for the device, when it is first seen or was changed; one that
            was made under ``torch.inference_mode`` does not say whether it was changed, and is read in every forward. Reading it breaks the
            graph under torch.compile.
        points: called for the coordinates as ``[S, 3]``.

    Raises:
        ValueError: the sequence does not end with the last frame of a grid; under torch.export, which knows no values.
    """
    return _value_of(key, "last grid", _last_grid, points)


def memory_before(model: nn.Module, arguments: Mapping[str, Any], thw: tuple[int, int, int]) -> tuple[DenseRun, ...]:
    """What stands before the video in a call of LTX-2's transformer: nothing, as in diffusers' own pipelines, which have key frames and
    references behind it; or all tokens that are not the video's, as Echo has its memory.

    Only where there are other tokens than the video's, their coordinates are read (see ``from_coordinates``): each of the video's frames
    begins when the one before it ends, and a single frame begins before everything else.
    """
    coords, frames, height, width = (arguments.get(name) for name in ("video_coords", "num_frames", "height", "width"))
    if coords is None or coords.dim() != 4 or frames is None or height is None or width is None:
        return ()
    video, others = frames * height * width, coords.shape[2] - frames * height * width
    if others <= 0:
        return ()

    def before(points: Tensor) -> tuple[DenseRun, ...]:
        first, last = (_gapless(part, frames) and (frames > 1 or bool(part[0, 0, 0] <= points[:, 0, 0].min()))
                       for part in (points[:video], points[others:]))
        return (DenseRun(others),) if last and not first else ()

    return _value_of(coords, ("before", video, frames), before, lambda: coords[0].movedim(0, 1))


def histories_before(names: Sequence[str], model: nn.Module, arguments: Mapping[str, Any], thw: tuple[int, int, int]
                     ) -> tuple[VideoGrid, ...]:
    """The grids before the video where earlier parts of it stand, which are packed more coarsely the older they are.

    Args:
        names: the arguments with their latents, the oldest first. The last one's tokens have the video's size, those before it twice the
            next one's along each axis; rounded up, as the models pad them. One that is None, or has no "indices_" of its name, is left out.
    """
    given = [(name, 2 ** (len(names) - 1 - number)) for number, name in enumerate(names)
             if arguments.get(name) is not None and arguments.get(f"indices_{name}") is not None]
    return tuple([VideoGrid(*(-(-size // (scale * patch)) for size, patch in zip(arguments[name].shape[2:], _patch(model))))
                  for name, scale in given])


_Value = TypeVar("_Value")


def _value_of(key: Tensor, what: Hashable, function: Callable[[Tensor], _Value], points: Callable[[], Tensor]) -> _Value:
    """``function`` of the coordinates ``points()``, which the tensor ``key`` holds; ``what`` names it."""
    if torch.compiler.is_exporting():
        raise ValueError("the canvas must be in shapes or numbers under torch.export, which knows no values of tensors, got coordinates, "
                         "from whose values SSTA takes it in this model; torch.compile works")
    return _read(key, what, function, points)


@torch.compiler.disable(reason="SSTA reads the video's canvas from the values of a tensor of coordinates: compile this model without "
                               "fullgraph=True, or its blocks with compile_repeated_blocks")
def _read(key: Tensor, what: Hashable, function: Callable[[Tensor], _Value], points: Callable[[], Tensor]) -> _Value:
    if key.is_inference():
        return function(points().detach().cpu())
    known = _KNOWN.get(key)
    if known is None or known[:2] != (what, key._version):
        known = what, key._version, function(points().detach().cpu())
        _KNOWN[key] = known
    return known[2]


def _frames(points: Tensor) -> tuple[int, int, int]:
    """(frames, height, width) of a sequence of equal frames: a frame ends where the place of its first token comes again."""
    places = points[:, 1:]
    again = (places[1:] == places[0]).all(1).nonzero().flatten()
    area = 1 + int(again[0]) if len(again) else len(points)
    width = _trailing((points[:area, 1] == points[0, 1]).flip(0))
    if len(points) % area or area % width or (places.unflatten(0, (-1, area)) != places[:area]).any():
        raise ValueError(f"video_coords must be those of frames alike in height and width where num_frames, height and width are 1, got "
                         f"{len(points)} tokens, of which the first {area} are no such frame")
    return len(points) // area, area // width, width


def _gapless(points: Tensor, frames: int) -> bool:
    """Whether ``[S, 3, 2]`` are that many frames alike in height and width, each of which begins when the one before it ends."""
    by_frame = points.unflatten(0, (frames, -1))
    alike = (by_frame[:, :, 1:] == by_frame[:1, :, 1:]).all() and (by_frame[:, :, 0] == by_frame[:, :1, 0]).all()
    return bool(alike) and torch.allclose(by_frame[1:, 0, 0, 0], by_frame[:-1, 0, 0, 1], rtol=1e-3, atol=1e-4)


def _last_grid(points: Tensor) -> tuple[int, int, int]:
    """Backwards from the end: tokens of the same row are the width, of the same frame the area; then whole frames, each earlier in time
    than the one after it and otherwise alike."""
    width = _trailing((points[:, :2] == points[-1, :2]).all(1))
    area = _trailing(points[:, 0] == points[-1, 0])
    if area % width:
        raise ValueError(f"the coordinates must end with a frame of whole rows, got {area} tokens in it and {width} in its last row")
    whole = points[len(points) % area:].unflatten(0, (-1, area))
    alike = (whole[:, :, 1:] == whole[-1, :, 1:]).all(-1).all(-1) & (whole[:, :, 0] == whole[:, :1, 0]).all(-1)
    earlier = torch.cat([whole[:-1, 0, 0] < whole[1:, 0, 0], torch.ones(1, dtype=torch.bool, device=whole.device)])
    return _trailing(alike & earlier), area // width, width


def _trailing(flags: Tensor) -> int:
    """How many of the last ``flags`` are True in a row."""
    return int(flags.flip(0).cumprod(0).sum())
