"""The data that all rooms share: Family, Site and Split describe a model; Ranks, Ruling and CallState describe a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from ssta import DenseRun, SSTAConfig, VideoGrid
from ssta.checks import require_kind
from ssta.ranks import deal

from .schedule.presets import first_layer_dense, small_tiles
from .schedule.schedule import Schedule


class Ranks(NamedTuple):
    """The ranks that share one forward.

    Attributes:
        group: their process group.
        rank: this one's number in it.
        size: how many they are.
        tokens: length of the whole sequence, where it is split as one run; None = videos are split and all other tokens are whole.
    """

    group: Any
    rank: int
    size: int
    tokens: int | None

    def share(self, tokens: int) -> int:
        """How many of ``tokens`` are this rank's."""
        return deal(tokens, self.size)[self.rank]

    def start(self, tokens: int) -> int:
        """The first of this rank's."""
        return sum(deal(tokens, self.size)[:self.rank])


class Ruling(NamedTuple):
    """How one layer attends in one forward.

    Attributes:
        dense: whether exactly, to everything.
        config: how, where it is not dense.
    """

    dense: bool
    config: SSTAConfig


class CallState(NamedTuple):
    """The state of one forward of a model.

    Attributes:
        thw: its canvas, in tokens.
        ruling: for layers without a configuration of their own.
        dense_layers: for layers that the schedule keeps dense.
        ranks: who shares it; None on one rank.
        before: the segments before the video, if its family finds any.
    """

    thw: tuple[int, int, int]
    ruling: Ruling
    dense_layers: Ruling
    ranks: Ranks | None = None
    before: tuple[VideoGrid | DenseRun, ...] = ()


# As diffusers' `enable_parallelism(cp_plan=...)` takes it: by a module's name, which arguments or outputs are split and which gathered.
SplitPlan = dict[str, Any]
# A forward's arguments by name; what gives the state of the forward in progress; handles of what was registered on a model.
Arguments = Mapping[str, Any]
Call = Callable[[], CallState]
Hooks = Iterable[RemovableHandle]


def _no_hooks(model: nn.Module, call: Call) -> Hooks:
    return ()


@dataclass(frozen=True)
class Split:
    """How a family's model runs on several ranks. Tokens of the video, or of the whole sequence, are split, everything else is whole.

    Attributes:
        plan: as diffusers' ``enable_parallelism`` takes it, or ``plan(model)`` that is; a list of blocks' name and ".-1" is the name of its
            last one, which must not be its first.
        whole: names of attention modules that attend on every rank without communication, ``*`` for any block's number: those of text
            alone, and cross-attention from a rank's own queries to whole keys. Any other module that is no site keeps what diffusers does.
        tokens: ``tokens(arguments, grids)`` is the length of the whole sequence where the plan splits it as one run, ``grids`` being the
            tokens of the canvas and of what ``Family.before`` finds; None = it splits the video.
        stock: whether the model's own processors are right under the plan. If not, ``remove`` takes the plan out of the model too.
        trains: True, or why gradients would be wrong.
        hooks: ``hooks(model, call)`` registers on the model what the plan cannot say, and yields the handles. ``call()`` is the CallState
            of the forward in progress, whose ``ranks`` are None on one rank; held by a ``partial``, it is a copied model's own.

    Raises:
        TypeError: a field of the wrong kind.
    """

    plan: SplitPlan | Callable[[nn.Module], SplitPlan] = field(hash=False)
    whole: tuple[str, ...] = ()
    tokens: Callable[[Arguments, int], int] | None = None
    stock: bool = False
    trains: bool | str = True
    hooks: Callable[[nn.Module, Call], Hooks] = _no_hooks

    def __post_init__(self) -> None:
        require_kind("Split.plan", self.plan, "a dict or a function", isinstance(self.plan, dict) or callable(self.plan))
        require_kind("Split.hooks", self.hooks, "a function", callable(self.hooks))
        require_kind("Split.whole", self.whole, "a tuple of names",
                     isinstance(self.whole, tuple) and all([isinstance(name, str) for name in self.whole]))
        require_kind("Split.tokens", self.tokens, "a function or None", self.tokens is None or callable(self.tokens))
        require_kind("Split.trains", self.trains, "True, or a sentence that says why not",
                     self.trains is True or isinstance(self.trains, str) and len(self.trains) > 0)

    def of(self, model: nn.Module) -> SplitPlan:
        """The plan of ``model``; ValueError where a list of which it wants the last block has just one."""
        plan = self.plan if isinstance(self.plan, dict) else self.plan(model)
        return {_counted(name, model): part for name, part in plan.items()}


def _counted(name: str, model: nn.Module) -> str:
    stack, _, number = name.rpartition(".")
    if number != "-1":
        return name
    blocks: Any = model.get_submodule(stack)
    if len(blocks) < 2:
        raise ValueError(f"model must have at least 2 {stack} to be split over ranks, got {len(blocks)}")
    return f"{stack}.{len(blocks) - 1}"


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

    @property
    def shared(self) -> Split:
        """``split``; ValueError where there is none."""
        if self.split is None:
            raise ValueError(f"model must have a family that says how it is split over ranks, got {self.model}, whose Family.split is None")
        return self.split


def _require_name(argument: str, value: object) -> None:
    require_kind(argument, value, "a str", isinstance(value, str))
    if not value:
        raise ValueError(f"{argument} must not be empty")
