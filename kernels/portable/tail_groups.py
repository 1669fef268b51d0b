"""Which heads a step of the tail does at once, so that the matrices that it works with fit into the room that there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def evenly(heads: int, most: int) -> int:
    """How many of ``heads`` are done at once, at most ``most`` and at least one, in as few groups as that takes; ``most`` where all are."""
    return most if most >= heads else -(-heads // -(-heads // max(most, 1)))


def head_groups(batch: int, kv_heads: int, group: int, at_once: int, several: int = 1) -> Iterator[tuple[tuple, tuple]]:
    """Indices of groups' (query heads, key heads): ``at_once`` key heads of one batch element, or all of all where there are no more. A
    key head has ``group`` query heads. ``several`` groups of ``at_once`` are one, but for what is left of fewer heads."""
    if batch * kv_heads <= at_once:
        yield (slice(None),) * 2, (slice(None),) * 2
        return
    for b in range(batch):
        first = 0
        while first < kv_heads:
            left = kv_heads - first
            end = first + (min(several * at_once, left // at_once * at_once) or left)
            yield (slice(b, b + 1), slice(first * group, end * group)), (slice(b, b + 1), slice(first, end))
            first = end


def mean_bytes(q: Tensor, k: Tensor) -> int:
    """The mean bytes of q, k, v and attention's result, no less than those of q. Rooms are shares of these."""
    return max(q.numel(), (q.numel() + k.numel()) // 2) * q.element_size()


def of_group(index: tuple, *xs: Tensor | None) -> list[Any]:
    """The same heads of several tensors, of those that are there."""
    return [None if x is None else x[index] for x in xs]
