"""The launches of a test."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ssta.kernels.launch import launch


@contextmanager
def launches() -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of ``kernels.launch.launch``, a tuple for each launch."""
    seen: list[tuple[Any, ...]] = []

    def noted(*arguments: Any) -> None:
        seen.append(arguments)
        launch(*arguments)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("ssta.kernels.") and vars(module).get("launch") is launch:
                stack.enter_context(mock.patch.object(module, "launch", noted))
        yield seen
