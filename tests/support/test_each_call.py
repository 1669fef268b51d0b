"""each_call_is_right sees the mistakes that a single call, or the same call again, hides."""

import pytest
import torch
from each_call import each_call_is_right
from uninitialised import POISON, free_blocks, poison_free_memory

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def exact(x, y):
    return x @ y, (x * y.mT).sum(2)


def right():
    return exact


def counts_once():
    """Rows are taken from a counter that is made once, as a queue of work may be: later calls find nothing left to do."""
    left = []

    def step(x, y):
        out = torch.empty_like(x)
        rows = range(x.shape[2])[len(left):]
        left.extend(rows)
        out[:, :, rows.start:rows.stop] = (x @ y)[:, :, rows.start:rows.stop]
        return out, exact(x, y)[1]

    return step


def writes_over_what_it_gave():
    memory = torch.empty(1, 2, 16, 16, device=DEVICE, dtype=torch.bfloat16)
    return lambda x, y: (torch.matmul(x, y, out=memory), exact(x, y)[1])


def remembers_the_first():
    first = []

    def step(x, y):
        first.append(x @ y)
        return first[0].clone(), exact(x, y)[1]

    return step


def remembers_by_address():
    seen = {}

    def step(x, y):
        return seen.setdefault((x.data_ptr(), y.data_ptr()), (x @ y).clone()).clone(), exact(x, y)[1]

    return step


def forgets_a_row():
    def step(x, y):
        out = torch.empty_like(x)
        out[:, :, :-1] = (x @ y)[:, :, :-1]
        return out, exact(x, y)[1]

    return step


def writes_to_an_input():
    return lambda x, y: ((x @ y).clone(), exact(x, y.mul_(1))[1] + 0 * x.add_(1).sum())


def one_block_in_the_place_of_another():
    def step(x, y):
        out = x @ y
        out[:, :, :4] = out[:, :, 4:8]
        return out, exact(x, y)[1]

    return step


def draw():
    return torch.randn(2, 1, 2, 16, 16, device=DEVICE).bfloat16().unbind()


# The steps, and which of their calls is the first that is wrong.
MISTAKES = {counts_once: "call 2 with all memory in use: result 0 is not finite",
            writes_over_what_it_gave: "call 1 with all memory in use: result 0 is off",
            remembers_the_first: "call 2 with all memory in use: result 0 is off",
            remembers_by_address: "call 2 at the same addresses: result 0 is off",
            forgets_a_row: "call 1 with all memory in use: result 0 is not finite",
            writes_to_an_input: "call 1 with all memory in use writes to an input",
            one_block_in_the_place_of_another: "call 1 with all memory in use: result 0 is off"}


def test_a_right_step_passes():
    each_call_is_right(lambda: (right(), exact, draw), block=4)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake):
    step = mistake()
    with pytest.raises(AssertionError, match=MISTAKES[mistake]):
        each_call_is_right(lambda: (step, exact, draw), block=4)


def test_a_state_goes_through_as_many_calls_as_its_reference():
    """A sum over the calls so far, from zero in each start; a sum that starts once is seen."""
    def summing(total):
        def step(x):
            total.add_(x.to(total.dtype))
            return (total.to(x.dtype),)

        return step

    def zero():
        return torch.zeros(1, 1, 16, 16, device=DEVICE, dtype=torch.float64)

    def one():
        return (torch.randn(1, 1, 16, 16, device=DEVICE).bfloat16(),)

    each_call_is_right(lambda: (summing(zero()), summing(zero()), one), same_bits=False)
    once = summing(zero())
    with pytest.raises(AssertionError, match="call 1 at the same addresses: result 0 is off"):
        each_call_is_right(lambda: (once, summing(zero()), one))


@pytest.mark.gpu
def test_on_a_gpu_a_graph_that_holds_the_first_inputs_is_seen():
    def step(x, y):
        # A capture sees the inputs of the call before it.
        held[:] = [x.clone(), y] if not torch.cuda.is_current_stream_capturing() else held
        return held[0] @ y, exact(x, y)[1]

    held: list = []
    with pytest.raises(AssertionError, match="call 2 replayed: result 0 is off"):
        each_call_is_right(lambda: (step, exact, draw), block=4, same_bits=False)
    with pytest.raises(AssertionError, match="call 2 replayed differs from a call with the same inputs"):
        each_call_is_right(lambda: (step, exact, draw), block=4)


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_waits_is_seen():
    def step(x, y):
        return exact(x * float(x.isfinite().all()), y)

    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        each_call_is_right(lambda: (step, exact, draw), block=4)


def test_free_blocks_are_those_that_the_stream_can_be_given():
    def segment(kind, *blocks, stream=7, device=0, pool=(0, 0)):
        return dict(device=device, stream=stream, segment_type=kind, segment_pool_id=pool,
                    blocks=[dict(size=size, state=state) for size, state in blocks])

    segments = [segment("small", (512, "inactive"), (1024, "active_allocated")), segment("small", (512, "inactive"), stream=8),
                segment("large", (4 << 20, "inactive"), (1 << 20, "inactive"), (2 << 20, "active_pending_free")),
                segment("large", (8 << 20, "inactive"), device=1), segment("large", (8 << 20, "inactive"), pool=(0, 1)),
                segment("small", (2 << 20, "inactive")), segment("small", ((1 << 20) + 1024, "inactive"))]
    assert free_blocks(segments, 0, 7) == [4 << 20, 1 << 20, 1 << 20, 1 << 20, 1024, 512]


@pytest.mark.gpu
def test_on_a_gpu_freed_memory_is_poisoned():
    """Of small blocks and large ones, and of none that is in use."""
    sizes = [300, 5000, 3 << 20, 40 << 20]
    used = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")
    for size in sizes:
        torch.zeros(size, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    poison_free_memory()
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    assert all([bool((x == POISON).all()) for x in taken])
    assert not used.any() and torch.cuda.memory_reserved() == reserved
