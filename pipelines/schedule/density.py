"""A density in place of a configuration's budget, and from which density on a forward is dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ssta import SSTAConfig

# From this density on a forward is dense: choosing what to leave out gains nothing.
DENSE_FROM = 63 / 64
# The fields that a density replaces, and what they then hold.
_BUDGET: dict[str, Any] = {"topk": None, "threshold": 0.0, "budget": None}


def with_density(config: SSTAConfig, density: float) -> SSTAConfig:
    """``config`` with ``density``, a share in (0, 1] of the video's tile pairs, in place of its budget, in its variants too.

    Raises:
        ValueError: the window alone selects.
    """
    variants = tuple([(frames, {name: value for name, value in dict(overrides).items() if name not in (*_BUDGET, "density")})
                      for frames, overrides in config.variants])
    try:
        return replace(config, **_BUDGET, density=density, variants=variants)
    except ValueError as error:
        raise ValueError(f"density = {density} must fit the configuration: {error}") from None
