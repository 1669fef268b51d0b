"""The recipe's switches, each by itself, every two and all together, on a tiny model; and what excludes what."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import recipe_cases
import torch
from graphs import Graphs
from peft import LoraConfig, get_peft_model_state_dict
from ranks import on_ranks, values_of
from tiny_pipelines import PIPELINES, latents, wan_with_frames

from ssta.pipelines import Schedule
from ssta.pipelines.published import Published, wan_inputs

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CPU = torch.device("cpu")
STEPS = 4
# What makes each cache skip all steps but the first ones of so few.
CACHES = {"first-block": {"threshold": 100.0}, "mag": {"mag_ratios": [1.0] * STEPS}, "taylor": {"cache_interval": 3},
          "cache-dit": {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 2, "residual_diff_threshold": 100.0}}
SWITCHES = ("compile", "int8", "lora", *CACHES)
WAN = diffusers.WanTransformer3DModel


@pytest.fixture(scope="module")
def recipe():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("recipe")
    sys.path.remove(str(EXAMPLES))
    for name in ("recipe", "fastest", "generate", "wan", "hunyuan_video_15"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A file of a LoRA that changes much."""
    transformer, folder = PIPELINES["wan"].build(layers=2).transformer, tmp_path_factory.mktemp("lora")
    torch.manual_seed(4)
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=1, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    diffusers.WanPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(transformer))
    return str(folder)


def made(recipe, switches, lora, backend=None):
    """The recipe of some switches."""
    cache = next(filter(CACHES.__contains__, switches), None)
    return recipe.Recipe(compile="compile" in switches, quantize="int8" if "int8" in switches else None, cache=cache,
                         cache_options=CACHES.get(cache, {}), lora=lora if "lora" in switches else None, backend=backend or Graphs())


def generated(recipe, of, sparse=True, **call):
    """(latents, the handle's report, how often the last block ran, if nothing is compiled)."""
    pipe = PIPELINES["wan"].build(layers=2)
    ran = []
    if not of.compile:
        # A compiled block would be compiled once more at each call, where what it counts is another number.
        pipe.transformer.blocks[-1].attn1.to_q.register_forward_hook(lambda *_: ran.append(1))
    of.check(type(pipe.transformer), CPU)
    # Blocks that are dense at some steps are compiled once more, which tests/pipelines/test_compile.py sees to.
    with recipe.cooked(pipe, of, STEPS, tile_thw=(2, 3, 4), density=0.3 if sparse else 1.0, schedule=Schedule()) as handle:
        out = latents(pipe, steps=STEPS, **PIPELINES["wan"].call | call)
        report = handle.report()
    assert type(pipe.transformer.blocks[0].attn1.processor).__name__ == "WanAttnProcessor"
    return out, report, len(ran)


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def known(recipe, lora):
    """Latents of recipes that nothing is compiled in, by their switches; each is generated once."""
    found = {}

    def of(*switches):
        key = frozenset(switches) - {"compile"}
        if key not in found:
            found[key] = generated(recipe, made(recipe, key, lora))
        return found[key]
    return of


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_does_what_it_says(switch, recipe, lora, known):
    plain, _, calls = known()
    assert calls == 2 * STEPS
    if switch == "compile":
        graphs = Graphs()
        out, _, _ = generated(recipe, made(recipe, ["compile"], lora, graphs))
        assert graphs.count and distance(out, plain) < 1e-4
        return
    out, _, calls = known(switch)
    if switch == "int8":
        assert 1e-5 < distance(out, plain) < 0.05
    elif switch == "lora":
        # Beside the adapter that is not fused.
        pipe = PIPELINES["wan"].build(layers=2)
        pipe.load_lora_weights(lora)
        with recipe.cooked(pipe, recipe.Recipe(), STEPS, tile_thw=(2, 3, 4), density=0.3, schedule=Schedule()):
            adapted = latents(pipe, steps=STEPS, **PIPELINES["wan"].call)
        assert distance(out, adapted) < 1e-4 and distance(out, plain) > 0.01
    else:
        assert calls < 2 * STEPS and 1e-4 < distance(out, plain) < 1


# What "mag" refuses to be compiled with, and what test_all_together compiles.
NOT_COMPILED = {"mag", "int8", "lora", "taylor"}
PAIRS = [pytest.param(pair, marks=[pytest.mark.slow] if "compile" in pair else [], id="+".join(pair))
         for pair in combinations(SWITCHES, 2)
         if len(set(pair) & set(CACHES)) < 2 and not ("compile" in pair and set(pair) & NOT_COMPILED)]


@pytest.mark.parametrize("pair", PAIRS)
def test_every_two_go_together(pair, recipe, lora, known):
    if "compile" in pair:
        # Without guidance by diffusers' cache, of which a second prompt, with a memory of its own, would be compiled once more.
        call, graphs = {"guidance_scale": 1.0} if "first-block" in pair else {}, Graphs()
        expected, _, _ = generated(recipe, made(recipe, set(pair) - {"compile"}, lora), **call)
        out, _, _ = generated(recipe, made(recipe, pair, lora, graphs), **call)
        assert graphs.count and distance(out, expected) < 1e-3
        return
    expected, _, calls = known(*pair)
    one, other = pair
    for alone, more in ((one, other), (other, one)):
        far = distance(expected, known(alone)[0])
        # 8 bits change little, the others much.
        assert 1e-5 < far < 0.1 if more == "int8" else far > 1e-3, (alone, more, far)
    if set(pair) & set(CACHES):
        assert calls < 2 * STEPS


@pytest.mark.slow
def test_all_together(recipe, lora, known):
    switches = ("compile", "int8", "lora", "taylor")
    expected, _, calls = known(*switches)
    graphs = Graphs()
    out, report, _ = generated(recipe, made(recipe, switches, lora, graphs))
    assert graphs.count and distance(out, expected) < 1e-3 and calls < 2 * STEPS
    assert [run.steps for run in report] == [STEPS] * 2


@pytest.mark.slow
def test_several_ranks_with_each_switch():
    found = values_of(on_ranks(recipe_cases.run, 2))
    wrong = [f"{case}, rank {rank}: {trace}" for rank, traces in enumerate(found) for case, trace in traces.items() if trace]
    assert not wrong and all(traces.keys() == recipe_cases.CASES.keys() for traces in found), "\n".join(wrong)


def test_sparse_is_near_dense_in_the_same_recipe(recipe, lora, known):
    for switches in ((), ("int8", "lora")):
        dense, report, _ = generated(recipe, made(recipe, switches, lora), sparse=False)
        assert distance(known(*switches)[0], dense) < 0.2 and all(run.density == 1 for run in report)


def test_quantised_projections_go_through_one_pass(recipe, lora):
    """Only linear layers of blocks are quantised, and no norm's."""
    pipe = PIPELINES["hunyuan_video_15"].build()
    with recipe.cooked(pipe, recipe.Recipe(quantize="int8"), STEPS):
        of = {name: type(module.weight).__name__ for name, module in pipe.transformer.named_modules()
              if isinstance(module, torch.nn.Linear)}
        assert of["transformer_blocks.0.attn.to_q"] == "Int8Tensor" and of["transformer_blocks.0.norm1.linear"] == "Parameter"
        assert {kind for name, kind in of.items() if not name.startswith("transformer_blocks.")} == {"Parameter"}
        assert latents(pipe, steps=2, **PIPELINES["hunyuan_video_15"].call).isfinite().all()


@pytest.mark.parametrize("options, kind, message", [
    (dict(quantize="int4"), WAN, "quantize must be 'float8', 'int8' or None, got 'int4'"),
    (dict(cache="tea"), WAN, "cache must be 'first-block', .* got 'tea'"),
    (dict(cache_options={"threshold": 1}), WAN, "cache_options must come with a cache"),
    (dict(quantize="float8"), WAN, "quantize must be 'int8' here, got 'float8', which needs a GPU of compute capability 8.9"),
    (dict(tune=True), WAN, "tune must come with compile"),
    (dict(compile=True, tune=True, backend="eager"), WAN, "tune must come with compile, whose kernels Inductor then tunes"),
    (dict(compile=True), diffusers.MochiTransformer3DModel, "compile must be off for MochiTransformer3DModel"),
    (dict(compile=True, cache="mag", cache_options={"mag_ratios": [1.0]}), WAN, "compile must be off with cache 'mag'"),
    (dict(cache="mag"), WAN, "cache 'mag' needs cache_options with mag_ratios"),
    (dict(cache="first-block"), diffusers.HunyuanVideo15Transformer3DModel, "whose blocks diffusers' cache does not know; 'taylor' takes"),
    (dict(cache="first-block", ranks=2), WAN, "cache 'first-block' must be off on several GPUs"),
    (dict(cache="cache-dit", ranks=2), WAN, "cache 'cache-dit' must be off on several GPUs")])
def test_what_excludes_what(options, kind, message, recipe):
    with pytest.raises(ValueError, match=message):
        recipe.Recipe(**options).check(kind, CPU)


def test_what_is_refused_would_not_work(recipe, lora):
    """The reasons hold for the diffusers that is installed; where one no longer does, its row goes."""
    graphs = Graphs()
    refused = made(recipe, ["compile", "mag"], lora, graphs)
    pipe = PIPELINES["wan"].build()
    with recipe.cooked(pipe, refused, STEPS):
        latents(pipe, steps=2, **PIPELINES["wan"].call)
    assert graphs.count == 0, "MagCache's hooks switch the compiler off"
    with pytest.raises(ValueError, match="not registered"):
        PIPELINES["hunyuan_video_15"].build().transformer.enable_cache(diffusers.FirstBlockCacheConfig())
    with pytest.raises(ValueError, match="_repeated_blocks"):
        PIPELINES["mochi"].build().transformer.compile_repeated_blocks()


def test_inductor_tunes_where_it_is_asked_to(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(WAN, "compile_repeated_blocks", lambda model, **options: seen.append(options))
    for switches in (dict(compile=True), dict(compile=True, tune=True), dict(compile=True, backend="eager")):
        of = recipe.Recipe(**switches)
        of.check(WAN, CPU)
        with recipe.cooked(PIPELINES["wan"].build(), of, STEPS):
            pass
    assert [options["options"] and options["options"]["coordinate_descent_tuning"] for options in seen] == [False, True, None]
    assert all(hasattr(torch._inductor.config, name) for name in seen[0]["options"])


@pytest.mark.parametrize("package, options", [("torchao", dict(quantize="int8")), ("cache_dit", dict(cache="cache-dit"))])
def test_packages_that_are_missing_are_named(package, options, recipe, monkeypatch):
    monkeypatch.setattr(recipe, "_missing", lambda name: name == package)
    with pytest.raises(ValueError, match="is not installed: pip install"):
        recipe.Recipe(**options).check(WAN, CPU)


def test_the_best_quantisation_follows_the_gpu(recipe, monkeypatch):
    assert recipe.best_quantization(CPU) == "int8"
    for capability, best in (((8, 6), "int8"), ((8, 9), "float8"), ((9, 0), "float8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert recipe.best_quantization(torch.device("cuda")) == best


def test_the_script_takes_each_switch(recipe, lora, monkeypatch, capsys, tmp_path):
    fastest, generate = importlib.import_module("fastest"), importlib.import_module("generate")
    written = []
    monkeypatch.setattr(generate, "require_video_writer", lambda: None)
    monkeypatch.setattr(generate, "write_video", lambda video, path, fps: written.append(video))
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", lambda model, **_: wan_with_frames())
    size = ["--cpu", "--height", "96", "--width", "128", "--num-frames", "9", "--num-inference-steps", "3",
            "--output", str(tmp_path / "a.mp4")]
    fastest.run(["wan", *size, "--quantize", "best", "--cache", "taylor", "--cache-options", '{"cache_interval": 2}', "--density", "0.3"])
    assert "transformer.blocks.1.attn1" in capsys.readouterr().out
    fastest.run(["wan", *size, "--dense"])
    assert [video.shape for video in written] == [(9, 3, 96, 128)] * 2 and "blocks" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="^0$"):
        fastest.run(["--help"])
    assert "--quantize" in capsys.readouterr().out
    for arguments, message in ((["van"], "the first argument must be one of wan, .* got van"),
                               (["wan", *size, "--cache", "mag"], "cache 'mag' needs cache_options"),
                               (["wan", *size, "--dense", "--density", "0.3"], "--density must be left out with --dense"),
                               (["hunyuan_video_15", *size, "--cache", "first-block"], "'taylor' takes any")):
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            fastest.run(arguments)
    for arguments, message in ((["--cache-options", "0.1"], "must be a JSON object such as .*, got '0.1'"),
                               (["--offload"], "--offload must be left out with --cpu")):
        with pytest.raises(SystemExit, match="^2$"):
            fastest.run(["wan", *size, *arguments])
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.gpu
def test_the_best_quantisation_compiled_on_a_gpu(recipe):
    """By Inductor, and nothing of ours warns."""
    torch._dynamo.reset()
    sizes = dict(num_attention_heads=2, attention_head_dim=64, text_dim=16, freq_dim=16, ffn_dim=256)
    of = Published("tiny", "WanTransformer3DModel", sizes, (5, 12, 16), 2, wan_inputs(16, 16))
    model, call = of.build("cuda", torch.bfloat16, 2), of.call("cuda", torch.bfloat16)
    pipe, quantized, found = SimpleNamespace(transformer=model), recipe.best_quantization(torch.device("cuda")), {}
    for switches in ({}, {"quantize": quantized}, {"compile": True}):
        # What one did to the weights stays for the next.
        with warnings.catch_warnings(record=True) as seen, torch.no_grad():
            warnings.simplefilter("always")
            with recipe.cooked(pipe, recipe.Recipe(**switches), STEPS, schedule=Schedule(dense_layers=(0,))):
                found[tuple(switches)] = model(**call)[0].float()
        assert not [warning for warning in seen if "ssta" in f"{warning.message}{warning.filename}"], [str(one.message) for one in seen]
    plain, quick, compiled = found.values()
    assert 1e-4 < distance(quick, plain) < 0.1 and distance(compiled, quick) < 0.05


def test_without_a_lora_of_the_pipelines_own_the_transformer_takes_it(recipe):
    seen = []
    transformer = SimpleNamespace(**{name: lambda *of, name=name: seen.append((name, *of)) for name in (
        "load_lora_adapter", "fuse_lora", "unload_lora")})
    recipe.fuse_lora(SimpleNamespace(transformer=transformer), "a file")
    assert seen == [("load_lora_adapter", "a file"), ("fuse_lora",), ("unload_lora",)]
