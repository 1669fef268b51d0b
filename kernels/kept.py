"""What is found again when it is needed, and so need not be kept for ever."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock


class Kept(OrderedDict):
    """A dict of at most ``most`` entries: another one takes the place of the one that was used least recently.

    ``get`` and ``[]`` are uses. They are noted from the time on that it is half full; before, a lookup costs little more than a dict's.
    Threads may share one. An entry that a thread has found may be gone at its next lookup.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self._half, self._lock = most, most // 2, Lock()

    def get(self, key, default=None):
        found = dict.get(self, key, default)
        if len(self) > self._half and found is not default:
            self._use(key)
        return found

    def __getitem__(self, key):
        found = dict.__getitem__(self, key)
        if len(self) > self._half:
            self._use(key)
        return found

    def __setitem__(self, key, value) -> None:
        with self._lock:
            super().__setitem__(key, value)
            self.move_to_end(key)
            while len(self) > self.most:
                # Not popitem, which looks its entry up by ``[]``.
                del self[next(iter(self))]

    def _use(self, key) -> None:
        with self._lock:
            try:
                self.move_to_end(key)
            except KeyError:
                pass  # another thread has put something else in its place
