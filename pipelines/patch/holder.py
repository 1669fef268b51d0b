"""Holder: where one layer's processor finds the selection that its thread's forward keeps."""

from __future__ import annotations

import threading
from typing import Protocol

from ssta.selection import Selection


class SelectionMemory(Protocol):
    """One layer's selection in one forward, see ``training.kept_selection``."""

    def selection(self, shape: tuple[int, ...]) -> Selection | None:
        """The selection for a query of ``shape``; None before ``keep``."""

    def keep(self, selection: Selection, shape: tuple[int, ...]) -> None:
        """Keeps ``selection``, which was made for a query of ``shape``."""


class Holder:
    """The ``SelectionMemory`` of each thread's forward; None = the layer selects, and keeps nothing."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __reduce__(self) -> tuple:
        return Holder, ()

    @property
    def frozen(self) -> SelectionMemory | None:
        return getattr(self._thread, "frozen", None)

    @frozen.setter
    def frozen(self, memory: SelectionMemory | None) -> None:
        self._thread.frozen = memory
