"""A contact sheet: the first, the middle and the last frame of some videos, a row for every way of making them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

TITLE = 14


class Sheet:
    def __init__(self) -> None:
        self._rows: list[tuple[str, Tensor]] = []

    def add(self, name: str, videos: list[Tensor]) -> None:
        """A row of frames of ``videos``, each ``[F, 3, H, W]`` in [0, 1] and all of one size."""
        frames = [video[i] for video in videos for i in (0, len(video) // 2, len(video) - 1)]
        self._rows.append((name, (255 * torch.cat(frames, 2)).round().byte().cpu()))

    def save(self, path: Path) -> None:
        from PIL import Image, ImageDraw

        height = max(frames.shape[1] for _, frames in self._rows) + TITLE
        sheet = Image.new("RGB", (max(frames.shape[2] for _, frames in self._rows), height * len(self._rows)))
        draw = ImageDraw.Draw(sheet)
        for i, (name, frames) in enumerate(self._rows):
            draw.text((3, i * height), name, fill="white")
            sheet.paste(Image.fromarray(frames.permute(1, 2, 0).numpy()), (0, i * height + TITLE))
        sheet.save(path, quality=90)
        print(f"wrote {path}")
