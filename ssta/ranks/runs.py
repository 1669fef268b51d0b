"""A sequence as runs of tokens, and how many of them each rank holds: plain numbers, known on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..checks import require_choice
from ..kernels.memo import remember_plain
from ..sequence import TokenLayout, VideoGrid, require_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SPLITS = ("video", "all")


@remember_plain
def deal(total: int, ranks: int) -> tuple[int, ...]:
    """How many of ``total`` each rank has, by ``torch.tensor_split``'s rule: the first ones have one more where they do not divide."""
    return tuple([total // ranks + (rank < total % ranks) for rank in range(ranks)])


@remember_plain
def dealt(total: int, key_heads: int, ranks: int) -> tuple[int, ...]:
    """How many of ``total`` heads each rank has; see ``Shards.deal_heads``."""
    if key_heads < ranks:
        what = "heads" if key_heads == total else "key heads"
        raise ValueError(f"group must have at most as many ranks as there are {what}, got {ranks} ranks and {key_heads} {what}; "
                         f"take at most {key_heads} ranks, which is ulysses_degree in diffusers")
    if total % key_heads:
        raise ValueError(f"query's heads must be a multiple of key's {key_heads}, got {total}")
    return tuple([count * (total // key_heads) for count in deal(key_heads, ranks)])


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sequence: ``shared`` out over the ranks, or whole on every one of them."""

    length: int
    shared: bool

    def held(self, ranks: int) -> tuple[int, ...]:
        """How many of its tokens each rank has."""
        return deal(self.length, ranks) if self.shared else (self.length,) * ranks


class RunPlace(NamedTuple):
    """Where a run lies: its first token in the sequence, and in this rank's; how many of its tokens each rank has."""

    length: int
    shared: bool
    start: int
    local: int
    held: tuple[int, ...]


class HeldTokens(NamedTuple):
    """What ranks hold of a sequence; see ``SharedSequence``."""

    places: tuple[RunPlace, ...]
    length: int
    lengths: tuple[int, ...]
    local_length: int


@remember_plain
def held_by(runs: tuple[Run, ...], ranks: int, rank: int) -> HeldTokens:
    places, start, local = [], 0, 0
    for run in runs:
        held = run.held(ranks)
        places.append(RunPlace(run.length, run.shared, start, local, held))
        start, local = start + run.length, local + held[rank]
    return HeldTokens(tuple(places), start, tuple([sum(held) for held in zip(*[place.held for place in places])]), local)


@dataclass(frozen=True)
class SharedSequence:
    """One sequence of S tokens and the ranks that share it out.

    Attributes:
        runs: the sequence. A rank's own sequence consists of its share of each shared run and of each whole run, in the order of runs.
        ranks, rank: how many there are, and which this process is.
        group: the ranks.
        places: where the runs lie.
        length: S.
        lengths: the tokens that each rank holds.
        local_length: the tokens of this rank, S_r.
    """

    runs: tuple[Run, ...]
    ranks: int
    rank: int
    group: ProcessGroup
    places: tuple[RunPlace, ...] = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    local_length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in zip(HeldTokens._fields, held_by(self.runs, self.ranks, self.rank)):
            object.__setattr__(self, name, value)


def runs_of(layout: TokenLayout, split: str) -> tuple[Run, ...]:
    """What ``split`` shares out of ``layout``, after their checks."""
    return _runs(require_layout("layout", layout), require_choice("split", split, SPLITS))


@remember_plain
def _runs(layout: TokenLayout, split: str) -> tuple[Run, ...]:
    if split == "all":
        return (Run(layout.length, True),)
    return tuple([Run(segment.length, isinstance(segment, VideoGrid)) for segment in layout.segments])
