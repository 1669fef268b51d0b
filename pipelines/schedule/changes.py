"""Other values for some fields of a configuration, and what somebody is told who wrote a whole one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from ssta import SSTAConfig
from ssta.config import NO_WINDOW
from ssta.kernels.memo import remember_plain
from ssta.kernels.notices import warn_once
from ssta.window import window_size

from .schedule import Schedule

# The fields of a budget, and what they hold where there is none.
_BUDGET: dict[str, Any] = {"topk": None, "threshold": 0.0, "budget": None}
_FIELDS = tuple([of.name for of in fields(SSTAConfig) if of.init])
_SCHEDULED = tuple([of.name for of in fields(Schedule)])


def require_changes(config: SSTAConfig | None, changes: Mapping[str, Any]) -> None:
    """That a user who calls for a model with a ``config`` or with ``changes`` by keyword gave one of them, and fields of ``SSTAConfig``."""
    if config is not None and not isinstance(config, SSTAConfig):
        hint = f"; presets are taken by name as preset={config!r}" if isinstance(config, str) else ""
        raise TypeError(f"config must be an SSTAConfig or None, got {type(config).__name__}{hint}")
    for name, value in changes.items():
        if name not in _FIELDS:
            raise TypeError(f"got an unexpected keyword {name!r}; {_meant(name, value)} beside the function's own are fields of "
                            f"SSTAConfig: {', '.join(_FIELDS)}. Steps and layers that stay dense are fields of Schedule, as in "
                            "schedule=Schedule(dense_steps=0.1)")
    if config is not None and changes:
        raise ValueError("config must be left out where fields by keyword change the model's default, got one and "
                         f"{', '.join(changes)}; dataclasses.replace(config, ...) changes those of a config")


def _meant(name: str, value: Any) -> str:
    """A question to whoever gave an unknown keyword, if there is one, and the next sentence's first word."""
    if name in _SCHEDULED:
        first = "" if name in ("dense_layers", "layer_configs") else ", dense_layers=(0,)"
        return f"did you mean schedule=Schedule({name}={value!r}{first})? Those"
    if name == "sparsity":
        number = isinstance(value, (int, float)) and 0 <= value < 1
        return f"did you mean density{f'={1 - value:.4g}' if number else ''}, which is 1 - sparsity? Those"
    close = get_close_matches(name, _FIELDS, 1)
    return f"did you mean {close[0]}? Those" if close else "those"


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


def warn_of_what_is_dropped(model: str, config: SSTAConfig, default: Any, published: Sequence[SSTAConfig] = (), argument: str = "config"
                            ) -> None:
    """Says that a configuration has no estimate where the model's default has one: once for each kind of ``model``, and once for its
    layers. The ``published`` configurations mean it."""
    if config.compensation != "none" or getattr(default, "compensation", "none") == "none" or config in published:
        return
    whole = argument == "config"
    how = ("give fields by keyword, such as density=0.2, in place of a config" if whole else
           "change the default's fields, as in dataclasses.replace(handle.config, density=0.2) with a handle of the model by default")
    warn_once(f"estimate of {'' if whole else 'layers of '}{model}",
              f"{'' if whole else f'{argument}: its '}config drops the tiles that it does not compute (compensation='none'), where the "
              f"default of {model} estimates them, for weights that were not trained with SSTA. To change the default and keep the rest of "
              f"it, {how}; to estimate with a configuration of your own, SSTAConfig(compensation='linear', ...); to drop, keep the first "
              "steps dense: schedule=Schedule.warm_up()")


def warn_of_dense_layers(model: str, schedule: Schedule | None, default: Any, layers: int) -> None:
    """Says, once for each kind of ``model``, that a schedule of one's own keeps no layer dense where the ``default`` does. Without a
    schedule, that the default keeps all ``layers`` dense. ``Schedule()``, and a schedule that keeps all steps dense, mean it."""
    dense = getattr(default, "dense_layers", ())
    if schedule is None:
        if layers == len(dense):
            warn_once(f"dense layers of {model}", f"{model} stays dense as a whole: by default dense_layers = {dense}, which are all "
                      "layers that it has; give schedule=Schedule() to keep none dense")
    elif dense and not schedule.dense_layers and schedule != Schedule() and schedule.dense_steps < 1:
        warn_once(f"dense layers of {model}", f"schedule keeps no layer dense, where the default of {model} keeps dense_layers = "
                  f"{dense}; a schedule takes the default's place as a whole, so give dense_layers={dense} too, unless no layer is to be "
                  "dense")


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
