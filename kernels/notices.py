"""Messages beside results and errors: one logger, silent unless it has a handler, and warnings that come once a process."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("ssta")
logger.addHandler(logging.NullHandler())

_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warns (RuntimeWarning) and logs ``message``, the first time in this process that ``key`` comes."""
    if key in _said:
        return
    _said.add(key)
    logger.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
