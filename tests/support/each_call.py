"""The one way in which tests call a step again and again: each call is held against the mathematics, however many came before it."""

from contextlib import contextmanager

import torch
from oracles import assert_no_worse
from uninitialised import poison_free_memory


def each_call_is_right(start, *, calls=4, warm=1, block=64, roundings=1, waits=False, graph=True, same_bits=True):
    """Every call of a step is right: with all memory of earlier calls in use, at their addresses, and, on a GPU, in a CUDA graph.

    ``exact`` of the inputs is the truth. A call is right where it is no farther from it than FACTOR times ``exact`` of inputs that were
    rounded once more, plus the result's own rounding: as a whole and in every run of rows. It writes to no input. Once it is warm it does
    not wait for the device, unless ``waits``. Before each call free memory is NaN.

    Args:
        start: ``() -> (step, exact, draw)``. ``step(*inputs)`` gives tensors; ``exact(*inputs)`` gives the same of floating inputs in
            float64; ``draw()`` gives other inputs each time. A step with a state, such as a cache, makes it in ``start``. Each of its calls
            has one call of ``exact`` with the same inputs, in the same order.
        calls: with memory that stays in use; at least two more at the same addresses.
        warm: calls before a graph is captured. These and the next one may wait for the device, to make constants.
        block: rows of a run.
        roundings: of the inputs; more than one for a step that also rounds intermediate results.
        waits: whether the step may wait for the device.
        graph: whether the step can be captured.
        same_bits: whether each replay of the graph is followed by a plain call with the same inputs, which gives the same bits.
    """
    def series(where):
        return _Series(start, block, roundings, where)

    _with_all_memory_in_use(series("with all memory in use"), calls)
    _at_the_same_addresses(series("at the same addresses"), max(calls, warm) + 2, None if waits else warm)
    if graph and any([x.is_cuda for x in start()[2]()]):
        _replayed(series("replayed"), calls, warm, same_bits)


class _Series:
    """Calls of one start.

    Attributes:
        step: as ``start`` makes it.
        inputs: copies of each call's inputs.
    """

    def __init__(self, start, block, roundings, where):
        (self.step, self._exact, self._draw), (_, self._disturbed, _) = start(), start()
        self._block, self._roundings, self._where = block, roundings, where
        self.inputs = []

    def draw(self):
        """Inputs of the next call, after a copy was made of them."""
        drawn = self._draw()
        self.inputs.append([x.clone() for x in drawn])
        return drawn

    def judge(self, outputs, tensors=None):
        """``outputs`` of each call, in order. ``tensors``: the inputs themselves, which must be unchanged."""
        assert len(outputs) == len(self.inputs)
        for number, (inputs, results) in enumerate(zip(self.inputs, outputs)):
            call = f"call {number + 1} {self._where}"
            assert tensors is None or all(map(torch.equal, tensors[number], inputs)), f"{call} writes to an input"
            exact = self._exact(*map(_wide, inputs))
            disturbed = self._disturbed(*[_rounded_again(x, self._roundings) for x in inputs])
            assert len(results) == len(exact), f"{call} gives {len(results)} tensors, not {len(exact)}"
            for place, (result, plain, truth) in enumerate(zip(results, disturbed, exact)):
                if result.is_floating_point():
                    assert_no_worse(f"{call}: result {place}", result, plain, truth, self._block)
                else:
                    assert torch.equal(result, truth), f"{call}: result {place} differs"


def _with_all_memory_in_use(series, calls):
    tensors, outputs = [], []
    for _ in range(calls):
        tensors.append(series.draw())
        poison_free_memory()
        outputs.append(series.step(*tensors[-1]))
    series.judge(outputs, tensors)


def _at_the_same_addresses(series, calls, warm):
    for _ in range(calls):
        series.draw()
    held, outputs = [x.clone() for x in series.inputs[0]], []
    for number, inputs in enumerate(series.inputs):
        _copy(inputs, held)
        poison_free_memory()
        with _without_waiting(warm is not None and number > warm and held[0].is_cuda):
            results = series.step(*held)
        # Made before the second call, so that its results lie where the first ones lay.
        outputs = outputs or [x.new_zeros(calls, *x.shape) for x in results]
        _copy(results, [memory[number] for memory in outputs])
        del results
    series.judge(list(zip(*outputs)))


def _replayed(series, calls, warm, same_bits):
    for _ in range(warm + calls - 1):
        series.draw()
    held, outputs = [x.clone() for x in series.inputs[0]], []

    def called(run):
        _copy(series.inputs[len(outputs)], held)
        poison_free_memory()
        outputs.append([x.clone() for x in run()])

    # A backward on the default stream ties its inputs to it, which a capture refuses.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            called(lambda: series.step(*held))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = series.step(*held)

    def replay():
        graph.replay()
        return captured

    for number in range(warm, warm + calls - 1):
        called(replay)
        if same_bits:
            poison_free_memory()
            plain = series.step(*series.inputs[number])
            assert all(map(torch.equal, plain, outputs[number])), f"call {number + 1} replayed differs from a call with the same inputs"
    series.judge(outputs)


def _copy(sources, targets):
    for source, target in zip(sources, targets):
        target.copy_(source)


@contextmanager
def _without_waiting(really):
    """Where ``really``, a wait for the GPU is an error."""
    if not really:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wide(x):
    return x.double() if x.is_floating_point() else x


def _rounded_again(x, roundings):
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
