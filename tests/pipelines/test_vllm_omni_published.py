"""SSTA in vLLM-Omni, against the files that it is published as: its own configuration, selection, layer and step counter call ours."""

import dataclasses
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from published import published
from published_omni import REQUIREMENT, published_omni
from torch.nn.functional import scaled_dot_product_attention

from ssta import DenseRun, TokenLayout, VideoGrid, ssta_attention
from ssta.pipelines.plugs.vllm_omni import STANDS_IN_FOR, VARIABLE, config_from, register

# The first of them loads some hundred modules.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ASKED = '{"tile_thw": [2, 4, 4], "kernel_thw": [1, 1, 1]}'
GRID, HEADS, DIM = (4, 8, 8), 2, 32


@pytest.fixture(scope="session")
def folder():
    return published(REQUIREMENT)


@pytest.fixture(scope="module")
def loaded(folder):
    with published_omni(folder) as omni:
        yield omni


@pytest.fixture
def omni(loaded, monkeypatch):
    """vLLM-Omni with SSTA registered as its plug-in loader does it, and nothing said yet."""
    monkeypatch.setenv(VARIABLE, ASKED)
    register()
    backend = importlib.import_module("ssta.pipelines.plugs.vllm_omni_backend")
    backend._said.clear()
    loaded.selector._cached_get_backend_cls.cache_clear()
    yield SimpleNamespace(**vars(loaded), backend=backend)
    loaded.registry[STANDS_IN_FOR].clear_override()


def make_layer(omni, spec=None, parallel=None, **options):
    """vLLM-Omni's own attention layer, as a model makes it under a user's configuration."""
    spec = {"backend": STANDS_IN_FOR, "block_sparse": {"sparsity": 0.75}} if spec is None else spec
    degrees = SimpleNamespace(**{"ring_degree": 1, "allgather_degree": 1, "sequence_parallel_size": 1, **(parallel or {})})
    config = SimpleNamespace(diffusion_attention_config=omni.data.build_attention_config({"default": spec}), model_class_name=None,
                             parallel_config=degrees)
    with omni.config.set_current_diffusion_config(config):
        given = dict(num_heads=HEADS, head_size=DIM, causal=False, softmax_scale=DIM ** -0.5, qkv_layout="BSND", prefix="blocks.3.attn1")
        return omni.layer.Attention(**{**given, **options}, skip_sequence_parallel=parallel is None)


def sparse(q, k, v, layout, density=0.25):
    config = dataclasses.replace(config_from(ASKED), density=density)
    return ssta_attention(*(x[:, :layout.length].transpose(1, 2) for x in (q, k, v)), layout, config).transpose(1, 2)


def dense(q, k, v, **options):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def qkv(tokens, heads=HEADS):
    return torch.randn(1, tokens, HEADS, DIM), torch.randn(1, tokens, heads, DIM), torch.randn(1, tokens, heads, DIM)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "vllm_omni.ssta"]


def layouts(omni):
    whole, span = omni.abstract.VideoTokenLayout, omni.abstract.VideoTokenSpan
    grid = VideoGrid(*GRID)
    return {
        "video alone": (whole(prefix_len=0, latent_grid=GRID, used_len=256), 256, (grid,)),
        "prefix": (whole(prefix_len=40, latent_grid=GRID), 296, (DenseRun(40), grid)),
        "padding": (whole(prefix_len=40, latent_grid=GRID), 320, (DenseRun(40), grid)),
        "several": (whole(used_len=600, video_spans=(span(10, GRID, "reference"), span(270, GRID, "target"))), 608,
                    (DenseRun(10), grid, DenseRun(4), grid, DenseRun(74)))}


@pytest.mark.parametrize("name", ["video alone", "prefix", "padding", "several"])
def test_a_layer_equals_ssta_attention_bit_for_bit(omni, name, caplog):
    caplog.set_level(logging.INFO, "vllm_omni.ssta")
    video, tokens, segments = layouts(omni)[name]
    q, k, v = qkv(tokens)
    layer, metadata, layout = make_layer(omni), omni.abstract.AttentionMetadata(video_layout=video), TokenLayout(segments)
    before = [x.clone() for x in (q, k, v)]
    out = layer(q, k, v, metadata)
    want = sparse(q, k, v, layout)
    assert torch.equal(out[:, :layout.length], want) and not out[:, layout.length:].any()
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before))
    assert not torch.allclose(want, dense(*(x[:, :layout.length] for x in (q, k, v))), atol=1e-3)
    layer(q, k, v, metadata)
    line, = said(caplog)
    assert "density 0.25" in line and "kernel torch on cpu" in line and "4 x 8 x 8 in tiles of 2 x 4 x 4" in line


def test_all_tiles_are_dense_attention_and_fewer_key_heads_are_shared(omni):
    video, tokens, segments = layouts(omni)["prefix"]
    q, k, v = qkv(tokens, heads=1)
    layer = make_layer(omni, {"backend": STANDS_IN_FOR, "block_sparse": {"sparsity": 1e-10}}, num_kv_heads=1)
    out = layer(q, k, v, omni.abstract.AttentionMetadata(video_layout=video))
    torch.testing.assert_close(out, dense(q, k, v, enable_gqa=True), rtol=1e-5, atol=1e-5)


def test_a_padding_mask_is_what_the_layout_says_already(omni):
    video, tokens, segments = layouts(omni)["padding"]
    q, k, v = qkv(tokens)
    mask = torch.arange(tokens)[None] < 296
    metadata = omni.abstract.AttentionMetadata(video_layout=video, attn_mask=mask, extra={
        "max_seqlen_q": 296, "cu_seqlens_q": torch.tensor([0, 296, 320]), "something_new": 1})
    assert torch.equal(make_layer(omni)(q, k, v, metadata)[:, :296], sparse(q, k, v, TokenLayout(segments)))


@pytest.mark.parametrize("why, change, options", [
    ("without a video layout", dict(video_layout=None), {}),
    ("without a video layout", None, {}),
    ("causal", {}, dict(causal=True)),
    ("mask must be bool", dict(attn_mask=torch.ones(1, 1, 256, 256, dtype=torch.bool)), {}),
    ("mask must be bool", dict(attn_mask=torch.zeros(1, 256)), {}),
    ("has query_ranges", dict(query_ranges=()), {}),
    ("has 256 tokens of 200", dict(extra={"max_seqlen_q": 200}), {}),
    ("has 256 tokens of None", dict(extra={"cu_seqlens_q": torch.tensor([0, 256])}), {}),
    ("qkv_layout 'BSND', and says None", {}, dict(qkv_layout=None))])
def test_what_is_not_one_sequence_with_a_known_video_is_vllm_omnis_and_said_once(omni, why, change, options, caplog):
    video, tokens, _ = layouts(omni)["video alone"]
    q, k, v = qkv(tokens)
    metadata = None if change is None else omni.abstract.AttentionMetadata(**{"video_layout": video, **change})
    layer = make_layer(omni, **options)
    for _ in range(2):
        out = layer(q, k, v, metadata)
    assert torch.equal(out, make_layer(omni, {"backend": "TORCH_SDPA"}, **options)(q, k, v, metadata))
    line, = said(caplog)
    assert why in line and "dense" in line and "SDPA" in line and "'self'" in line


def test_cross_attention_is_vllm_omnis(omni, caplog):
    q, (_, k, v) = qkv(256)[0], qkv(20)
    assert torch.equal(make_layer(omni, role="cross")(q, k, v), dense(q, k, v, scale=DIM ** -0.5))
    assert len(said(caplog)) == 1 and "'cross'" in said(caplog)[0]


def test_metadata_of_a_later_version_that_is_set_keeps_a_layer_dense(omni, monkeypatch, caplog):
    @dataclasses.dataclass
    class Later(omni.abstract.AttentionMetadata):
        sinks: torch.Tensor | None = None

    monkeypatch.setattr(omni.backend, "_UNKNOWN", ("sinks",))
    monkeypatch.setattr(omni.backend, "_BLANK", Later())
    video, tokens, segments = layouts(omni)["video alone"]
    q, k, v = qkv(tokens)
    layer = make_layer(omni)
    assert torch.equal(layer(q, k, v, Later(video_layout=video)), sparse(q, k, v, TokenLayout(segments)))
    assert torch.equal(layer(q, k, v, Later(video_layout=video, sinks=torch.zeros(2))), dense(q, k, v))
    assert "its metadata has sinks" in said(caplog)[0]


def test_steps_and_layers_are_dense_as_vllm_omnis_options_say(omni, caplog):
    video, tokens, segments = layouts(omni)["video alone"]
    q, k, v = qkv(tokens)
    metadata = omni.abstract.AttentionMetadata(video_layout=video)
    want = {True: sparse(q, k, v, TokenLayout(segments)), False: dense(q, k, v)}
    spec = {"backend": STANDS_IN_FOR, "block_sparse": {"sparsity": 0.75, "start_step": 2, "end_step": 1, "skip_layers": "0-2"}}
    layer, skipped = make_layer(omni, spec), make_layer(omni, spec, prefix="blocks.2.attn1")
    with omni.context.set_forward_context(omni_diffusion_config=SimpleNamespace(parallel_config=SimpleNamespace(sequence_parallel_size=1))):
        for step in range(6):
            omni.context.DenoiseProgressMixin().record_denoise_step(step, total_steps=6)
            assert torch.equal(layer(q, k, v, metadata), want[2 <= step < 5])
            assert torch.equal(skipped(q, k, v, metadata), want[False])
        assert said(caplog) == []
        omni.context.DenoiseProgressMixin().record_denoise_step(3)
        assert torch.equal(layer(q, k, v, metadata), want[False])
    assert torch.equal(layer(q, k, v, metadata), want[False])
    assert torch.equal(make_layer(omni, spec, prefix="")(q, k, v, metadata), want[False])
    unknown_total, unknown_step, unnumbered = said(caplog)
    assert "how many steps" in unknown_total and "which step" in unknown_step and "skip_layers" in unnumbered


def test_sparsity_0_is_dense_and_said(omni, caplog):
    caplog.set_level(logging.INFO, "vllm_omni.ssta")
    video, tokens, _ = layouts(omni)["video alone"]
    q, k, v = qkv(tokens)
    layer = make_layer(omni, {"backend": STANDS_IN_FOR, "block_sparse": {"sparsity": 0.0}})
    assert torch.equal(layer(q, k, v, omni.abstract.AttentionMetadata(video_layout=video)), dense(q, k, v))
    assert len(said(caplog)) == 1 and "dense in all steps" in said(caplog)[0]


@pytest.mark.parametrize("degree", ["ring_degree", "allgather_degree"])
def test_parallelism_that_hides_the_sequence_is_refused(omni, degree):
    with pytest.raises(ValueError, match=f"{degree} must be 1 with SSTA.*got 2; use Ulysses"):
        make_layer(omni, parallel={degree: 2})


def test_a_compiled_block_gives_the_same(omni):
    video, tokens, segments = layouts(omni)["padding"]
    q, k, v = qkv(tokens)
    layer, metadata = make_layer(omni), omni.abstract.AttentionMetadata(video_layout=video)
    compiled = torch.compile(lambda q, k, v: layer(q * 1, k, v, metadata), dynamic=True, backend="eager")
    assert torch.equal(compiled(q, k, v)[:, :296], sparse(q, k, v, TokenLayout(segments)))


def test_abilities_are_the_dense_backends(omni):
    backend, sdpa = omni.registry[STANDS_IN_FOR].get_class(), omni.registry.TORCH_SDPA.get_class()
    assert backend is omni.backend.SSTABackend and backend.get_supported_head_sizes() == [] and backend.get_name() == "SSTA"
    assert backend.supports_attention_mask() and not backend.supports_packed_mask_free() and not backend.supports_paged_kv
    assert backend.supports_prefix_kv_slicing is sdpa.supports_prefix_kv_slicing
    assert backend.supports_piecewise_spans is sdpa.supports_piecewise_spans
    assert backend.get_metadata_cls() is omni.abstract.AttentionMetadata and backend.get_builder_cls() is None


def test_an_ascend_npu_refuses_it(omni, monkeypatch):
    platform = omni.backend.current_omni_platform
    monkeypatch.setattr(type(platform), "_omni_enum", type(platform._omni_enum).NPU)
    with pytest.raises(ValueError, match="runs on cuda only"):
        make_layer(omni)


def test_the_entry_point_is_where_vllm_omni_looks(omni, monkeypatch):
    text = (ROOT / "pyproject.toml").read_text()
    _, section = text.split(f'[project.entry-points."{omni.plugins.OMNI_DEFAULT_PLUGINS_GROUP}"]\n')
    name, value = section.split("\n")[0].replace('"', "").split(" = ")
    entry = importlib.metadata.EntryPoint(name, value, omni.plugins.OMNI_DEFAULT_PLUGINS_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    omni.registry[STANDS_IN_FOR].clear_override()
    monkeypatch.setattr(omni.plugins, "omni_plugins_loaded", False)
    omni.plugins.load_omni_general_plugins()
    assert omni.registry[STANDS_IN_FOR].is_overridden()


def test_unasked_vllm_omni_keeps_its_backend(loaded, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    assert not loaded.registry[STANDS_IN_FOR].is_overridden()


def reload_backend(omni):
    sys.modules.pop("ssta.pipelines.plugs.vllm_omni_backend")
    try:
        importlib.import_module("ssta.pipelines.plugs.vllm_omni_backend")
    finally:
        sys.modules["ssta.pipelines.plugs.vllm_omni_backend"] = omni.backend


def fewer(cls, name):
    return dataclasses.make_dataclass(cls.__name__, [(f.name, f.type, None) for f in dataclasses.fields(cls) if f.name != name])


@pytest.mark.parametrize("what, words", [
    ("field", r"AttentionMetadata: expected .*video_layout.*, found (?!.*video_layout)"),
    ("new geometry", "VideoTokenLayout: expected .*, found .*stride"),
    ("argument", r"forward_cuda: expected .*attn_metadata.*, found .*context"),
    ("class", "cannot import name 'VideoTokenSpan'")])
def test_another_vllm_omni_is_refused_with_what_was_expected_and_found(omni, what, words, monkeypatch):
    abstract = omni.abstract
    if what == "field":
        monkeypatch.setattr(abstract, "AttentionMetadata", fewer(abstract.AttentionMetadata, "video_layout"))
    elif what == "new geometry":
        monkeypatch.setattr(abstract, "VideoTokenLayout", dataclasses.make_dataclass("VideoTokenLayout", [
            *[(f.name, f.type, None) for f in dataclasses.fields(abstract.VideoTokenLayout)], ("stride", int, None)]))
    elif what == "argument":
        monkeypatch.setattr(abstract.AttentionImpl, "forward_cuda", lambda self, query, key, value, context: None)
    else:
        monkeypatch.delattr(abstract, "VideoTokenSpan")
    with pytest.raises(ImportError, match=f"written for vLLM-Omni 0.30 and does not fit vLLM-Omni .*{words}"):
        reload_backend(omni)


def test_a_registry_without_the_backend_is_refused(omni, monkeypatch):
    registry = importlib.import_module("vllm_omni.diffusion.attention.backends.registry")
    monkeypatch.setattr(registry, "DiffusionAttentionBackendEnum", SimpleNamespace(__members__={"FLASH_ATTN": 1}))
    with pytest.raises(ImportError, match=r"RAINFUSION_ATTN .*expected.*found the backends \['FLASH_ATTN'\]"):
        register()


def test_the_plug_in_loads_beside_the_diffusers_that_vllm_omni_asks_for(folder):
    requirement, = [line.split(": ")[1] for line in next(folder.glob("vllm_omni-*.dist-info")).joinpath("METADATA").read_text().splitlines()
                    if line.startswith("Requires-Dist: diffusers")]
    path = published(requirement)
    program = ("import diffusers, ssta.pipelines.plugs.vllm_omni as plug; plug.register(); "
               "print(diffusers.__version__, plug.config_from('{}').tile_thw)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path])})
    assert run.stdout.strip() == f"{requirement.split('==')[1]} (4, 4, 8)", run.stderr
