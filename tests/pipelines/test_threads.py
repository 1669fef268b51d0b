"""One patched model in several threads: canvas and step belong to the call; gradient checkpointing finds those of its forward."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
import torch
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run, steps_at

from ssta.pipelines import Schedule, apply_ssta

# As many tokens, so that nothing but the numbers would tell.
CANVASES = (3, 6, 8), (4, 6, 6)


@pytest.fixture
def hasty():
    """Threads take turns far more often than they do by themselves."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def gradients_of(model, calls: list[dict], elsewhere: bool) -> list[torch.Tensor]:
    """Those of all parameters after a forward of each call and one backward, which runs in another thread if ``elsewhere``."""
    model.zero_grad()
    loss = sum(model(**call)[0].square().sum() for call in calls)
    if elsewhere:
        thread = threading.Thread(target=loss.backward)
        thread.start(), thread.join()
    else:
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def wrong_of(count: int, model, calls: list[dict]) -> list[int]:
    """How many of ``count`` outputs of each call differ from those of the call alone, when each call has a thread of its own."""
    alone = [run(model, call) for call in calls]
    wrong, errors = [0] * len(calls), []

    def work(index: int) -> None:
        try:
            wrong[index] = sum(not torch.equal(run(model, calls[index]), alone[index]) for _ in range(count))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return wrong


@pytest.mark.parametrize("name", ["wan", "hunyuan_video_15", "ltx", "minimax_h3"])
def test_each_thread_has_its_own_canvas(hasty, name):
    model = TINY[name].build(layers=4)
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        assert wrong_of(10, model, [TINY[name].call(thw) for thw in CANVASES]) == [0, 0]
        # Every forward was counted: the two alone, and ten in each thread.
        assert handle.report()[0].steps == 22


def test_each_thread_has_its_own_step(hasty):
    model, scheduler = TINY["wan"].build(layers=4), steps_at(900.0, 100.0)
    calls = [TINY["wan"].call() | {"timestep": timestep.expand(1)} for timestep in scheduler.timesteps]
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5), scheduler=scheduler):
        assert not torch.equal(*(run(model, call) for call in calls))
        assert wrong_of(20, model, calls) == [0, 0]


def test_a_thread_s_forward_leaves_the_others_canvas():
    model, (first, second) = TINY["wan"].build(), CANVASES
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        context = model.blocks[0].attn1.processor.context
        with pytest.raises(ValueError, match="forward of the whole model"):
            _ = context.thw
        run(model, TINY["wan"].call(first))
        thread = threading.Thread(target=run, args=(model, TINY["wan"].call(second)))
        thread.start(), thread.join()
        assert context.thw == first
        # A thread that has called nothing, as autograd's is, takes the last call of all.
        found = []
        thread = threading.Thread(target=lambda: found.append(context.thw))
        thread.start(), thread.join()
        assert found == [second]


def test_copies_know_no_call():
    model = TINY["wan"].build()
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        run(model, TINY["wan"].call())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(ValueError, match="forward of the whole model"):
                _ = twin.blocks[0].attn1.processor.context.thw
            assert torch.equal(run(twin, TINY["wan"].call()), run(model, TINY["wan"].call()))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpointing_recomputes_with_the_canvas_and_step_of_its_forward(elsewhere):
    """Also where the backward runs in another thread, as autograd's for GPUs does."""
    model, scheduler = TINY["wan"].build(layers=3).train(), steps_at(900.0, 500.0)
    call, other = (TINY["wan"].call(thw) | {"timestep": timestep.expand(1)} for thw, timestep in zip(CANVASES, scheduler.timesteps))

    def gradients() -> list[torch.Tensor]:
        return gradients_of(model, [call], elsewhere)

    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5), scheduler=scheduler):
        run(model, other)
        plain = gradients()
        run(model, other)
        model.enable_gradient_checkpointing()
        for ours, expected in zip(gradients(), plain, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpointing_recomputes_each_of_two_forwards_with_its_own(elsewhere):
    """Whichever came last: of another canvas with as many tokens, or of another step."""
    model, scheduler = TINY["wan"].build(layers=2).train(), steps_at(900.0, 500.0)
    first, second = (timestep.expand(1) for timestep in scheduler.timesteps)
    calls = [TINY["wan"].call(thw) | {"timestep": timestep} for thw, timestep in
             ((CANVASES[0], first), (CANVASES[1], second), (CANVASES[0], second))]

    def gradients() -> list[torch.Tensor]:
        return gradients_of(model, calls, elsewhere)

    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5), scheduler=scheduler):
        plain = gradients()
        model.enable_gradient_checkpointing()
        default = model._gradient_checkpointing_func
        for ours, expected in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    # Nothing stays behind.
    assert model._gradient_checkpointing_func is default


def test_checkpointing_in_two_threads_whose_backwards_run_there():
    """On a CPU the backward runs in its caller's thread, which knows its own forward."""
    model = TINY["wan"].build(layers=2).train()
    model.enable_gradient_checkpointing()
    calls = [TINY["wan"].call(thw) for thw in CANVASES]
    order, done = [threading.Event() for _ in calls], []

    def gradient(index: int) -> torch.Tensor:
        call = calls[index]
        call["hidden_states"].grad = None
        out = model(**call)[0].sum()
        if not done:
            # The other's forward comes between this one's and its backward.
            order[index].set(), order[1 - index].wait(20)
        out.backward()
        return call["hidden_states"].grad

    with apply_ssta(model, SPARSE, schedule=Schedule()):
        for call in calls:
            call["hidden_states"].requires_grad_()
        found = [None, None]
        threads = [threading.Thread(target=lambda index=index: found.__setitem__(index, gradient(index).clone())) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.append(True)
        for index in (0, 1):
            assert torch.equal(found[index], gradient(index))
