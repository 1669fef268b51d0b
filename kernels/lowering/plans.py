"""A step of several launches, planned once for each kind of tensors: its code runs on tensors without memory, and what it would launch is
written down. A call then takes memory for its results and launches by address, without a view or a decision in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memo import Kept
from .quick_launch import KINDS_KEPT, QuickLaunch, Tiles, _Direct, aligned, current_stream, descriptors_known, hooked

# Of what a step works in, bytes: where its tensors begin.
ALIGNMENT = 256


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        base: which of a call's tensors it is in: its inputs, its results, and last the memory that it works in.
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
            base = base.view(self.dtype)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset // self.dtype.itemsize)


class Plan:
    """What a step does, while its code writes it down on tensors of the device "meta".

    Views of these are followed wherever they begin. What the code makes by itself has no place and is refused, so inputs that the kernels
    cannot follow are copied before.

    Args:
        device: where calls have their tensors.
        inputs: such as calls have.
    """

    def __init__(self, device: torch.device, inputs: Sequence[Tensor]) -> None:
        self.device = device
        self.results: list[Tensor] = []
        self.steps: list[_Launch | _Call] = []
        # Bytes of the memory that the step works in.
        self.needed = self._used = 0
        # (base, bytes before it, the tensor) of each storage, which is kept so that no other has its number.
        self._storages: dict[int, tuple[int, int, Tensor]] = {}
        self._bases = 0
        self.inputs = [self._base(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")) for x in inputs]

    def result(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that calls return, in the order of these, which all come before what the step works in."""
        assert not self.needed
        self.results.append(self._base(torch.empty(shape, dtype=dtype, device="meta")))
        return self.results[-1]

    def result_like(self, x: Tensor) -> Tensor:
        """The same, of x's shape and dtype, in its memory order."""
        assert not self.needed
        self.results.append(self._base(torch.empty_like(x)))
        return self.results[-1]

    def working(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that the step alone needs, until ``memory_again`` ends around it."""
        x = torch.empty(shape, dtype=dtype, device="meta")
        self._storages[x.untyped_storage()._cdata] = self._bases, self._used, x
        self._used += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        self.needed = max(self.needed, self._used)
        return x

    @contextmanager
    def memory_again(self) -> Iterator[None]:
        """What is made ``working`` in here gives its memory to what comes after, which the device does after it too."""
        used = self._used
        yield
        self._used = used

    def launch(self, quick: QuickLaunch, key: tuple, grid: tuple[int, int, int], descriptors: Sequence[Tiles | None],
               tensors: Sequence[Tensor | None], numbers: Sequence[int | float], constants: dict, options: dict) -> None:
        """A launch by ``quick``, whose arguments these are."""
        self.steps.append(_Launch(quick, key, grid, [None if x is None else _Spot(self._place(x.x), x.kind, x.make) for x in descriptors],
                                  [None if x is None else self._place(x) for x in tensors], numbers, constants, options))

    def call(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        """A function of torch that writes to tensors which it is given."""
        self.steps.append(_Call(function, [self._place(x) for x in tensors]))

    def _base(self, x: Tensor) -> Tensor:
        self._storages[x.untyped_storage()._cdata] = self._bases, 0, x
        self._bases += 1
        return x

    def _place(self, x: Tensor) -> Place:
        base, before, _ = self._storages[x.untyped_storage()._cdata]
        return Place(base, before + int(x.storage_offset()) * x.element_size(), x.shape, x.stride(), x.dtype)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """For ``Plan.call``: out = a @ b of batches of matrices."""
    torch.bmm(a, b, out=out)


class Planned:
    """What a Plan has written down, for calls with tensors of its kind.

    The first call launches with tensors, which compiles; later ones by address, if Triton's launchers are known, no launch hook listens,
    and all tensors begin at multiples of 16 bytes, as torch's own do.
    """

    def __init__(self, plan: Plan) -> None:
        self.device, self.steps, self.needed = plan.device, plan.steps, plan.needed
        # An empty one is the same for all calls, and may be saved for a backward pass.
        with torch.inference_mode(False):
            self.results = [(None if x.numel() else torch.empty(x.shape, dtype=x.dtype, device=plan.device), x.shape, x.stride(), x.dtype)
                            for x in plan.results]
        self.by_address: _ByAddress | None = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results, on the current device and stream."""
        device = self.device
        results = [torch.empty_strided(shape, strides, dtype=dtype, device=device) if empty is None else empty
                   for empty, shape, strides, dtype in self.results]
        bases = [*inputs, *results]
        if self.needed:
            bases.append(torch.empty(self.needed // 2, dtype=torch.bfloat16, device=device))
        begins = [x.data_ptr() for x in bases]
        if self.by_address is None or not aligned(begins) or hooked():
            self._with_tensors(bases, aligned(begins))
        else:
            self.by_address(current_stream(), bases, begins)
        return results

    def _with_tensors(self, bases: list[Tensor], usual: bool) -> None:
        for step in self.steps:
            step.with_tensors(bases)
        if usual and any([isinstance(step, _Launch) for step in self.steps]):
            self.by_address = _ByAddress.of(self.steps)


class _ByAddress:
    """The steps of a plan, which all take what they need from two lists that a call makes once."""

    def __init__(self) -> None:
        self.steps: list[Callable[[int, list[int], list[Tensor], list[Tensor]], None]] = []
        # In the order in which steps have asked for them: (base, bytes behind it) of what kernels get, and what functions of torch get.
        self._addresses: dict[tuple[int, int], int] = {}
        self._tensors: dict[Place, int] = {}

    @classmethod
    def of(cls, steps: Sequence[_Launch | _Call]) -> _ByAddress | None:
        """None unless all kernels are compiled, and launched directly."""
        found = cls()
        for step in steps:
            by_address = step.by_address(found)
            if by_address is None:
                return None
            found.steps.append(by_address)
        return found

    def addresses_of(self, places: Sequence[Place | None]) -> Callable[[list[int]], tuple]:
        """Picks the places' addresses. None: something that is not read, whose address is 0."""
        spots = [(-1, 0) if place is None else (place.base, place.offset) for place in places]
        return _picker([self._addresses.setdefault(spot, len(self._addresses)) for spot in spots])

    def tensors_of(self, places: Sequence[Place]) -> Callable[[list[Tensor]], tuple]:
        """Picks the places' tensors."""
        return _picker([self._tensors.setdefault(place, len(self._tensors)) for place in places])

    def __call__(self, stream: int, bases: list[Tensor], begins: list[int]) -> None:
        begins.append(0)
        addresses = [begins[base] + offset for base, offset in self._addresses]
        tensors = [place.of(bases) for place in self._tensors]
        for step in self.steps:
            step(stream, addresses, tensors, bases)


def _picker(numbers: Sequence[int]) -> Callable[[list], tuple]:
    """What stands at these places of a list."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda found: tuple([found[number] for number in numbers])


class _Spot(NamedTuple):
    """``Tiles`` of a tensor that is to come."""

    place: Place
    kind: Hashable
    make: Callable[[Tensor], Any]


class _Launch(NamedTuple):
    """The arguments of a QuickLaunch."""

    quick: QuickLaunch
    key: tuple
    grid: tuple[int, int, int]
    spots: list[_Spot | None]
    places: list[Place | None]
    numbers: Sequence[int | float]
    constants: dict
    options: dict

    def with_tensors(self, bases: list[Tensor]) -> None:
        descriptors = [None if spot is None else Tiles(spot.place.of(bases), spot.kind, spot.make) for spot in self.spots]
        tensors = [None if place is None else place.of(bases) for place in self.places]
        self.quick(self.key, self.grid, descriptors, tensors, self.numbers, self.constants, self.options)

    def by_address(self, call: _ByAddress) -> Callable[[int, list[int], list[Tensor], list[Tensor]], None] | None:
        """The same for later calls; None where it is not launched directly."""
        direct = self.quick.direct(self.key, [0 if place is None else place.offset for place in self.places])
        if direct is None:
            return None
        launch, grid, settled, flat = direct.launch, self.grid, direct.settled, direct.flat
        rest, pointers = (*self.numbers, *self.constants.values()), call.addresses_of(self.places)
        described = self._described(direct, call) if self.spots else None

        def run(stream: int, addresses: list[int], tensors: list[Tensor], bases: list[Tensor]) -> None:
            descriptors = described(addresses, bases) if described else ()
            if flat:
                launch(*grid, stream, *settled, *descriptors, *pointers(addresses), *rest)
            else:
                launch(*grid, stream, *settled, [*descriptors, *pointers(addresses), *rest])

        return run

    def _described(self, direct: _Direct, call: _ByAddress) -> Callable[[list[int], list[Tensor]], list]:
        """Gives the kernel's arguments for all descriptors."""
        pick = call.addresses_of([None if spot is None else spot.place for spot in self.spots])
        # Their own objects are found faster than what they describe. Numbers leave out those that are None, whose address is 0.
        present = [spot is not None for spot in self.spots]
        named = [(spot, object(), sum(present[:at])) for at, spot in enumerate(self.spots)]
        # (Address, arguments) of the last call, which most often are the next one's too.
        last: list[tuple[int, list]] = [(0, [None])] * len(named)

        def described(addresses: list[int], bases: list[Tensor]) -> list:
            arguments: list = []
            for at, address in enumerate(pick(addresses)):
                before, known = last[at]
                if before != address:
                    spot, name, number = named[at]
                    assert spot is not None
                    known = descriptors_known.get((address, name)) or direct.describe(number, spot.place.of(bases), name, spot.make)
                    last[at] = address, known
                arguments += known
            return arguments

        return described


class _Call(NamedTuple):
    """A function of torch and its tensors."""

    function: Callable[..., Any]
    places: list[Place]

    def with_tensors(self, bases: list[Tensor]) -> None:
        self.function(*[place.of(bases) for place in self.places])

    def by_address(self, call: _ByAddress) -> Callable[[int, list[int], list[Tensor], list[Tensor]], None]:
        function, arguments = self.function, call.tensors_of(self.places)
        return lambda stream, addresses, tensors, bases: function(*arguments(tensors))


class Plans:
    """Plans of a step, one for each kind of tensors that comes.

    Args:
        write: ``(plan, xs, others, *options)``, the step's code, which depends on the tensors' kinds and the options, never on values.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write
        self.kinds: dict[tuple, Planned] = Kept(KINDS_KEPT)

    def __call__(self, xs: Sequence[Tensor], others: Sequence[Tensor], *options: Hashable) -> list[Tensor]:
        """The step's results, on the current device and stream.

        Args:
            xs: tensors that the step follows by their strides.
            others: contiguous tensors of one dtype each, of which the sizes alone make a difference.
            options: what else decides.
        """
        key = (xs[0].get_device(), *[(x.shape, x.stride(), x.dtype) for x in xs], *[x.shape for x in others], options)
        planned = self.kinds.get(key)
        if planned is None:
            plan = Plan(xs[0].device, (*xs, *others))
            self.write(plan, plan.inputs[:len(xs)], plan.inputs[len(xs):], *options)
            planned = self.kinds[key] = Planned(plan)
        return planned(*xs, *others)
