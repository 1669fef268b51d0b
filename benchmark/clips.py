"""Clips to train a small video model on: cut-free stretches of a folder's videos, divided into those to train on and those held out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from arguments import Unusable
from torch import Tensor

ENDINGS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg")
# Frames are resized to so much more than is used of them, so that crops vary.
SPARE = 1.06
# Mean absolute difference of neighbouring frames, of 255: a cut is above CUT and stands out of so many frames around it, a still picture is
# below STILL.
CUT, STILL, SURROUNDINGS = 12.0, 0.1, 12
# Of the windows, so many are held out: every fifth, whatever the seed.
HELD_EVERY = 5


@dataclass(frozen=True)
class Window:
    """``length`` frames without a cut, from frame ``first`` of the file ``path`` on."""

    path: Path
    first: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.path.name}, frames {self.first} to {self.first + self.length - 1}"


@dataclass(frozen=True)
class Clip:
    """A name, and frames uint8 ``[3, F, H, W]``."""

    name: str
    frames: Tensor

    def to(self, device: torch.device) -> Clip:
        return Clip(self.name, self.frames.to(device))

    def take(self, frames: int, height: int, width: int, generator: torch.Generator | None = None) -> Tensor:
        """uint8 ``[3, frames, height, width]``: from anywhere, as ``generator`` has it, or the middle."""
        room = [have - want for have, want in zip(self.frames.shape[1:], (frames, height, width))]
        t, y, x = (of // 2 if generator is None else int(torch.randint(of + 1, (1,), generator=generator)) for of in room)
        return self.frames[:, t:t + frames, y:y + height, x:x + width]


@dataclass(frozen=True)
class Clips:
    """What a model is trained on and what is held out; ``source`` says where they are from."""

    source: str
    train: list[Clip]
    held: list[Clip]

    def to(self, device: torch.device) -> Clips:
        return Clips(self.source, [clip.to(device) for clip in self.train], [clip.to(device) for clip in self.held])


def read_clips(folder: Path, train: int, held: int, frames: int, height: int, width: int, seed: int) -> Clips:
    """``train`` and ``held`` clips, or as many as there are, of at least ``frames`` frames, a little larger than ``height`` x ``width``.

    They are spread over all files, in the order of their names; another ``seed`` trains on others. What is held out is the same for all
    seeds, so it is never trained on.

    Raises:
        Unusable: no such folder, no videos in it, a file that cannot be read, nothing to read videos with, or fewer than three windows.
    """
    windows = [window for path in video_files(folder) for window in windows_of(path, frames)]
    if len(windows) < 3:
        raise Unusable(f"--clips {folder} must hold at least 3 stretches of {frames} frames without a cut, got {len(windows)}")
    for_held = windows[2::HELD_EVERY]
    for_train = [window for i, window in enumerate(windows) if i % HELD_EVERY != 2]
    chosen = [spread(for_train, train, seed), spread(for_held, held, 0)]
    return Clips(folder.name, *([Clip(window.name, x) for window, x in zip(of, load(of, height, width))] for of in chosen))


def spread(windows: list[Window], count: int, seed: int) -> list[Window]:
    """``count`` of them at equal distances, shifted by a share of the distance that differs from seed to seed (the golden ratio's)."""
    count = min(count, len(windows))
    shift = seed * 0.6180339887 % 1
    return [windows[int((i + shift) * len(windows) / count)] for i in range(count)]


def video_files(folder: Path) -> list[Path]:
    """The videos in ``folder``, by name."""
    if not folder.is_dir():
        raise Unusable(f"--clips must be a folder of videos, got {folder}")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    if not files:
        raise Unusable(f"--clips {folder} must hold videos ({', '.join(ENDINGS)}), got none")
    return files


def windows_of(path: Path, least: int) -> list[Window]:
    """The stretches of ``path`` between cuts, of ``least`` to three times as many frames; longer ones are divided. One frame at either side
    of a cut is left out, and so are still pictures."""
    found = []
    differences = _differences(path)
    edges = [0, *cuts(differences), len(differences) + 1]
    for i, (first, end) in enumerate(zip(edges, edges[1:])):
        first, end = first + (i > 0), end - (i < len(edges) - 2)
        if end - first < least:
            continue
        parts = -(-(end - first) // (3 * least))
        marks = [first + (end - first) * part // parts for part in range(parts + 1)]
        found += [Window(path, a, b - a) for a, b in zip(marks, marks[1:]) if b - a >= least and differences[a:b - 1].mean() >= STILL]
    return found


def cuts(differences: np.ndarray) -> list[int]:
    """The frames that begin a new shot; ``differences[i]`` is that between frames i and i + 1.

    At a cut it is large, larger than nearby, and several times what is usual on the quieter side: a wild shot may follow one at rest.
    """
    found = []
    for i, here in enumerate(differences):
        before, after = differences[max(0, i - SURROUNDINGS):i], differences[i + 1:i + 1 + SURROUNDINGS]
        usual = min((float(np.median(side)) for side in (before, after) if len(side)), default=0.0)
        nearby = max((float(side.max()) for side in (before[-3:], after[:3]) if len(side)), default=0.0)
        if here > CUT and here > 3 * usual + 4 and here > 1.15 * nearby:
            found.append(i + 1)
    return found


def _differences(path: Path) -> np.ndarray:
    """Mean absolute difference of each frame to the next, seen at every few pixels."""
    before, found = None, []
    for frame in frames_of(path):
        step = max(1, min(frame.shape[:2]) // 32)
        small = frame[::step, ::step].astype(np.float32)
        if before is not None:
            found.append(float(np.abs(small - before).mean()))
        before = small
    return np.array(found)


def load(windows: list[Window], height: int, width: int) -> list[Tensor]:
    """The frames of each window, uint8 ``[3, F, H, W]``, scaled to cover ``height`` x ``width`` with a little to spare."""
    found: dict[Window, list[Tensor]] = {window: [] for window in windows}
    for path in dict.fromkeys(window.path for window in windows):
        wanted = [window for window in windows if window.path == path]
        last = max(window.first + window.length for window in wanted)
        for i, frame in enumerate(frames_of(path)):
            if i >= last:
                break
            for window in wanted:
                if window.first <= i < window.first + window.length:
                    found[window].append(_covering(frame, height, width))
    return [torch.stack(found[window], 1) for window in windows]


def _covering(frame: np.ndarray, height: int, width: int) -> Tensor:
    least = [-(-int(100 * SPARE * size) // 100) for size in (height, width)]
    scale = max(want / have for want, have in zip(least, frame.shape))
    size = [max(want, round(scale * have)) for want, have in zip(least, frame.shape)]
    x = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
    x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)[0].round().clamp(0, 255).byte()
    top, left = ((have - want) // 2 for have, want in zip(size, least))
    return x[:, top:top + least[0], left:left + least[1]]


def frames_of(path: Path) -> Iterator[np.ndarray]:
    """The frames of a file, uint8 ``[H, W, 3]`` RGB.

    Raises:
        Unusable: it has none that can be read, or there is nothing to read it with.
    """
    package = next((package for package in READERS if importlib.util.find_spec(package)), None)
    if package is None:
        raise Unusable(f"{path} can be read with cv2 or imageio, and neither is installed: pip install opencv-python-headless, or "
                        "pip install imageio imageio-ffmpeg")
    count = 0
    try:
        for frame in READERS[package](path):
            yield frame
            count += 1
    # imageio's plugins raise what they like, and some only when they close.
    except Exception as error:
        raise Unusable(f"{path} cannot be read with {package} beyond frame {count}: {error}") from error
    if not count:
        raise Unusable(f"{path} cannot be read with {package}: it gave no frame")


def _by_cv2(path: Path) -> Iterator[np.ndarray]:
    import cv2

    video = cv2.VideoCapture(str(path))
    try:
        while True:
            there, frame = video.read()
            if not there:
                return
            yield frame[:, :, ::-1]
    finally:
        video.release()


def _by_imageio(path: Path) -> Iterator[np.ndarray]:
    import imageio.v3

    yield from imageio.v3.imiter(path)


# By package, the preferred one first.
READERS = {"cv2": _by_cv2, "imageio": _by_imageio}
