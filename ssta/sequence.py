"""What a sequence consists of: TokenLayout is a list of video grids and dense runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Any

from .checks import require_int, require_triple
from .kernels.memo import remember_plain


@dataclass(frozen=True)
class VideoGrid:
    """A segment of t * h * w tokens of a video latent, t-major, then h, then w. Entries are ints of at least 1.

    Attributes:
        thw: (t, h, w).
        length: t * h * w.
    """

    t: int
    h: int
    w: int
    thw: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        t, h, w = self.t, self.h, self.w
        if not (type(t) is type(h) is type(w) is int and t > 0 and h > 0 and w > 0):
            t, h, w = (require_int(f"VideoGrid.{axis}", getattr(self, axis), 1) for axis in "thw")
        for name, value in (("t", t), ("h", h), ("w", w), ("thw", (t, h, w)), ("length", t * h * w)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class DenseRun:
    """A segment of ``length`` tokens, at least 1, that attend to everything and that everything attends to: text, audio, references."""

    length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", require_int("DenseRun.length", self.length, 1))


@dataclass(frozen=True)
class TokenLayout:
    """What a sequence consists of: video grids and dense runs, one after the other, in any order. Hashable.

    Attributes:
        segments: the VideoGrids and DenseRuns.
        video, dense: those of one kind, in their order.
        video_length, dense_length, length: tokens of the video, of the dense runs, and of both.
        longest_video: (t, h, w) of the grid with the most frames, None without video.

    Raises:
        TypeError: a segment is neither a VideoGrid nor a DenseRun.
        ValueError: there is no segment.
    """

    segments: tuple[VideoGrid | DenseRun, ...]
    video: tuple[VideoGrid, ...] = field(init=False, repr=False, compare=False)
    dense: tuple[DenseRun, ...] = field(init=False, repr=False, compare=False)
    video_length: int = field(init=False, repr=False, compare=False)
    dense_length: int = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)
    longest_video: tuple[int, int, int] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.segments, (tuple, list)):
            raise TypeError(f"segments must be a tuple of VideoGrid and DenseRun, got {self.segments!r}")
        segments = tuple(self.segments)
        if not segments:
            raise ValueError("segments must hold at least one VideoGrid or DenseRun, got none")
        for i, segment in enumerate(segments):
            if not isinstance(segment, (VideoGrid, DenseRun)):
                raise TypeError(f"segments[{i}] must be a VideoGrid or a DenseRun, got {segment!r}")
        video = tuple([segment for segment in segments if isinstance(segment, VideoGrid)])
        dense = tuple([segment for segment in segments if isinstance(segment, DenseRun)])
        video_length, dense_length = sum([grid.length for grid in video]), sum([run.length for run in dense])
        for name, value in (("segments", segments), ("video", video), ("dense", dense), ("video_length", video_length),
                            ("dense_length", dense_length), ("length", video_length + dense_length),
                            ("longest_video", max([grid.thw for grid in video]) if video else None)):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # Every call of a layer looks itself up by it.
        found = vars(self).get("_hash")
        if found is None:
            found = vars(self)["_hash"] = hash(self.segments)
        return found

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def plain(self) -> tuple[tuple[int, ...], ...]:
        """The segments as plain numbers: (t, h, w) of a video grid, (length,) of a dense run."""
        # A compiler's symbols become their numbers.
        return tuple([tuple(map(index, segment.thw if isinstance(segment, VideoGrid) else (segment.length,))) for segment in self.segments])

    @classmethod
    def from_plain(cls, plain: tuple[tuple[int, ...], ...]) -> TokenLayout:
        """What ``plain`` was taken of."""
        return cls(tuple([VideoGrid(*numbers) if len(numbers) == 3 else DenseRun(*numbers) for numbers in plain]))

    @classmethod
    def video_text(cls, thw: tuple[int, int, int], text_len: int = 0) -> TokenLayout:
        """A video of (t, h, w) tokens followed by ``text_len`` tokens of text, which may be 0."""
        return _video_text(cls, *require_triple("thw", thw), require_int("text_len", text_len, 0))

    def __str__(self) -> str:
        parts = [f"video {' x '.join(map(str, segment.thw))}" if isinstance(segment, VideoGrid) else f"dense {segment.length:,}"
                 for segment in self.segments]
        return f"TokenLayout of {self.length:,} tokens: {' + '.join(parts)}"


@remember_plain
def _video_text(kind: type[TokenLayout], t: int, h: int, w: int, text_len: int) -> TokenLayout:
    video = VideoGrid(t, h, w)
    return kind((video, DenseRun(text_len)) if text_len else (video,))


def require_layout(name: str, layout: Any) -> TokenLayout:
    """``layout``, a TokenLayout."""
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"{name} must be a TokenLayout, got {type(layout).__name__}")
    return layout
