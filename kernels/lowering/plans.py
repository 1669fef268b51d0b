"""Steps of one launch or many, planned once for each kind of tensors: their code runs on tensors without memory, and what it would launch
is written down. A call then takes memory for results and for all that lies between, and launches by address, without a view or a decision.

A step that is called while another one's plan is written becomes a part of that plan: so a layer of many steps is one plan. One that is
given constants alone is computed then, once, and later launches may only read what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memo import Kept, Unplanned, captured
from .by_address import ByAddress, Constant, HostCall, HostSide, Launch, PlannedStep, Spot, TensorPlace, TorchCall
from .quick_launch import KINDS_KEPT, Tiles, aligned, current_stream, hooked
from .rooms import ALIGNMENT, Room, Span, shared
from .step_mode import StepMode

# By each thread for itself.
_writing: ContextVar[Plan | None] = ContextVar("the plan that is being written", default=None)


class Plan:
    """What a step does, while its code writes it down on tensors of the device "meta".

    Views of these are followed wherever they begin. Other tensors are constants, the same in all calls. What the code makes by itself has
    no place and is refused, so inputs that the kernels cannot follow are copied before.

    Args:
        device: where calls have their tensors.
        inputs: such as calls have.
    """

    def __init__(self, device: torch.device, inputs: Sequence[Tensor]) -> None:
        self.device = device
        self.results: list[Tensor] = []
        self.kept: list[tuple[Tensor | None, ...]] = []
        self.steps: list[PlannedStep] = []
        # All that is known, by storage; the tensors are held, so that no other storage has the same number.
        self._numbers: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        # Inputs that are a call's own, and the last step that still needs them as they are; None = as its code says.
        self._own: dict[int, int | None] = {}
        self._waits = self._starts = 0
        self.inputs = [self.known(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")) for x in inputs]

    def arriving(self, x: Tensor, sent: Tensor | None) -> Arriving:
        """The input x, which is on its way when a call begins, while the input ``sent`` goes the other way. Both are a call's own: what is
        made after the last use of x may lie there, and where ``sent`` is once x has arrived."""
        self._own[self._number(x)], number, self._waits = None, self._waits, self._waits + 1
        if sent is not None:
            self._own[self._number(sent)] = len(self.steps)
        return Arriving(x, partial(self._wait, number, sent))

    def _wait(self, number: int, sent: Tensor | None) -> None:
        if sent is not None:
            self._own[self._number(sent)] = len(self.steps)
        self.steps.append(HostCall(lambda host: host.waits[number]()))

    def start(self, function: Callable[..., Callable[[], object]], *tensors: Tensor) -> Callable[[], None]:
        """A function that the host calls with ``tensors`` between launches, such as a collective, and which gives what waits for its work.
        Returns what writes down that a call waits for it; the tensors are the work's until then."""
        number, places = self._starts, [self._place(x) for x in tensors]
        self._starts += 1

        def begin(host: HostSide, *xs: Tensor) -> None:
            host.started[number] = function(*xs)

        self.steps.append(HostCall(begin, places))
        return lambda: self.steps.append(HostCall(lambda host: host.started.pop(number)(), kept=places))

    def tell(self, word: str) -> None:
        """``word`` to the call's ``tell``, once all before it is launched."""
        self.steps.append(HostCall(lambda host: host.tell(word)))

    def result(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that the step returns, in the order of these."""
        return self.result_as(torch.empty(shape, dtype=dtype, device="meta"))

    def result_like(self, x: Tensor) -> Tensor:
        """The same, of x's shape and dtype, in its memory order."""
        return self.result_as(torch.empty_like(x, device="meta"))

    def result_as(self, x: Tensor) -> Tensor:
        """The same, of a new tensor on "meta"."""
        self.results.append(self.known(x))
        return x

    def working(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that the step alone needs, from the first to the last launch that gets it."""
        return self.known(torch.empty(shape, dtype=dtype, device="meta"))

    def keep(self, *xs: Tensor | None) -> None:
        """These stay after a call, in one memory, and are tensors by themselves when somebody asks for them."""
        self.kept.append(xs)

    def launch(self, kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor | None], numbers: Sequence[int | float],
               constants: dict, options: dict | None = None, descriptors: Sequence[Tiles | None] = ()) -> None:
        """A launch of Triton's ``kernel``, which takes ``*descriptors, *tensors, *numbers, **constants``; ``options``: num_warps and the
        like."""
        self.steps.append(Launch(kernel, grid, [None if x is None else Spot(self._place(x.x), x.make) for x in descriptors],
                                  [None if x is None else self._place(x) for x in tensors], numbers, constants, options or {}))

    def call(self, function: Callable[..., Any], *tensors: Tensor | None) -> None:
        """A function of torch that writes to tensors which it is given, and does the same in all calls; given none, the host's own."""
        self.steps.append(TorchCall(function, [None if x is None else self._place(x) for x in tensors]))

    def step(self, write: Callable[..., Any], xs: Sequence[Tensor | None], others: Sequence[Tensor | None], options: tuple) -> list[Tensor]:
        """The results of another step, which becomes a part of this one."""
        results, self.results = self.results, []
        try:
            write(self, xs, others, *options)
            return self.results
        finally:
            self.results = results

    def has(self, x: Tensor | None) -> bool:
        """Whether x is one of this plan's."""
        return x is not None and x.is_meta and x.untyped_storage()._cdata in self._numbers

    def owns(self, x: Tensor) -> bool:
        """Whether x, one of this plan's, is none of its inputs: others may lie where it was once it is read."""
        return self._numbers[x.untyped_storage()._cdata] >= len(self.inputs)

    @property
    def constants(self) -> list[Tensor]:
        """What calls read that is the same in all of them."""
        return [place.x for step in self.steps for place in step.places() if isinstance(place, Constant)]

    def _number(self, x: Tensor) -> int:
        return self._numbers[x.untyped_storage()._cdata]

    def known(self, x: Tensor) -> Tensor:
        """x, a new tensor on "meta", as one of this plan's."""
        self._numbers[x.untyped_storage()._cdata] = len(self._tensors)
        self._tensors.append(x)
        return x

    def _place(self, x: Tensor) -> TensorPlace | Constant:
        if not x.is_meta:
            return Constant(x)
        number = self._numbers.get(x.untyped_storage()._cdata)
        if number is None:
            raise Unplanned(f"a tensor of shape {tuple(x.shape)} is neither given to the step nor made by its plan")
        return TensorPlace(number, int(x.storage_offset()) * x.element_size(), x.shape, x.stride(), x.dtype)

    # Memory

    def spare(self, still: Sequence[Tensor]) -> int:
        """Bytes of its own that it has needed at once and does not now, while ``still``, some of its tensors, stay."""
        uses, end = self._uses(), len(self.steps)
        stays = [self._number(x) for x in still if self.has(x)]
        spans = [self._span(number, first, end if number in stays else last)
                 for number, (first, last) in uses.items() if number >= len(self.inputs)]
        live = [sum([of.size for of in spans if of.first <= at <= of.last]) for at in range(end + 1)]
        return max(live) - live[end]

    def needs(self, write: Callable[[], Any], still: Sequence[Tensor]) -> tuple[int, int]:
        """(Bytes of results and rooms, launches) with all that ``write`` would add, after which ``still`` stay; nothing of it remains."""
        before = len(self.steps)
        write()
        self.call(lambda *xs: None, *still)
        _, *rooms = self.rooms()
        found = sum([room.size for of in rooms for room in of]), len(self.steps)
        del self.steps[before:]
        return found

    def _uses(self) -> dict[int, tuple[int, int]]:
        """The first and the last launch that uses a tensor, by its number."""
        uses: dict[int, tuple[int, int]] = {}
        for at, step in enumerate(self.steps):
            for place in step.places():
                if isinstance(place, TensorPlace):
                    uses[place.base] = uses.get(place.base, (at, at))[0], at
        return uses

    def rooms(self) -> tuple[dict[int, tuple[int, int]], list[Room], list[Room]]:
        """(Base, bytes before it) of each tensor by its number, for a call's bases: inputs, results, memories of what is kept, and rooms to
        work in; of these results and what is kept; the rooms to work in. Inputs that are a call's own are rooms too, in which results
        may lie."""
        uses, end = self._uses(), len(self.steps)
        first = len(self.inputs)
        given = {number: (number, 0) for number in range(first)}
        rooms = [Room.around(self._span(number, 0, uses.get(number, (0, 0))[1] if last is None else last))
                 for number, last in self._own.items()]
        bases = [*self._own, *range(first, first + len(self._tensors))]
        for result in self.results:
            number = self._number(result)
            span = self._span(number, uses.get(number, (0, 0))[0], end)
            own = ((at, room.place(span)) for at, room in enumerate(rooms[:len(self._own)]))
            within = next(((at, before) for at, before in own if before is not None), None)
            if within is None:
                within = len(rooms), 0
                rooms.append(Room.around(span))
            given[number] = bases[within[0]], within[1]
        for xs in self.kept:
            kept = Room(None)
            for x in xs:
                if x is not None and self.has(x):
                    number = self._number(x)
                    if number not in given:
                        given[number] = bases[len(rooms)], kept.place(self._span(number, uses.get(number, (0, 0))[0], end)) or 0
            kept.capacity = kept.size
            rooms += [kept] if kept.size else []
        stay = len(rooms)
        inner = [number for number in uses if number not in given]
        spans = [self._span(number, *uses[number]) for number in inner]
        places, rooms = shared(spans, rooms)
        given.update({number: (bases[room], place) for number, (room, place) in zip(inner, places)})
        return given, rooms[len(self._own):stay], rooms[stay:]

    def _span(self, number: int, first: int, last: int) -> Span:
        return Span(self._tensors[number].untyped_storage().nbytes(), first, last)


class Arriving(NamedTuple):
    """An input of a plan that is on its way when a call begins.

    Attributes:
        x: the input.
        arrive: writes down that a call waits for it here.
    """

    x: Tensor
    arrive: Callable[[], None]

    def wait(self) -> Tensor:
        """The input, from then on."""
        self.arrive()
        return self.x


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """For ``Plan.call``: out = a @ b of batches of matrices."""
    torch.bmm(a, b, out=out)


class Planned:
    """What a Plan has written down, for calls with tensors of its kind.

    The first call launches with tensors, which compiles; later ones by address, if Triton's launchers are known, no launch hook listens,
    and all tensors begin at multiples of 16 bytes, as torch's own do.

    Attributes:
        kept: where the tensors that a call gives have what the step keeps.
        results: what those are like that lie in no input.
        note: what the step's code has returned.
        constants: what calls read that is the same in all of them.
    """

    def __init__(self, plan: Plan, note: Any = None) -> None:
        self.device, self.note, self.constants = plan.device, note, plan.constants
        given, stay, rooms = plan.rooms()

        def final(place: TensorPlace | Constant | None) -> TensorPlace | Constant | None:
            if not isinstance(place, TensorPlace):
                return place
            base, before = given[place.base]
            return place._replace(base=base, offset=before + place.offset)

        self.steps = [step.moved(final) for step in plan.steps]
        self.kept = [None if x is None else final(plan._place(x)) for xs in plan.kept for x in xs]
        self._inputs, self._stay = len(plan.inputs), len(plan.inputs) + len(stay)
        self._places = [place for x in plan.results if isinstance(place := final(plan._place(x)), TensorPlace)]
        # An empty one is the same for all calls, and may be saved for a backward pass.
        with torch.inference_mode(False):
            self.results = [(None if x.numel() else torch.empty(x.shape, dtype=x.dtype, device=plan.device), x.shape, x.stride(), x.dtype)
                            for x, place in zip(plan.results, self._places) if place.base >= self._inputs]
        # The strides of inputs and results, in the order of ``run``.
        self._strides = [*[x.stride() for x in plan.inputs], *[strides for _, _, strides, _ in self.results]]
        # In numbers of two bytes.
        self._sizes = [-(-room.size // ALIGNMENT) * ALIGNMENT // 2 for room in (*stay[len(self.results):], *rooms)]
        self.by_address: ByAddress | None = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results, on the current device and stream."""
        return self.run(inputs)[self._inputs:self._inputs + len(self.results)]

    def run(self, inputs: Sequence[Tensor], waits: Sequence[Callable[[], object]] = (), tell: Callable[[str], object] = lambda word: None
            ) -> list[Tensor]:
        """Inputs, results, and the memories of what is kept, in which ``kept`` has its places.

        Args:
            waits, tell: as ``HostSide`` has them.
        """
        bases = self.memory(inputs)
        begins, host = [x.data_ptr() for x in bases], HostSide(waits, tell, {})
        if self.by_address is None or not aligned(begins) or hooked():
            self._with_tensors(bases, aligned(begins), host)
        else:
            self.by_address(current_stream(self.device), bases, begins, host)
        return bases[:self._stay]

    def as_run(self, held: Sequence[Tensor]) -> list[Tensor]:
        """What ``run`` gave, which autograd has saved: hooks of saved tensors, such as ``save_on_cpu``'s, give it back in other strides."""
        laid = [x if x.stride() == strides else _laid_out(x, strides) for x, strides in zip(held, self._strides)]
        return [*laid, *held[len(laid):]]

    def result(self, held: Sequence[Tensor], number: int) -> Tensor:
        """One of the results that ``run`` gave, which may lie in an input that arrived."""
        place = self._places[number]
        return held[place.base] if place.base >= self._inputs else place.of(held)

    def memory(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All of a call's tensors, of which all but the inputs are new."""
        device = self.device
        bases = [*inputs]
        bases += [torch.empty_strided(shape, strides, dtype=dtype, device=device) if empty is None else empty
                  for empty, shape, strides, dtype in self.results]
        bases += [torch.empty(size, dtype=torch.bfloat16, device=device) for size in self._sizes]
        return bases

    def _with_tensors(self, bases: list[Tensor], usual: bool, host: HostSide) -> None:
        compiled = [step.with_tensors(bases, host) for step in self.steps]
        if usual and self.by_address is None and any([isinstance(step, Launch) for step in self.steps]):
            self.by_address = ByAddress.of(self.steps, compiled)


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x in memory of its own with these strides."""
    found = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    once = tuple([slice(None) if stride else slice(1) for stride in strides])
    found[once].copy_(x[once])
    return found


class Plans:
    """A step: plans of it, one for each kind of tensors that comes.

    Args:
        write: ``(plan, xs, others, *options)``, the step's code, which depends on the tensors' kinds and the options, never on values.
    """

    def __init__(self, write: Callable[..., Any]) -> None:
        self.write = write
        self.kinds: dict[tuple, Planned | Unplanned] = Kept(KINDS_KEPT)

    def __call__(self, xs: Sequence[Tensor | None], others: Sequence[Tensor | None], *options: Hashable) -> list[Tensor]:
        """The step's results, on the current device and stream; where a plan is being written of tensors such as these, those that it will
        have.

        Args:
            xs: tensors that the step follows by their strides.
            others: contiguous tensors of one dtype each, of which the sizes alone make a difference.
            options: what else decides.

        Raises:
            Unplanned: of code that no plan can hold.
        """
        within = _writing.get()
        if within is not None and any([within.has(x) for x in (*xs, *others)]):
            return within.step(self.write, xs, others, options)
        planned = self.planned(xs, others, *options)
        if isinstance(planned, Unplanned):
            raise planned
        return planned(*[x for x in (*xs, *others) if x is not None])

    def planned(self, xs: Sequence[Tensor | None], others: Sequence[Tensor | None], *options: Hashable) -> Planned | Unplanned:
        """The plan for tensors such as these, or why there is none."""
        first = next(x for x in (*xs, *others) if x is not None)
        key = (first.get_device(), *[None if x is None else (x.shape, x.stride(), x.dtype) for x in xs],
               *[None if x is None else x.shape for x in others], options)
        planned = self.kinds.get(key)
        if planned is None:
            planned = self._written(first.device, xs, others, options)
            # Constants that a CUDA graph's capture has made hold nothing yet.
            if isinstance(planned, Unplanned) or not (planned.constants and captured()):
                self.kinds[key] = planned
        return planned

    def _written(self, device: torch.device, xs: Sequence[Tensor | None], others: Sequence[Tensor | None], options: tuple
                 ) -> Planned | Unplanned:
        plan = Plan(device, [x for x in (*xs, *others) if x is not None])
        inputs = iter(plan.inputs)
        virtual = [None if x is None else next(inputs) for x in (*xs, *others)]
        outer = _writing.set(plan)
        try:
            with StepMode(plan):
                note = self.write(plan, virtual[:len(xs)], virtual[len(xs):], *options)
            return Planned(plan, note)
        except Unplanned as why:
            return why
        finally:
            _writing.reset(outer)
