"""Other values for some fields of a configuration, and what somebody is told who wrote a whole one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from ssta import SSTAConfig
from ssta.config import NO_WINDOW
from ssta.kernels.memo import remember_plain
from ssta.kernels.notices import warn_once
from ssta.window import window_size

# The fields of a budget, and what they hold where there is none.
_BUDGET: dict[str, Any] = {"topk": None, "threshold": 0.0, "budget": None}
_FIELDS = tuple([of.name for of in fields(SSTAConfig) if of.init])


def require_changes(config: SSTAConfig | None, changes: Mapping[str, Any]) -> None:
    """That a user who calls for a model with a ``config`` or with ``changes`` by keyword gave one of them, and fields of ``SSTAConfig``."""
    if config is not None and not isinstance(config, SSTAConfig):
        hint = f"; presets are taken by name as preset={config!r}" if isinstance(config, str) else ""
        raise TypeError(f"config must be an SSTAConfig or None, got {type(config).__name__}{hint}")
    for name in changes:
        if name not in _FIELDS:
            raise TypeError(f"got an unexpected keyword {name!r}; those beside the function's own are fields of SSTAConfig: "
                            f"{', '.join(_FIELDS)}. Steps and layers that stay dense are fields of Schedule, as in "
                            "schedule=Schedule(dense_steps=0.1)")
    if config is not None and changes:
        raise ValueError("config must be left out where fields by keyword change the model's default, got one and "
                         f"{', '.join(changes)}; dataclasses.replace(config, ...) changes those of a config")


def changed(config: SSTAConfig, **changes: Any) -> SSTAConfig:
    """``config`` with other values in some fields, whatever the canvas, and without what they leave no room for.

    A density takes the place of top-k, threshold and budget, and any of these that of a density. A budget takes the place of top-k and
    threshold, and these that of a budget. The window alone (``sparse_type="sta"``) takes the place of all four, and where no window is kept
    the one that there was is gone. Without a compensation there are no parts and no error to select by. A variant keeps those of its fields
    that neither ``changes`` nor this replaces.

    Raises:
        TypeError, ValueError: what ``SSTAConfig`` raises.
    """
    settled = dict(changes)
    budgets = [name for name, free in _BUDGET.items() if changes.get(name, free) != free]
    if changes.get("density") is not None:
        settled = _BUDGET | settled
    elif changes.get("sparse_type") == "sta":
        settled = _BUDGET | {"density": None} | settled
    elif budgets:
        settled.setdefault("density", None)
        settled = ({"topk": None, "threshold": 0.0} if "budget" in budgets else {"budget": None}) | settled
    if changes.get("compensation") == "none":
        settled.setdefault("compensation_parts", 1)
        if config.sampling_type == "error":
            settled.setdefault("sampling_type", None)
    selects = SSTAConfig(sparse_type=changes.get("sparse_type", config.sparse_type),
                         compensation=changes.get("compensation", config.compensation)).selected_by
    if selects == "block_attn" and config.kernel_thw != NO_WINDOW:
        settled.setdefault("kernel_thw", None)
    if "variants" not in changes:
        kept = [(frames, {name: value for name, value in dict(overrides).items() if name not in settled})
                for frames, overrides in config.variants]
        while kept and not kept[-1][1]:
            kept.pop()
        settled["variants"] = tuple(kept)
    return replace(config, **settled)


@remember_plain
def at_density(config: SSTAConfig, density: float) -> SSTAConfig:
    """``changed(config, density=density)``, the same object each time."""
    return changed(config, density=density)


def warn_of_what_is_dropped(model: str, config: SSTAConfig, default: Any, published: Iterable[SSTAConfig] = ()) -> None:
    """Says, once for each kind of ``model``, that a configuration of one's own, which is none of the ``published`` ones, has no estimate
    where the model's default has one."""
    if config.compensation != "none" or getattr(default, "compensation", "none") == "none" or config in published:
        return
    warn_once(f"estimate of {model}", "config drops the tiles that it does not compute (compensation='none'), where the default of "
              f"{model} estimates them, for weights that were not trained with SSTA. To change the default and keep the rest of it, give "
              "fields by keyword, such as density=0.2, in place of a config; to estimate with a configuration of your own, "
              "SSTAConfig(compensation='linear', ...); to drop, keep the first steps dense: schedule=Schedule.warm_up()")


def warn_of_the_window(model: str, config: SSTAConfig | None, thw: tuple[int, int, int]) -> None:
    """Says, once for each kind of ``model``, that on the canvas ``thw`` the window alone is more than the configuration's density."""
    config = None if config is None else config.for_canvas(thw)
    if config is None or config.density is None or config.selected_by == "block_attn":
        return
    tiles = -(-thw[0] // config.tile_thw[0]), -(-thw[1] // config.tile_thw[1]), -(-thw[2] // config.tile_thw[2])
    share = window_size(tiles, config.window) / math.prod(tiles)
    if share > config.density:
        window, canvas = (" x ".join(map(str, sizes)) for sizes in (config.window, tiles))
        warn_once(f"window of {model}", f"config has density = {config.density}, but its window of {window} tiles, which is computed "
                  f"whole, is {share:.1%} of the tile pairs of a canvas of {canvas} tiles of {model}: give a smaller kernel_thw or "
                  "tile_thw, or sparse_type='block_attn', which has no window")
