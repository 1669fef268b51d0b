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
    purchase is made in part where its two settings differ in density alone; error and cost are then taken to be linear between them, which
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
    for _, i, a, b in purchases:
        if error is not None and wrong <= error:
            break
        part = 1.0
        if error is not None:
            part = min(part, (wrong - error) / (a.error - b.error))
        if cost is not None:
            part = min(part, (cost - spent) / (b.cost - a.cost))
        if part < 1 and a.compensation != b.compensation:
            # Not to be had in part: the least that is under the error, the most that is under the cost.
            part = 1.0 if cost is None else 0.0
        chosen[i] = bought = b if part >= 1 else _between(a, b, max(part, 0.0))
        spent, wrong = spent + bought.cost - a.cost, wrong + bought.error - a.error
        if part < 1:
            break
    return chosen


def _between(a: Setting, b: Setting, part: float) -> Setting:
    cost, error, density = ((1 - part) * x + part * y for x, y in zip(a[:3], b[:3]))
    return Setting(cost, error, density, a.compensation)
