"""What is found again when it is needed, and so need not be kept for ever."""

from __future__ import annotations


class Kept(dict):
    """A dict that is emptied when it has ``most`` entries and gets another: what is in it can be found again."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __setitem__(self, key, value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
