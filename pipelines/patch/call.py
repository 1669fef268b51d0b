"""CallState: what belongs to one forward of a model; Ranks: who shares it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ssta import DenseRun, VideoGrid
from ssta.ranks import deal


class Ranks(NamedTuple):
    """The ranks that share one forward.

    Attributes:
        group: their process group.
        rank: this one's number in it.
        size: how many they are.
        tokens: length of the whole sequence, where it is split as one run; None = videos are split and all other tokens are whole.
    """

    group: Any
    rank: int
    size: int
    tokens: int | None

    def share(self, tokens: int) -> int:
        """How many of ``tokens`` are this rank's."""
        return deal(tokens, self.size)[self.rank]

    def start(self, tokens: int) -> int:
        """The first of this rank's."""
        return sum(deal(tokens, self.size)[:self.rank])


class CallState(NamedTuple):
    """One forward's own: its canvas in tokens, whether its step is dense, the ranks that share it, if there are any, what its family has
    found before the video, and the density that the schedule has for its step, if it has one."""

    thw: tuple[int, int, int]
    dense_step: bool
    ranks: Ranks | None = None
    before: tuple[VideoGrid | DenseRun, ...] = ()
    density: float | None = None
