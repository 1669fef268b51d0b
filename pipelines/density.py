"""How dense a step is: the log signal-to-noise ratio of a noise level, the published curve over it, and the few densities there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ssta import SSTAConfig
from ssta.kernels import require_number

# A density that follows the noise takes at most as many values: a compiled block is compiled once for each, twice where selections serve
# several steps or a stack's first block gets its tokens in another order, and torch compiles it eight times at most (recompile_limit).
LEVELS = 4
# From here on a step is dense: nothing is gained by choosing what to leave out.
DENSE_FROM = 63 / 64
# Noise levels of 0 and 1 have no finite ratio.
_LEAST_NOISE = 1e-4
# Where a density's range is looked for.
_SAMPLES = 256
# What a density takes the place of, and what that leaves.
_BUDGET: dict[str, Any] = {"topk": None, "threshold": 0.0, "budget": None}


def log_snr(noise: float) -> float:
    """The log signal-to-noise ratio 2 log((1 - noise) / noise) of flow matching at a noise level (its sigma); within 18.5 of 0."""
    noise = min(max(noise, _LEAST_NOISE), 1 - _LEAST_NOISE)
    return 2 * math.log((1 - noise) / noise)


@dataclass(frozen=True)
class NoiseDensity:
    """A density that falls with the noise along a logistic curve in the log signal-to-noise ratio l; see ``Schedule.by_noise``.

        density(l) = least + (most - least) (1 - sigmoid(k (l - l_halfway)))        k = log(tau / (1 - tau)) / |l_reached - l_halfway|

    iCATS has this form, for the softmax mass that it keeps in place of a density, with most = 1 and tau of 0.99 to 0.999.

    Args:
        least: the density in (0, 1] that it falls to.
        reached: the noise level in (0, 1) at which it has come to ``least`` but for 1 - ``tau`` of the way.
        halfway: the noise level in (0, 1), above ``reached``, at which it is halfway between ``most`` and ``least``.
        most: the density in (0, 1] of the noisiest steps.
        tau: in (0.5, 1).

    Raises:
        TypeError: no numbers.
        ValueError: out of range, or in another order.
    """

    least: float
    reached: float = 0.85
    halfway: float = 0.95
    most: float = 1.0
    tau: float = 0.99

    def __post_init__(self) -> None:
        for name in ("least", "reached", "halfway", "most", "tau"):
            object.__setattr__(self, name, require_number(name, getattr(self, name)))
        if not 0 < self.least <= self.most <= 1:
            raise ValueError(f"least and most must be densities, 0 < least <= most <= 1, got least = {self.least} and most = {self.most}")
        if not 0 < self.reached < self.halfway < 1:
            raise ValueError("reached and halfway must be noise levels, 0 < reached < halfway < 1, for the density falls with the noise, "
                             f"got reached = {self.reached} and halfway = {self.halfway}")
        if not 0.5 < self.tau < 1:
            raise ValueError(f"tau must lie in (0.5, 1), got {self.tau}")

    def __call__(self, log_snr_of_step: float) -> float:
        pivot = log_snr(self.halfway)
        k = math.log(self.tau / (1 - self.tau)) / abs(log_snr(self.reached) - pivot)
        # 1 - sigmoid(x) = (1 - tanh(x / 2)) / 2, which does not overflow.
        return self.least + (self.most - self.least) * (1 - math.tanh(k * (log_snr_of_step - pivot) / 2)) / 2


def checked_density(density: Callable[[float], float], noise: float) -> float:
    """What a schedule's ``density`` gives at a noise level.

    Raises:
        TypeError, ValueError: no number, or none in (0, 1].
    """
    ratio = log_snr(noise)
    value = require_number("schedule's density", density(ratio))
    if not 0 < value <= 1:
        raise ValueError(f"schedule's density must give values in (0, 1], got {value} for a log signal-to-noise ratio of {ratio:.3g}")
    return value


def levels_of(density: Callable[[float], float]) -> tuple[float, ...]:
    """The densities that steps have, ascending: all that ``density`` gives if they are few, else ``LEVELS`` from its least to its greatest,
    each the same factor above the one before. What is from ``DENSE_FROM`` on is 1.

    Raises:
        TypeError, ValueError: what ``checked_density`` raises, at any noise level.
    """
    given = [checked_density(density, i / _SAMPLES) for i in range(_SAMPLES + 1)]
    found = sorted({1.0 if value >= DENSE_FROM else value for value in given})
    if len(found) <= LEVELS:
        return tuple(found)
    least, most = found[0], found[-1]
    return tuple([least, *(least * (most / least) ** (i / (LEVELS - 1)) for i in range(1, LEVELS - 1)), most])


def nearest(levels: tuple[float, ...], density: float) -> int:
    """Which of ``levels`` is the fewest times above or below ``density``."""
    return min(range(len(levels)), key=lambda i: abs(math.log(levels[i] / density)))


def with_density(config: SSTAConfig, density: float, *, chosen: bool = False) -> SSTAConfig:
    """``config`` with ``density`` in place of its budget, in its variants too.

    Args:
        config: with any budget.
        density: in (0, 1].
        chosen: somebody chose the configuration, so that its budget, unless that is a density, is not to be lost.

    Raises:
        ValueError: the window alone selects, or a budget that was chosen.
    """
    if chosen:
        for overrides in ({name: getattr(config, name) for name in _BUDGET}, *(dict(pairs) for _, pairs in config.variants)):
            for name, free in _BUDGET.items():
                if overrides.get(name, free) != free:
                    raise ValueError(f"schedule's density must come with a configuration that leaves the budget to it, got {name} = "
                                     f"{overrides[name]} in config and density = {density} in schedule; leave {name} out of config, or "
                                     "density out of schedule")
    variants = tuple([(frames, {name: value for name, value in dict(overrides).items() if name not in (*_BUDGET, "density")})
                      for frames, overrides in config.variants])
    try:
        return replace(config, **_BUDGET, density=density, variants=variants)
    except ValueError as error:
        raise ValueError(f"schedule's density = {density} must fit the configuration: {error}") from None
