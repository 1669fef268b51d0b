"""The register of families: which of them a model belongs to, and what presets its models take."""

from __future__ import annotations

import importlib
from typing import Any

import diffusers
from torch import nn

from ssta import SSTAConfig
from ssta.kernels.checks import require_bool

from ..families import PLACES
from ..schedule.presets import PRESETS, apply_preset
from ..schedule.schedule import Schedule
from ..terms import Family, SplitPlan

# By the model's class name: the family, or "module:NAME", where it is until it is first needed.
_FAMILIES: dict[str, Family | str] = dict(PLACES)


def register_family(family: Family | str, place: str | None = None, *, overwrite: bool = False) -> None:
    """Makes ``apply_ssta`` know one more kind of transformer.

    Args:
        family: a ``Family``; or the class name of a transformer whose family is imported when a model of that class first comes.
        place: with a class name, where its ``Family`` is: ``"module:NAME"``, such as ``"ssta.pipelines.families.wan:WAN"``.
        overwrite: whether it may take the place of a family that is registered already, as where a notebook's cell runs again. Models that
            have SSTA applied keep the one that they have.

    Raises:
        TypeError: neither a ``Family`` alone nor a class name with a place, or an overwrite that is no bool.
        ValueError: the class name is registered already, or a place of another form.
    """
    entry: Family | str
    require_bool("overwrite", overwrite)
    if isinstance(family, str) and isinstance(place, str):
        module, _, name = place.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ValueError(f'place must be "module:NAME", such as "ssta.pipelines.families.wan:WAN", got {place!r}')
        if not family:
            raise ValueError("family must not be empty")
        model, entry = family, place
    elif isinstance(family, Family) and place is None:
        model, entry = family.model, family
    else:
        raise TypeError("family must be a Family alone, or a model's class name with the place of its Family, got "
                        f"{type(family).__name__} with place {place!r}")
    if model in _FAMILIES and not overwrite:
        raise ValueError(f"family must name a model that is not registered yet, got {model!r}; overwrite=True takes its place")
    _FAMILIES[model] = entry


def unregister_family(model: str) -> None:
    """Undoes ``register_family``: the library's own family, if there is one for that class name, is in place again.

    Args:
        model: the class name.

    Raises:
        ValueError: ``register_family`` has registered none of that name.
    """
    own = PLACES.get(model)
    entry = _FAMILIES.get(model)
    if entry is None or entry == own or own is not None and isinstance(entry, Family) and entry is imported(own, model):
        raise ValueError(f"model must be the class name of a family that register_family registered, got {model!r}")
    if own is None:
        del _FAMILIES[model]
    else:
        _FAMILIES[model] = own


def supported_models() -> tuple[str, ...]:
    """Class names of the transformers that ``apply_ssta`` knows, sorted. Imports none of their families."""
    return tuple(sorted(_FAMILIES))


def family_of(model: nn.Module) -> Family:
    """The family that ``model`` belongs to, by its class or the nearest base class.

    Raises:
        ValueError: there is none; the message names those there are.
        ImportError: the family cannot be imported, as with a diffusers that it does not fit.
        TypeError: what is registered for it is no ``Family`` of it.
    """
    found = family_of_class(type(model))
    if found is not None:
        return found
    if hasattr(model, "get_base_model"):
        raise ValueError(f"model must be the transformer itself, got it wrapped in {type(model).__name__}; give model.get_base_model(), "
                         "whose adapters stay in it")
    if hasattr(model, "_orig_mod") or hasattr(model, "module"):
        raise ValueError(f"model must be the transformer itself, got it wrapped in {type(model).__name__}; apply SSTA before wrapping")
    raise ValueError(f"model must be one of {', '.join(supported_models())}, got {type(model).__name__}; register_family adds others, and "
                     "docs/pipelines.md says why some are not there")


def family_of_class(kind: type) -> Family | None:
    """The family that models of class ``kind`` belong to, by it or the nearest base class; None if there is none."""
    return next((_registered(base.__name__) for base in kind.__mro__ if base.__name__ in _FAMILIES), None)


def cp_plan(transformer: nn.Module) -> SplitPlan:
    """How a transformer's tokens are split over ranks under SSTA: for ``transformer.enable_parallelism(config=..., cp_plan=...)``.

    Needed only where ``enable_parallelism`` comes before ``apply_ssta``, which otherwise leaves the plan on the model.

    Raises:
        ValueError: an unsupported model, or one whose family says nothing of several ranks.
    """
    return family_of(transformer).shared.of(transformer)


def preset_names(family: Family) -> tuple[str, ...]:
    """The presets that a family's models take: its own, then those that all have."""
    return *family.presets, *(name for name in PRESETS if name not in family.presets)


def preset_settings(family: Family, name: str) -> tuple[SSTAConfig, Schedule]:
    """The configuration and schedule that ``name`` stands for; a family's own preset comes before one that all families have."""
    if name in family.presets:
        made: Any = family.presets[name]()
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{family.model}'s preset {name!r} must return (SSTAConfig, Schedule), got {type(made).__name__}")
        return made
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, preset_names(family)))} for {family.model}, got {name!r}")
    return apply_preset(name, family.default_config()), family.default_schedule()


def _registered(model: str) -> Family:
    found = _FAMILIES[model]
    if isinstance(found, str):
        place, found = found, imported(found, model)
        if not isinstance(found, Family) or found.model != model:
            named = f"a Family of {found.model}" if isinstance(found, Family) else type(found).__name__
            raise TypeError(f"{place} must be the Family of {model} that is registered, got {named}")
        _FAMILIES[model] = found
    return found


def imported(place: str, model: str) -> Any:
    """What lies at ``"module:NAME"``."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"SSTA's family {name} for {model} cannot be loaded from {module} with diffusers {diffusers.__version__}, "
                          f"other families can: {error}") from error
