"""Clips that anybody can make: textured objects that move, turn and cover one another, under a camera that pans, turns and zooms."""

from __future__ import annotations

import math

import torch
from clips import SPARE, Clip, Clips
from torch import Tensor

# Longer than what is used of a clip at a time, so that windows vary.
LENGTH = 1.25
SHAPES = ("ellipse", "box", "diamond", "ring")


def procedural_clips(train: int, held: int, frames: int, height: int, width: int, seed: int) -> Clips:
    """``train`` and ``held`` scenes, the same for the same ``seed`` on every machine, up to the rounding of its arithmetic."""
    length = math.ceil(LENGTH * frames)
    height, width = math.ceil(SPARE * height), math.ceil(SPARE * width)
    of = [Clip(f"scene {seed}.{i}", scene(length, height, width, 1000 * seed + i)) for i in range(train + held)]
    return Clips("procedural", of[:train], of[train:])


def scene(frames: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 ``[3, F, H, W]``. Lengths are in heights of the picture, whose middle is 0; time runs from 0 to 1."""
    g = torch.Generator().manual_seed(seed)
    time = torch.linspace(0, 1, frames).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.linspace(-0.5, 0.5, height), torch.linspace(-0.5, 0.5, width) * width / height, indexing="ij")
    zoom = torch.exp(_draw(g, -0.4, 0.4) * time)
    x, y = _turned(x * zoom, y * zoom, _draw(g, -0.25, 0.25) * time)
    x, y = x + _path(g, time, 0.5), y + _path(g, time, 0.3)
    picture = _texture(g, x * 0.5, y * 0.5)
    for _ in range(3 + int(torch.randint(5, (1,), generator=g))):
        size = _draw(g, 0.1, 0.35)
        away_x, away_y = x - _draw(g, -0.7, 0.7) - _path(g, time, 0.9), y - _draw(g, -0.4, 0.4) - _path(g, time, 0.6)
        own_x, own_y = _turned(away_x / size, away_y / (size * _draw(g, 0.6, 1.4)), _draw(g, -3, 3) * time + _draw(g, 0, 6))
        # A pixel's width of blur at the edge.
        cover = torch.sigmoid(-_distance(g, own_x, own_y) * size * height * 2)
        picture = torch.lerp(picture, _texture(g, own_x * 0.4, own_y * 0.4), cover[None])
    return (255 * picture.clamp(0, 1)).round().byte()


def _draw(g: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=g))


def _path(g: torch.Generator, time: Tensor, far: float) -> Tensor:
    """A place over time: a straight line with a swing on it."""
    swing = _draw(g, 0, 0.15) * torch.sin(2 * math.pi * (_draw(g, 0.3, 1.5) * time + _draw(g, 0, 1)))
    return _draw(g, -far, far) * (time - 0.5) + swing


def _turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()


def _distance(g: torch.Generator, x: Tensor, y: Tensor) -> Tensor:
    """How far outside of a shape of about unit radius; negative inside."""
    shape = SHAPES[int(torch.randint(len(SHAPES), (1,), generator=g))]
    if shape == "box":
        return torch.maximum(x.abs(), y.abs()) - 0.8
    if shape == "diamond":
        return (x.abs() + y.abs() - 1.1) / math.sqrt(2)
    radius = torch.hypot(x, y)
    return radius - 1 if shape == "ellipse" else (radius - 0.7).abs() - 0.3


def _texture(g: torch.Generator, x: Tensor, y: Tensor) -> Tensor:
    """``[3, F, H, W]`` in [0, 1]: noise of several scales between two colours, on half of them stripes in a third; mirrored at +-1."""
    noise = torch.zeros(1, 1, 256, 256)
    for octave in (4, 8, 16, 32, 64):
        coarse = torch.randn(1, 1, octave, octave, generator=g)
        noise += torch.nn.functional.interpolate(coarse, (256, 256), mode="bicubic") * octave ** -0.7
    place = torch.stack([x, y], -1)
    noise = noise.expand(len(place), -1, -1, -1)
    height = torch.nn.functional.grid_sample(noise, place, padding_mode="reflection", align_corners=False)[:, 0]
    one, other, third = torch.rand(3, 3, 1, 1, 1, generator=g)
    picture = one + (other - one) * torch.sigmoid(4 * height)[None]
    if torch.rand((), generator=g) < 0.5:
        angle, often = torch.tensor(_draw(g, 0, math.pi)), _draw(g, 4, 14)
        stripes = torch.sigmoid(8 * torch.sin(often * _turned(x, y, angle)[0] * math.pi + 2 * height))
        picture = torch.lerp(picture, third.expand_as(picture), 0.7 * stripes[None])
    return picture
