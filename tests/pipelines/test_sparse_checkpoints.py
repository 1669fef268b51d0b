"""apply_vsa and apply_sla: trained branches found in checkpoints, equal to the methods' formulas, saved, removed, refused."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from tiny_models import HEAD_DIM, HEADS, TINY, cast, run
from tiny_pipelines import PIPELINES, latents
from torch import nn
from vsa_oracle import sparse_linear_attention, video_sparse_attention

from ssta import SSTAConfig
from ssta.pipelines import (
    Schedule,
    apply_sla,
    apply_ssta,
    apply_vsa,
    frozen_checkpoint,
    remove_ssta,
    set_density,
    teacher_student,
)
from ssta.pipelines.families.trained import sparse_checkpoints

CANVAS = (5, 6, 7)
WAN = TINY["wan"]
# A call that adds a branch, its module, and the names that published files have for it.
METHODS = {
    "vsa": (apply_vsa, "to_gate_compress", ("blocks.{}.to_gate_compress", "blocks.{}.attn1.to_gate_compress")),
    "sla": (apply_sla, "proj_l", ("blocks.{}.self_attn.attn_op.local_attn.proj_l", "blocks.{}.attn1.attn_op.local_attn.proj_l",
                                  "blocks.{}.attn1.attn_impl.proj_l", "blocks.{}.attn1.proj_l")),
}
both = pytest.mark.parametrize("method", METHODS)


def branch(method, layers=2, name=0, prefix="", seed=3, head_dim=HEAD_DIM):
    """A trained branch as a checkpoint has it."""
    generator, width = torch.Generator().manual_seed(seed), HEADS * head_dim if method == "vsa" else head_dim
    names = [prefix + METHODS[method][2][name].format(i) for i in range(layers)]
    return {f"{name}.{kind}": torch.randn(*shape, generator=generator) / 4 for name in names
            for kind, shape in (("weight", (width, width)), ("bias", (width,)))}


def by_definition(before, processor, attn, hidden_states, query, key, value, layout):
    """The method's definition in the middle of the model's own attention, in float64; ``before``: tokens of the runs before the video."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if hasattr(attn, "to_gate_compress"):
        gate = attn.to_gate_compress(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        out, _ = video_sparse_attention(q, k, v, gate, layout.video[0].thw, 0.6, before=before)
    else:
        layer = getattr(attn, "proj_l", SimpleNamespace(weight=None, bias=None))
        out = sparse_linear_attention(q, k, v, layer.weight, layer.bias, 0.5, "softmax", 128, 64)
    return out.transpose(1, 2)


def h3_gates(name="transformer_blocks.{}.attn.to_gate_compress.weight"):
    """MiniMax-H3's gates, which have no biases, as a checkpoint has them."""
    generator = torch.Generator().manual_seed(3)
    return {name.format(i): torch.randn(HEADS * HEAD_DIM, 24, generator=generator) / 4 for i in range(2)}


def applied(method, model, weights=None, **options):
    return METHODS[method][0](model, weights, **({"sparsity": 0.6} if method == "vsa" else {"density": 0.5}) | options)


# MiniMax-H3's sequence: 4 tokens of text, 6 of a condition frame, 5 of audio, and the video.
H3, BEFORE = TINY["minimax_h3"], (4, 6, 5)


@pytest.mark.parametrize("name, method", [("wan", "vsa"), ("wan", "sla"), ("minimax_h3", "vsa"), ("minimax_h3", "sla")])
def test_a_model_is_its_definition_forward_and_backward(name, method):
    tiny = TINY[name]
    model, call = tiny.build().double(), cast(tiny.call(CANVAS), torch.float64)
    weights = branch(method) if name == "wan" else h3_gates() if method == "vsa" else None
    handle = applied(method, model, weights)
    out = model(**call)[0]
    # Every weight of the model and of the branches; the second loss is of the model with the definition in it.
    parameters = [(of, parameter) for of, parameter in model.named_parameters() if not of.startswith("audio_proj_out")]
    grads = torch.autograd.grad(out.square().sum(), [parameter for _, parameter in parameters])
    for layer in model.modules():
        if getattr(getattr(layer, "processor", None), "method", None) is not None:
            layer.processor.method = partial(by_definition, () if name == "wan" else BEFORE)
    expected = model(**call)[0]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected.square().sum(), [parameter for _, parameter in parameters])
    for found, exact, (of, _) in zip(grads, wanted, parameters):
        torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-8, msg=of)
    assert any(METHODS[method][1] in of for of, _ in parameters) == (weights is not None) and handle.active


@both
def test_off_is_bit_identical_and_leaves_nothing(method):
    model, call = WAN.build(), WAN.call(CANVAS)
    before, keys, hooks = run(model, call), list(model.state_dict()), len(model._forward_pre_hooks)
    weights = branch(method)
    kept = {name: x.clone() for name, x in weights.items()}
    with applied(method, model, weights) as handle:
        assert not torch.allclose(run(model, call), before, rtol=1e-2, atol=1e-3)
        assert [run_.layer for run_ in handle.report()] == ["blocks.0.attn1", "blocks.1.attn1"]
        assert len(model.state_dict()) == len(keys) + 4
        model.blocks[0].attn1.get_submodule(METHODS[method][1]).weight.data.zero_()
    assert torch.equal(run(model, call), before) and list(model.state_dict()) == keys and len(model._forward_pre_hooks) == hooks
    assert not any("ssta" in name for name in vars(model)) and all(torch.equal(x, kept[name]) for name, x in weights.items())
    applied(method, model, weights)
    remove_ssta(model)
    assert torch.equal(run(model, call), before)


def test_the_report_says_what_ran():
    model = WAN.build()
    with apply_vsa(model, branch("vsa"), sparsity=0.8) as handle:
        run(model, WAN.call(CANVAS))
        layer, config = handle.report()[0], handle.config
        # 2 x 2 x 2 tiles, of which ceil(0.2 x 8) are kept.
        assert (layer.tiles, layer.density, layer.thw, layer.dense_steps) == (8, 0.25, CANVAS, 0)
        assert (config.tile_thw, config.sparse_type, round(config.density, 6)) == ((4, 4, 4), "block_attn", 0.2)
    with apply_sla(model, branch("sla"), density=0.3) as handle:
        run(model, WAN.call(CANVAS))
        # 210 tokens: 4 blocks of keys, of which int(0.3 x 4) is kept.
        assert (handle.report()[0].tiles, handle.report()[0].density) == (4, 0.25)


@pytest.mark.parametrize("method, name", [(method, i) for method, (_, _, names) in METHODS.items() for i in range(len(names))])
def test_every_published_name_is_known(method, name):
    model, call = WAN.build(), WAN.call(CANVAS)
    with applied(method, model, branch(method)):
        expected = run(model, call)
    others = {"blocks.0.attn1.to_q.weight": torch.zeros(2), "vace_blocks.0.norm.weight": torch.zeros(2)}
    with applied(method, model, branch(method, name=name, prefix="net.") | others):
        assert torch.equal(run(model, call), expected)


@both
def test_saved_with_the_model_and_found_where_it_was_loaded_from(method, tmp_path):
    model, call = WAN.build(), WAN.call(CANVAS)
    with applied(method, model, branch(method)):
        expected = run(model, call)
        model.save_pretrained(tmp_path / "transformer")
    stored = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert f"blocks.1.attn1.{METHODS[method][1]}.weight" in stored
    loads = [(tmp_path / "transformer", {}), (tmp_path, dict(subfolder="transformer"))]
    for place, options in loads:
        loaded = WanTransformer3DModel.from_pretrained(place, **options).eval()
        for weights in (None, tmp_path, tmp_path / "transformer", str(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")):
            with applied(method, loaded, weights):
                torch.testing.assert_close(run(loaded, call), expected, rtol=1e-4, atol=1e-5)


def test_shards_and_pickled_files_are_read(tmp_path):
    model, call, weights = WAN.build(), WAN.call(CANVAS), branch("vsa")
    with apply_vsa(model, weights):
        expected = run(model, call)
        model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    torch.save({"state_dict": weights, "step": 3}, tmp_path / "trained.pth")
    (tmp_path / "other").mkdir()
    save_file(weights, tmp_path / "other" / "anything.safetensors")
    for place in ("shards", "trained.pth", "other"):
        with apply_vsa(model, tmp_path / place):
            assert torch.equal(run(model, call), expected)


def test_a_name_on_the_hub_is_a_folder_of_its_cache(tmp_path, monkeypatch):
    import huggingface_hub

    model, call, asked = WAN.build(), WAN.call(CANVAS), []
    (tmp_path / "transformer").mkdir()
    save_file(branch("vsa"), tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path))
    with apply_vsa(model, "FastVideo/FastWan2.1-T2V-1.3B-Diffusers"):
        assert run(model, call).isfinite().all()
    assert asked == [("FastVideo/FastWan2.1-T2V-1.3B-Diffusers", {"allow_patterns": "transformer/*"})]

    def absent(name, **options):
        raise FileNotFoundError("401: not yours")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(ValueError, match="weights must be .* got 'a/b', which is no file, and from the Hub: 401: not yours"):
        apply_vsa(model, "a/b")


def test_two_transformers_get_their_own(tmp_path):
    pipe = next(pipeline for pipeline in PIPELINES.values() if pipeline.two and pipeline.tiny == "wan").build()
    weights = {"transformer": branch("vsa"), "transformer_2": branch("vsa", seed=4)}
    for name, state in weights.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "diffusion_pytorch_model.safetensors")
    for given in (weights, tmp_path, {name: tmp_path / name for name in weights}):
        with apply_vsa(pipe, given):
            for name, state in weights.items():
                assert torch.equal(getattr(pipe, name).blocks[1].attn1.to_gate_compress.bias, state["blocks.1.to_gate_compress.bias"])
    with pytest.raises(ValueError, match="an entry for each of transformer, transformer_2, got 'blocks.0.to_gate_compress.weight'"):
        apply_vsa(pipe, weights["transformer"])
    with pytest.raises(ValueError, match="an entry for each of the pipeline's transformers, got the file"):
        apply_vsa(pipe, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match="weights must be a folder with a transformer's weights, got .* without any in .*transformer'"):
        apply_vsa(pipe, tmp_path / "transformer")
    assert not any("ssta" in name for model in (pipe.transformer, pipe.transformer_2) for name in vars(model))


@both
def test_weights_that_do_not_fit_say_what_was_found(method):
    model, weights, module = WAN.build(), branch(method), METHODS[method][1]
    first = next(iter(weights))
    cases = [
        ({name: x for name, x in weights.items() if "blocks.1" not in name},
         "each of the model's 2 attentions, and no more, got none for blocks.1"),
        (branch(method, layers=3), "got some for blocks.2, in the state dict"),
        (weights | {first: torch.zeros(3, 5)}, rf"weights' {first} must be .* of shape .* got torch.float32 of shape \(3, 5\)"),
        (weights | {first: weights[first].char()}, rf"weights' {first} must be a floating-point tensor .* got torch.int8"),
        (weights | branch(method, name=1), f"weights must have one {module} for each attention, got '{first}' and"),
        ({"blocks.0.attn1.to_q.weight": torch.zeros(2)},
         f"trained with {method.upper()}, with tensors such as 'blocks.0.attn1.{module}.weight', got 1 tensors such as 'blocks.0.att"),
        ({}, f"trained with {method.upper()}, .* got 0 tensors in the state dict"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            applied(method, model, wrong)
    with pytest.raises(ValueError, match=f"weights' {first} must have values, got a tensor on the meta device"):
        applied(method, model, {name: x.to("meta") for name, x in weights.items()})
    for made, layout in ((weights[first].to_sparse(), "sparse_coo"), (weights[first].to_mkldnn(), "_mkldnn")):
        with pytest.raises(TypeError, match=f"weights' {first} must be a dense, strided tensor, got torch.{layout}"):
            applied(method, model, weights | {first: made})
    assert not any(hasattr(block.attn1, module) for block in model.blocks) and not any("ssta" in name for name in vars(model))


def test_refuses_what_it_cannot_serve(tmp_path):
    model, weights = WAN.build(), branch("vsa")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    for error, message, call in [
        (ValueError, r"weights must be given for a model that from_pretrained did not load, got None", lambda: apply_vsa(model)),
        (TypeError, "weights must be a state dict, a file, a folder or a name on the Hub, got int", lambda: apply_vsa(model, 3)),
        (TypeError, "weights must map names to tensors, got 'a': str in the state dict", lambda: apply_vsa(model, {"a": "b"})),
        (ValueError, "got '/no/such/place', which is no file", lambda: apply_vsa(model, "/no/such/place")),
        (ValueError, "got .*broken.safetensors', which cannot be read", lambda: apply_vsa(model, tmp_path / "broken.safetensors")),
        (ValueError, r"sparsity must lie in \[0, 1\)", lambda: apply_vsa(model, weights, sparsity=1.0)),
        (ValueError, r"density must lie in \(0, 1\]", lambda: apply_sla(model, branch("sla"), density=0)),
        (ValueError, "impl must be one of", lambda: apply_vsa(model, weights, impl="fast")),
        (ValueError, "transformer of Wan's or MiniMax-H3, which VSA checkpoints are for, got LTXVideo",
         lambda: apply_vsa(TINY["ltx"].build(), weights)),
        (TypeError, "schedule must be a Schedule or None, got int", lambda: apply_vsa(model, weights, schedule=3)),
        (ValueError, "schedule must have no layer_configs, for VSA has one sparsity",
         lambda: apply_vsa(model, weights, schedule=Schedule(layer_configs={0: SSTAConfig(topk=2)}))),
        (ValueError, r"schedule must not count steps without a scheduler, got .* densities = \(1.0, 0.5\)",
         lambda: apply_vsa(model, weights, schedule=Schedule(densities=(1, 0.5)))),
        (TypeError, "model must be a transformer or a pipeline", lambda: apply_vsa("wan", weights)),
        (ValueError, "must have its weights before those of VSA", lambda: apply_vsa(WAN.build().to("meta"), weights)),
    ]:
        with pytest.raises(error, match=message):
            call()
    with apply_vsa(model, weights):
        for again in (lambda: apply_vsa(model, weights), lambda: apply_sla(model, branch("sla")), lambda: apply_ssta(model)):
            with pytest.raises(ValueError, match="must not have SSTA applied already"):
                again()
    model.blocks[0].attn1.to_gate_compress = nn.Identity()
    with pytest.raises(ValueError, match="blocks.0.attn1 must have no to_gate_compress of its own"):
        apply_vsa(model, weights)


def test_a_branch_takes_dtype_device_and_training_of_the_model_and_may_lack_a_bias():
    model = WAN.build().bfloat16().requires_grad_(False)
    weights = {name: x for name, x in branch("vsa").items() if name.endswith("weight")}
    with apply_vsa(model, weights):
        gate = model.blocks[0].attn1.to_gate_compress
        assert gate.weight.dtype == torch.bfloat16 and gate.bias is None and not gate.weight.requires_grad and not gate.training
    for block in model.blocks:
        # As quantised and layerwise cast models have it.
        block.attn1.to_q.weight.data = block.attn1.to_q.weight.data.to(torch.float8_e4m3fn)
    with apply_vsa(model, weights):
        assert model.blocks[0].attn1.to_gate_compress.weight.dtype == torch.bfloat16


def test_a_copy_lives_on_its_own_and_a_dropped_model_is_freed():
    model, call = WAN.build(), WAN.call(CANVAS)
    apply_vsa(model, branch("vsa"))
    expected, twin = run(model, call), copy.deepcopy(model)
    twin.blocks[0].attn1.to_gate_compress.weight.data.zero_()
    assert torch.equal(run(model, call), expected) and not torch.equal(run(twin, call), expected)
    remove_ssta(twin)
    assert torch.equal(run(model, call), expected) and not hasattr(twin.blocks[0].attn1, "to_gate_compress")
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model.blocks[0].attn1.to_gate_compress)
        del model
        assert alive() is None
    finally:
        gc.enable()


@both
def test_a_branch_is_part_of_the_model_at_every_density(method):
    """What leaves next to nothing out is not dense attention, and a teacher is."""
    model, call = WAN.build(), WAN.call(CANVAS)
    dense, frozen = run(model, call), copy.deepcopy(model).requires_grad_(False)
    whole = {"sparsity": 0.0} if method == "vsa" else {"density": 1.0}
    with applied(method, model, branch(method), **whole):
        expected = run(model, call)
    with applied(method, model, branch(method)) as handle:
        set_density(handle, 1.0)
        assert torch.equal(run(model, call), expected) and handle.report()[0].dense_steps == 0
        velocities = teacher_student(model, frozen)(**call)
        assert torch.equal(velocities.teacher, dense) and torch.equal(velocities.student, expected)
        for teacher, got in ((None, "got None, and a model with"), (model, "got WanTransformer3DModel with")):
            with pytest.raises(ValueError, match=f"teacher must be the dense model, {got} {method.upper()}'s branches"):
                teacher_student(model, teacher)


@both
def test_checkpointing_keeps_what_was_selected(method):
    """Whatever density is set between a forward and its backward."""
    model, call = WAN.build(), WAN.call(CANVAS)
    with applied(method, model, branch(method)) as handle:
        grads = []
        for checkpointed in (False, True):
            model.zero_grad()
            if checkpointed:
                model.enable_gradient_checkpointing(frozen_checkpoint)
            loss = model.train()(**call)[0].square().sum()
            if checkpointed:
                set_density(handle, 0.1)
            loss.backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(map(torch.equal, *grads))


H3_NAMES = ["transformer_blocks.{}.attn.to_gate_compress.weight", "transformer_blocks.{}.attn.to_gate_compress.set_weight",
            "model.diffusion_model.blocks.{}.attn.to_gate_compress.weight"]


@pytest.mark.parametrize("name", H3_NAMES)
def test_every_published_name_of_minimax_h3_is_known(name):
    model = H3.build()
    with apply_vsa(model, h3_gates(name) | {"transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 2)}) as handle:
        for number, block in enumerate(model.transformer_blocks):
            assert torch.equal(block.attn.to_gate_compress.weight, h3_gates()[H3_NAMES[0].format(number)])
        run(model, H3.call(CANVAS))
        # 2 x 2 x 2 tiles of the video, and one of text, of conditions and of audio each.
        assert [layer.tiles for layer in handle.report()] == [11, 11]
    assert "to_gate_compress" not in str(model)
    with pytest.raises(ValueError, match="got none for transformer_blocks.1, in the state dict"):
        apply_vsa(model, {of: x for of, x in h3_gates(name).items() if ".0." in of})


def test_minimax_h3_s_sla_has_no_branch_unless_it_is_given_one():
    model, call = H3.build(), H3.call(CANVAS)
    dense = run(model, call)
    with apply_sla(model, density=1.0):
        torch.testing.assert_close(run(model, call), dense, rtol=1e-4, atol=1e-5)
    with apply_sla(model, density=0.4):
        assert not torch.allclose(run(model, call), dense, rtol=1e-3, atol=1e-4)
    layer = torch.nn.Linear(HEAD_DIM, HEAD_DIM)
    with apply_sla(model, {f"transformer_blocks.{i}.attn.proj_l.{of}": x for i in range(2) for of, x in layer.named_parameters()}):
        assert torch.equal(model.transformer_blocks[1].attn.proj_l.weight, layer.weight)
    assert torch.equal(run(model, call), dense)


def densities_of(pipe, steps, schedule, method="vsa", **options):
    """Of each transformer the densities with which its second layer attended, forward by forward."""
    seen = {}
    with METHODS[method][0](pipe, {"transformer": branch(method)}, schedule=schedule, **options):
        processor = pipe.transformer.blocks[1].attn1.processor
        noted = processor._ended
        processor._ended = lambda *args: seen.setdefault("transformer", []).append(processor.ruling.config.density) or noted(*args)
        latents(pipe, steps=steps, **PIPELINES["wan"].call)
    return seen["transformer"]


@both
def test_a_density_of_one_keeps_the_branch_and_counts_as_no_dense_step(method):
    pipe, outs = PIPELINES["wan"].build(), []
    for options in (dict(schedule=Schedule(densities=(1,))), {"sparsity": 0.0} if method == "vsa" else {"density": 1.0}):
        with applied(method, pipe, branch(method), **options) as handle:
            outs.append(latents(pipe, steps=2, **PIPELINES["wan"].call))
            assert handle.report()[0].dense_steps == 0
    assert torch.equal(*outs)


@both
def test_densities_by_step_reach_the_branch_s_attention(method):
    pipe = PIPELINES["wan"].build()
    forwards = len(densities_of(pipe, 1, None, method))
    assert densities_of(pipe, 4, Schedule(densities=(1, 0.5, 0.5, 0.25)), method) == [
        density for density in (1.0, 0.5, 0.5, 0.25) for _ in range(forwards)]
    assert densities_of(pipe, 4, Schedule(densities=(1, 0.25)), method)[::forwards] == [1.0, 1.0, 0.25, 0.25]
    # What the schedule keeps dense has all tiles, and the branch.
    options = {"sparsity": 0.75} if method == "vsa" else {"density": 0.25}
    assert densities_of(pipe, 4, Schedule(dense_steps=0.5), method, **options)[::forwards] == [1.0, 1.0, 0.25, 0.25]
    assert densities_of(pipe, 2, Schedule(dense_layers=(1,)), method, **options)[::forwards] == [1.0, 1.0]


def test_fused_projections_and_autocast_run():
    model, call = WAN.build(), WAN.call(CANVAS)
    with apply_vsa(model, branch("vsa")):
        expected = run(model, call)
        for block in model.blocks:
            block.attn1.fuse_projections()
        torch.testing.assert_close(run(model, call), expected, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            assert (run(model, call) - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@both
def test_with_and_without_gradients_it_is_the_same(method, device, dtype):
    """On a GPU norms and RoPE are then computed on the way into the tiles."""
    model = WAN.build(attention_head_dim=64).to(device, dtype)
    call = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in cast(WAN.call(CANVAS), dtype).items()}
    with applied(method, model, branch(method, head_dim=64)):
        out = model(**call)[0]
        out.square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.blocks.parameters())
        # A tile's mean that is rounded otherwise may select another tile.
        assert (run(model, call) - out).abs().mean() < 8 * torch.finfo(dtype).eps * out.abs().mean()


@pytest.mark.slow
@both
def test_blocks_compile_whole(method):
    model, call = WAN.build(), WAN.call(CANVAS)
    with applied(method, model, branch(method)):
        expected = run(model, call)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        torch.testing.assert_close(run(model, call), expected)


def test_names_of_other_tensors_are_not_the_branch_s():
    assert sparse_checkpoints.VSA.pattern.search("a.blocks.12.to_gate_compress.bias").groups() == (
        "blocks.12", "bias")
    for name in ("to_gate_compress.weight_scale", "to_gate_compress.lora_A.weight", "attn2.to_gate_compress.bias"):
        assert sparse_checkpoints.VSA.pattern.search(f"blocks.1.{name}") is None
