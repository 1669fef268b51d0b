"""In which world an exchange runs: in a graph that is traced, with gradients, or where ranks may wait for one another."""

from __future__ import annotations

from ..kernels.memo import captured, traced
from ..kernels.operators import recorded
from ..kernels.operators import watched as in_graph

__all__ = ["in_graph", "may_wait", "recorded"]


def may_wait() -> bool:
    """Whether the host may wait for other ranks: neither while something is traced nor while a CUDA graph is captured."""
    return not (traced() or captured())
