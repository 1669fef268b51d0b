"""A step that is planned once for a kind of tensors launches the same by address as it does with tensors, and mixes up no kinds."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from tail_cases import tail_case

from ssta.kernels.lowering import by_address, replays
from ssta.kernels.lowering.plans import Plan, Planned, Plans
from ssta.kernels.lowering.quick_launch import Tiles
from ssta.kernels.lowering.rooms import ALIGNMENT, LARGE, Room, Span, _placed, shared
from ssta.kernels.memo import Unplanned
from ssta.kernels.portable import tail, tail_combine

CPU = torch.device("cpu")
NOBODY = by_address.HostSide((), lambda word: None, {})


class Recorder:
    """In the place of a kernel and of what Triton compiles: what it would get, (grid, addresses, numbers and constants)."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        def launch(*arguments, enable_fp_fusion, num_warps=None, num_stages=None, maxnreg=None, **constants):
            at = [0 if x is None else x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
            self.seen.append((*grid, *at, *constants.values()))
            return self

        return launch

    def launch(self, *arguments):
        stream, *rest = arguments[3:]
        assert stream == 7, "another stream"
        self.seen.append((*arguments[:3], *rest))

    settled, flat = (), True

    def encoded(self, number, made):
        return [made]


@pytest.fixture(autouse=True)
def directly():
    """What a Recorder gives as compiled is launched by the Recorder."""
    of = by_address.Direct.of
    with mock.patch.object(by_address.Direct, "of", lambda compiled, descriptors: (
            compiled if isinstance(compiled, Recorder) else of(compiled, descriptors))):
        yield


def both_ways(planned, inputs, recorder):
    """What a step launches with tensors, and by address, on the same memory."""
    bases = planned.memory(inputs)
    recorder.seen = []
    planned._with_tensors(bases, True, NOBODY)
    with_tensors, recorder.seen = recorder.seen, []
    planned.by_address(7, bases, [x.data_ptr() for x in bases], NOBODY)
    return with_tensors, recorder.seen


def test_launches_by_address_get_what_launches_with_tensors_get():
    recorder, x, y = Recorder(), torch.randn(2, 3, 4, 8), torch.zeros(5, dtype=torch.int32)
    plan = Plan(CPU, (x, y))
    a, b = plan.inputs
    out = plan.result(3, 8, dtype=torch.float16)
    for head in range(3):
        work = plan.working(2, 100, dtype=torch.float32)
        tiles = Tiles(a[:, head:head + 1], lambda x: x.data_ptr())
        plan.launch(recorder, (head, 2, 1), (a[1, head], None, b[2:], work[1], out[head]), (3, 0.5), dict(N=64), {}, (tiles,))
    assert sum(room.size for room in plan.rooms()[2]) == 800, "groups work in the same memory"
    with_tensors, by_address = both_ways(Planned(plan), (x, y), recorder)
    assert with_tensors == by_address and len(by_address) == 3
    assert by_address[2][3:6] == (x[0, 2].data_ptr(), x[1, 2].data_ptr(), 0)


@pytest.mark.parametrize("refused", [False, True])
def test_steps_of_tensors_that_lie_where_others_lay_are_one_graph(refused, monkeypatch):
    """From the third call on, which runs the same; of launches and what torch does, but neither across what the host does, which no graph
    does in its place, nor while a graph is captured, nor for another stream, nor of few steps."""
    recorder, graphs, host = Recorder(), [], []

    def graph(device, stream, run):
        if refused:
            raise RuntimeError
        before, recorder.seen = recorder.seen, []
        run(7)
        graphs.append(recorder.seen)
        recorder.seen = before
        return lambda stream, *_, found=graphs[-1]: recorder.seen.extend(found)

    monkeypatch.setattr(by_address, "Graph", graph)
    monkeypatch.setattr(replays, "MOST", 2)
    plan = Plan(CPU, (torch.zeros(6, 8),))
    for group in (range(4), range(4, 6)):
        for row in group:
            plan.launch(recorder, (row, 2, 1), (plan.inputs[0][row],), (3,), {})
        plan.call(lambda x: recorder.seen.append((0, 0, 0, x.data_ptr(), 0)), plan.inputs[0][1:])
        plan.call(lambda: host.append(len(recorder.seen)))
    planned, calls = Planned(plan), []
    xs = [torch.zeros(6, 8) for _ in range(3)]
    for turn, x in enumerate([xs[0]] * 5 + [xs[1]] * 4 + [xs[2]] * 4 + [xs[0]]):
        if turn == 0:
            both_ways(planned, (x,), recorder)
        recorder.seen, host[:] = [], []
        planned.by_address(7, [x], [x.data_ptr()], NOBODY)
        calls.append([place - x.data_ptr() for _, _, _, place, _ in recorder.seen])
        assert host == [5, 8]
    assert calls == [[0, 32, 64, 96, 32, 128, 160, 32]] * len(calls)
    assert [len(of) for of in graphs] == ([] if refused else [5, 3, 5, 3])
    assert [of[0][3] for of in graphs[::2]] == ([] if refused else [xs[0].data_ptr(), xs[1].data_ptr()])
    with pytest.raises(AssertionError, match="another stream"):
        planned.by_address(8, [xs[0]], [xs[0].data_ptr()], NOBODY)
    for of in graphs:
        of.clear()
    monkeypatch.setattr(by_address, "captured", lambda: True)
    recorder.seen = []
    planned.by_address(7, [xs[0]], [xs[0].data_ptr()], NOBODY)
    assert len(recorder.seen) == 8


def test_what_has_no_place_is_refused():
    plan = Plan(CPU, (torch.zeros(4, 4),))
    with pytest.raises(Unplanned, match="neither given to the step nor made"):
        plan.call(torch.Tensor.zero_, plan.inputs[0] + 1)


@pytest.mark.parametrize("compute, name", [
    (lambda x: x.zero_(), "zero_"), (lambda x: x + torch.ones(4), "add"), (lambda x: torch.stack([x]), "stack")])
def test_what_torch_computes_is_refused(compute, name):
    with pytest.raises(Unplanned, match=name):
        Plans(lambda plan, xs, others: compute(plan.result(4, dtype=torch.float32)))((torch.zeros(4),), ())


def test_steps_within_a_step_are_a_part_of_it():
    """Copies too; and what does not come from the plan is a constant of it."""
    fixed = torch.arange(4.0)
    more = Plans(lambda plan, xs, others: plan.call(lambda out, a, b: torch.add(a, b, out=out), plan.result_like(xs[0]), xs[0], others[0]))

    def write(plan, xs, others):
        of = more((more((xs[0].T,), (fixed,))[0],), (fixed,))[0]
        plan.results.append(of[:, 1:].clone(memory_format=torch.contiguous_format))
        plan.keep(of)

    step = Plans(write)
    x = torch.arange(12.0).view(4, 3)
    for y in (x, x + 1):
        assert torch.equal(step((y,), ())[0], (y.T + 2 * fixed)[:, 1:])
        planned = step.planned((y,), ())
        assert len(planned.steps) == 3 and torch.equal(planned.kept[0].of(planned.run((y,))), y.T + 2 * fixed)
    assert len(step.kinds) == 1 and not more.kinds


def test_a_plan_works_where_its_inputs_arrived_and_were_sent_from():
    """Each is waited for where the code does, read before anything else lies there, and what was sent is kept until then."""
    def write(plan, xs, others):
        late = plan.arriving(xs[0], xs[2]), plan.arriving(xs[1], None)
        one, two, three = (plan.working(6, dtype=torch.float32) for _ in range(3))
        y = late[1].wait()
        plan.call(lambda out, x: torch.add(x, 1, out=out), one, y)
        x = late[0].wait()
        plan.call(lambda out, x, y: torch.add(x, y, out=out), two, x, one)
        plan.call(lambda out, x, y: torch.mul(x, y, out=out), three, two, x)
        plan.call(lambda out, x, y: torch.add(x, y, out=out), plan.result(6, dtype=torch.float32), three, two)

    def arrive(memory, number, x, waits):
        assert not memory[2].any(), "it is on its way"
        waits.append(number)
        memory[number].copy_(x)

    step, x, y = Plans(write), torch.arange(6.0), torch.arange(6.0) * 10
    for _ in range(2):
        memory, waits = [torch.full((6,), float("nan")), torch.full((6,), float("nan")), torch.zeros(6)], []
        planned = step.planned(memory, ())
        held = planned.run(memory, [partial(arrive, memory, 0, x, waits), partial(arrive, memory, 1, y, waits)])
        out = planned.result(held, 0)
        assert torch.equal(out, (x + y + 1) * x + x + y + 1) and waits == [1, 0] and len(held) == 3
        assert out.untyped_storage().data_ptr() in [of.untyped_storage().data_ptr() for of in memory]
        assert len(planned.memory(memory)) == 4, "one tensor has no room until something is read"


def test_what_the_host_does_between_launches_is_no_part_of_a_graph(monkeypatch):
    """It is called with a call's own tensors, which stay until it was waited for, whether all else is a graph or not."""
    monkeypatch.setattr(by_address, "Graph", lambda device, stream, run: lambda *_: run(7))
    begun = []

    def begin(received, sent):
        def wait():
            received.copy_(sent[:6] * 2)
            begun.append("waited")

        begun.append("begun")
        return wait

    def write(plan, xs, others):
        sent, received, other = (plan.working(length, dtype=torch.float32) for length in (12, 6, 12))
        plan.call(torch.Tensor.copy_, sent, xs[0])
        wait = plan.start(begin, received, sent)
        # Where what is sent lay nothing else may lie yet.
        plan.call(lambda out: out.fill_(7), other)
        wait()
        plan.tell("arrived")
        plan.call(lambda out, x, y: torch.add(x, y, out=out), plan.result(6, dtype=torch.float32), received, other[:6])

    step, x = Plans(write), torch.arange(12.0)
    planned = step.planned((x,), ())
    assert [of.recordable for of in planned.steps] == [True, False, True, False, False, True]
    for _ in range(2):
        out = planned.run((x,), (), begun.append)[1]
        assert torch.equal(out, 2 * x[:6] + 7)
    steps = by_address.ByAddress.of(planned.steps, [None] * len(planned.steps))
    bases = planned.memory((x,))
    for _ in range(replays.SIGHTS + 1):
        bases[1].zero_()
        steps(7, bases, [of.data_ptr() for of in bases], by_address.HostSide((), begun.append, {}))
        assert torch.equal(bases[1], 2 * x[:6] + 7)
    assert begun == ["begun", "waited", "arrived"] * (2 + replays.SIGHTS + 1)


@pytest.mark.parametrize("room, numbers", [(1e9, (5, 3, 5)), (0.0, (11, 9, 10))])
def test_the_tails_launches_by_address(room, numbers, monkeypatch):
    """All of both steps and of the gradients, with groups of heads, most of which begin at no multiple of 16 bytes, and without."""
    of = tail_case([20, 35, 9, 13], 3, heads=4, kv_heads=2, batch=2, parts=2)
    lists, found = of.some_blocks(), of.estimate()
    (out, lse), _ = of.exact(lists)
    launched = []
    monkeypatch.setattr(Planned, "__call__", lambda planned, *inputs: launched.append((planned, inputs)) or [
        torch.zeros(shape, dtype=dtype) for _, shape, _, dtype in planned.results])
    for plans_of in (tail._estimates, tail_combine._merged, tail_combine._gradients):
        plans_of.kinds.clear()
    tail.estimate(of.q, of.k, of.v, *of.shape, of.scale, 2, room=room)
    _, *kept = tail_combine.combine(out, lse, of.q, of.k, of.v, *of.shape, lists.counts, lists.indices, found, of.scale, True,
                                    room=room)
    tail_combine.combine_backward(out, out, lse, out, lse, kept[0], of.q, of.k, of.v, *of.shape, *kept[1:], found.log_count,
                                  found.order, found.k_mean, found.v_mean, of.scale, room=room)
    monkeypatch.undo()
    for plans_of in (tail._estimates, tail_combine._merged, tail_combine._gradients):
        plans_of.kinds.clear()
    # Order, mass and which heads are useful for all heads, and by group keys and queries; biases for all, and by group covariances and
    # merge; of a batch element's groups covariances, rows, units, matrices and tokens.
    for (planned, inputs), launches in zip(launched, numbers):
        recorder = Recorder()
        planned.steps = [step._replace(kernel=recorder) if hasattr(step, "kernel") else step._replace(function=lambda *xs: None)
                         for step in planned.steps]
        with_tensors, by_address = both_ways(planned, inputs, recorder)
        assert with_tensors == by_address and len(by_address) == launches


def results(of, lists):
    """Of estimate and combine."""
    (out, lse), _ = of.exact(lists)
    estimates = of.estimate()
    return [estimates.half_variance, estimates.mass, estimates.k_mean, estimates.useful, *of.add(out, lse, lists, estimates)]


def test_kinds_in_turn_are_not_mixed_up():
    """Each again after all others: the same bits as when no other plan was there. Ragged blocks, grouped heads, units that are halves, some
    groups of heads, and tensors at odd addresses, which launch by tensor."""
    cases = [tail_case([20, 35, 9, 13], 3, heads=4, kv_heads=2, batch=2, parts=2), tail_case([20, 35, 9, 13], 3, heads=4, kv_heads=2),
             tail_case([35, 20, 13, 9], 3, heads=4, kv_heads=2), tail_case([20, 9, 13], 2, heads=3, kv_heads=3, dtype=torch.float32)]
    odd = tail_case([20, 35, 9, 13], 3, heads=4, kv_heads=2)
    for name in "qkv":
        x = getattr(odd, name)
        place = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert place.data_ptr() % 16
        setattr(odd, name, place.copy_(x))
    cases.append(odd)
    given = [(replace(of, room=room), of.some_blocks()) for of in cases for room in (1e9, 0.0)]
    alone = []
    for each in given:
        for plans_of in (tail._estimates, tail_combine._merged):
            plans_of.kinds.clear()
        alone.append(results(*each))
    for each, wanted in zip(given, alone):
        assert all(torch.equal(a, b) for a, b in zip(results(*each), wanted))
    # Aligned or not, the same plan: room and shapes make kinds.
    assert len(tail._estimates.kinds) >= 7


def test_plans_depend_on_kinds_alone():
    written = []

    def write(plan, xs, others, number):
        written.append(number)
        plan.call(torch.Tensor.copy_, plan.result(*xs[0].shape, dtype=xs[0].dtype), xs[0])

    step = Plans(write)
    x = torch.randn(4, 6)
    for y in (x, x + 1, x.T, x[:, :3], x.double(), x - 1):
        assert torch.equal(step((y,), (), 1)[0], y)
    assert written == [1] * 4
    step((x,), (torch.zeros(2),), 1), step((x,), (torch.zeros(3),), 1), step((x,), (torch.ones(3),), 1), step((x,), (), 2)
    assert written == [1] * 6 + [2]


def test_what_is_there_at_once_lies_apart():
    """In rooms that were there before and in new ones, large and small; and the order of sizes takes no less memory."""
    sizes, times = torch.randint(1, 3 * LARGE // 2, (40,)).tolist(), torch.randint(0, 30, (40, 2)).sort(1).values.tolist()
    spans = [Span(size, *time) for size, time in zip(sizes, times)]
    result = Room(LARGE)
    result.place(Span(LARGE, 25, 30))
    places, rooms = shared(spans, [result])
    for at, (span, (room, place)) in enumerate(zip(spans, places)):
        assert place + span.size <= rooms[room].size and place % ALIGNMENT == 0
        others = [(*spans[n], places[n]) for n in range(at)] + [(LARGE, 25, 30, (0, 0))]
        assert not any(to[0] == room and first <= span.last and span.first <= last and place < to[1] + size and to[1] < place + span.size
                       for size, first, last, to in others)
    assert sum(room.size for room in rooms) <= sum(room.size for room in _placed(spans, [result], lambda of: of.size)[1])


def test_what_was_needed_before_is_spare():
    plan = Plan(torch.device("cpu"), [torch.empty(1000)])
    stays, goes, then = (plan.working(size, dtype=torch.float32) for size in (100, 50, 20))
    plan.call(torch.Tensor.copy_, stays, plan.inputs[0])
    plan.call(torch.Tensor.copy_, goes, stays)
    plan.call(torch.Tensor.copy_, then, goes)
    assert plan.owns(stays) and not plan.owns(plan.inputs[0])
    assert plan.spare([stays, torch.empty(7)]) == 4 * 70 and plan.spare([goes, then]) == 4 * 80
    assert plan.needs(lambda: plan.call(torch.Tensor.copy_, goes, then), [stays])[1] == 5 and len(plan.steps) == 3
