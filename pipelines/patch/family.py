"""Family: what has to be said about one kind of video transformer before SSTA can be put into it; the register of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
from torch import nn

from ssta import DenseRun, SSTAConfig, VideoGrid
from ssta.checks import require_kind
from ssta.kernels.checks import require_bool

from ..families import PLACES
from ..ranks.split import Split
from ..schedule.presets import PRESETS, apply_preset, first_layer_dense, small_tiles
from ..schedule.schedule import Schedule


@dataclass(frozen=True)
class Site:
    """One self-attention over video tokens inside a model.

    Attributes:
        name: the module's dotted name in the model.
        module: the attention module, which holds its processor in ``.processor``.
        stock: the class of the model's original processor (or a tuple of classes) that the site is known to work with; SSTA refuses to
            replace any other.
        replacement: called with the model's ``ModelContext``, returns the ``SSTAProcessor`` that attends in the original one's place.

    Raises:
        TypeError: a field of the wrong kind.
        ValueError: an empty name.
    """

    name: str
    module: nn.Module
    stock: type | tuple[type, ...]
    replacement: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _require_name("Site.name", self.name)
        require_kind("Site.module", self.module, f"the attention module {self.name!r}", isinstance(self.module, nn.Module))
        require_kind("Site.stock", self.stock, "a processor class or a tuple of them",
                     len(self.classes) > 0 and all([isinstance(kind, type) for kind in self.classes]))
        require_kind("Site.replacement", self.replacement, "a function", callable(self.replacement))

    @property
    def classes(self) -> tuple[type, ...]:
        """``stock`` as a tuple."""
        return self.stock if isinstance(self.stock, tuple) else (self.stock,)


def stack_sites(
    model: nn.Module, stack: str | tuple[str, ...], attention: str, stock: type | tuple[type, ...],
    replacement: Callable[[Any], Any] | tuple[Callable[[Any], Any], ...],
) -> Iterator[Site]:
    """The module ``attention`` of every block in the model's list of blocks ``stack``, or in several, in order: what most families'
    ``sites`` are.

    Args:
        model: the transformer.
        stack: dotted name of the list, such as ``"transformer_blocks"``, or several of them.
        attention: name of the self-attention in a block, such as ``"attn1"``.
        stock: the original processor's class, or a tuple of classes.
        replacement: what makes the processor that takes its place; for a tuple of classes as many, in the same order, or one for all.

    Raises:
        AttributeError: the model has no such list, or a block no such module.
        ValueError: as many replacements as classes are wanted, and others came.
    """
    classes = stock if isinstance(stock, tuple) else (stock,)
    replacements = replacement if isinstance(replacement, tuple) else (replacement,) * len(classes)
    if len(replacements) != len(classes):
        raise ValueError(f"replacement must be one, or one for each of the {len(classes)} classes of stock, got {len(replacements)}")
    chosen = dict(zip(classes, replacements))
    for name in (stack,) if isinstance(stack, str) else stack:
        blocks: Any = model.get_submodule(name)
        for index, block in enumerate(blocks):
            module = block.get_submodule(attention)
            yield Site(f"{name}.{index}.{attention}", module, stock, chosen.get(type(getattr(module, "processor", None)), replacements[0]))


@dataclass(frozen=True)
class Family:
    """One kind of video transformer.

    Attributes:
        model: class name of the transformer; its subclasses belong to the family too.
        sites: ``sites(model)`` yields the model's video self-attentions, at least one. Cross-attention and text-only layers are not sites.
            ``stack_sites`` makes them where they stand in lists of blocks.
        canvas: ``canvas(model, arguments)`` is the canvas (t, h, w) in tokens of a forward, from its arguments by name. It runs before
            every forward, so it looks at shapes and numbers, not at a tensor's values, which lie on the device.
        default_config: makes the configuration when the user gives none.
        default_schedule: makes the schedule when the user gives none.
        presets: ``{name: f}``, where ``f()`` is the configuration and the schedule for weights that were trained with SSTA;
            ``apply_ssta(preset=name)`` takes them.
        split: how it runs on several ranks; None = it does not.
        before: ``before(model, arguments, thw)`` are the segments of ``TokenLayout`` that stand before the video, where they differ from
            call to call and an attention's own arguments do not say it; its processors find them in ``context.call.before``.
            None = they need not know.

    Raises:
        TypeError: a field of the wrong kind.
        ValueError: an empty name.
    """

    model: str
    sites: Callable[[nn.Module], Iterable[Site]]
    canvas: Callable[[nn.Module, Mapping[str, Any]], tuple[int, int, int]]
    default_config: Callable[[], SSTAConfig] = small_tiles
    default_schedule: Callable[[], Schedule] = first_layer_dense
    presets: Mapping[str, Callable[[], tuple[SSTAConfig, Schedule]]] = field(default_factory=dict, hash=False)
    split: Split | None = None
    before: Callable[[nn.Module, Mapping[str, Any], tuple[int, int, int]], tuple[VideoGrid | DenseRun, ...]] | None = None

    def __post_init__(self) -> None:
        _require_name("Family.model", self.model)
        for name in ("sites", "canvas", "default_config", "default_schedule"):
            require_kind(f"Family.{name}", getattr(self, name), "a function", callable(getattr(self, name)))
        require_kind("Family.before", self.before, "a function or None", self.before is None or callable(self.before))
        require_kind("Family.presets", self.presets, "a dict of functions by name", isinstance(self.presets, Mapping)
                     and all([isinstance(name, str) and callable(make) for name, make in self.presets.items()]))
        require_kind("Family.split", self.split, "a Split or None", self.split is None or isinstance(self.split, Split))


def _require_name(argument: str, value: object) -> None:
    require_kind(argument, value, "a str", isinstance(value, str))
    if not value:
        raise ValueError(f"{argument} must not be empty")


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
        _require_name("family", family)
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
