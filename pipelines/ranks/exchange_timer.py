"""ExchangeTimer: how long one attention waits for the other ranks."""

from __future__ import annotations

import torch

from ..patch.report import Stopwatch


class ExchangeTimer:
    """Times the exchange before attention from when q is sent, which is last and has nothing left to hide under, and the one after it."""

    def __init__(self) -> None:
        self._before, self._after = Stopwatch(), Stopwatch()
        self._device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        """That something is about to be sent."""
        if not torch.compiler.is_compiling():
            self._device = device
            self._before.start(device)

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
        """The seconds of both exchanges together; None where nothing was exchanged, or inside a graph. Waits for the device."""
        before, after = self._before.seconds(), self._after.seconds()
        return None if before is None or after is None else before + after
