"""Exchange: what one attention sends to the other ranks and gets from them, and how long it waits for that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssta.kernels.checks import autocast_inputs
from ssta.layout import Input
from ssta.ranks import Sent, Shards

from ..patch.report import Stopwatch


class OnItsWay(NamedTuple):
    """q, k or v of this rank's tokens, sent for those of its heads.

    Attributes:
        sent: what arrives.
        shape: ``[B, H_r, S, D]``, of what arrives.
        heads: H.
        dtype, device: its.
    """

    sent: Sent
    heads: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device


# What attention gets of q, k and v: they themselves, their projections, or what other ranks send.
Given = Input | OnItsWay


class Exchange:
    """Times the exchange before attention from when q is sent, which is last and has nothing left to hide under, and the one after it."""

    def __init__(self) -> None:
        self._before, self._after = Stopwatch(), Stopwatch()
        self._device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        """That something is about to be sent."""
        if not torch.compiler.is_compiling():
            self._device = device
            self._before.start(device)

    def send(self, shards: Shards, x: Input, key_heads: int) -> OnItsWay:
        """This rank's tokens of all heads ``[B, S_r, H, D]``, or deferred, to the ranks whose heads they are."""
        self.begin(x.device)
        if isinstance(x, Tensor):
            # Attention would do it, but later.
            x, = autocast_inputs(x=x)
            x = x.transpose(1, 2)
        batch, heads, _, dim = x.shape
        own = shards.deal_heads(heads, key_heads)[shards.rank]
        return OnItsWay(shards.start(x, key_heads=key_heads), heads, (batch, own, shards.length, dim), x.dtype, x.device)

    def sent(self, shards: Shards, query: Given, key: Given, value: Given) -> tuple[OnItsWay, OnItsWay, OnItsWay]:
        """All three, unless they are on their way already."""
        if isinstance(query, OnItsWay) and isinstance(key, OnItsWay) and isinstance(value, OnItsWay):
            return query, key, value
        assert not isinstance(query, OnItsWay) and not isinstance(key, OnItsWay) and not isinstance(value, OnItsWay)
        key_heads = key.shape[2 if isinstance(key, Tensor) else 1]
        # Each is packed while the one before it is on its way.
        v, k, q = (self.send(shards, x, key_heads) for x in (value, key, query))
        return q, k, v

    def note(self, step: str) -> None:
        """That a step is launched: what was sent has "arrived", attention is over ("attended"), or heads have "returned"."""
        if torch.compiler.is_compiling():
            return
        if step == "arrived":
            self._before.stop()
        elif step == "attended":
            self._after.start(self._device)
        else:
            self._after.stop()

    def seconds(self) -> float | None:
        """Of both; None where nothing was exchanged, or inside a graph. Waits for the device."""
        before, after = self._before.seconds(), self._after.seconds()
        return None if before is None or after is None else before + after
