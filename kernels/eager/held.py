"""What a cache holds, in plain torch: room for units' statistics, and what is written to the places of a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..estimate import Estimate
from .steps import compute_dtype


def room_for_statistics(k: Tensor, blocks: int, parts: int) -> Estimate:
    """Room for what is known of so many blocks of keys such as ``k [B, Hkv, P, D]``: as ``key_statistics`` gives it."""
    batch, heads, _, dim = k.shape

    def room(*shape: int) -> Tensor:
        return torch.zeros(batch, heads, blocks * parts, *shape, dtype=compute_dtype(k), device=k.device)

    return Estimate(parts, room(), None, room(dim), room(dim), room(dim, dim), room(dim * dim))


def write_statistics(found: Estimate, into: Estimate, places: Tensor | int) -> None:
    """Writes what ``key_statistics`` has found of some units, covariances too, into what ``room_for_statistics`` has made.

    Args:
        places: int64, which of its units they become; a number: those from this one on.
    """
    if isinstance(places, int):
        places = torch.arange(found.log_count.shape[2], device=found.log_count.device) + places
    for x, room in zip(found.cached.values(), into.cached.values()):
        room.index_copy_(2, places, x)


def write_ring(xs: Sequence[Tensor], source: Tensor, at: Tensor, place: Tensor, each: int, size: int) -> None:
    """Writes what stands behind the first ``size`` entries of ``xs [B, H, m, ...]``, which are a ring of pages, into these.

    Args:
        source: int64 ``[n]``, which of the entries behind the ring.
        at: int64 ``[n]``, where they go, counted from the beginning of a page on, from the ring's end on at its beginning.
        place: int64 ``[1]``, the page.
        each: entries of a page.
    """
    for x in xs:
        x.index_copy_(2, (at + place * each) % size, x.index_select(2, source + size))
