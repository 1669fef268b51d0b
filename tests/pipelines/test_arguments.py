"""A forward's arguments by name: through subclasses and wrappers that only hand them on, and the errors where no name fits."""

from __future__ import annotations

import pytest
import torch
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run
from torch import nn

from ssta.pipelines import Schedule, apply_ssta
from ssta.pipelines.patch.arguments import ArgumentNames
from ssta.pipelines.patch.canvas import from_bcfhw

# The refiner is called with a cache of two layers.
LAYERS = {name: 2 if name.startswith("sana_wm") else 1 for name in TINY}


def sparse(model: nn.Module, *args, **call) -> torch.Tensor:
    with apply_ssta(model, SPARSE, schedule=Schedule()), torch.no_grad():
        out = model(*args, **call)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", TINY)
def test_a_forward_that_hands_its_arguments_on_is_as_the_model_s(name):
    """A subclass's, one that takes an argument more, and an instance's, with arguments by name and by position."""
    model, call = TINY[name].build(layers=LAYERS[name]), TINY[name].call()
    kind, expected = type(model), sparse(model, **call)

    class HandsOn(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class TakesMore(HandsOn):
        def forward(self, label, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs)

    tokens = call.pop("hidden_states")
    for model.__class__, args in ((HandsOn, (tokens,)), (TakesMore, ("mine", tokens))):
        assert torch.equal(sparse(model, *args, **call), expected)
    model.__class__ = kind
    forward = model.forward
    model.forward = lambda *args, label=None, **kwargs: forward(*args, **kwargs)
    assert torch.equal(sparse(model, tokens, **call, label="mine"), expected)
    # A wrapper that comes after SSTA.
    del model.forward
    with apply_ssta(model, SPARSE, schedule=Schedule()):
        model.forward = lambda *args, label=None, **kwargs: forward(*args, **kwargs)
        assert torch.equal(run(model, {"hidden_states": tokens, **call, "label": "mine"}), expected)


@pytest.mark.parametrize("name", ["wan", "ltx", "minimax_h3"])
def test_a_class_that_was_patched_without_its_signature(name, monkeypatch):
    model, call = TINY[name].build(layers=1), TINY[name].call()
    expected, forward = sparse(model, **call), type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    assert torch.equal(sparse(model, **call), expected)
    if name == "wan":
        tokens = call.pop("hidden_states")
        with pytest.raises(TypeError, match="WanTransformer3DModel must be called with hidden_states, .* by keyword .*, got timestep, "):
            sparse(model, tokens, **call)


@pytest.mark.parametrize("name, names", [
    ("wan", "hidden_states"), ("cogvideox", "hidden_states"), ("minimax_h3", "position_ids"),
    ("ltx", "num_frames or height or width or video_coords")])
def test_names_of_one_s_own_are_refused_with_what_ssta_looks_for(name, names):
    model = TINY[name].build(layers=1)

    class Renamed(type(model)):
        def forward(self, latents, at, text):
            return super().forward(latents, at, text)

    model.__class__ = Renamed
    with pytest.raises(ValueError, match=f"Renamed.forward must take {names}, from which .* canvas of {TINY[name].model}, got a forward "
                                         "that takes at, latents, text; "):
        apply_ssta(model, SPARSE)
    assert not model._forward_pre_hooks and not any("ssta" in key for key in vars(model))


def test_positions_go_on_where_the_outer_forward_ends():
    model = TINY["wan"].build(layers=1)

    class TakesMore(type(model)):
        def forward(self, label, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs)

    model.__class__ = TakesMore
    names = ArgumentNames(model, "WanTransformer3DModel", from_bcfhw)
    assert names.by_name(("mine", 1, 2, 3), {"more": 4}) == dict(label="mine", hidden_states=1, timestep=2, encoder_hidden_states=3, more=4)
