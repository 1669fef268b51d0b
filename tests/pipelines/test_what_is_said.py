"""Warnings and errors for calls that mean something else than they say: by apply_ssta, by its handle, and at a forward."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import FusedCogVideoXAttnProcessor2_0
from peft import LoraConfig, get_peft_model
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run, steps_at

from ssta import SSTAConfig
from ssta.kernels import notices
from ssta.pipelines import Schedule, apply_ssta, remove_ssta, set_density


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())


def wan(layers: int = 3, seed: int = 0) -> torch.nn.Module:
    return TINY["wan"].build(seed, layers=layers)


@contextmanager
def silent():
    """Within it a RuntimeWarning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


# Schedules


@pytest.mark.parametrize("schedule", [Schedule(densities=(1, 0.4)), Schedule(dense_steps=0.1),
                                      Schedule(layer_configs={1: SSTAConfig(density=0.5, compensation="linear")})])
def test_a_schedule_that_gives_up_the_dense_layer_says_so_once(schedule):
    model, scheduler = wan(), steps_at(3, 2, 1)
    with pytest.warns(RuntimeWarning, match=r"schedule keeps no layer dense, .* so give dense_layers=\(0,\) too") as found:
        for _ in range(2):
            apply_ssta(model, schedule=schedule, scheduler=scheduler).remove()
    assert len(found) == 1


@pytest.mark.parametrize("schedule", [None, Schedule(), Schedule.warm_up(), Schedule(dense_steps=1.0), Schedule(dense_layers=(1,))])
def test_a_schedule_that_means_it_is_not_told(schedule, recwarn):
    apply_ssta(wan(), schedule=schedule, scheduler=steps_at(3, 2, 1))
    apply_ssta(TINY["hunyuan_video_15"].build(), preset="hunyuan_video_15_sparse", schedule=Schedule(dense_steps=0.1),
               scheduler=steps_at(3, 2, 1))
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def test_a_model_whose_only_layer_stays_dense_is_told():
    with pytest.warns(RuntimeWarning, match=r"WanTransformer3DModel stays dense as a whole: .* give schedule=Schedule\(\)"):
        apply_ssta(wan(layers=1))


def test_a_layer_that_drops_is_told_after_the_model_was():
    with pytest.warns(RuntimeWarning, match="^config drops"):
        apply_ssta(wan(), SSTAConfig(density=0.5))
    with pytest.warns(RuntimeWarning, match=r"^layer_configs\[1\]: its config drops .* dataclasses.replace\(handle.config"):
        apply_ssta(wan(), schedule=Schedule(dense_layers=(0,), layer_configs={1: SSTAConfig(density=0.5)}))


def test_a_density_that_steps_have_of_their_own_is_not_set():
    with apply_ssta(wan(), schedule=Schedule(densities=(0.4, 0.2), dense_layers=(0,)), scheduler=steps_at(2, 1)) as handle:
        with pytest.warns(RuntimeWarning, match=r"set_density changes nothing in generations .* densities = \(0.4, 0.2\)"):
            set_density(handle, 0.3)


# Two transformers


def both() -> SimpleNamespace:
    return SimpleNamespace(transformer=wan(), transformer_2=wan(seed=1))


def dense_layers(handle) -> list[str]:
    return [layer.layer for layer in handle.report() if layer.implementation.startswith("dense")]


def test_layers_of_two_transformers_go_by_the_names_of_the_report():
    pipeline, call = both(), TINY["wan"].call()
    own = SSTAConfig(density=0.5, compensation="linear", tile_thw=(2, 4, 4))
    schedule = Schedule(dense_layers=("transformer_2.blocks.1.attn1", "transformer.blocks.2.attn1", 0),
                        layer_configs={"transformer.blocks.1.attn1": own})
    with apply_ssta(pipeline, SPARSE, schedule=schedule) as handle:
        run(pipeline.transformer, call), run(pipeline.transformer_2, call)
        first, second = "transformer.blocks.{}.attn1".format, "transformer_2.blocks.{}.attn1".format
        assert dense_layers(handle) == [first(0), first(2), second(0), second(1)]
        assert handle.schedules["transformer"].dense_layers == ("blocks.2.attn1", 0)
        assert handle.schedules["transformer_2"] == Schedule(dense_layers=("blocks.1.attn1", 0))
        assert handle.configs == {"transformer": SPARSE, "transformer_2": SPARSE}
        assert dict(handle.schedules["transformer"].layer_configs) == {"blocks.1.attn1": own}
    # Of one that is alone in its pipeline too.
    alone = SimpleNamespace(transformer=wan())
    with apply_ssta(alone, SPARSE, schedule=Schedule(dense_layers=("transformer.blocks.1.attn1",))) as handle:
        run(alone.transformer, call)
        assert dense_layers(handle) == ["transformer.blocks.1.attn1"]


@pytest.mark.parametrize("layers, message", [
    (("transformer_3.blocks.1.attn1",), "must name video self-attentions such as 'blocks.0.attn1', got 'transformer_3.blocks.1.attn1'"),
    (("transformer_2.blocks.7.attn1",), "got 'blocks.7.attn1'"), ((3,), "got 3; positions count in each transformer by itself"),
    (("transformer.blocks.1.attn1", "blocks.1.attn1"), "must name a layer once, got 'blocks.1.attn1' twice")])
def test_layers_that_neither_transformer_has(layers, message):
    with pytest.raises(ValueError, match=message):
        apply_ssta(both(), SPARSE, schedule=Schedule(dense_layers=layers))


# Keywords


@pytest.mark.parametrize("options, question", [
    (dict(sparsity=0.8), "did you mean density=0.2, which is 1 - sparsity"),
    (dict(sparsity="high"), "did you mean density, which is 1 - sparsity"),
    (dict(densty=0.3), "did you mean density"), (dict(compensation_part=1), "did you mean compensation_parts"),
    (dict(dense_steps=0.1), r"did you mean schedule=Schedule\(dense_steps=0.1, dense_layers=\(0,\)\)"),
    (dict(dense_layers=(0, 1)), r"did you mean schedule=Schedule\(dense_layers=\(0, 1\)\)")])
def test_an_unknown_keyword_is_answered_with_a_question(options, question):
    with pytest.raises(TypeError, match=rf"unexpected keyword {next(iter(options))!r}; {question}\? Those beside"):
        apply_ssta(wan(), **options)


# Models


def test_a_model_in_peft_s_wrapper_is_to_be_taken_out():
    model, call = wan(), TINY["wan"].call()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["to_q"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r"transformer itself, got it wrapped in PeftModel; give model.get_base_model\(\)"):
        apply_ssta(wrapped)
    stock = run(wrapped, call)
    with apply_ssta(wrapped.get_base_model(), SPARSE, schedule=Schedule()):
        assert not torch.allclose(run(wrapped, call), stock)
    assert torch.equal(run(wrapped, call), stock)


@pytest.mark.parametrize("name", ["cogvideox", "wan", "hunyuan_video"])
def test_processors_that_were_exchanged_since_are_told_once(name):
    model, call = TINY[name].build(), TINY[name].call()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        with silent():
            run(model, call)
        if name == "cogvideox":
            model.fuse_qkv_projections()
            words = f"2 of 2 self-attentions of CogVideoXTransformer3DModel run without SSTA: .* {FusedCogVideoXAttnProcessor2_0.__name__}"
        else:
            site = next(module for module in model.modules() if getattr(module, "processor", None) is handle.layers()[0][3][0][1])
            site.processor = type(TINY[name].build(layers=2).get_submodule(handle.layers()[0][3][0][0]).processor)()
            words = f"1 of 2 self-attentions of {TINY[name].model} run without SSTA: .* {type(site.processor).__name__} in the place"
        with pytest.warns(RuntimeWarning, match=words):
            run(model, call)
        with silent():
            run(model, call)


def test_a_deleted_block_is_no_exchanged_processor():
    model, call = wan(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule()), silent():
        del model.blocks[1]
        run(model, call)


# Handles


def test_a_handle_prints_what_is_on():
    pipeline = both()
    handle = apply_ssta(pipeline, density=0.3)
    line = "{}, WanTransformer3DModel: 3 layers, 1 of them dense, density 0.3"
    assert repr(handle) == f"SSTAHandle({line.format('transformer')}; {line.format('transformer_2')})"
    remove_ssta(pipeline.transformer)
    assert repr(handle) == f"SSTAHandle({line.format('transformer_2')})"
    handle.remove()
    assert repr(handle) == "SSTAHandle(removed)"
    handle = apply_ssta(pipeline.transformer, SPARSE, schedule=Schedule())
    assert repr(handle) == "SSTAHandle(WanTransformer3DModel: 3 layers, 0 of them dense, topk 2)"
