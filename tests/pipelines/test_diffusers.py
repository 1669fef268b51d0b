"""SSTA beside the rest of diffusers: LoRA, offloading, fused projections, checkpointing, caches, saving, copies."""

from __future__ import annotations

import copy
from dataclasses import replace

import diffusers
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import FasterCacheConfig, FirstBlockCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from tiny_hunyuan import CANVAS, EVERYTHING, SPARSE, WINDOW
from tiny_models import TINY, TOLERANCE, run
from tiny_pipelines import PIPELINES, latents

from ssta.pipelines import Schedule, apply_ssta, remove_ssta
from ssta.pipelines.patch.register import family_of

NEVER_DENSE = Schedule()
ALL = sorted(set(TINY) - {"hunyuan_video_i2v", "wan_ti2v", "cogvideox_2b", "cogvideox_1.5", "consisid"})
# One of each kind: joint with a mask, video alone, tokens, text first, learned RoPE.
KINDS = ["hunyuan_video", "wan", "ltx", "cogvideox", "mochi"]
LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "to_query", "to_key", "to_value"],
                  init_lora_weights=False)


def stock_everywhere(model) -> bool:
    return all(type(site.module.processor).__module__.startswith("diffusers.") for site in family_of(model).sites(model))


# LoRA


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(getattr(diffusers, TINY[name].model), "add_adapter")])
def test_lora_before_and_after(name):
    tiny = TINY[name]
    call = tiny.call()
    outs = []
    for lora_first in (True, False):
        model = tiny.build()
        if lora_first:
            torch.manual_seed(7)
            model.add_adapter(LORA, "one")
        with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
            if not lora_first:
                plain = run(model, call)
                torch.manual_seed(7)
                model.add_adapter(LORA, "one")
            outs.append(run(model, call))
            model.disable_adapters()
            without = run(model, call)
            model.enable_adapters()
        dense = run(model, call)
        assert stock_everywhere(model)
    assert torch.equal(*outs) and torch.equal(without, plain)
    assert not torch.equal(outs[0], plain) and not torch.equal(outs[0], dense)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "ltx"] + ["ltx", "hunyuan_video_15", "kandinsky5", "motif_video"])
def test_a_lora_trains_through_ssta_under_gradient_checkpointing(name):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call(prompts=(3, 6))
    torch.manual_seed(7)
    model.add_adapter(LORA, "one")
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in parameter_name)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = model(**call)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    stock = gradients()
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE):
        exact = gradients()
    scale = max(float(grad.abs().max()) for grad in stock.values())
    for key, grad in stock.items():
        tolerance = 2e-2 if name == "kandinsky5" else 1e-4
        torch.testing.assert_close(exact[key], grad, rtol=tolerance, atol=tolerance * scale, msg=key)
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_layers=(1,))):
        sparse = gradients()
        model.enable_gradient_checkpointing()
        again = gradients()
    assert sparse.keys() == again.keys() == stock.keys()
    assert all(torch.equal(again[key], sparse[key]) for key in sparse)
    assert any(not torch.allclose(sparse[key], stock[key], rtol=1e-2) for key in sparse)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        before = float(model(**call)[0].square().mean())
        gradients(), optimiser.step()
        assert float(model(**call)[0].square().mean()) < before


# Offloading


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offload_before_and_after(name, kind):
    tiny = TINY[name]
    call = tiny.call()
    model = tiny.build()
    before = run(model, call)
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        sparse = run(model, call)

    def offload(model):
        apply_group_offloading(model, onload_device=torch.device("cpu"), offload_type=kind,
                               num_blocks_per_group=1 if kind == "block_level" else None)

    for offload_first in (True, False):
        model = tiny.build()
        if offload_first:
            offload(model)
        handle = apply_ssta(model, SPARSE, schedule=NEVER_DENSE)
        if not offload_first:
            offload(model)
        assert torch.equal(run(model, call), sparse) and torch.equal(run(model, call), sparse)
        handle.remove()
        assert torch.equal(run(model, call), before)


@pytest.mark.parametrize("name", KINDS)
def test_model_cpu_offload_before_and_after(name):
    tiny = TINY[name]
    call = tiny.call()
    for offload_first in (True, False):
        model = tiny.build()
        before = run(model, call)
        if offload_first:
            cpu_offload_with_hook(model, torch.device("cpu"))
        handle = apply_ssta(model, SPARSE, schedule=NEVER_DENSE)
        if not offload_first:
            cpu_offload_with_hook(model, torch.device("cpu"))
        sparse = run(model, call)
        # Pipelines take the hook off and put it on again after every call.
        for _ in range(2):
            remove_hook_from_module(model, recurse=True)
            cpu_offload_with_hook(model, torch.device("cpu"))
            assert torch.equal(run(model, call), sparse) and len(handle.report()) == 2
        handle.remove()
        assert torch.equal(run(model, call), before) and not torch.equal(sparse, before)
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(run(model, call), before)


# Fused projections


FUSED = ["wan", "wan_i2v", "wan_vace", "skyreels_v2", "minimax_h3", "hunyuan_video"]


@pytest.mark.parametrize("name", FUSED)
def test_projections_fused_before_and_after(name):
    tiny = TINY[name]
    call = tiny.call()
    model = tiny.build()
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        plain = run(model, call)
        model.fuse_qkv_projections()
        torch.testing.assert_close(run(model, call), plain, rtol=1e-4, atol=1e-4)
        model.unfuse_qkv_projections()
        assert torch.equal(run(model, call), plain)
    model.fuse_qkv_projections()
    before = run(model, call)
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        torch.testing.assert_close(run(model, call), plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(model, call), before)


def test_cogvideox_exchanges_its_processors_to_fuse():
    tiny = TINY["cogvideox"]
    model, call = tiny.build(), tiny.call()
    before = run(model, call)
    handle = apply_ssta(model, SPARSE, schedule=NEVER_DENSE)
    plain = run(model, call)
    # Fusing puts processors of its own in SSTA's place, and the report does not hide it.
    model.fuse_qkv_projections()
    torch.testing.assert_close(run(model, call), before, rtol=1e-4, atol=1e-4)
    assert handle.report() == []
    model.unfuse_qkv_projections()
    assert torch.equal(run(model, call), plain) and len(handle.report()) == 2
    handle.remove()
    # Fused before, SSTA keeps the fused projections.
    model.fuse_qkv_projections()
    fused = run(model, call)
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        torch.testing.assert_close(run(model, call), plain, rtol=1e-4, atol=1e-4)
        called = []
        model.transformer_blocks[0].attn1.to_qkv.register_forward_hook(lambda *_: called.append(1))
        run(model, call)
        assert called
    assert torch.equal(run(model, call), fused)


# Caches


@pytest.mark.parametrize("name", ["hunyuan_video", "wan", "ltx", "cogvideox", "mochi"])
def test_the_first_block_cache(name):
    tiny = TINY[name]
    model, call = tiny.build(layers=3 if name != "hunyuan_video" else 4), tiny.call()
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE) as handle:
        plain = run(model, call)
        model.enable_cache(FirstBlockCacheConfig(threshold=1e-6))
        with model.cache_context("cond"):
            assert torch.equal(run(model, call), plain)
            # Nothing changed since, so the other blocks are skipped and their last result is used.
            torch.testing.assert_close(run(model, call), plain, rtol=1e-4, atol=1e-4)
        model.disable_cache()
        assert torch.equal(run(model, call), plain) and len(handle.report()) == len(list(family_of(model).sites(model)))
    assert stock_everywhere(model)


@pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox", "hunyuan_video", "mochi"])
def test_attention_broadcast_skips_whole_layers(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    with apply_ssta(pipe, SPARSE) as handle:
        plain = latents(pipe, steps=6, **tiny.call)
        pipe.transformer.enable_cache(PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001),
            spatial_attention_block_identifiers=("blocks", "transformer_blocks", "single_transformer_blocks"),
            current_timestep_callback=lambda: pipe._current_timestep))
        cached = latents(pipe, steps=6, **tiny.call)
        assert cached.isfinite().all() and not torch.equal(cached, plain)
        pipe.transformer.disable_cache()
        assert torch.equal(latents(pipe, steps=6, **tiny.call), plain)
        assert {layer.steps for layer in handle.report()} == {6}


@pytest.mark.parametrize("name, cache", [("hunyuan_video", "taylor"), ("cogvideox", "faster")])
def test_caches_of_attention_results_come_and_go(name, cache):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    config = TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, max_order=1) if cache == "taylor" else FasterCacheConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001), unconditional_batch_skip_range=5,
        unconditional_batch_timestep_skip_range=(-1, 641), attention_weight_callback=lambda _: 0.3,
        current_timestep_callback=lambda: pipe._current_timestep)
    with apply_ssta(pipe, SPARSE) as handle:
        plain = latents(pipe, steps=6, **tiny.call)
        pipe.transformer.enable_cache(config)
        cached = latents(pipe, steps=6, **tiny.call)
        assert cached.isfinite().all() and not torch.equal(cached, plain)
        pipe.transformer.disable_cache()
        assert torch.equal(latents(pipe, steps=6, **tiny.call), plain)
        assert {layer.steps for layer in handle.report()} == {6}
    assert stock_everywhere(pipe.transformer)


# Saving, copying, sharing a process, failing


@pytest.mark.parametrize("name", ALL)
def test_saved_weights_are_the_stock_model_s(name, tmp_path):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call()
    before, keys, modules = run(model, call), list(model.state_dict()), [key for key, _ in model.named_modules()]
    with apply_ssta(model, SPARSE):
        run(model, call)
        assert list(model.state_dict()) == keys and [key for key, _ in model.named_modules()] == modules
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in loaded.state_dict().items())
    # Not bit by bit: how a CPU multiplies depends on where the weights were loaded to.
    torch.testing.assert_close(run(loaded, call), before, rtol=1e-4, atol=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_lives_on_its_own(name):
    tiny = TINY[name]
    model, call, other = tiny.build(), tiny.call(), tiny.call((2, 5, 5))
    before = run(model, call)
    handle = apply_ssta(model, SPARSE, schedule=Schedule(dense_layers=(0,)))
    sparse, sparse_other = run(model, call), run(model, other)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, other), sparse_other) and torch.equal(run(model, call), sparse)
    remove_ssta(twin)
    assert stock_everywhere(twin) and torch.equal(run(twin, call), before) and torch.equal(run(model, call), sparse)
    handle.remove()
    assert torch.equal(run(model, call), before)


def test_two_pipelines_keep_their_own_configurations_and_steps():
    one, two = PIPELINES["wan"].build(), PIPELINES["ltx"].build()
    wan, ltx = PIPELINES["wan"].call, PIPELINES["ltx"].call
    warm = Schedule(dense_steps=0.15)
    with apply_ssta(one, SPARSE, schedule=warm):
        alone = latents(one, **wan)
    with apply_ssta(two, WINDOW, schedule=Schedule(dense_steps=0.6)):
        alone_two = latents(two, **ltx)
    with apply_ssta(one, SPARSE, schedule=warm) as first, apply_ssta(two, WINDOW, schedule=Schedule(dense_steps=0.6)) as second:
        inner = []
        out = latents(one, **wan, callback_on_step_end=lambda *_: inner.append(latents(two, **ltx)) or {})
        assert torch.equal(out, alone) and all(torch.equal(each, alone_two) for each in inner)
        assert (first.config, second.config) == (SPARSE, WINDOW)
        assert (first.report()[1].dense_steps, second.report()[1].dense_steps) == (1, 3)


@pytest.mark.parametrize("name", ["wan", "hunyuan_video", "ltx", "cogvideox", "mochi"])
def test_an_exception_in_the_middle_of_a_generation_leaves_nothing_behind(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    before = latents(pipe, **tiny.call)
    handle = apply_ssta(pipe, SPARSE, schedule=Schedule.warm_up())
    sparse = latents(pipe, **tiny.call)

    def interrupt(pipe, index, timestep, kept):
        if index == 1:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        latents(pipe, **tiny.call, callback_on_step_end=interrupt)
    layer = list(family_of(pipe.transformer).sites(pipe.transformer))[1].module
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        latents(pipe, **tiny.call)
    hook.remove()
    assert torch.equal(latents(pipe, **tiny.call), sparse)
    assert [layer.dense_steps for layer in handle.report()] == [4, 1]
    handle.remove()
    assert torch.equal(latents(pipe, **tiny.call), before) and stock_everywhere(pipe.transformer)


@pytest.mark.parametrize("name", KINDS)
def test_a_tile_larger_than_the_canvas_is_one_tile(name):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call()
    stock = run(model, call)
    with apply_ssta(model, replace(SPARSE, tile_thw=(64, 64, 64)), schedule=NEVER_DENSE) as handle:
        torch.testing.assert_close(run(model, call), stock, rtol=1e-4, atol=1e-4)
        assert all(layer.tiles == (2 if tiny.conditions else 1) and layer.thw == CANVAS for layer in handle.report())


def test_attention_backends_of_diffusers_serve_the_dense_steps():
    model, call = TINY["wan"].build(), TINY["wan"].call()
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_layers=(0,))) as handle:
        run(model, call)
        assert handle.report()[0].implementation == "dense, default backend"
        model.set_attention_backend("native")
        run(model, call)
        assert [layer.implementation for layer in handle.report()] == ["dense, native", "torch"]
    assert {str(block.attn1.processor._attention_backend.value) for block in model.blocks} == {"native"}


