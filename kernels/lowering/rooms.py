"""Where the tensors lie that a step works in: those that are not there at the same time share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

# Bytes of which every place in a room is a multiple.
ALIGNMENT = 256
# From so many bytes on a tensor has a room for itself, which others enter before and after it: large rooms in one piece are hard to find.
LARGE = 1 << 26


class Span(NamedTuple):
    """A tensor of ``size`` bytes, and the first and the last launch that use it."""

    size: int
    first: int
    last: int


class Room:
    """Memory of ``capacity`` bytes; None = as much as it takes."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity, self.size = capacity, capacity or 0
        self._within: list[tuple[int, Span]] = []

    @classmethod
    def around(cls, span: Span) -> Room:
        """Memory for ``span``, which others may share before and after it."""
        room = cls(span.size)
        room.place(span)
        return room

    def place(self, span: Span) -> int | None:
        """Where ``span`` lies from now on; None where nothing is free as long as it is there."""
        at = 0
        for begin, other in sorted([of for of in self._within if of[1].first <= span.last and span.first <= of[1].last]):
            if begin - at >= span.size:
                break
            at = max(at, -(-(begin + other.size) // ALIGNMENT) * ALIGNMENT)
        if self.capacity is not None and at + span.size > self.capacity:
            return None
        self._within.append((at, span))
        self.size = max(self.size, at + span.size)
        return at


def shared(spans: Sequence[Span], rooms: Sequence[Room]) -> tuple[list[tuple[int, int]], list[Room]]:
    """(room, place) of each span, and all rooms: first those that there are. Large spans choose first, of equal ones those that come first
    or those that stay longest; or those that are large and stay long; whichever takes least memory."""
    orders: list[Callable[[Span], Any]] = [lambda of: of.size, lambda of: (of.size, of.last - of.first),
                                           lambda of: of.size * (of.last - of.first + 1)]
    found = [_placed(spans, deepcopy(rooms), order) for order in orders]
    return min(found, key=lambda of: sum([room.size for room in of[1]]))


def _placed(spans: Sequence[Span], rooms: Sequence[Room], first: Callable[[Span], Any]) -> tuple[list[tuple[int, int]], list[Room]]:
    rooms, places = list(rooms), [(0, 0)] * len(spans)
    for number in sorted(range(len(spans)), key=lambda number: first(spans[number]), reverse=True):
        span = spans[number]
        found = next(((at, place) for at, room in enumerate(rooms) if (place := room.place(span)) is not None), None)
        if found is None:
            rooms.append(Room(span.size if span.size >= LARGE else None))
            found = len(rooms) - 1, rooms[-1].place(span) or 0
        places[number] = found
    return places, rooms
