"""apply_ssta and remove_ssta: on, off, copied, saved, dropped, misused; nothing is ever left behind or half-installed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15Transformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from tiny_hunyuan import SPARSE, WINDOW, apply_ssta, inputs, run, tiny_transformer
from tiny_models import TINY
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ssta import SSTAConfig, pipelines
from ssta.pipelines import Schedule, SSTAProcessor, remove_ssta
from ssta.pipelines.patch.register import family_of, preset_settings
from ssta.pipelines.schedule.presets import small_tiles


def stock_everywhere(model) -> bool:
    return all(type(block.attn.processor) is HunyuanVideo15AttnProcessor2_0 for block in model.transformer_blocks)


# On and off


def test_off_on_off_is_bit_identical():
    model = tiny_transformer()
    stock_processors = [block.attn.processor for block in model.transformer_blocks]
    hooks = len(model._forward_pre_hooks)
    before = run(model)
    handle = apply_ssta(model, SPARSE)
    sparse = run(model)
    handle.remove()
    assert torch.equal(run(model), before)
    assert not torch.allclose(sparse, before, rtol=1e-3, atol=1e-4)
    assert [block.attn.processor for block in model.transformer_blocks] == stock_processors
    assert len(model._forward_pre_hooks) == hooks and not any("ssta" in name for name in vars(model))


def test_a_checkpoint_trained_with_ssta_is_named():
    """What a model's weights were trained with cannot be seen, so nothing is left sparse throughout unless the user says so."""
    model = tiny_transformer()
    with apply_ssta(model) as handle:
        assert (handle.config, handle.schedule) == (small_tiles(), Schedule(dense_layers=(0,)))
        assert run(model).isfinite().all()
    with apply_ssta(model, preset="hunyuan_video_15_sparse") as handle:
        assert (handle.config, handle.schedule) == (SSTAConfig.hunyuan_video_15(), Schedule())
        assert run(model).isfinite().all()


def test_remove_ssta_and_the_context_manager():
    model = tiny_transformer()
    before = run(model)
    handle = apply_ssta(model, SPARSE)
    remove_ssta(model)
    assert not handle.active and handle.report() == []
    with apply_ssta(model, SPARSE) as handle:
        assert handle.active
        remove_ssta(model)
    with pytest.raises(KeyError, match="inside"), apply_ssta(model, SPARSE):
        raise KeyError("inside")
    assert stock_everywhere(model) and torch.equal(run(model), before)


@pytest.mark.parametrize("config", [SPARSE, replace(SPARSE, variants=((1, {"tile_thw": (1, 4, 2)}), (2, {"topk": 1})))])
def test_the_canvas_may_change_between_calls(config):
    model = tiny_transformer()
    with apply_ssta(model, config):
        for thw in [(3, 6, 8), (1, 9, 4), (3, 8, 6), (2, 8, 8), (3, 6, 8)]:
            fresh = tiny_transformer()
            with apply_ssta(fresh, config.for_canvas(thw)):
                assert torch.equal(run(model, **inputs(thw)), run(fresh, **inputs(thw)))


def test_arguments_may_be_positional():
    model, call = tiny_transformer(), inputs()
    first = [call.pop(name) for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    with apply_ssta(model, SPARSE), torch.no_grad():
        assert torch.equal(model(*first, **call)[0], run(model))


def test_two_models_keep_their_own_configs():
    one, two = tiny_transformer(), tiny_transformer()
    call_one, call_two = inputs((3, 6, 8)), inputs((2, 8, 8))
    with apply_ssta(one, SPARSE):
        alone = run(one, **call_one)
    with apply_ssta(two, WINDOW):
        alone_two = run(two, **call_two)
    with apply_ssta(one, SPARSE) as first, apply_ssta(two, WINDOW) as second:
        assert torch.equal(run(one, **call_one), alone)
        assert torch.equal(run(two, **call_two), alone_two)
        assert torch.equal(run(one, **call_one), alone)
        assert (first.config, second.config) == (SPARSE, WINDOW)


def test_a_copy_of_a_patched_model_lives_on_its_own():
    model = tiny_transformer()
    before = run(model)
    handle = apply_ssta(model, SPARSE)
    sparse, other = run(model), run(model, **inputs((2, 5, 5)))
    twin = copy.deepcopy(model)
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks) == 2
    # Each keeps its own canvas, whichever ran last.
    assert torch.equal(run(twin, **inputs((2, 5, 5))), other)
    assert torch.equal(run(model), sparse)
    twin.transformer_blocks[0].attn.to_q.weight.data.zero_()
    assert torch.equal(run(model), sparse) and not torch.equal(run(twin), sparse)
    # Each is removed on its own.
    remove_ssta(twin)
    assert stock_everywhere(twin) and not twin._forward_pre_hooks and not stock_everywhere(model)
    assert torch.equal(run(model), sparse)
    another = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(run(model), before)
    assert torch.equal(run(another), sparse)
    remove_ssta(another)
    assert torch.equal(run(another), before)


def test_an_exception_in_a_call_leaves_nothing_behind():
    model = tiny_transformer()
    before = run(model)
    handle = apply_ssta(model, SPARSE)
    sparse = run(model)

    def fail(*_):
        raise RuntimeError("in the middle")

    hook = model.transformer_blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(model, **inputs((2, 5, 5)))
    hook.remove()
    with pytest.raises(TypeError, match="timestep"):
        model(hidden_states=torch.randn(1, 9, 2, 2, 2))
    with pytest.raises(ValueError, match="hidden_states must be .* got shape"):
        run(model, **{**inputs(), "hidden_states": torch.randn(1, 9, 4, 4)})
    assert torch.equal(run(model), sparse)
    handle.remove()
    assert torch.equal(run(model), before)


def test_a_patched_model_is_freed_when_it_is_dropped():
    gc.collect()
    gc.disable()
    try:
        model = tiny_transformer(layers=1)
        apply_ssta(model, SPARSE)
        run(model)
        alive = weakref.ref(model.transformer_blocks[0].attn.to_q.weight)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_saved_weights_are_the_stock_model_s(tmp_path):
    model = tiny_transformer()
    before, keys, modules = run(model), list(model.state_dict()), [name for name, _ in model.named_modules()]
    with apply_ssta(model, SPARSE):
        run(model)
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_modules()] == modules
        model.save_pretrained(tmp_path)
    assert torch.equal(run(HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path).eval()), before)


def test_settings_of_diffusers_travel_there_and_back():
    model = tiny_transformer()
    first, second = (block.attn for block in model.transformer_blocks)
    first.processor._attention_backend = "native"
    handle = apply_ssta(model, SPARSE)
    assert (first.processor._attention_backend, second.processor._attention_backend) == ("native", None)
    second.processor._attention_backend = "flash"
    handle.remove()
    assert (first.processor._attention_backend, second.processor._attention_backend) == ("native", "flash")
    assert HunyuanVideo15AttnProcessor2_0._attention_backend is None and SSTAProcessor._attention_backend is None


# Nothing to run on


def test_an_export_keeps_no_steps_and_a_schedule_that_follows_them_says_so():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_steps=0.5), scheduler=FlowMatchEulerDiscreteScheduler()) as handle:
        with pytest.raises(ValueError, match=r"schedule must not follow the steps under torch.export.* apply SSTA with Schedule\(\)"):
            torch.export.export(model, (), call, strict=False)
        with pytest.raises(ValueError, match="mean_density must come after a forward with SSTA, got a report of no layers"):
            handle.report().mean_density()


def test_reports_after_an_export_and_after_fake_tensors_have_no_layers():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        stock = TINY["wan"].build()
        expected = model(**call)[0]
        exported = torch.export.export(model, (), call, strict=False).module()
        assert handle.report() == [] and str(handle.report()) == "no layer has run with SSTA yet"
        torch.testing.assert_close(exported(**call)[0], expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, apply_ssta(stock, SPARSE, schedule=Schedule()) as handle:
        stock(**{name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()})
        assert handle.report() == []


def test_the_report_says_why_nothing_faster_ran():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_layers=(0,))) as handle:
        run(model, **call)
        dense, sparse = handle.report()
        assert dense.implementation == "dense, default backend" and dense.explanation == () and sparse.implementation == "torch"
        assert [reason.split(",")[0] for reason in sparse.explanation] == ["not 'hopper'", "not 'cudnn'", "not 'triton'"]
        assert str(handle.report()).splitlines()[-3:] == [f"torch: {reason}" for reason in sparse.explanation]
        assert dense.by == () and sparse.by
    with apply_ssta(model, SPARSE, schedule=Schedule(), impl="torch") as handle:
        run(model, **call)
        assert handle.report()[0].explanation == ()
        assert dict(handle.report()[0].by) == dict.fromkeys(("gather", "estimate", "score", "select", "merge", "take"), "torch")
        assert str(handle.report()).splitlines()[-1].startswith("other steps of sparse layers: gather by torch, ")


def test_a_report_outlives_the_patch():
    model = tiny_transformer()
    with apply_ssta(model, SPARSE, schedule=Schedule()) as handle:
        run(model)
        inside = handle.report()
    assert not handle.active and [layer.layer for layer in handle.report()] == [layer.layer for layer in inside]
    assert "\nall, dense steps included " in str(handle.report())
    # Another one's forwards are not this one's.
    with apply_ssta(model, SPARSE):
        run(model, **inputs((2, 4, 4)))
    assert {layer.thw for layer in handle.report()} == {layer.thw for layer in inside}


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_block_that_was_deleted_takes_its_site_along(deleted):
    model = tiny_transformer(layers=3)
    before = [block.attn.processor for block in model.transformer_blocks]
    handle = apply_ssta(model, SPARSE)
    del model.transformer_blocks[deleted]
    run(model)
    assert [layer.layer for layer in handle.report()] == [f"transformer_blocks.{i}.attn" for i in range(2)]
    handle.remove()
    assert stock_everywhere(model) and not handle.active
    del before[deleted]
    assert [block.attn.processor for block in model.transformer_blocks] == before
    with apply_ssta(model, SPARSE):
        run(model)


# A density, and what a configuration of one's own gives up


def test_a_density_changes_the_default_and_keeps_the_rest():
    model = tiny_transformer()
    default = family_of(model).default_config()
    with pipelines.apply_ssta(model, density=0.3) as handle:
        assert handle.config.density == 0.3 and handle.config == replace(default, density=0.3)
        assert handle.config.compensation == "linear" and handle.config.for_canvas((1, 8, 8)).density == 0.3
    with pipelines.apply_ssta(model, preset="near", density=0.2) as handle:
        config, schedule = preset_settings(family_of(model), "near")
        assert handle.config == replace(config, density=0.2) and handle.schedule.dense_layers == schedule.dense_layers


@pytest.mark.parametrize("changes, expected", [
    (dict(tile_thw=(4, 8, 8), compensation_parts=2), dict(tile_thw=(4, 8, 8), compensation_parts=2, variants=())),
    (dict(topk=5), dict(topk=5, density=None)),
    (dict(compensation="none"), dict(compensation="none", compensation_parts=1)),
    (dict(density=0.3, sparse_type="ssta", kernel_thw=(1, 3, 3)), dict(density=0.3, sparse_type="ssta", kernel_thw=(1, 3, 3))),
    (dict(sparse_type="sta", kernel_thw=(3, 3, 3)), dict(sparse_type="sta", kernel_thw=(3, 3, 3), density=None)),
])
def test_any_field_changes_the_default_and_keeps_the_rest(changes, expected, monkeypatch):
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    model = tiny_transformer()
    with warnings.catch_warnings():
        # What is asked for by name is not warned of.
        warnings.simplefilter("error", RuntimeWarning)
        with pipelines.apply_ssta(model, **changes) as handle:
            assert handle.config == replace(family_of(model).default_config(), **expected)


@pytest.mark.parametrize("options, error, message", [
    (dict(density=1.5), ValueError, r"density must lie in \(0, 1\], a share of the tile pairs, got 1.5"),
    (dict(density="0.2"), TypeError, "density must be a number, got '0.2'"),
    (dict(density=0.2, config=SPARSE, topk=3), ValueError, "config must be left out where fields .* got one and topk, density"),
    (dict(densty=0.2), TypeError, "unexpected keyword 'densty'; .* fields of SSTAConfig: tile_thw, kernel_thw, topk, .*"),
    (dict(dense_steps=0.1), TypeError, r"unexpected keyword 'dense_steps'; .* schedule=Schedule\(dense_steps=0.1\)"),
    (dict(kernel_thw=(3, 3, 3)), ValueError, "kernel_thw must come with sparse_type='ssta' where no window is kept"),
    (dict(density=0.2, topk=3), ValueError, "topk must be None with a density"),
    (dict(config="fast"), TypeError, "config must be an SSTAConfig or None, got str; presets are taken by name as preset='fast'"),
])
def test_wrong_densities_and_configurations(options, error, message):
    model = tiny_transformer()
    with pytest.raises(error, match=message):
        pipelines.apply_ssta(model, **options)
    assert stock_everywhere(model)


def test_a_configuration_without_the_defaults_estimate_is_told_once(monkeypatch):
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    model = tiny_transformer()
    with pytest.warns(RuntimeWarning, match="config drops the tiles that it does not compute .* by keyword, such as density=0.2") as found:
        for _ in range(2):
            apply_ssta(model, SSTAConfig(density=0.15)).remove()
    assert len(found) == 1
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    with pytest.warns(RuntimeWarning, match="config drops the tiles"):
        apply_ssta(model, schedule=Schedule(layer_configs={1: SSTAConfig(density=0.15)})).remove()
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (small_tiles(), SSTAConfig(density=0.15, compensation="linear"), SSTAConfig.hunyuan_video_15()):
            apply_ssta(model, config).remove()


def test_a_window_that_alone_exceeds_the_density_is_told_once(monkeypatch):
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    model = tiny_transformer()
    own = SSTAConfig(density=0.15, tile_thw=(2, 3, 4), sparse_type="ssta", compensation="linear")
    with apply_ssta(model, own, schedule=Schedule()), pytest.warns(RuntimeWarning) as found:
        run(model)
        run(model, **inputs((4, 6, 8)))
    assert len(found) == 1
    assert "its window of 3 x 3 x 3 tiles, which is computed whole, is 100.0% of the tile pairs" in str(found[0].message)
    # By default the first layer is dense, and it is the first that asks for the canvas.
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    with pipelines.apply_ssta(model, own), pytest.warns(RuntimeWarning, match="its window of 3 x 3 x 3 tiles"):
        run(model)
    monkeypatch.setattr("ssta.kernels.notices._said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for config in (replace(own, sparse_type="block_attn"), replace(own, kernel_thw=(1, 1, 1), density=0.3)):
            with apply_ssta(model, config, schedule=Schedule()):
                run(model)


# Two transformers


def test_a_handle_is_not_what_is_removed_from():
    with apply_ssta(tiny_transformer(), SPARSE) as handle, pytest.raises(TypeError, match=r"got SSTAHandle; its own remove\(\) takes SSTA"):
        remove_ssta(handle)


def test_both_transformers_of_a_pipeline():
    pipeline = SimpleNamespace(transformer=tiny_transformer(0), transformer_2=tiny_transformer(1))
    handle = apply_ssta(pipeline, SPARSE)
    run(pipeline.transformer), run(pipeline.transformer_2)
    assert [layer.layer for layer in handle.report()] == [
        f"{name}.transformer_blocks.{i}.attn" for name in ("transformer", "transformer_2") for i in range(2)]
    remove_ssta(pipeline.transformer_2)
    assert stock_everywhere(pipeline.transformer_2) and handle.active
    handle.remove()
    assert stock_everywhere(pipeline.transformer)
    # Nothing is installed in the first when the second is refused.
    apply_ssta(pipeline.transformer_2, SPARSE)
    with pytest.raises(ValueError, match="applied already"):
        apply_ssta(pipeline, SPARSE)
    assert stock_everywhere(pipeline.transformer)
    # MiniMax-H3's for references, beside the other or alone.
    both = SimpleNamespace(transformer=tiny_transformer(0), transformer_ref=tiny_transformer(1))
    with apply_ssta(both, SPARSE):
        assert not stock_everywhere(both.transformer) and not stock_everywhere(both.transformer_ref)
    del both.transformer
    with apply_ssta(both, SPARSE):
        assert not stock_everywhere(both.transformer_ref)
    assert stock_everywhere(both.transformer_ref)
    # One transformer under both names is one transformer.
    shared = SimpleNamespace(transformer=pipeline.transformer, transformer_2=pipeline.transformer)
    apply_ssta(shared, SPARSE).remove()
    assert stock_everywhere(pipeline.transformer)
    remove_ssta(pipeline)
    assert stock_everywhere(pipeline.transformer_2)


# Mistakes


def test_an_unsupported_model_is_refused_by_name():
    with pytest.raises(ValueError, match="one of .*HunyuanVideo15Transformer3DModel.*, got Linear; register_family adds"):
        apply_ssta(nn.Linear(2, 2))
    for wrong in (object(), None, SimpleNamespace(transformer=None), SimpleNamespace(unet=nn.Linear(2, 2))):
        with pytest.raises(TypeError, match="model must be a transformer or a pipeline"):
            apply_ssta(wrong)
        with pytest.raises(TypeError, match="model must be a transformer or a pipeline"):
            remove_ssta(wrong)


@pytest.mark.parametrize("options, error, message", [
    ({"config": {"topk": 3}}, TypeError, "config must be an SSTAConfig or None, got dict"),
    ({"impl": "fastest"}, ValueError, "impl must be one of .*'auto'.*, got 'fastest'"),
    ({"preset": "sparse"}, ValueError, "preset must be one of 'hunyuan_video_15_sparse', 'near', 'balanced', .*got 'sp"),
    ({"preset": ["sparse"]}, TypeError, "preset must be a name or None, got list"),
    ({"preset": "hunyuan_video_15_sparse", "config": SPARSE}, ValueError, "preset must stand alone"),
    ({"scheduler": SimpleNamespace(timesteps=[3, 2, 1])}, TypeError, "a tensor of timesteps, got SimpleNamespace whose timesteps are list"),
    ({"scheduler": SimpleNamespace(timesteps=None)}, TypeError, "a tensor of timesteps, got SimpleNamespace whose timesteps are NoneType"),
    ({"scheduler": torch.arange(3)}, TypeError, "must be a diffusers scheduler, .*, got Tensor"),
])
def test_bad_options_install_nothing(options, error, message):
    model = tiny_transformer(layers=1)
    with pytest.raises(error, match=message):
        apply_ssta(model, **options)
    assert stock_everywhere(model) and not model._forward_pre_hooks


def test_applying_twice_and_removing_without():
    model = tiny_transformer(layers=1)
    with pytest.raises(ValueError, match="must have SSTA applied"):
        remove_ssta(model)
    handle = apply_ssta(model, SPARSE)
    sparse = run(model)
    with pytest.raises(ValueError, match="call remove_ssta"):
        apply_ssta(model, WINDOW)
    assert torch.equal(run(model), sparse)
    assert handle.remove() is None and handle.remove() is None and repr(handle) == "SSTAHandle(removed)"
    with pytest.raises(ValueError, match="must have SSTA applied"):
        remove_ssta(model)
    # An old handle does not reach a newer installation.
    newer = apply_ssta(model, WINDOW)
    handle.remove()
    assert newer.active and not handle.active


def test_a_replaced_processor_is_refused_and_later_left_alone():
    class Other(HunyuanVideo15AttnProcessor2_0):
        pass

    model, other = tiny_transformer(), Other()
    stock = model.transformer_blocks[1].attn.processor
    model.transformer_blocks[1].attn.set_processor(other)
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn must have its original processor .*, got Other"):
        apply_ssta(model, SPARSE)
    assert type(model.transformer_blocks[0].attn.processor) is HunyuanVideo15AttnProcessor2_0 and not model._forward_pre_hooks
    model.transformer_blocks[1].attn.set_processor(stock)
    handle = apply_ssta(model, SPARSE)
    model.transformer_blocks[1].attn.set_processor(other)
    run(model)
    assert [layer.layer for layer in handle.report()] == ["transformer_blocks.0.attn"]
    handle.remove()
    assert model.transformer_blocks[1].attn.processor is other
    assert type(model.transformer_blocks[0].attn.processor) is HunyuanVideo15AttnProcessor2_0


def test_another_model_s_processor_is_not_taken_for_ours():
    model, donor = tiny_transformer(), tiny_transformer()
    foreign = apply_ssta(donor, SPARSE) and donor.transformer_blocks[0].attn.processor
    handle = apply_ssta(model, WINDOW)
    model.transformer_blocks[0].attn.set_processor(foreign)
    handle.remove()
    assert model.transformer_blocks[0].attn.processor is foreign
    assert type(model.transformer_blocks[1].attn.processor) is HunyuanVideo15AttnProcessor2_0


def test_tokens_that_are_not_the_canvas_are_refused():
    model = tiny_transformer(layers=1)
    attn = model.transformer_blocks[0].attn
    with apply_ssta(model, SPARSE):
        with pytest.raises(ValueError, match="forward of the whole model"):
            attn(torch.randn(1, 144, 32), encoder_hidden_states=torch.randn(1, 4, 32))
        run(model)
        with pytest.raises(ValueError, match=r"145 video tokens.*3 x 6 x 8|3 x 6 x 8.*145"):
            attn(torch.randn(1, 145, 32), encoder_hidden_states=torch.randn(1, 4, 32))
