"""What a sequence consists of: TokenLayout is a list of video grids and dense runs."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require_int, require_triple


@dataclass(frozen=True)
class VideoGrid:
    """A segment of t * h * w tokens of a video latent, t-major, then h, then w. Entries are ints of at least 1."""

    t: int
    h: int
    w: int

    def __post_init__(self) -> None:
        for axis in "thw":
            require_int(f"VideoGrid.{axis}", getattr(self, axis), 1)

    @property
    def thw(self) -> tuple[int, int, int]:
        return self.t, self.h, self.w

    @property
    def length(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True)
class DenseRun:
    """A segment of ``length`` tokens, at least 1, that attend to everything and that everything attends to: text, audio, references."""

    length: int

    def __post_init__(self) -> None:
        require_int("DenseRun.length", self.length, 1)


@dataclass(frozen=True)
class TokenLayout:
    """What a sequence consists of: video grids and dense runs, one after the other, in any order. Hashable.

    Raises:
        TypeError: a segment is neither a VideoGrid nor a DenseRun.
        ValueError: there is no segment.
    """

    segments: tuple[VideoGrid | DenseRun, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.segments, (tuple, list)):
            raise TypeError(f"segments must be a tuple of VideoGrid and DenseRun, got {self.segments!r}")
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            raise ValueError("segments must hold at least one VideoGrid or DenseRun, got none")
        for i, segment in enumerate(self.segments):
            if not isinstance(segment, (VideoGrid, DenseRun)):
                raise TypeError(f"segments[{i}] must be a VideoGrid or a DenseRun, got {segment!r}")

    @classmethod
    def video_text(cls, thw: tuple[int, int, int], text_len: int = 0) -> TokenLayout:
        """A video of (t, h, w) tokens followed by ``text_len`` tokens of text, which may be 0."""
        video = VideoGrid(*require_triple("thw", thw))
        return cls((video, DenseRun(text_len)) if require_int("text_len", text_len, 0) else (video,))

    @property
    def video(self) -> tuple[VideoGrid, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, VideoGrid))

    @property
    def dense(self) -> tuple[DenseRun, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, DenseRun))

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.video_length + self.dense_length

    @property
    def video_length(self) -> int:
        return sum(grid.length for grid in self.video)

    @property
    def dense_length(self) -> int:
        return sum(run.length for run in self.dense)
