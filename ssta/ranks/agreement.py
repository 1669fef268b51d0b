"""Facts that all ranks of a group must have alike. Each rank leaves its facts in the group's store, where the others read them.

No collective is part of it, because a rank that repeats a call does not compare, and goes into its exchange instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar
from warnings import warn
from weakref import WeakKeyDictionary

from torch import Tensor

from .group import resolve_group
from .world import may_wait

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# So many facts a group remembers.
CAPACITY = 1024
# After so long a rank warns that others do not come; it goes on waiting for as long as its group does.
SOON = timedelta(seconds=10)
# How many of its messages a rank leaves in the store: no other is so far behind.
MESSAGES = 64

Made = TypeVar("Made")
# (name, value) of all that must be the same on all ranks.
AgreedFacts = tuple[tuple[str, object], ...]


class Message(NamedTuple):
    """A rank's answer to the others.

    Attributes:
        error: "TypeError" or "ValueError" and its text; None where nothing is wrong.
        facts: by name, as ``told`` writes them.
    """

    error: tuple[str, str] | None
    facts: dict[str, str]


class Agreement:
    """The facts that the ranks of a group have compared. All ranks fill it alike, because they compare together."""

    def __init__(self) -> None:
        # In the order in which they came up.
        self.facts: dict[AgreedFacts, None] = {}
        # How many messages each rank has left.
        self.messages = 0


# Nothing in it holds a group.
_AGREED: WeakKeyDictionary[ProcessGroup, Agreement] = WeakKeyDictionary()


def check_ranks(group: ProcessGroup | DeviceMesh | None, **facts: object) -> None:
    """That all ranks of ``group`` were given the same facts. It waits for every rank: for the start of a generation or for finding a
    mistake, not for every layer.

    Args:
        group: None = the default group.
        facts: by the name that the error gives them, plain values: numbers, strings, tuples, a TokenLayout, an SSTAConfig. Functions count
            by their names, tensors by shape and dtype.

    Raises:
        ValueError: on all ranks, what differs and how.
    """
    _compare(resolve_group(group), facts)


def agree(group: ProcessGroup, facts: dict[str, object]) -> None:
    """Sees to it that all ranks make a call with the same facts. The first time that facts come up, every rank says its own, and waits for
    all others. Afterwards, in a graph and in its capture, no rank waits.

    Args:
        facts: by name, as ``check_ranks`` takes them; their values can be hashed.

    Raises:
        TypeError, ValueError: facts that differ, and what another rank refused; on all ranks.
    """
    if not may_wait():
        return
    known, key = _agreement(group).facts, tuple(facts.items())
    if key in known:
        return
    _compare(group, facts, known)
    known[key] = None
    if len(known) > CAPACITY:
        # The oldest, which is the same on all ranks.
        del known[next(iter(known))]


def refuse(group: ProcessGroup, error: TypeError | ValueError) -> NoReturn:
    """Raises this rank's error, and leaves it for ranks that come to compare. It waits for no rank: others may repeat a call."""
    if not may_wait():
        raise error
    message = Message(("TypeError" if isinstance(error, TypeError) else "ValueError", str(error)), {})
    _send(group, message)
    raise _error(group.rank(), message) from error


def said_to(group: ProcessGroup | DeviceMesh, make: Callable[[], Made]) -> Made:
    """The result of ``make``; its errors are left for the ranks of ``group``, as ``refuse`` does."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        refuse(resolve_group(group), error)


def _compare(group: ProcessGroup, facts: dict[str, object], known: Iterable[AgreedFacts] = ()) -> None:
    """Waits for the facts of all ranks. One rank's error, or facts that differ, are raised on every rank. ``known``: agreed on before."""
    messages = _received(group, _send(group, Message(None, {name: told(value) for name, value in facts.items()})),
                         lambda: _differences(facts, known))
    for rank, message in enumerate(messages):
        if message.error is not None:
            raise _error(rank, message)
    for name in dict.fromkeys([name for message in messages for name in message.facts]):
        values = [message.facts.get(name, "nothing") for message in messages]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(f"{name} must be the same on all ranks, got {values[0]} on rank 0 and {value} on rank {rank}")


def _error(rank: int, message: Message) -> TypeError | ValueError:
    kind, text = message.error or ("", "")
    return (TypeError if kind == "TypeError" else ValueError)(f"on rank {rank}: {text}")


def _agreement(group: ProcessGroup) -> Agreement:
    found = _AGREED.get(group)
    if found is None:
        found = _AGREED[group] = Agreement()
    return found


def _send(group: ProcessGroup, message: Message) -> int:
    """Leaves a message for the other ranks of a group; gives its number."""
    agreement, store = _agreement(group), group.get_group_store()
    number, agreement.messages = agreement.messages, agreement.messages + 1
    store.set(_key(number, group.rank()), json.dumps(message))
    if number >= MESSAGES:
        store.delete_key(_key(number - MESSAGES, group.rank()))
    return number


def _differences(facts: dict[str, object], known: Iterable[AgreedFacts]) -> str:
    """How these facts differ from the most similar known ones."""
    like = dict(max(known, key=lambda one: len(set(one) & set(facts.items())), default=()))
    return ", ".join([f"{name} = {told(value)}" + (f" where it was {told(like[name])}" if name in like else "")
                      for name, value in facts.items() if name not in like or like[name] != value])


def _received(group: ProcessGroup, number: int, news: Callable[[], str]) -> list[Message]:
    """The messages of all ranks of a group, for which this one waits. ``news``: says which of its facts are new."""
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
    return [Message(*json.loads(store.get(key))) for key in keys]


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
        return f"{{{', '.join(f'{told(key)}: {told(item)}' for key, item in value.items())}}}"
    if isinstance(value, partial):
        return f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)
