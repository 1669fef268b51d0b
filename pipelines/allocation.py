"""Which of the settings that were measured for every layer are worth their time: the best of all under one error or one cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Setting(NamedTuple):
    """A layer's way to attend, with what it costs and what it gets wrong.

    Attributes:
        cost: the time of its attention over that of dense attention.
        error: what it adds to the square of the model's error.
        density: share of the video's tile pairs that is computed exactly; 1 = dense attention.
        compensation: of the others, see ``SSTAConfig``.
    """

    cost: float
    error: float
    density: float
    compensation: str


DENSE = Setting(1.0, 0.0, 1.0, "none")


def worthwhile(settings: Sequence[Setting]) -> list[Setting]:
    """The settings on the lower convex hull of error over cost, the cheapest first, up to dense attention, which needs not be among them.

    Between any two of them what a unit of cost gains only falls; the others are worth less than a mixture of their neighbours.
    """
    hull: list[Setting] = []
    for setting in sorted([*settings, DENSE]):
        if hull and setting.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], setting) >= _gain(hull[-2], hull[-1]):
            hull.pop()
        # Of equal cost the first has the least error, for they are sorted.
        hull.append(setting)
    return hull


def _gain(a: Setting, b: Setting) -> float:
    """How much error a unit of cost takes away from ``a`` to ``b``, which costs more."""
    return (a.error - b.error) / (b.cost - a.cost)


def allocate(layers: Sequence[Sequence[Setting]], *, error: float | None = None, cost: float | None = None) -> list[Setting]:
    """A setting for each layer: the least cost under an error, or the least error at a cost.

    Begins with everybody's cheapest and buys, in all layers together, what gains most for its cost, which at every price is the best that
    the settings give (a Lagrangian relaxation). So more money never leaves a greater error, and a greater error never costs more. The last
    purchase is made in part, unless its two settings have other compensations; error and cost are taken to be linear between them, which
    exaggerates the error, for the hull is convex.

    Args:
        layers: the settings of each, dense attention not among them; may be none.
        error: sum of the settings' errors that must not be exceeded, above 0.
        cost: sum of the settings' costs that must not be exceeded.

    Raises:
        ValueError: not even everybody's cheapest setting is under ``cost``.
    """
    hulls = [worthwhile(settings) for settings in layers]
    chosen = [hull[0] for hull in hulls]
    spent, wrong = sum([setting.cost for setting in chosen]), sum([setting.error for setting in chosen])
    if cost is not None and spent > cost + 1e-9:
        raise ValueError(f"cost must be at least {spent:.4g}, got {cost:.4g}")
    purchases = sorted(((-_gain(a, b), i, a, b) for i, hull in enumerate(hulls) for a, b in zip(hull, hull[1:])),
                       key=lambda purchase: purchase[:2])
    left_out: set[int] = set()
    for _, i, a, b in purchases:
        if error is not None and wrong <= error:
            break
        if i in left_out:
            continue
        bought = b
        if error is not None and wrong - a.error + b.error < error or cost is not None and spent - a.cost + b.cost > cost + 1e-9:
            part = _partly(a, b, None if error is None else error - wrong + a.error, None if cost is None else cost - spent + a.cost)
            if part is None and cost is not None:
                # What others offer gains less, but is to be had.
                left_out.add(i)
                continue
            bought = b if part is None else part
        chosen[i] = bought
        spent, wrong = spent + bought.cost - a.cost, wrong + bought.error - a.error
        if bought is not b:
            break
    return chosen


def _partly(a: Setting, b: Setting, error: float | None, cost: float | None) -> Setting | None:
    """What lies between ``a`` and ``b`` and has this error or this cost; None where nothing does that is cheaper than ``b``."""
    if b.density == 1:
        # Up to the last tile the others are estimated, at the price that this has.
        b = Setting(1 + a.cost - a.density, 0.0, 1.0, a.compensation)
    if a.compensation != b.compensation:
        return None
    part = max((a.error - error) / (a.error - b.error) if error is not None else ((cost or 0.0) - a.cost) / (b.cost - a.cost), 0.0)
    at, wrong, density = ((1 - part) * x + part * y for x, y in zip(a[:3], b[:3]))
    return Setting(at, wrong, density, a.compensation) if density < 1 and at < 1 else None
