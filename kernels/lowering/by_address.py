"""What a plan does in a call: launches by address and functions of torch, of tensors whose places are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memo import Kept, captured
from .quick_launch import FUSED, Direct
from .replays import LEAST, Graph, Replays

# The kernels' arguments for descriptors, half a kilobyte each, by address and by what describes them. A descriptor holds no memory and does
# not depend on the contents, so it also serves any later tensor of that kind at the same address.
descriptors_known: dict[tuple[int, object], list] = Kept(8192)


class TensorPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        base: which of a call's tensors it is in: its inputs, its results, what it keeps, and last the memory that it works in; while a
            plan is written, which of all that the plan knows.
        offset: bytes behind where that begins.
        shape, strides, dtype: the tensor's.
    """

    base: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, bases: Sequence[Tensor]) -> Tensor:
        """The tensor, in a call's."""
        base = bases[self.base]
        if base.dtype != self.dtype:
            if not base.is_contiguous():
                at = (base.storage_offset() * base.element_size() + self.offset) // self.dtype.itemsize
                return torch.empty(0, dtype=self.dtype, device=base.device).set_(base.untyped_storage(), at, self.shape, self.strides)
            base = base.view(self.dtype)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset // self.dtype.itemsize)

    def begin(self) -> tuple[int, int]:
        """(base, bytes behind where it begins)."""
        return self.base, self.offset


class Constant(NamedTuple):
    """A tensor that is the same in all calls."""

    x: Tensor

    def of(self, bases: Sequence[Tensor]) -> Tensor:
        return self.x

    def begin(self) -> tuple[int, int]:
        return -1, self.x.data_ptr()


class HostSide(NamedTuple):
    """What the host of one call has to do between launches.

    Attributes:
        waits: of each input that arrives, in the order of ``Plan.arriving``, what waits for it.
        tell: takes the words of ``Plan.tell``.
        started: what waits for each function that ``Plan.start`` has written down and that was called, by its number.
    """

    waits: Sequence[Callable[[], object]]
    tell: Callable[[str], object]
    started: dict[int, Callable[[], object]]


# Takes a call's stream, the addresses and the tensors of its ByAddress, all its tensors, and its host's side.
AddressStep = Callable[[int, list[int], list[Tensor], list[Tensor], HostSide], object]


class ByAddress:
    """The steps of a plan, which all take what they need from two lists that a call makes once."""

    def __init__(self) -> None:
        self.steps: list[AddressStep] = []
        # Which of them the device runs, and what there is in place of these in later calls.
        self.recordable: list[bool] = []
        self.replays = Replays()
        # In the order in which steps have asked for them: (base, bytes behind it) of what kernels get, and what functions of torch get.
        self._addresses: dict[tuple[int, int], int] = {}
        self._tensors: dict[TensorPlace | Constant | None, int] = {}

    @classmethod
    def of(cls, steps: Sequence[PlannedStep], compiled: Sequence[Any]) -> ByAddress | None:
        """``compiled``: what each has given ``with_tensors``. None unless all kernels are launched directly."""
        found = cls()
        for step, kernel in zip(steps, compiled):
            by_address = step.by_address(found, kernel)
            if by_address is None:
                return None
            found.steps.append(by_address)
            found.recordable.append(step.recordable)
        return found

    def addresses_of(self, places: Sequence[TensorPlace | Constant | None]) -> Callable[[list[int]], tuple]:
        """Picks the places' addresses. None: something that is not read, whose address is 0."""
        spots = [(-1, 0) if place is None else place.begin() for place in places]
        return _picker([self._addresses.setdefault(spot, len(self._addresses)) for spot in spots])

    def tensors_of(self, places: Sequence[TensorPlace | Constant | None]) -> Callable[[list[Tensor]], tuple]:
        """Picks the places' tensors."""
        return _picker([self._tensors.setdefault(place, len(self._tensors)) for place in places])

    def __call__(self, stream: int, bases: list[Tensor], begins: list[int], host: HostSide) -> None:
        # A graph that is being captured takes launches, but no graph.
        many = len(self.steps) >= LEAST and not captured()
        known = self.replays.of((stream, *begins), lambda: self._recorded(stream, bases, begins)) if many else None
        found = self._found(bases, begins) if known is None else ([], [])
        for step in known or self.steps:
            step(stream, *found, bases, host)

    def _found(self, bases: list[Tensor], begins: Sequence[int]) -> tuple[list[int], list[Any]]:
        """What steps take theirs from: addresses and tensors."""
        begins = [*begins, 0]
        return ([begins[base] + offset for base, offset in self._addresses],
                [None if place is None else place.of(bases) for place in self._tensors])

    def _recorded(self, stream: int, bases: list[Tensor], begins: Sequence[int]) -> list[AddressStep]:
        """The steps with graphs in place of what the device runs, of tensors that lie here."""
        found, nothing = self._found(bases, begins), HostSide((), lambda word: None, {})
        steps: list[AddressStep] = []

        def run(some: list[AddressStep], own: int) -> None:
            for step in some:
                step(own, *found, bases, nothing)

        for recordable, pairs in groupby(zip(self.steps, self.recordable), itemgetter(1)):
            some = [step for step, _ in pairs]
            steps += [Graph(bases[0].device, stream, partial(run, some))] if recordable else some
        return steps


def _picker(numbers: Sequence[int]) -> Callable[[list], tuple]:
    """What stands at these places of a list."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda found: tuple([found[number] for number in numbers])


class Spot(NamedTuple):
    """``Tiles`` of a tensor that is to come."""

    place: TensorPlace | Constant
    make: Callable[[Tensor], Any]


class Launch(NamedTuple):
    """``kernel[grid](*descriptors, *tensors, *numbers, **constants, **options)``."""

    kernel: Any
    grid: tuple[int, int, int]
    spots: list[Spot | None]
    where: list[TensorPlace | Constant | None]
    numbers: Sequence[int | float]
    constants: dict
    options: dict

    @property
    def recordable(self) -> bool:
        """Whether a graph can do it in its place; so below."""
        return True

    def places(self) -> list[TensorPlace | Constant | None]:
        return [*[None if spot is None else spot.place for spot in self.spots], *self.where]

    def moved(self, final: Callable) -> Launch:
        """The same with other places."""
        return self._replace(spots=[None if spot is None else spot._replace(place=final(spot.place)) for spot in self.spots],
                             where=[final(place) for place in self.where])

    def with_tensors(self, bases: list[Tensor], host: HostSide) -> Any:
        """What Triton has compiled for that, which is the same wherever tensors lie as much aligned."""
        descriptors = [None if spot is None else spot.make(spot.place.of(bases)) for spot in self.spots]
        tensors = [None if place is None else place.of(bases) for place in self.where]
        return self.kernel[self.grid](*descriptors, *tensors, *self.numbers, **self.constants, **FUSED | self.options)

    def by_address(self, call: ByAddress, compiled: Any) -> AddressStep | None:
        """The same for later calls; None where it is not launched directly."""
        direct = Direct.of(compiled, sum([spot is not None for spot in self.spots]))
        if direct is None:
            return None
        launch, grid, settled, flat = direct.launch, self.grid, direct.settled, direct.flat
        rest, pointers = (*self.numbers, *self.constants.values()), call.addresses_of(self.where)
        described = self._described(direct, call) if self.spots else None

        def run(stream: int, addresses: list[int], tensors: list[Tensor], bases: list[Tensor], host: HostSide) -> None:
            descriptors = described(addresses, bases) if described else ()
            if flat:
                launch(*grid, stream, *settled, *descriptors, *pointers(addresses), *rest)
            else:
                launch(*grid, stream, *settled, [*descriptors, *pointers(addresses), *rest])

        return run

    def _described(self, direct: Direct, call: ByAddress) -> Callable[[list[int], list[Tensor]], list]:
        """Gives the kernel's arguments for all descriptors."""
        pick = call.addresses_of([None if spot is None else spot.place for spot in self.spots])
        # Their own objects are found faster than what they describe. Numbers leave out those that are None, whose address is 0.
        present = [spot is not None for spot in self.spots]
        named = [(spot, object(), sum(present[:at])) for at, spot in enumerate(self.spots)]
        # (Address, arguments) of the last call, which most often are the next one's too.
        last: list[tuple[int, Any]] = [(0, [None])] * len(named)

        def described(addresses: list[int], bases: list[Tensor]) -> list:
            arguments: list = []
            for at, address in enumerate(pick(addresses)):
                before, known = last[at]
                if before != address:
                    spot, name, number = named[at]
                    assert spot is not None
                    known = descriptors_known.get((address, name))
                    if known is None:
                        known = descriptors_known[address, name] = direct.encoded(number, spot.make(spot.place.of(bases)))
                    last[at] = address, known
                arguments += known
            return arguments

        return described


class TorchCall(NamedTuple):
    """A function of torch and its tensors."""

    function: Callable[..., Any]
    where: list[TensorPlace | Constant | None]

    @property
    def recordable(self) -> bool:
        """Without tensors it looks at what the device has told the host."""
        return bool(self.where)

    def places(self) -> list[TensorPlace | Constant | None]:
        return self.where

    def moved(self, final: Callable) -> TorchCall:
        return self._replace(where=[final(place) for place in self.where])

    def with_tensors(self, bases: list[Tensor], host: HostSide) -> None:
        self.function(*[None if place is None else place.of(bases) for place in self.where])

    def by_address(self, call: ByAddress, compiled: Any) -> AddressStep:
        function, arguments = self.function, call.tensors_of(self.where)
        return lambda stream, addresses, tensors, bases, host: function(*arguments(tensors))


class HostCall(NamedTuple):
    """What the host does between launches, which is no part of a graph.

    Attributes:
        function: takes the host's side of a call, and the tensors.
        where: the tensors that it takes.
        kept: those that others use until then.
    """

    function: Callable[..., object]
    where: Sequence[TensorPlace | Constant | None] = ()
    kept: Sequence[TensorPlace | Constant | None] = ()

    @property
    def recordable(self) -> bool:
        return False

    def places(self) -> list[TensorPlace | Constant | None]:
        return [*self.where, *self.kept]

    def moved(self, final: Callable) -> HostCall:
        return self._replace(where=[final(place) for place in self.where], kept=[final(place) for place in self.kept])

    def with_tensors(self, bases: list[Tensor], host: HostSide) -> None:
        self.function(host, *[None if place is None else place.of(bases) for place in self.where])

    def by_address(self, call: ByAddress, compiled: Any) -> AddressStep:
        return lambda stream, addresses, tensors, bases, host: self.with_tensors(bases, host)


PlannedStep = Launch | TorchCall | HostCall
