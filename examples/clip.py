"""A seeded procedural video clip, and a deterministic way to turn it into latents without a VAE."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PATCH = (2, 8, 8)  # frames, rows and columns of pixels that become one latent token
_SKY, _FIELD = ((0.25, 0.42, 0.66), (0.55, 0.68, 0.80)), ((0.24, 0.33, 0.16), (0.42, 0.46, 0.22))
_BALL, _BOX = ((0.72, 0.16, 0.12), (0.97, 0.62, 0.20)), ((0.30, 0.12, 0.42), (0.82, 0.70, 0.90))

_THINGS = (  # kind, radius, centre row and column, drift down and right over the clip; radius and rows in heights, columns in widths
    ("ball", 0.15, 0.24, 0.24, 0.06, 0.20),
    ("ball", 0.15, 0.76, 0.80, -0.04, -0.16),
    ("box", 0.12, 0.22, 0.84, 0.05, -0.22),
    ("box", 0.12, 0.74, 0.20, 0.02, 0.18),
)


def thing_centre(index: int, time: float) -> tuple[float, float]:
    """Where a thing is at ``time`` (0 the first frame, 1 the last), but for a small swing: fractions of the height and of the width.

    Things 0 and 1 are the balls, 2 and 3 the boxes.
    """
    _, _, row, column, down, right = _THINGS[index]
    return row + down * time, column + right * time


def render_clip(frames: int, height: int, width: int, *, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Renders two balls and two boxes, each pair with one texture, that drift over a sky and a field.

    The pairs are there on purpose: far away from each ball is another region that looks like it.

    Args:
        frames, height, width: size of the clip in frames and pixels, each at least 1.
        seed: fixes the textures and how the things swing; where they drift is the same for all seeds.
        device: where to render.

    Returns:
        float32 [frames, height, width, 3], colours in [0, 1].
    """
    generator = torch.Generator().manual_seed(seed)
    # Coordinates in units of the picture's height, so that the same seed looks the same at every size.
    aspect = width / height
    rows = ((torch.arange(height, device=device) + 0.5) / height)[:, None].expand(height, width)
    columns = ((torch.arange(width, device=device) + 0.5) / height)[None, :].expand(height, width)
    waves = {name: _random_waves(generator, base) for name, base in (("sky", 3.0), ("field", 9.0), ("ball", 16.0), ("box", 12.0))}
    phase = 2 * math.pi * torch.rand(4, generator=generator)
    horizon = 0.45
    clip = torch.empty(frames, height, width, 3, device=device)
    for frame in range(frames):
        time = frame / max(frames - 1, 1)
        picture = torch.where((rows < horizon)[..., None],
                              _shade(_SKY, _texture(waves["sky"], rows, columns - 0.1 * time)),
                              _shade(_FIELD, _texture(waves["field"], rows, columns)))
        for index, (kind, radius, *_) in enumerate(_THINGS):
            row, column = thing_centre(index, time)
            swing = 0.02 * math.sin(2 * math.pi * time + float(phase[index]))
            dy, dx = rows - row - swing, columns - column * aspect
            inside = (dy.square() + dx.square() < radius**2) if kind == "ball" else (torch.maximum(dy.abs(), dx.abs()) < radius)
            # The texture is a function of the place on the object: it travels with it.
            colour = _shade(_BALL if kind == "ball" else _BOX, _texture(waves[kind], dy, dx))
            picture = torch.where(inside[..., None], colour, picture)
        clip[frame] = picture
    return clip


def clip_to_latents(clip: Tensor, channels: int, *, seed: int = 0) -> Tensor:
    """Cuts the clip into patches of ``PATCH`` pixels and projects each one to ``channels`` numbers.

    This is not a VAE: it is space-to-depth followed by a seeded matrix with orthonormal columns, standardised per channel.
    Like a VAE's, its tokens are local and similar pixels give similar tokens; unlike a VAE's, nobody could decode them.

    Args:
        clip: float32 [frames, height, width, 3], each size a multiple of ``PATCH``'s.
        channels: latent channels, at most the numbers in a patch.
        seed: fixes the matrix.

    Returns:
        float32 [1, channels, t, h, w] with (t, h, w) = (frames, height, width) / ``PATCH``.

    Raises:
        ValueError: a size that is not a multiple of the patch, or more channels than numbers in a patch.
    """
    if clip.dim() != 4 or any(size % patch for size, patch in zip(clip.shape, PATCH)):
        raise ValueError(f"clip must be [frames, height, width, 3] in multiples of {PATCH}, got {tuple(clip.shape)}")
    per_patch = math.prod(PATCH) * clip.shape[3]
    if not 1 <= channels <= per_patch:
        raise ValueError(f"channels must be between 1 and {per_patch}, the numbers in a patch, got {channels}")
    t, h, w = (size // patch for size, patch in zip(clip.shape, PATCH))
    patches = clip.reshape(t, PATCH[0], h, PATCH[1], w, PATCH[2], -1).permute(0, 2, 4, 1, 3, 5, 6).reshape(t * h * w, per_patch)
    matrix = torch.linalg.qr(torch.randn(per_patch, channels, generator=torch.Generator().manual_seed(seed)))[0]
    latents = patches @ matrix.to(patches)
    latents = (latents - latents.mean(0)) / latents.std(0, correction=0).clamp(min=1e-6)
    return latents.T.reshape(1, channels, t, h, w).contiguous()


def _random_waves(generator: torch.Generator, base: float) -> list[tuple[float, float, float]]:
    """Three plane waves (cycles per height down and right, phase) near one frequency, in seeded directions."""
    angle, stretch, phase = torch.rand(3, 3, generator=generator).tolist()
    return [(base * (0.7 + 0.6 * s) * math.sin(math.pi * a), base * (0.7 + 0.6 * s) * math.cos(math.pi * a), 2 * math.pi * p)
            for a, s, p in zip(angle, stretch, phase)]


def _texture(waves: list[tuple[float, float, float]], rows: Tensor, columns: Tensor) -> Tensor:
    """Values in [0, 1]: the mean of the waves."""
    total = sum(torch.sin(2 * math.pi * (down * rows + right * columns) + phase) for down, right, phase in waves)
    return 0.5 + 0.5 * total / len(waves)


def _shade(colours: tuple[tuple[float, ...], tuple[float, ...]], value: Tensor) -> Tensor:
    """From the dark to the light colour: [..., 3]."""
    dark, light = (torch.tensor(colour, device=value.device) for colour in colours)
    return dark + (light - dark) * value[..., None]


if __name__ == "__main__":
    print("This is a module of examples/demo.py, which says what it can do: --help.")
