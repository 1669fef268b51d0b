"""Steps: what comes before and after attention, for tensors of one kind that come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

from .lengths import valid_lengths
from .reorder import gather_blocks, take_tokens
from .select import score_blocks, select_blocks

if TYPE_CHECKING:
    from ..lowering.quick_launch import Settled


class Steps:
    """``gather_blocks``, ``score_blocks``, ``select_blocks``, ``valid_lengths`` and ``take_tokens``, each for arguments of one kind: the
    same shapes, strides, dtypes and device, and the same numbers. The first call settles a step, later ones make memory and launch.

    For tensors that nobody watches and that want no gradient, where ``kernels_run``; that, and that they are of one kind, is the caller's
    to see to.
    """

    __slots__ = ("_gather", "_scores", "_lists", "_lengths", "_take")

    def __init__(self) -> None:
        self._gather: Settled | None = None
        self._scores: tuple[Settled, Settled] | None = None
        self._lists: Settled | None = None
        self._lengths: Settled | None = None
        self._take: Settled | None = None

    def gather(self, q: Tensor, k: Tensor, v: Tensor, source: Tensor, offsets: Tensor, mean_blocks: int) -> Sequence[Tensor]:
        """``gather_blocks``."""
        if self._gather is not None:
            return self._gather(q, k, v, source, offsets)
        new = gather_blocks(q, k, v, source, offsets, mean_blocks)
        if new[0].numel() and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            self._gather = _settled(_kernels("reorder").launch_gather(q, k, v, offsets, *new[:4]), *new)
        return new

    def scores(self, q: Tensor, k: Tensor, lambda_: float | None) -> Tensor:
        """``score_blocks`` of contiguous descriptors."""
        if self._scores is not None:
            prepare, multiply = self._scores
            return multiply(*prepare(q, k))[0]
        new = score_blocks(q, k, lambda_)
        if new.numel():
            self._scores = _kernels("select").settled_score(q, k, float(lambda_ or 0), lambda_ is not None)
        return new

    def lists(self, forced: Tensor, scores: Tensor, k_per_row: int | Tensor, active: Tensor | None, beyond: bool) -> tuple[Tensor, Tensor]:
        """``select_blocks`` of contiguous tensors, where ``active`` may also be integers ``[B, 1, T]``, not 0 where active."""
        per_row, k = (k_per_row, 0) if isinstance(k_per_row, Tensor) else (None, k_per_row)
        if self._lists is None:
            new = select_blocks(forced, scores, k_per_row, None if active is None else (active != 0).flatten(1), beyond=beyond)
            self._lists = _settled(_kernels("select").launch_select(forced, scores, active, per_row, k, beyond, new[0]), *new)
            return new
        # A pointer that is not read may be any.
        counts, indices = self._lists(forced, scores, forced if active is None else active, forced if per_row is None else per_row)
        return counts, indices

    def lengths(self, valid: Tensor, runs: Tensor, before: Tensor, lengths: Tensor, least: int) -> Tensor:
        """``valid_lengths``."""
        if self._lengths is not None:
            return self._lengths(valid, runs, before, lengths)[0]
        new = valid_lengths(valid, runs, before, lengths, least)
        if new.numel():
            self._lengths = _settled(_kernels("lengths").launch_lengths(valid, least, new), new)
        return new

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """``take_tokens``."""
        if self._take is not None:
            return self._take(x, index)[0]
        new = take_tokens(x, index)
        if new.numel() and x.stride(-1) == 1:
            self._take = _settled(_kernels("reorder").launch_take(x, new), new)
        return new


def _kernels(name):
    return import_module(f".{name}_kernel", __package__)


def _settled(launch, *outputs: Tensor) -> Settled:
    return import_module("..lowering.quick_launch", __package__).Settled.of(launch, *outputs)
