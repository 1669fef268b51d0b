"""A contact sheet: the first, the middle and the last frame of some videos, a row for every way of making them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

# Pixels of a label, and of the line that it stands in.
LETTERS, TITLE = 22, 30


class Sheet:
    """Rows named in ``order`` come in that order, below the others, which come as they were added."""

    def __init__(self, order: Iterable[str] = ()) -> None:
        self._order = list(order)
        self._rows: list[tuple[str, Tensor]] = []

    def add(self, name: str, videos: list[Tensor]) -> None:
        """A row of frames of ``videos``, each ``[F, 3, H, W]`` in [0, 1] and all of one size."""
        frames = [video[i] for video in videos for i in (0, len(video) // 2, len(video) - 1)]
        self._rows.append((name, (255 * torch.cat(frames, 2)).round().byte().cpu()))

    def save(self, path: Path) -> None:
        from PIL import Image, ImageDraw, ImageFont

        rows = sorted(self._rows, key=lambda row: self._order.index(row[0]) if row[0] in self._order else -1)
        height = max(frames.shape[1] for _, frames in rows) + TITLE
        sheet = Image.new("RGB", (max(frames.shape[2] for _, frames in rows), height * len(rows)))
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(LETTERS)
        for i, (name, frames) in enumerate(rows):
            draw.text((4, i * height + 1), name, fill="white", font=font)
            sheet.paste(Image.fromarray(frames.permute(1, 2, 0).numpy()), (0, i * height + TITLE))
        sheet.save(path, quality=90)
        print(f"wrote {path}")
