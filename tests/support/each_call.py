"""The one way in which tests call a step again and again: each call is held against the mathematics, whatever was called before."""

from contextlib import contextmanager

import torch
from oracles import assert_no_worse
from uninitialised import poison_free_memory


def each_call_is_right(start, *, calls=4, warm=1, block=64, roundings=1, graph=True, same_bits=True):
    """Every call of a step is right: with all memory of earlier calls in use, at their addresses, and, on a GPU, in a CUDA graph.

    ``exact`` of the inputs is the truth. A call is right where it is no farther from it than FACTOR times ``exact`` of inputs that were
    rounded once more, plus the result's own rounding: as a whole and in every run of rows. It writes to no input, and from the third call
    on it does not wait for the device. Before each call free memory is NaN.

    Args:
        start: ``() -> (step, exact, draw)``, functions with no memory of earlier ones but their own. ``step(*inputs) -> tensors``;
            ``exact`` likewise, of floating inputs in float64; ``draw() -> inputs``, other ones each time. A step with a state, as a cache
            has it, makes it in ``start``; each of its calls has one call of ``exact`` with the same inputs, in the same order.
        calls: with memory that is kept; two more at the same addresses.
        warm: calls before a graph is captured.
        block: rows of a run.
        roundings: how many more there are, of steps that round what they find before they go on.
        graph: whether the step can be captured.
        same_bits: whether each replay of the graph is followed by a plain call with the same inputs, which gives the same bits.
    """
    _with_all_memory_in_use(_Calls(start, block, roundings, "with all memory in use"), calls)
    calls_there = _Calls(start, block, roundings, "at the same addresses")
    _at_the_same_addresses(calls_there, calls + 2)
    if graph and any([x.is_cuda for x in calls_there.inputs[0]]):
        _replayed(_Calls(start, block, roundings, "replayed"), calls, warm, same_bits)


class _Calls:
    """Calls of one start: what they were given, and the judgement of what they gave."""

    def __init__(self, start, block, roundings, where):
        (self.step, self.exact, self.draw), (_, self.disturbed, _) = start(), start()
        self.block, self.roundings, self.where = block, roundings, where
        self.inputs = []

    def fresh(self):
        """Inputs of the next call, of which a copy is remembered."""
        drawn = self.draw()
        self.inputs.append([x.clone() for x in drawn])
        return drawn

    def judge(self, results, at=None):
        """``results`` of each call, in order. ``at``: the tensors that each was given."""
        assert len(results) == len(self.inputs)
        for number, (drawn, found) in enumerate(zip(self.inputs, results)):
            call = f"call {number + 1} {self.where}"
            if at is not None:
                assert all(map(torch.equal, at[number], drawn)), f"{call} writes to an input"
            wanted, near = self.exact(*map(_wide, drawn)), self.disturbed(*[_disturbed(x, self.roundings) for x in drawn])
            assert len(found) == len(wanted), f"{call} gives {len(found)} tensors, not {len(wanted)}"
            for place, (got, plain, truth) in enumerate(zip(found, near, wanted)):
                name = f"{call}: result {place}"
                if got.is_floating_point():
                    assert_no_worse(name, got, plain, truth, self.block)
                else:
                    assert torch.equal(got, truth), f"{name} differs"


def _with_all_memory_in_use(of, calls):
    at, results = [], []
    for _ in range(calls):
        at.append(of.fresh())
        poison_free_memory()
        results.append(of.step(*at[-1]))
    of.judge(results, at)


def _at_the_same_addresses(of, calls):
    held, seen = [x.clone() for x in of.fresh()], []
    for _ in range(calls - 1):
        of.fresh()
    for number, drawn in enumerate(of.inputs):
        for x, new in zip(held, drawn):
            x.copy_(new)
        poison_free_memory()
        with _without_waiting(number > 1 and held[0].is_cuda):
            found = of.step(*held)
        # All of it before the second call, so that results lie where the first ones lay.
        seen = seen or [x.new_zeros(calls, *x.shape) for x in found]
        for results, x in zip(seen, found):
            results[number] = x
        del found, x
    of.judge(list(zip(*seen)))


def _replayed(of, calls, warm, same_bits):
    held, results = [x.clone() for x in of.fresh()], []

    def called(run):
        for x, new in zip(held, of.inputs[-1]):
            x.copy_(new)
        poison_free_memory()
        results.append([x.clone() for x in run()])

    # A backward on the default stream ties its inputs to it, which a capture refuses.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(warm):
            if number:
                of.fresh()
            called(lambda: of.step(*held))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = of.step(*held)

    def replay():
        graph.replay()
        return captured

    for number in range(calls - 1):
        of.fresh()
        called(replay)
        if same_bits:
            poison_free_memory()
            plain = of.step(*of.inputs[-1])
            assert all(map(torch.equal, plain, results[-1])), f"replay {number + 1} differs from a call with the same inputs"
    of.judge(results)


@contextmanager
def _without_waiting(really):
    """Whatever waits for the GPU raises here."""
    torch.cuda.set_sync_debug_mode("error" if really else "default") if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default") if torch.cuda.is_available() else None


def _wide(x):
    return x.double() if x.is_floating_point() else x


def _disturbed(x, roundings):
    """x in float64, each number off by up to half a unit in the last place for each rounding."""
    if not x.is_floating_point():
        return x
    return x.double() * (1 + roundings * torch.finfo(x.dtype).eps * (torch.rand(x.shape, device=x.device, dtype=torch.float64) - 0.5))


def differentiated(attend):
    """The step ``(q, k, v, dout, *rest) -> (out, dq, dk, dv)`` of ``attend(q, k, v, *rest) -> out``."""
    def step(q, k, v, dout, *rest):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves, *rest)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return step


def undifferentiated(attend):
    """The step ``(q, k, v, dout, *rest) -> (out,)`` of ``attend(q, k, v, *rest) -> out``."""
    def step(q, k, v, dout, *rest):
        with torch.no_grad():
            return (attend(q, k, v, *rest),)

    return step
