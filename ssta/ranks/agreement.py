"""That all ranks were given the same. What a rank says it leaves in its group's store, where the others read it.

No collective is part of it, because a rank that repeats a call does not compare, and goes into its exchange instead.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar
from warnings import warn
from weakref import WeakKeyDictionary

from torch import Tensor

from .group import groups_of, resolve_group
from .world import may_wait

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

FACTS_KEPT = 1024
# After so long a rank warns that others do not come; it goes on waiting for as long as its group does.
SOON = timedelta(seconds=10)
# How many of its words a rank leaves in the store: no other is so far behind.
WORDS_KEPT = 64

Made = TypeVar("Made")
# (name, value) of all that must be the same on all ranks.
AgreedFacts = tuple[tuple[str, object], ...]


class Word(NamedTuple):
    """What a rank says.

    Attributes:
        rank: which, among all.
        wrong: "TypeError" or "ValueError" and its text; None where nothing is wrong.
        facts: what must be the same on all ranks, by name.
        made: what ``CallsMade`` has of the calls since the ranks compared last.
    """

    rank: int
    wrong: tuple[str, str] | None
    facts: dict[str, str]
    made: Sequence[int] = ()


class CallsMade:
    """The calls that a rank has made since the ranks compared last: how many, and one number for all of them in their order. Other ranks
    that made as many have the same number, or mixed one call with another. Graphs run without being counted, so other counts say nothing.

    Attributes:
        agreements: how many facts the ranks have agreed on; the same on all of them.
    """

    def __init__(self) -> None:
        self.agreements = self.count = self.order = 0

    def note(self, agreement: int) -> None:
        """A call with the facts of that agreement."""
        self.count += 1
        self.order = (self.order * 1_000_003 + agreement) % (2 ** 61 - 1)

    def take(self) -> tuple[int, int]:
        """Both numbers; the count begins anew."""
        taken = self.count, self.order
        self.count = self.order = 0
        return taken


class Agreement:
    """What the ranks of a group have found to be the same on all of them. They fill it alike, because they compare together."""

    def __init__(self) -> None:
        # By all that a rank knows of a call the number of its agreement; and by the facts that were compared that number, and which calls
        # they cover.
        self.calls: dict[Hashable, int] = {}
        self.facts: OrderedDict[AgreedFacts, tuple[int, list[Hashable]]] = OrderedDict()
        # By the names of the other groups of a mesh.
        self.made: defaultdict[tuple[str, ...], CallsMade] = defaultdict(CallsMade)
        # How many words each of them has said.
        self.said = 0


# Nothing in it holds a group.
_AGREED: WeakKeyDictionary[ProcessGroup, Agreement] = WeakKeyDictionary()


def check_ranks(group: ProcessGroup | DeviceMesh | None, **facts: object) -> None:
    """That all ranks of ``group`` were given the same facts, and have repeated the same calls since they compared last. It waits for every
    rank: for the start of a generation or for finding a mistake, not for every layer.

    Args:
        group: None = the default group.
        facts: by the name that the error gives them, plain values: numbers, strings, tuples, a TokenLayout, an SSTAConfig. Functions count
            by their names, tensors by shape and dtype.

    Raises:
        ValueError: on all ranks, what differs and how.
    """
    agree((resolve_group(group),), facts)


def settle(groups: Sequence[ProcessGroup], call: Hashable, facts: Callable[[], dict[str, object]]) -> None:
    """Sees to it that all ranks make a call with the same facts. The first time that facts come up, every rank says what it was given, and
    waits for all others. Afterwards, in a graph and in its capture, nobody waits, and the call is only noted.

    Args:
        groups: the ranks: one group, or those of a mesh's dimensions, the last dimension first.
        call: plain values; the same again are not compared. None = never the same.
        facts: gives what must be the same on all ranks, by name.

    Raises:
        TypeError, ValueError: facts that differ, and what another rank refused; on all ranks.
    """
    if not may_wait():
        return
    known, others = _agreement(groups[0]), _names(groups[1:])
    made, agreement = known.made[others], known.calls.get((others, call))
    if agreement is None:
        found = facts()
        key = ("groups", others), *found.items()
        if key not in known.facts:
            agree(groups, found, known.facts)
            made.agreements += 1
            known.facts[key] = made.agreements, []
            if len(known.facts) > FACTS_KEPT:
                # The oldest, which is the same on all ranks.
                for forgotten in known.facts.popitem(last=False)[1][1]:
                    del known.calls[forgotten]
        agreement, calls = known.facts[key]
        if call is not None:
            known.calls[others, call] = agreement
            calls.append((others, call))
    made.note(agreement)


def agree(groups: Sequence[ProcessGroup], facts: dict[str, object], known: Collection[AgreedFacts] = ()) -> None:
    """Waits for what all ranks say, and raises on every one of them what is wrong on one, facts that are not the same, or that ranks have
    repeated different calls since they compared last.

    Args:
        groups: as ``settle`` takes them.
        known: what they agreed on before.
    """
    made = _agreement(groups[0]).made[_names(groups[1:])]
    words = [Word(_place(groups), None, {name: told(value) for name, value in facts.items()}, made.take())]
    for number, group in enumerate(groups):
        words = _heard(group, _say(group, words), lambda: _news(facts, known))
        wrong = [word for word in words if word.wrong is not None]
        if wrong:
            for other in groups[number + 1:]:
                _say(other, wrong)
            raise _error(wrong[0])
    for name in dict.fromkeys([name for word in words for name in word.facts]):
        values = [word.facts.get(name, "nothing") for word in words]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(f"{name} must be the same on all ranks, got {values[0]} on rank 0 and {value} on rank {rank}")
    for rank, word in enumerate(words):
        (count, order), (first_count, first_order) = word.made, words[0].made
        if count == first_count and order != first_order:
            raise ValueError("calls that ranks agreed on must be repeated in the same order on all ranks, got other ones on rank 0 than on "
                             f"rank {rank} among the {count} since the ranks compared last, so that these have mixed different calls")


def refuse(groups: Sequence[ProcessGroup], error: TypeError | ValueError) -> NoReturn:
    """Raises what is wrong on this rank, and says it to those that come to compare. It waits for none: others that repeat a call do not."""
    if not may_wait():
        raise error
    word = Word(_place(groups), ("TypeError" if isinstance(error, TypeError) else "ValueError", str(error)), {})
    for group in groups:
        _say(group, [word])
    raise _error(word) from error


def said_to(group: ProcessGroup | DeviceMesh, make: Callable[[], Made]) -> Made:
    """What ``make`` gives; what it raises is said to the ranks of ``group``, as ``refuse`` does."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        refuse(groups_of(group), error)


def _error(word: Word) -> TypeError | ValueError:
    kind, text = word.wrong or ("", "")
    return (TypeError if kind == "TypeError" else ValueError)(f"on rank {word.rank}: {text}")


def _agreement(group: ProcessGroup) -> Agreement:
    found = _AGREED.get(group)
    if found is None:
        found = _AGREED[group] = Agreement()
    return found


def _names(groups: Sequence[ProcessGroup]) -> tuple[str, ...]:
    return tuple([group.group_name for group in groups])


def _place(groups: Sequence[ProcessGroup]) -> int:
    """This process's number among all ranks of ``groups``."""
    place = 0
    for group in reversed(groups):
        place = place * group.size() + group.rank()
    return place


def _say(group: ProcessGroup, words: Sequence[Word]) -> int:
    """Leaves ``words`` for the other ranks of a group; gives their number."""
    agreement, store = _agreement(group), group.get_group_store()
    number, agreement.said = agreement.said, agreement.said + 1
    store.set(_key(number, group.rank()), json.dumps(words))
    if number >= WORDS_KEPT:
        store.delete_key(_key(number - WORDS_KEPT, group.rank()))
    return number


def _news(facts: dict[str, object], known: Collection[AgreedFacts]) -> str:
    """What of ``facts`` is not as in those of ``known`` that are most like them."""
    like = dict(max(known, key=lambda of: len(set(of) & set(facts.items())), default=()))
    return ", ".join([f"{name} = {told(value)}" + (f" where it was {told(like[name])}" if name in like else "")
                      for name, value in facts.items() if name not in like or like[name] != value])


def _heard(group: ProcessGroup, number: int, news: Callable[[], str]) -> list[Word]:
    """What all ranks of a group said, which this one waits for. ``news``: says what it has that was not agreed on before."""
    store, keys = group.get_group_store(), [_key(number, rank) for rank in range(group.size())]
    limit: timedelta = store.timeout  # type: ignore[attr-defined]
    try:
        store.wait(keys, min(SOON, limit))
    except RuntimeError:
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        text = (f"rank {group.rank()} waits for ranks {late} of its group to make a call that they have not agreed on yet, the first with "
                f"{news()}. A rank that repeats a call which all agreed on does not come: it waits for this one in its exchange")
        warn(f"{text}, until the group's time limit of {limit.total_seconds():.0f} s.", stacklevel=2)
        try:
            store.wait(keys, max(limit - SOON, timedelta(milliseconds=1)))
        except RuntimeError as error:
            raise ValueError(f"{text}.") from error
    return [Word(*word) for key in keys for word in json.loads(store.get(key))]


def _key(number: int, rank: int) -> str:
    return f"ssta/{number}/{rank}"


def told(value: object) -> str:
    """``value`` in words that are the same in every process."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = [f"{field.name}={told(getattr(value, field.name))}" for field in fields(value) if field.repr]
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{told(key)}: {told(of)}' for key, of in value.items())}}}"
    if isinstance(value, partial):
        return f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
