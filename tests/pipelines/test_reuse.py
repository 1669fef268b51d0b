"""Selections that serve several steps: who chooses when, in every pipeline; each of a step's forwards its own; what makes layers choose
sooner; what is kept is freed; checkpointing, caches and threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run
from tiny_pipelines import PIPELINES, latents

from ssta.kernels import notices
from ssta.pipelines import Schedule, apply_ssta, processor
from ssta.pipelines.reuse import KeptSelection, _packed, _unpacked

THIRDS = Schedule(refresh=3)


class Watch:
    """What sparse layers attended to from now on: for each call whether its selection was given, and its mask."""

    def __init__(self, monkeypatch):
        self.calls: list[tuple[bool, torch.Tensor]] = []
        layer = processor.ssta_layer

        def watched(*args, selection=None, **options):
            result = layer(*args, selection=selection, **options)
            self.calls.append((selection is not None, result.selection.blocks.to_mask()))
            return result

        monkeypatch.setattr(processor, "ssta_layer", watched)

    def reused(self, *shape: int) -> list:
        """Whether the calls since last time reused a selection, as nested lists of ``shape``."""
        found = torch.tensor([reused for reused, _ in self.calls]).reshape(shape).tolist()
        self.calls.clear()
        return found


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())


def layers_of(model) -> list:
    return [module.processor for module in model.modules() if hasattr(getattr(module, "processor", None), "holder")]


def kept_tensors(handle) -> int:
    """How many selections are kept, in all threads."""
    return sum(kept._shape is not None for _, _, installation in handle._installed for reuse in installation.context._reuses
               for forward in reuse._forwards for kept in forward.layers.values())


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "wan_2.2"])
def test_every_pipeline_s_forwards_choose_at_the_first_of_three_steps(watch, name):
    """Whatever a pipeline's guidance is: each of a step's forwards finds what it chose itself."""
    tiny = PIPELINES[name]
    pipe = tiny.build(layers=2)
    whole = {"strength": 1.0} if name.endswith("video_to_video") else {}
    with apply_ssta(pipe, SPARSE, schedule=THIRDS) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            latents(pipe, steps=7, **tiny.call | whole)
            steps = watch.reused(7, -1)
            assert [set(step) for step in steps] == [{place % 3 > 0} for place in range(7)]
            assert all((run.steps, run.chosen_steps) == (7, 3) for run in handle.report())
        assert kept_tensors(handle) == 0


def test_each_of_a_step_s_forwards_keeps_its_own(watch):
    pipe, call = PIPELINES["wan"].build(layers=2), PIPELINES["wan"].call
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.2, refresh=4)) as handle:
        latents(pipe, steps=10, **call)
        # Two dense steps; then with and without the prompt, two layers each.
        lists = [mask for _, mask in watch.calls]
        first, again = lists[:4], lists[4:16]
        assert all(torch.equal(ours, first[i % 4]) for i, ours in enumerate(again)) and not torch.equal(first[1], first[3])
        assert not torch.equal(lists[16], first[0])
        assert watch.reused(8, 4) == [[place % 4 > 0] * 4 for place in range(8)]
        report = handle.report()
        assert [(run.steps, run.dense_steps, run.chosen_steps) for run in report] == [(10, 2, 2)] * 2
        assert "chosen anew" in str(report).splitlines()[0] and " 2 of 10" in str(report).splitlines()[1]


def test_a_selection_that_serves_one_step_is_not_kept(watch):
    pipe, call = PIPELINES["wan"].build(layers=2), PIPELINES["wan"].call
    with apply_ssta(pipe, SPARSE, schedule=Schedule()) as handle:
        latents(pipe, steps=3, **call)
        assert not any(reused for reused, _ in watch.calls) and kept_tensors(handle) == 0
        assert handle.report()[0].chosen_steps is None and "chosen anew" not in str(handle.report())


class Loop:
    """A denoising loop of a user's own, which says by its timesteps which step it is."""

    def __init__(self, model, scheduler, steps: int = 6):
        self.model, self.scheduler = model, scheduler
        scheduler.set_timesteps(steps)

    def forward(self, step: int, call: dict) -> torch.Tensor:
        return run(self.model, call | {"timestep": self.scheduler.timesteps[step].expand(call["hidden_states"].shape[0])})


@pytest.fixture
def loop():
    model, scheduler = TINY["hunyuan_video"].build(), PIPELINES["hunyuan_video"].build().scheduler
    with apply_ssta(model, SPARSE, schedule=Schedule(refresh=100), scheduler=scheduler):
        yield Loop(model, scheduler)


def call_of(**options) -> dict:
    return TINY["hunyuan_video"].call(**options)


@pytest.mark.parametrize("changed", ["canvas", "batch", "prompt", "mask", "written mask", "longer prompt", "nothing"])
def test_another_input_chooses_at_once(watch, loop, changed):
    call = call_of(prompts=(4,))
    loop.forward(0, call)
    loop.forward(1, call)
    assert watch.reused(2, 2) == [[False] * 2, [True] * 2]
    other = {
        "canvas": lambda: call_of(thw=(4, 6, 6)), "batch": lambda: call_of(prompts=(4, 4)),
        "prompt": lambda: call | {"encoder_hidden_states": call["encoder_hidden_states"].clone()},
        "mask": lambda: call | {"encoder_attention_mask": call["encoder_attention_mask"].clone()},
        "written mask": lambda: call["encoder_attention_mask"][:, 3:].zero_() is None or call,
        "longer prompt": lambda: call | {"encoder_hidden_states": call["encoder_hidden_states"].repeat(1, 2, 1),
                                         "encoder_attention_mask": call["encoder_attention_mask"].repeat(1, 2)},
        "nothing": lambda: call | {"hidden_states": call["hidden_states"] + 1}}[changed]()
    out = loop.forward(2, other)
    assert watch.reused(1, 2) == [[changed == "nothing"] * 2]
    if changed != "nothing":
        # What was chosen is what is chosen without anything kept.
        loop.scheduler.set_timesteps(6)
        torch.testing.assert_close(loop.forward(2, other), out)


def test_a_new_generation_chooses(watch, loop):
    call = call_of()
    loop.forward(0, call), loop.forward(3, call)
    loop.scheduler.set_timesteps(6)
    loop.forward(3, call)
    # Its place going back is one too.
    loop.forward(2, call), loop.forward(3, call)
    assert watch.reused(5, 2) == [[reused] * 2 for reused in (False, True, False, False, True)]


def test_more_forwards_in_a_step_than_are_kept(watch, loop):
    call = call_of()
    for step in (0, 1):
        for _ in range(10):
            loop.forward(step, call)
    assert watch.reused(2, 10, 2)[1] == [[True] * 2] * 8 + [[False] * 2] * 2


def test_without_a_scheduler_nothing_is_kept(watch, unsaid):
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=THIRDS) as handle:
        with pytest.warns(RuntimeWarning, match="refresh = 3, but nothing says which step .*; tiles are chosen anew in every forward"):
            run(model, call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, call)
        assert not any(reused for reused, _ in watch.calls) and kept_tensors(handle) == 0
        assert (handle.report()[0].steps, handle.report()[0].chosen_steps) == (2, 2)


def test_forwards_that_record_gradients_choose_and_say_so(watch, unsaid, loop):
    call = call_of()
    loop.forward(0, call)
    with torch.enable_grad(), pytest.warns(RuntimeWarning, match="refresh = 100, but HunyuanVideoTransformer3DModel was called while grad"):
        loop.model(**call | {"timestep": loop.scheduler.timesteps[1].expand(1)})
    loop.forward(2, call)
    assert watch.reused(3, 2) == [[False] * 2, [False] * 2, [True] * 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_selection_of_its_forward(watch, reentrant):
    """Also where another forward, which reuses what it may, came in between."""
    model, scheduler = TINY["wan"].build(layers=3).train(), PIPELINES["wan"].build().scheduler
    call = TINY["wan"].call()

    def gradients(loop: Loop) -> list[torch.Tensor]:
        model.zero_grad()
        loop.forward(0, call), loop.forward(1, call)
        timestep = loop.scheduler.timesteps[2].expand(1)
        hidden = call["hidden_states"].clone().requires_grad_()
        loss = model(**call | {"timestep": timestep, "hidden_states": hidden * 1})[0].square().sum()
        loop.forward(2, call | {"hidden_states": call["hidden_states"] * 2})
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None] + [hidden.grad]

    with apply_ssta(model, SPARSE, schedule=Schedule(refresh=3), scheduler=scheduler):
        plain = gradients(Loop(model, scheduler))
        options = {"gradient_checkpointing_func": lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=reentrant)}
        model.enable_gradient_checkpointing(**options)
        for ours, expected in zip(gradients(Loop(model, scheduler)), plain, strict=True):
            # Recomputing everything in one go adds gradients in another order; other tiles would change all digits.
            torch.testing.assert_close(ours, expected, rtol=1e-4 if reentrant else 0, atol=1e-4 if reentrant else 0)


def test_removal_and_the_end_of_a_generation_free_what_was_kept(loop):
    call, context = call_of(), layers_of(loop.model)[0].context
    reuse = next(iter(context._reuses), None)
    assert reuse is None
    loop.forward(0, call)
    (reuse,) = context._reuses
    bits = [kept._bits for forward in reuse._forwards for kept in forward.layers.values()]
    # Two heads, and eight tiles of video and one of text in nine rows, of two bytes each.
    assert [of.untyped_storage().nbytes() for of in bits] == [2 * 9 * 2] * 2
    lists = [weakref.ref(of) for of in bits]
    del bits
    loop.forward(5, call)
    gc.collect()
    assert all(held() is None for held in lists)


def test_removal_frees_what_an_unfinished_generation_kept():
    model, scheduler = TINY["wan"].build(), PIPELINES["wan"].build().scheduler
    handle = apply_ssta(model, SPARSE, schedule=THIRDS, scheduler=scheduler)
    Loop(model, scheduler).forward(0, TINY["wan"].call())
    assert kept_tensors(handle) == 2
    handle.remove()
    assert kept_tensors(handle) == 0


def test_copies_keep_nothing():
    model, scheduler = TINY["wan"].build(), PIPELINES["wan"].build().scheduler
    with apply_ssta(model, SPARSE, schedule=THIRDS, scheduler=scheduler):
        Loop(model, scheduler).forward(0, TINY["wan"].call())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(layer.holder.kept is None for layer in layers_of(twin))
            run(twin, TINY["wan"].call())


def test_layers_that_a_step_cache_skips_choose_when_they_next_run(monkeypatch):
    """No selection serves longer than it may, whatever is skipped."""
    tiny = PIPELINES["wan"]
    pipe = tiny.build(layers=4)
    ages, born = [], {}
    keep, selection = KeptSelection.keep, KeptSelection.selection

    def kept(self, *args):
        born[self] = place[0]
        return keep(self, *args)

    def taken(self, *args):
        found = selection(self, *args)
        if found is not None:
            ages.append(place[0] - born[self])
        return found

    monkeypatch.setattr(KeptSelection, "keep", kept)
    monkeypatch.setattr(KeptSelection, "selection", taken)
    place = [0]
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    with apply_ssta(pipe, SPARSE, schedule=THIRDS):
        latents(pipe, steps=12, **tiny.call, callback_on_step_end=lambda pipe, step, t, kept: place.__setitem__(0, step + 1) or {})
    assert ages and max(ages) <= 2 and len(ages) < 12 * 2 * 4 * 2 // 3


def test_each_thread_keeps_its_own(watch):
    """A thread's forward does not find what another's chose, and leaves it as it is."""
    model, scheduler = TINY["wan"].build(), PIPELINES["wan"].build().scheduler
    call = TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=THIRDS, scheduler=scheduler):
        loop = Loop(model, scheduler)
        loop.forward(0, call)
        thread = threading.Thread(target=loop.forward, args=(1, call))
        thread.start(), thread.join()
        loop.forward(2, call)
        assert watch.reused(3, 2) == [[False] * 2, [False] * 2, [True] * 2]


@pytest.mark.parametrize("value, error, message", [
    (0, ValueError, "refresh must be at least 1, got 0"), (2.5, TypeError, "refresh must be an int, got 2.5"),
    (True, TypeError, "refresh must be an int"), (None, TypeError, "refresh must be an int")])
def test_bad_refresh(value, error, message):
    with pytest.raises(error, match=message):
        Schedule(refresh=value)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_bits_are_what_was_packed(length):
    mask = torch.rand(2, 3, 5, length, generator=torch.Generator().manual_seed(0)) < 0.4
    bits = _packed(mask)
    assert bits.shape == (2, 3, 5, -(-length // 8)) and bits.dtype == torch.uint8 and torch.equal(_unpacked(bits, length), mask)
