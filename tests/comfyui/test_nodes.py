"""The node pack: it loads as ComfyUI loads it, its nodes do what they say, its workflow fits them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from comfy_stand_in import HunyuanVideo, LTXVModel, Patcher, WanModel

import ssta
from ssta.pipelines import Schedule
from ssta.pipelines.plugs.comfy import KEY, patch_model, report_model
from ssta.pipelines.schedule.presets import PRESETS, small_tiles

PACK = Path(__file__).parents[2] / "comfyui"
DEFAULTS = {"density": 0.15, "top_k": 0, "tile": "2x4x4", "dense_steps": 0.0, "dense_blocks": "", "compensation": "linear"}


@pytest.fixture(scope="module")
def pack():
    """Loaded from its folder, under a name with the folder's path in it."""
    name = str(PACK).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for loaded in (name, f"{name}.nodes"):
        del sys.modules[loaded]


@pytest.fixture
def wan():
    torch.manual_seed(0)
    return Patcher(WanModel().eval())


VIDEO, CONTEXT = torch.randn(1, 4, 4, 16, 16), torch.randn(1, 5, 128)


def node(pack, name):
    kind = pack.NODE_CLASS_MAPPINGS[name]
    made = kind()
    return lambda **inputs: getattr(made, kind.FUNCTION)(**inputs)


def node_inputs(pack, name):
    return pack.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()["required"]


def test_nodes_are_whole(pack):
    assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys() == {
        "SSTAPreset", "SSTA", "SSTATrained", "SSTAReport", "SSTARemove"}
    for kind in pack.NODE_CLASS_MAPPINGS.values():
        assert set(kind.INPUT_TYPES()) == {"required"} and kind.DESCRIPTION and kind.CATEGORY
        assert isinstance(kind.RETURN_TYPES, tuple) and callable(getattr(kind, kind.FUNCTION))


def test_presets_are_the_library_s(pack, wan):
    given = {}
    for name in node_inputs(pack, "SSTAPreset")["preset"][0]:
        (patched,) = node(pack, "SSTAPreset")(model=wan, preset=name)
        patch = patched.get_attachment(KEY)
        given[name] = {config.density for config in patch.configs if config}, patch.schedule.dense_steps, patch.configs[0]
    assert given == {name: ({density}, 0, None) for name, density in PRESETS.items()}
    by_hand = patch_model(wan, small_tiles(), Schedule(dense_layers=(0,))).run(VIDEO, CONTEXT)
    (balanced,) = node(pack, "SSTAPreset")(model=wan, preset="balanced")
    assert torch.equal(balanced.run(VIDEO, CONTEXT), by_hand)
    with pytest.raises(ValueError, match="preset must be one of 'near', 'balanced', 'fast', '8 steps', '4 steps', got 'far'"):
        node(pack, "SSTAPreset")(model=wan, preset="far")


def test_apply_report_remove(pack, wan):
    dense = wan.run(VIDEO, CONTEXT)
    (sparse,) = node(pack, "SSTA")(model=wan, **DEFAULTS | {"dense_blocks": "0", "tile": "1x2x2", "density": 0.2})
    out = sparse.run(VIDEO, CONTEXT)
    assert not torch.allclose(out, dense, atol=1e-6)
    told = node(pack, "SSTAReport")(model=sparse.clone(), samples={"samples": out})
    assert told["ui"]["text"] == [told["result"][0]] and "4 x 8 x 8" in told["result"][0] and "dense, ComfyUI's" in told["result"][0]
    (plain,) = node(pack, "SSTARemove")(model=sparse)
    assert torch.equal(plain.run(VIDEO, CONTEXT), dense) and torch.equal(wan.run(VIDEO, CONTEXT), dense)


@pytest.mark.parametrize("changes", [{"density": 1.0}, {"density": 0.0, "top_k": 4096}, {"density": 1.0, "compensation": "none"},
                                     {"density": 1.0, "tile": " 4, 8,8"}])
def test_all_of_it_is_dense(pack, wan, changes):
    (patched,) = node(pack, "SSTA")(model=wan, **DEFAULTS | changes)
    torch.testing.assert_close(patched.run(VIDEO, CONTEXT), wan.run(VIDEO, CONTEXT), rtol=1e-4, atol=1e-5)
    assert all(run.density == 1 for run in report_model(patched))


def test_every_setting_reaches_the_patch(pack, wan):
    (patched,) = node(pack, "SSTA")(model=wan, density=0.0, top_k=3, tile="4x8x8", dense_steps=0.25, dense_blocks="0-1",
                                    compensation="none")
    patch = patched.get_attachment(KEY)
    config = patch.configs[2]
    assert patch.configs[:2] == [None, None]
    assert (config.topk, config.density, config.tile_thw, config.compensation) == (3, None, (4, 8, 8), "none")
    assert patch.schedule.dense_steps == 0.25


def test_the_defaults_are_the_librarys(pack, wan):
    required = pack.NODE_CLASS_MAPPINGS["SSTA"].INPUT_TYPES()["required"]
    inputs = {name: of[1].get("default", of[0][0]) for name, of in required.items() if name != "model"}
    (patched,), plain = node(pack, "SSTA")(model=wan, **inputs), patch_model(wan)
    patch, other = patched.get_attachment(KEY), plain.get_attachment(KEY)
    assert patch.schedule == other.schedule
    for field in ("tile_thw", "density", "topk", "selected_by", "compensation", "scored_by", "pad_type"):
        assert getattr(patch.configs[1], field) == getattr(other.configs[1], field), field


@pytest.mark.parametrize("text, blocks", [("", ()), ("0", (0,)), ("0, 2-4,-1", (0, 2, 3, 4, -1)), ("1-2, 2", (1, 2))])
def test_blocks_are_read(pack, text, blocks):
    assert sys.modules[f"{pack.__name__}.nodes"].parse_blocks(text) == blocks


@pytest.mark.parametrize("changes, match", [
    ({"top_k": 4}, "one of density and top_k must be above 0 and the other one 0, got 0.15 and 4"),
    ({"density": 0.0}, "got 0.0 and 0"),
    ({"tile": "2x8"}, "tile must be three numbers"),
    ({"dense_blocks": "4-2"}, "dense_blocks must be numbers of blocks"),
    ({"dense_blocks": "first"}, "dense_blocks must be numbers of blocks"),
    ({"dense_blocks": "3"}, "for this model's 3 layers"),
])
def test_wrong_settings_are_refused(pack, wan, changes, match):
    with pytest.raises(ValueError, match=match):
        node(pack, "SSTA")(model=wan, **DEFAULTS | changes)


def test_the_trained_pattern_is_for_the_model_that_was(pack, wan):
    (patched,) = node(pack, "SSTATrained")(model=Patcher(HunyuanVideo()))
    assert set(patched.get_attachment(KEY).configs) == {ssta.SSTAConfig.hunyuan_video_15()}
    for other in (wan, Patcher(LTXVModel()), Patcher(HunyuanVideo(patch=(1, 2, 2), flipped=True))):
        with pytest.raises(ValueError, match="must be HunyuanVideo 1.5"):
            node(pack, "SSTATrained")(model=other)


def test_the_workflow_fits_the_nodes(pack):
    (path,) = (PACK / "example_workflows").glob("*.json")
    workflow = json.loads(path.read_text())
    nodes = {of["id"]: of for of in workflow["nodes"]}
    for link, start, output, end, slot, kind in workflow["links"]:
        assert link in nodes[start]["outputs"][output]["links"] and nodes[start]["outputs"][output]["type"] == kind
        assert nodes[end]["inputs"][slot]["link"] == link and nodes[end]["inputs"][slot]["type"] in (kind, "*")
    assert all(of["link"] is not None for found in nodes.values() for of in found["inputs"])
    ours = [found for found in nodes.values() if found["type"] in pack.NODE_CLASS_MAPPINGS]
    assert {found["type"] for found in ours} == {"SSTA", "SSTAReport"}
    for found in ours:
        kind = pack.NODE_CLASS_MAPPINGS[found["type"]]
        required = kind.INPUT_TYPES()["required"]
        plugged = [name for name, of in required.items() if len(of) < 2 or isinstance(of[0], str) and of[0] in ("MODEL", "LATENT")]
        assert [of["name"] for of in found["inputs"]] == plugged
        assert tuple(of["type"] for of in found["outputs"]) == kind.RETURN_TYPES
        widgets = {name: of for name, of in required.items() if name not in plugged}
        assert len(widgets) == len(found["widgets_values"])
        for (options, more), value in zip(widgets.values(), found["widgets_values"]):
            assert value == more.get("default", options[0])


def test_its_registry_entry_is_of_this_version():
    text = (PACK / "pyproject.toml").read_text()
    assert f'version = "{ssta.__version__}"' in text and "[tool.comfy]" in text and "dependencies = []" in text
    # ComfyUI's manager installs what this file names, from PyPI.
    assert not (PACK / "requirements.txt").exists()


def test_without_the_library_the_pack_says_where_it_comes_from(monkeypatch):
    spec = importlib.util.spec_from_file_location("pack_without_library", PACK / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="`python -m pip install .` in a checkout of SSTA"):
        spec.loader.exec_module(module)
