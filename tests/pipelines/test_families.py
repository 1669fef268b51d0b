"""SSTA in a tiny model of every family: exact when everything is selected, sparse when not, exactly gone when removed."""

from __future__ import annotations

import math
from dataclasses import replace

import diffusers
import pytest
import torch
from tiny_hunyuan import CANVAS, EVERYTHING, SPARSE, WINDOW
from tiny_models import TINY, TOLERANCE, all_dense, cast, helios_with_histories, note_projections, run
from tiny_pipelines import PIPELINES, flow, latents
from torch.utils._pytree import tree_map

from ssta import DenseRun, SSTAConfig, VideoGrid
from ssta.pipelines import Schedule, SSTAProcessor, apply_ssta, remove_ssta, supported_models
from ssta.pipelines.patch.canvas import from_coordinates
from ssta.pipelines.patch.register import family_of

NEVER_DENSE = Schedule()
# An animation has a frame besides the reference.
SINGLE_FRAMES = [name for name in TINY if name != "wan_animate"]
# Their queries look at keys that earlier passes kept, in structures of their own.
KEPT = ("anyflow_far", "sana_wm_refiner", "sana_wm_refiner_split")


def test_every_family_has_a_tiny_model():
    # README's example registers one that is not of diffusers.
    assert {tiny.model for tiny in TINY.values()} == {name for name in supported_models() if hasattr(diffusers, name)}


@pytest.mark.parametrize("name, thw, prompts", [*((name, *case) for name in TINY for case in ((CANVAS, (4,)), ((5, 3, 4), (2, 6)))),
                                               *((name, (1, 5, 7), (7,)) for name in SINGLE_FRAMES)])
def test_everything_selected_is_the_stock_model(name, thw, prompts):
    tiny = TINY[name]
    model, call = tiny.build().to(tiny.dtype), cast(tiny.call(thw, prompts), tiny.dtype)
    stock = run(model, call)
    tolerance = TOLERANCE.get(name, 1e-6 if tiny.dtype == torch.float64 else 1e-5)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE) as handle:
        torch.testing.assert_close(run(model, call), stock, rtol=tolerance, atol=tolerance)
        assert {layer.density for layer in handle.report()} == {1.0}
    with apply_ssta(model, SPARSE, schedule=all_dense(model)) as handle:
        torch.testing.assert_close(run(model, call), stock, rtol=tolerance, atol=tolerance)
        assert all(layer.implementation.startswith("dense, ") for layer in handle.report())
        assert len(handle.report()) == len(list(family_of(model).sites(model)))


@pytest.mark.parametrize("name", [name for name in TINY if name != "kandinsky5"])
def test_everything_selected_rounds_no_worse_than_the_stock_model_in_bfloat16(name):
    tiny = TINY[name]
    model, call = tiny.build(layers=2), tiny.call(prompts=(3, 6))
    exact = run(model, call)
    model, call = model.bfloat16(), cast(call, torch.bfloat16)
    if name == "minimax_h3":
        call["position_ids"] = tiny.call(prompts=(3, 6))["position_ids"]
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE):
        ours = run(model, call)
    assert ours.dtype == stock.dtype
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()
    assert (ours - exact).norm() <= 1.1 * (stock - exact).norm()


@pytest.mark.parametrize("name", TINY)
def test_off_on_off_is_bit_identical_and_on_is_sparse(name):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call(prompts=(3, 6))
    projected: list = []
    note_projections(model, projected)
    processors = [site.module.processor for site in family_of(model).sites(model)]
    before = run(model, call)
    handle = apply_ssta(model, SPARSE, schedule=NEVER_DENSE)
    stock, projected[:] = projected[:], []
    sparse = run(model, call)
    # Random numbers of adapters fall as they fall without SSTA; what stands for LTX-2's attention is there first.
    assert projected == stock or name == "ltx2" and set(projected) == set(stock)
    for layer in handle.report():
        assert (layer.implementation, layer.thw) == ("torch", CANVAS)
        tiles = layer.tiles - (1 if tiny.conditions else 0)
        if name == "framepack" or name in KEPT:  # grids more, or of keys alone
            continue
        if layer.tokens == 2 * 144:  # the decoder of Motif-Video sees two videos
            tiles = layer.tiles
        else:
            assert (layer.tokens, tiles) == (144 + tiny.conditions, 8)
        # One window tile and the two best: two or three, and the conditions; the conditions' row is full.
        more = layer.tiles - tiles
        assert tiles * (2 + more) + more * layer.tiles <= round(layer.density * layer.tiles**2, 3)
        assert round(layer.density * layer.tiles**2, 3) <= tiles * (3 + more) + more * layer.tiles
    again = run(model, call)
    remove_ssta(model)
    assert torch.equal(run(model, call), before) and torch.equal(again, sparse)
    assert not torch.allclose(sparse, before, rtol=1e-3, atol=1e-4)
    assert [site.module.processor for site in family_of(model).sites(model)] == processors
    assert not model._forward_pre_hooks and not model._forward_hooks and not any("ssta" in key for key in vars(model))


def test_anyflow_far_goes_from_chunk_to_chunk():
    """Of three chunks the first is compressed when the last one looks at it."""
    tiny = replace(PIPELINES["anyflow"], pipeline="AnyFlowFARPipeline", tiny="anyflow_far", options=dict(full_chunk_limit=2))
    pipe, call = tiny.build(), tiny.call | dict(chunk_partition=[1, 1, 1])
    stock = latents(pipe, **call)
    with apply_ssta(pipe, EVERYTHING, schedule=NEVER_DENSE):
        torch.testing.assert_close(latents(pipe, **call), stock, rtol=1e-4, atol=1e-4)
    with apply_ssta(pipe, SPARSE, schedule=NEVER_DENSE) as handle:
        sparse = latents(pipe, **call)
        assert {(layer.thw, layer.tokens) for layer in handle.report()} == {((1, 6, 8), 48)}
    assert not torch.allclose(sparse, stock, rtol=1e-3, atol=1e-4) and torch.equal(latents(pipe, **call), stock)


@pytest.mark.parametrize("mode, taken", [("capture_pre_rope", "get_captured_pre_rope"),
                                         ("inject_and_capture_post_rope", "get_captured_post_rope")])
def test_sana_wm_s_refiner_hands_its_pipeline_what_it_wants_to_keep(mode, taken):
    tiny = TINY["sana_wm_refiner"]
    model, call = tiny.build(), tiny.call() | {"kv_cache_mode": mode}

    def kept() -> list[torch.Tensor]:
        return [run(model, call), *[x for layer in call["kv_cache"].layer_caches for x in getattr(layer, taken)()]]

    stock = kept()
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE) as handle:
        for ours, theirs in zip(kept(), stock):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        # Without what was kept before, the sink itself attends as any video does.
        assert {layer.tiles for layer in handle.report()} == {8 + 6 * (mode != "capture_pre_rope")}


def test_kandinsky_is_rounded_where_the_stock_model_is():
    tiny = TINY["kandinsky5"]
    model, call = tiny.build(), tiny.call()
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE):
        # A few roundings to bfloat16 may go the other way; all of them, and it were 3e-4.
        assert (run(model, call) - stock).abs().mean() < 5e-5


def near(thw: tuple[int, int, int], config: SSTAConfig) -> torch.Tensor:
    """Whether token i's window holds token j, bool [N, N], from the definition."""
    tiles = torch.cartesian_prod(*(torch.arange(n) // size for n, size in zip(thw, config.tile_thw)))
    inside = torch.ones(len(tiles), len(tiles), dtype=torch.bool)
    for axis, (n, size, kernel) in enumerate(zip(thw, config.tile_thw, config.window)):
        last = -(-n // size) - 1
        centre = tiles[:, axis].clamp(min=kernel // 2).clamp(max=last - kernel // 2)
        inside &= (centre[:, None] - tiles[:, axis]).abs() <= kernel // 2
    return inside


def assert_window(model, call, thw, before: int, conditions: int, tolerance: float = 1e-4) -> None:
    """That WINDOW gives what dense attention gives under a mask in which the video stands after ``before`` of the ``conditions``."""
    tokens = math.prod(thw)
    window = torch.ones(conditions + tokens, conditions + tokens, dtype=torch.bool)
    window[before : before + tokens, before : before + tokens] = near(thw, WINDOW)

    def masked(self, query, key, value, layout, text_mask=None):
        allowed = window.expand(len(query), 1, -1, -1).clone()
        if text_mask is not None:
            allowed[..., tokens:] &= text_mask[:, None, None].bool()
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), attn_mask=allowed)
        return out.transpose(1, 2)

    stock = run(model, call)
    with apply_ssta(model, WINDOW, schedule=NEVER_DENSE):
        sparse = run(model, call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SSTAProcessor, "attend", masked)
            expected = run(model, call)
    torch.testing.assert_close(sparse, expected, rtol=tolerance, atol=tolerance)
    assert (sparse - stock).abs().max() > 20 * (sparse - expected).abs().max()


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("motif_video", "framepack", *KEPT)])
def test_a_window_is_dense_attention_under_a_window_mask(name):
    tiny, thw = TINY[name], (2, 7, 8)
    assert_window(tiny.build(), tiny.call(thw, (3, 6)), thw, tiny.before, tiny.conditions, TOLERANCE.get(name, 1e-4))


@pytest.mark.parametrize("name", [name for name in TINY if name not in KEPT])
def test_one_batch_element_alone_is_the_same_in_a_batch(name):
    tiny = TINY[name]
    model, call = tiny.build(), tiny.call(prompts=(3, 7))
    shared = {"timestep", "timestep_indices"} if name == "minimax_h3" else set()
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE):
        together = run(model, call)
        for i in range(2):
            alone = {key: x[i : i + 1] if isinstance(x, torch.Tensor) and len(x) == 2 and key not in shared and "indices_" not in key else x
                     for key, x in call.items()}
            # Kandinsky's rounding, see TOLERANCE.
            tolerance = TOLERANCE.get(name, 1e-4)
            torch.testing.assert_close(run(model, alone), together[i : i + 1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SINGLE_FRAMES)
def test_the_canvas_may_change_between_calls(name):
    tiny = TINY[name]
    model = tiny.build(layers=1 if name == "wan" else 2)
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE) as handle:
        for thw in [(2, 6, 7), (1, 9, 4), (2, 6, 7)]:
            first = run(model, tiny.call(thw))
            assert {layer.thw for layer in handle.report()} == {thw}
        again = run(model, tiny.call(thw))
    assert torch.equal(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in TINY if name != "kandinsky5" and not name.startswith("sana_wm")])
def test_on_a_gpu_attention_is_exact_sparse_timed_and_never_waits(name, monkeypatch):
    def on_gpu(call):
        return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, call)

    tiny = TINY[name]
    model, call = tiny.build(), tiny.call(prompts=(3, 6))
    exact = run(model, call)
    positions = call.get("position_ids")
    model, call = model.bfloat16().cuda(), on_gpu(cast(call, torch.bfloat16))
    if positions is not None:
        call["position_ids"] = positions.cuda()
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE):
        ours = run(model, call)
    assert (ours.cpu() - exact).norm() <= 1.2 * (stock.cpu() - exact).norm()
    with apply_ssta(model, SPARSE, schedule=Schedule(dense_layers=(0,))) as handle:
        first = run(model, call)
        attend = SSTAProcessor.attend

        def without_waiting(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return attend(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(SSTAProcessor, "attend", without_waiting)
        assert torch.equal(run(model, call), first) and not torch.equal(first, stock)
        layers = handle.report()
        assert layers[0].implementation.startswith("dense, ") and layers[1].implementation == "triton"
        assert all(0 < layer.seconds < 1 for layer in layers)
    assert torch.equal(run(model, call), stock)


# What single families have


def test_ltx_with_condition_tokens_before_the_video():
    tiny = TINY["ltx"]
    model, call = tiny.build().double(), cast(tiny.call(CANVAS, (4, 6)), torch.float64)
    t, h, w = (call.pop(name) for name in ("num_frames", "height", "width"))
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) * 1.5 for n in (t, h, w)), indexing="ij")).flatten(1)
    # A frame of conditions that lies between two of the video's.
    conditions = torch.stack([torch.full((h * w,), 2.0), grid[1, : h * w], grid[2, : h * w]])
    coords = torch.cat([conditions, grid], dim=1).double().expand(2, -1, -1)
    call |= {"video_coords": coords, "hidden_states": torch.randn(2, (t + 1) * h * w, 4, dtype=torch.float64)}
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE) as handle:
        torch.testing.assert_close(run(model, call), stock, rtol=1e-6, atol=1e-6)
        assert {(layer.thw, layer.tokens) for layer in handle.report()} == {(CANVAS, (t + 1) * h * w)}
        with pytest.raises(ValueError, match="num_frames, height and width, or video_coords, must be given"):
            run(model, call | {"video_coords": None})
    assert_window(model, call, CANVAS, before=h * w, conditions=h * w)


def test_the_real_ltx_pipeline_puts_conditions_before_the_video():
    from diffusers import AutoencoderKLLTXVideo, LTXConditionPipeline
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
    from PIL import Image

    narrow = dict(block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
                  decoder_layers_per_block=(1,) * 5)
    vae = AutoencoderKLLTXVideo(latent_channels=4, **narrow).eval()
    pipe = LTXConditionPipeline(scheduler=flow(), vae=vae, text_encoder=None, tokenizer=None, transformer=TINY["ltx"].build())
    pipe.set_progress_bar_config(disable=True)
    image = Image.new("RGB", (256, 192), (90, 20, 200))
    for frames, tokens in (((), 144), ((0,), 144), ((0, 8), 144 + 48)):
        call = PIPELINES["ltx"].call | {"conditions": [LTXVideoCondition(image=image, frame_index=frame) for frame in frames] or None}
        stock = latents(pipe, **call)
        with apply_ssta(pipe, EVERYTHING, schedule=NEVER_DENSE) as handle:
            torch.testing.assert_close(latents(pipe, **call), stock, rtol=1e-4, atol=1e-4)
            assert {(layer.thw, layer.tokens, layer.steps) for layer in handle.report()} == {(CANVAS, tokens, 4)}


def test_ltx2_with_keyframes_after_the_video():
    tiny = TINY["ltx2"]
    model, call = tiny.build().double(), cast(tiny.call(CANVAS, (4,)), torch.float64)
    coords = model.rope.prepare_video_coords(1, *CANVAS, torch.device("cpu"), fps=25.0)
    call |= {"video_coords": torch.cat([coords, coords[:, :, :48]], dim=2), "hidden_states": torch.randn(1, 144 + 48, 4).double()}
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE) as handle:
        torch.testing.assert_close(run(model, call), stock, rtol=1e-6, atol=1e-6)
        assert {(layer.thw, layer.tokens) for layer in handle.report()} == {(CANVAS, 192)}
    assert_window(model, call, CANVAS, before=0, conditions=48)


@pytest.mark.parametrize("mask", [0.0, 0.5, 1.0])
def test_ltx2_perturbed_guidance_is_the_stock_model_s(mask):
    tiny = TINY["ltx2_gated"]
    model, call = tiny.build().double(), cast(tiny.call(CANVAS, (4, 6)), torch.float64)
    call |= {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.full((2, 1, 1), mask, dtype=torch.float64)}
    stock = run(model, call)
    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE):
        torch.testing.assert_close(run(model, call), stock, rtol=1e-6, atol=1e-6)


def test_the_grid_at_the_end_of_coordinates():
    frame = torch.cartesian_prod(torch.arange(3.0), torch.arange(4.0))
    video = torch.cat([torch.tensor([0.0, 1.0, 9.0]).repeat_interleave(12)[:, None], frame.repeat(3, 1)], dim=1)
    others = {"text": torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.0, 0.0]),
              "a later frame": torch.cat([torch.full((12, 1), 4.0), frame], 1),
              "a frame of another size": torch.cat([torch.full((6, 1), -1.0), frame[:6]], 1), "nothing": video[:0]}
    for points in others.values():
        points = torch.cat([points, video])
        assert from_coordinates(points, lambda points=points: points) == (3, 3, 4)
    points = video.clone()
    assert from_coordinates(points, lambda: points) == (3, 3, 4)
    points[:12, 0] = 5.0
    assert from_coordinates(points, lambda: points) == (2, 3, 4)
    with pytest.raises(ValueError, match="whole rows"):
        ragged = video[1:].clone()
        ragged[:, 0] = 0
        from_coordinates(ragged, lambda: ragged)


@pytest.mark.parametrize("tiny", [replace(TINY["helios"], inputs=helios_with_histories), TINY["framepack"]], ids=lambda of: of.model)
def test_histories_have_grids_of_their_own(tiny):
    model, call = tiny.build().double(), cast(tiny.call(CANVAS, (4, 6)), torch.float64)
    stock, layouts, attend = run(model, call), set(), SSTAProcessor.attend

    def noted(processor, query, key, value, layout, text_mask=None):
        layouts.add(layout.segments)
        return attend(processor, query, key, value, layout, text_mask)

    with apply_ssta(model, EVERYTHING, schedule=NEVER_DENSE) as handle, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SSTAProcessor, "attend", noted)
        torch.testing.assert_close(run(model, call), stock, rtol=1e-6, atol=1e-6)
        assert {layer.density for layer in handle.report()} == {1.0}
    text = (DenseRun(tiny.conditions),) if tiny.conditions else ()
    assert layouts == {(VideoGrid(2, 2, 2), VideoGrid(2, 3, 4), VideoGrid(2, 6, 8), VideoGrid(*CANVAS), *text)}
    with apply_ssta(model, SPARSE, schedule=NEVER_DENSE) as handle:
        assert (run(model, call) - stock).abs().max() > 1e-3
        assert all(layer.density < 0.5 for layer in handle.report())


def test_masks_and_sparsity_that_ssta_does_not_have_are_refused():
    tiny = TINY["skyreels_v2"]
    model = tiny.build()
    with apply_ssta(model, SPARSE):
        model._set_ar_attention(3)
        with pytest.raises(ValueError, match="attention_mask must be None.*causally"):
            run(model, tiny.call())
    with pytest.raises(ValueError, match="attention_type 'regular', got 'nabla'"):
        apply_ssta(TINY["kandinsky5"].build(attention_type="nabla"))
    tiny = TINY["kandinsky5"]
    model = tiny.build()
    with apply_ssta(model, SPARSE), pytest.raises(ValueError, match="sparse_params must be None"):
        run(model, tiny.call() | {"sparse_params": {"to_fractal": False}})
    tiny = TINY["ltx2"]
    model = tiny.build()
    with apply_ssta(model, SPARSE), pytest.raises(ValueError, match="video_self_attention_mask must be None"):
        run(model, tiny.call() | {"video_self_attention_mask": torch.ones(1, 144, 144)})


@pytest.mark.parametrize("name, message", [
    ("wan", "frames, height, width"), ("cogvideox", "frames, channels"), ("kandinsky5", "width, channels")])
def test_latents_of_another_shape_are_refused(name, message):
    tiny = TINY[name]
    model = tiny.build()
    with apply_ssta(model, SPARSE), pytest.raises(ValueError, match=f"hidden_states must be .*{message}.*got shape"):
        run(model, tiny.call() | {"hidden_states": torch.randn(1, 4, 4)})


def test_cogvideox_1_5_rounds_frames_up():
    from types import SimpleNamespace

    model = SimpleNamespace(config=SimpleNamespace(patch_size=2, patch_size_t=2))
    assert family_of(TINY["cogvideox"].build(layers=1)).canvas(model, {"hidden_states": torch.empty(1, 5, 4, 6, 8)}) == (3, 3, 4)


@pytest.mark.parametrize("name", ["hunyuan_video_15", "wan", "wan_vace", "ltx"])
def test_a_token_is_in_one_place_in_memory_while_ssta_is_applied(name):
    """A patch embedding by convolution leaves a channel's tokens side by side. No block has to work on that, and nothing else changes."""
    tiny = TINY[name]
    model, call, seen = tiny.build(), tiny.call(), []
    blocks = model.blocks if name.startswith("wan") else model.transformer_blocks
    blocks[1].register_forward_pre_hook(lambda block, args, kwargs: seen.append([*args, *kwargs.values()][0].stride(-1)), with_kwargs=True)
    with torch.no_grad():
        model(**call)
        with apply_ssta(model, SSTAConfig(tile_thw=(2, 4, 4))) as handle:
            sparse = model(**call)[0]
            hooks = handle._installed[0][2].hooks[2:]
            assert len(hooks) == (2 if name == "wan_vace" else 1)
            for hook in hooks:
                hook.remove()
            assert torch.equal(model(**call)[0], sparse)
        model(**call)
    assert seen[1] == 1
    assert name != "hunyuan_video_15" or 1 not in (seen[0], *seen[2:]), "without SSTA they work on that"


@pytest.mark.parametrize("name", TINY)
def test_attention_before_a_forward_of_the_model_says_that_it_needs_one(name):
    """A layer's forward alone knows no canvas; what it was called with is kept from a forward of the model without SSTA."""
    model, calls = TINY[name].build(), {}
    sites = list(family_of(model).sites(model))

    def keep(module, args, kwargs):
        calls[module] = args, kwargs

    hooks = [site.module.register_forward_pre_hook(keep, with_kwargs=True) for site in sites]
    run(model, TINY[name].call())
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(sites)
    with apply_ssta(model, SPARSE):
        for module, (args, kwargs) in calls.items():
            with pytest.raises(ValueError, match="SSTA learns the canvas from a forward of the whole model"):
                module(*args, **kwargs)
