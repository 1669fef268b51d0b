"""SSTA inside a tiny HunyuanVideo 1.5: exact when everything is selected, sparse when not, trainable, without an S x S tensor."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from graphs import Graphs
from tiny_hunyuan import CANVAS, EVERYTHING, SPARSE, WINDOW, apply_ssta, inputs, run, tiny_transformer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssta.pipelines import Schedule

# Exactness


def cast(call, dtype) -> dict:
    return {name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in call.items()}


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("thw, prompts", [(CANVAS, (4,)), ((1, 5, 7), (7,)), ((5, 3, 4), (2, 6))])
def test_everything_selected_is_the_stock_model(thw, prompts, image):
    model, call = tiny_transformer().double(), inputs(thw, prompts, image=image)
    call = cast(call, torch.float64)
    stock = run(model, **call)
    with apply_ssta(model, EVERYTHING):
        torch.testing.assert_close(run(model, **call), stock, rtol=1e-5, atol=1e-6)


def test_everything_selected_is_the_stock_layer_for_valid_and_padding_conditions_alike():
    model = tiny_transformer().double()
    seen = []
    model.transformer_blocks[1].attn.register_forward_hook(lambda module, args, kwargs, out: seen.append((kwargs, out)), with_kwargs=True)
    call = cast(inputs(prompts=(3, 7)), torch.float64)
    run(model, **call)
    kwargs, (video, text) = seen[0]
    with apply_ssta(model, EVERYTHING):
        run(model, **call)
        ours = model.transformer_blocks[1].attn(**kwargs)
        no_mask = model.transformer_blocks[1].attn(**{**kwargs, "attention_mask": None})
    torch.testing.assert_close(ours, (video, text), rtol=1e-6, atol=1e-6)
    all_valid = HunyuanVideo15AttnProcessor2_0()(model.transformer_blocks[1].attn, kwargs["hidden_states"], kwargs["encoder_hidden_states"],
                                                 torch.ones_like(kwargs["attention_mask"]), kwargs["image_rotary_emb"])
    torch.testing.assert_close(no_mask, all_valid, rtol=1e-6, atol=1e-6)


def test_everything_selected_rounds_no_worse_than_the_stock_model_in_bfloat16():
    model, call = tiny_transformer().bfloat16(), cast(inputs(prompts=(3, 7)), torch.bfloat16)
    exact = run(copy.deepcopy(model).double(), **cast(call, torch.float64))
    stock = run(model, **call)
    with apply_ssta(model, EVERYTHING):
        ours = run(model, **call)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()


def test_a_layer_without_conditions_is_the_stock_layer():
    model = tiny_transformer().double()
    attn, video = model.transformer_blocks[0].attn, torch.randn(2, math.prod(CANVAS), 32, dtype=torch.float64)
    stock = attn(video, attention_mask=torch.ones(2, math.prod(CANVAS), dtype=torch.bool))
    with apply_ssta(model, EVERYTHING):
        run(model, **cast(inputs(), torch.float64))
        torch.testing.assert_close(attn(video), stock, rtol=1e-6, atol=1e-6)


class DenselyMaskedWindow(HunyuanVideo15AttnProcessor2_0):
    """The stock attention under a dense mask, in which every token looks for itself whether the other is in its window."""

    def __init__(self, thw, config):
        tokens = [(a // tile[0], b // tile[1], c // tile[2]) for tile in [config.tile_thw]
                  for a in range(thw[0]) for b in range(thw[1]) for c in range(thw[2])]
        counts = [math.ceil(n / tile) for n, tile in zip(thw, config.tile_thw)]

        def near(i, j):
            centres = [min(max(a, k // 2), n - 1 - k // 2) for a, n, k in zip(i, counts, config.window)]
            return all(abs(centre - b) <= k // 2 for centre, b, k in zip(centres, j, config.window))

        self.near = torch.tensor([[near(i, j) for j in tokens] for i in tokens])

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        def dense(query, key, value, attn_mask, **_):
            video = len(self.near)
            allowed = attn_mask.clone()
            allowed[:, :, :video, :video] &= self.near
            out = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), attn_mask=allowed)
            return out.transpose(1, 2)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("diffusers.models.transformers.transformer_hunyuan_video15.dispatch_attention_fn", dense)
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def test_a_window_is_the_stock_model_under_a_dense_window_mask():
    thw = (2, 7, 8)
    model, call = tiny_transformer(), inputs(thw, (3, 6))
    stock = run(model, **call)
    with apply_ssta(model, WINDOW):
        sparse = run(model, **call)
    for block in model.transformer_blocks:
        block.attn.set_processor(DenselyMaskedWindow(thw, WINDOW))
    masked = run(model, **call)
    torch.testing.assert_close(sparse, masked, rtol=1e-4, atol=1e-5)
    assert (sparse - stock).abs().max() > 100 * (sparse - masked).abs().max()


def test_one_batch_element_alone_is_the_same_in_a_batch():
    model, call = tiny_transformer(), inputs(prompts=(3, 7))
    with apply_ssta(model, SPARSE):
        together = run(model, **call)
        for i in range(2):
            alone = {name: x[i : i + 1] if isinstance(x, torch.Tensor) else x for name, x in call.items()}
            torch.testing.assert_close(run(model, **alone), together[i : i + 1], rtol=1e-4, atol=1e-5)


def test_patches_shrink_the_canvas():
    model = tiny_transformer(patch_size=2, patch_size_t=1)
    call = inputs((3, 8, 12))
    stock = run(model, **call)
    with apply_ssta(model, EVERYTHING) as handle:
        torch.testing.assert_close(run(model, **call), stock, rtol=1e-4, atol=1e-5)
        assert {layer.thw for layer in handle.report()} == {(3, 4, 6)}


# Training


def gradients(model, call) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**call)[0].square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_flow_and_survive_checkpointing():
    model, call = tiny_transformer(), inputs(prompts=(3, 6))
    with apply_ssta(model, EVERYTHING):
        exact = gradients(model, call)
    stock = gradients(model, call)
    assert exact.keys() == stock.keys()
    scale = max(g.abs().max() for g in stock.values())
    for name in stock:
        torch.testing.assert_close(exact[name], stock[name], rtol=1e-3, atol=1e-5 * float(scale), msg=name)
    with apply_ssta(model, SPARSE):
        sparse = gradients(model, call)
        for weight in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj"):
            assert sparse[f"transformer_blocks.0.attn.{weight}.weight"].abs().max() > 0
        model.enable_gradient_checkpointing()
        again = gradients(model, call)
        assert all(torch.equal(again[name], sparse[name]) for name in sparse)


# Memory


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operator's result holds; the model's own weights do not count."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.weights:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_sequence_squared_is_made():
    thw = (4, 16, 16)
    model, call = tiny_transformer(layers=1), inputs(thw)
    tokens = math.prod(thw) + 7 + 5 + 6
    with apply_ssta(model, SPARSE), LargestTensor(model) as sparse:
        run(model, **call)
    with LargestTensor(model) as stock:
        run(model, **call)
    assert sparse.elements < tokens**2 // 2
    assert stock.elements >= tokens**2


# The report


def test_the_report_says_what_each_layer_ran():
    model = tiny_transformer()
    with apply_ssta(model, SPARSE, impl="reference") as handle:
        assert handle.report() == []
        run(model)
        layers = handle.report()
        assert [layer.layer for layer in layers] == ["transformer_blocks.0.attn", "transformer_blocks.1.attn"]
        for layer in layers:
            assert (layer.implementation, layer.thw, layer.tokens) == ("reference", CANVAS, 144 + 18)
            # 2 x 2 x 2 tiles of video; the conditions fit into one more.
            assert layer.tiles == 9
            # One window tile and the two best: two or three of eight, and the conditions; the conditions' row is full.
            assert (8 * (2 + 1) + 9) / 81 <= layer.density <= (8 * (3 + 1) + 9) / 81
    with apply_ssta(model, EVERYTHING) as handle:
        run(model)
        assert {(layer.implementation, layer.density) for layer in handle.report()} == {("torch", 1.0)}


# A whole pipeline


def test_the_real_pipeline_off_on_off():
    from diffusers import AutoencoderKLHunyuanVideo15, ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline

    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16, 16), layers_per_block=1, spatial_compression_ratio=4, temporal_compression_ratio=4)
    pipe = HunyuanVideo15Pipeline(
        vae=vae.eval(), transformer=tiny_transformer(layers=1), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=ClassifierFreeGuidance(), text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.vision_num_semantic_tokens = 6
    call = {}
    for i, name in enumerate(("prompt", "negative_prompt")):
        embeds = inputs(prompts=(3 + i,), seed=i)
        for suffix in ("", "_2"):
            call[f"{name}_embeds{suffix}"] = embeds[f"encoder_hidden_states{suffix}"]
            call[f"{name}_embeds_mask{suffix}"] = embeds[f"encoder_attention_mask{suffix}"]

    def video():
        torch.manual_seed(3)
        return pipe(height=24, width=32, num_frames=9, num_inference_steps=2, generator=torch.Generator().manual_seed(2),
                    output_type="pt", **call).frames

    before = video()
    with apply_ssta(pipe, SPARSE) as handle:
        sparse = video()
        assert [(layer.thw, layer.steps, layer.dense_steps) for layer in handle.report()] == [(CANVAS, 2, 0)]
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.5)) as handle:
        video()
        assert [(layer.steps, layer.dense_steps) for layer in handle.report()] == [(2, 1)]
    assert torch.equal(video(), before) and not torch.equal(sparse, before)


# Compilation


@pytest.mark.slow
def test_repeated_blocks_compile_into_as_many_graphs_as_stock():
    def compiled_run(model) -> tuple[torch.Tensor, int]:
        graphs = Graphs()
        model.compile_repeated_blocks(fullgraph=True, backend=graphs)
        run(model)
        return run(model), graphs.count

    _, stock_graphs = compiled_run(tiny_transformer(layers=3))
    model = tiny_transformer(layers=3)
    with apply_ssta(model, SPARSE):
        eager = run(model)
        out, ssta_graphs = compiled_run(model)
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)
    assert ssta_graphs == stock_graphs
