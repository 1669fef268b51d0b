"""The register of families: loaded when first needed, one at a time; a family that is mistaken is refused and changes nothing."""

from __future__ import annotations

import subprocess
import sys

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_wan
from tiny_hunyuan import CANVAS, EVERYTHING, SPARSE
from tiny_models import TINY
from torch import nn

from ssta import SSTAConfig, TokenLayout, pipelines
from ssta.kernels import notices
from ssta.pipelines import (
    Family,
    Schedule,
    Site,
    SSTAProcessor,
    apply_ssta,
    register_family,
    remove_ssta,
    stack_sites,
    supported_models,
    unregister_family,
)
from ssta.pipelines.families import PLACES
from ssta.pipelines.patch import register as families

NAMES = {place.partition(":")[2]: model for model, place in PLACES.items()}


@pytest.fixture(autouse=True)
def register(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    return families._FAMILIES


# Loading


def test_importing_the_package_imports_no_model(tmp_path):
    program = ("import sys, diffusers; before = set(sys.modules); import ssta.pipelines as p; models = p.supported_models(); dir(p); "
               "print(len(models), *sorted(name for name in set(sys.modules) - before if not name.startswith('ssta')))")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    count, *loaded = run.stdout.split()
    assert int(count) == len(PLACES)
    assert not [name for name in loaded if name.startswith(("diffusers.models.transformers", "diffusers.pipelines", "transformers"))]
    # What the dense steps dispatch to, and the package that it is in.
    assert sum(name.startswith("diffusers.") for name in loaded) < 10


def test_families_are_exported_by_name():
    assert set(NAMES) <= set(dir(pipelines)) and not set(NAMES) & set(pipelines.__all__)
    for name, model in NAMES.items():
        found = getattr(pipelines, name)
        assert isinstance(found, Family) and found.model == model and getattr(pipelines, name) is found
    from ssta.pipelines import WAN

    assert families.family_of(TINY["wan"].build(layers=1)) is WAN
    with pytest.raises(AttributeError, match="has no attribute 'WAM'"):
        assert pipelines.WAM


def test_a_class_renamed_upstream_takes_its_own_family_down(monkeypatch, register):
    models = {name: TINY[name].build(layers=1) for name in ("wan", "wan_vace", "skyreels_v2", "ltx")}
    # As in a process that has used none of them.
    register.update(PLACES)
    for module in [name for name in sys.modules if name.startswith("ssta.pipelines.families.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(transformer_wan, "WanAttnProcessor")
    for name in ("wan", "wan_vace"):
        model = models[name]
        with pytest.raises(ImportError, match=rf"WAN.* for {type(model).__name__} .*diffusers {diffusers.__version__}.*WanAttnProcessor"):
            apply_ssta(model)
    with pytest.raises(ImportError, match="SSTA's family WAN for WanTransformer3DModel"):
        assert pipelines.WAN
    for name in ("skyreels_v2", "ltx"):
        apply_ssta(models[name]).remove()
    assert len(supported_models()) == len(PLACES)


def test_a_place_that_holds_something_else():
    register_family("ToyTransformer", "ssta.pipelines.families.wan:WAN")
    with pytest.raises(TypeError, match="wan:WAN must be the Family of ToyTransformer .*, got a Family of WanTransformer3DModel"):
        apply_ssta(ToyTransformer())


@pytest.mark.parametrize("arguments, error, message", [
    (("ToyTransformer",), TypeError, "family must be a Family alone, or a model's class name with the place of its Family, got str"),
    ((None,), TypeError, "family must be a Family alone, .*, got NoneType"),
    (("ToyTransformer", 3), TypeError, "got str with place 3"),
    (("ToyTransformer", "toy.TOY"), ValueError, 'place must be "module:NAME", .*, got \'toy.TOY\''),
    (("ToyTransformer", ":TOY"), ValueError, 'place must be "module:NAME"'),
    (("", "toy:TOY"), ValueError, "family must not be empty"),
    (("WanTransformer3DModel", "toy:TOY"), ValueError, "not registered yet, got 'WanTransformer3DModel'"),
])
def test_what_cannot_be_registered(arguments, error, message):
    with pytest.raises(error, match=message):
        register_family(*arguments)
    assert len(supported_models()) == len(PLACES)


# A family of one's own


class ToyTransformer(nn.Module):
    """A video transformer of attention without projections, to show what registering takes."""

    class Attention(nn.Module):
        processor = None

        def forward(self, x):
            return self.processor(self, x)

    def __init__(self, layers: int = 1):
        super().__init__()
        self.attn = self.Attention()
        self.attn.processor = ToyProcessor()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": self.Attention()}) for _ in range(layers)])
        for block in self.blocks:
            block["attn"].processor = ToyProcessor()

    def forward(self, x):
        batch, channels, *thw = x.shape
        return self.attn(x.flatten(2).mT).mT.reshape(x.shape)


class ToyProcessor:
    def __call__(self, attn, x):
        x = x.unflatten(2, (1, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


class OtherProcessor(ToyProcessor):
    pass


class ToySSTAProcessor(SSTAProcessor):
    def __call__(self, attn, x):
        layout = TokenLayout.video_text(self.canvas(x.shape[1]), 0)
        x = x.unflatten(2, (1, -1))
        return self.attend(x, x, x, layout).flatten(2)


class OtherSSTAProcessor(ToySSTAProcessor):
    pass


def toy(sites=lambda model: [Site("attn", model.attn, ToyProcessor, ToySSTAProcessor)], **fields) -> Family:
    return Family("ToyTransformer", sites, lambda model, arguments: tuple(arguments["x"].shape[2:]),
                  **{"default_config": lambda: SPARSE, "default_schedule": Schedule} | fields)


def test_another_family_can_be_registered():
    model, x = ToyTransformer(), torch.randn(2, 16, *CANVAS)
    with pytest.raises(ValueError, match="register_family"):
        apply_ssta(model)
    register_family(toy())
    assert "ToyTransformer" in supported_models() and sorted(supported_models()) == list(supported_models())
    before = model(x)
    with apply_ssta(model, EVERYTHING):
        torch.testing.assert_close(model(x), before)
    with apply_ssta(model):
        assert not torch.allclose(model(x), before)
    assert torch.equal(model(x), before)
    with pytest.raises(ValueError, match="not registered yet, got 'ToyTransformer'; overwrite=True takes its place"):
        register_family(toy())


def test_a_family_is_registered_again_and_forgotten():
    """As where a notebook's cell runs again, with another function."""
    model = ToyTransformer()
    register_family(toy(default_config=lambda: EVERYTHING))
    with apply_ssta(model) as handle:
        register_family(toy(), overwrite=True)
        assert handle.config == EVERYTHING
    assert apply_ssta(model).config == SPARSE
    remove_ssta(model)
    unregister_family("ToyTransformer")
    assert "ToyTransformer" not in supported_models()
    with pytest.raises(ValueError, match="register_family adds others"):
        apply_ssta(model)
    # One of the library's own comes back.
    own = families.family_of(TINY["wan"].build(layers=1))
    register_family(Family("WanTransformer3DModel", own.sites, own.canvas, default_config=lambda: EVERYTHING), overwrite=True)
    with apply_ssta(TINY["wan"].build(layers=2)) as handle:
        assert handle.config == EVERYTHING
    unregister_family("WanTransformer3DModel")
    assert families.family_of(TINY["wan"].build(layers=1)) is own
    for name in ("WanTransformer3DModel", "ToyTransformer", "LTXVideoTransformer3DModel"):
        with pytest.raises(ValueError, match=f"a family that register_family registered, got '{name}'"):
            unregister_family(name)
    with pytest.raises(TypeError, match="overwrite must be a bool, got int"):
        register_family(toy(), overwrite=1)


@pytest.mark.parametrize("canvas, error, message", [
    (lambda model, arguments: None, TypeError, r"ToyTransformer's Family.canvas must return \(t, h, w\), got None"),
    (lambda model, arguments: arguments["x"].shape[3:], TypeError, r"Family.canvas must return \(t, h, w\), got torch.Size\(\[6, 8\]\)"),
    (lambda model, arguments: 3, TypeError, r"must return \(t, h, w\), got 3"),
    (lambda model, arguments: arguments["latents"].shape, ValueError, "ToyTransformer.forward must take latents, .* takes x"),
])
def test_a_mistaken_canvas(canvas, error, message):
    register_family(Family("ToyTransformer", site(), canvas, default_config=lambda: SPARSE, default_schedule=Schedule))
    model, x = ToyTransformer(), torch.randn(2, 16, *CANVAS)
    with pytest.raises(error, match=message):
        apply_ssta(model)
        model(x)


def test_a_canvas_that_is_too_small_is_told(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())

    class Lenient(SSTAProcessor):
        def __call__(self, attn, x):
            layout = self.video_then(x.shape[1])
            x = x.unflatten(2, (1, -1))
            return self.attend(x, x, x, layout).flatten(2)

    # Half of each size: an eighth of the tokens.
    register_family(Family("ToyTransformer", site(replacement=Lenient), lambda model, arguments: (2, 3, 4), default_config=lambda: SPARSE,
                           default_schedule=Schedule))
    with apply_ssta(model := ToyTransformer()):
        model(torch.randn(1, 16, 2, 6, 4))
        with pytest.warns(RuntimeWarning, match="168 tokens of Toy.* beside its canvas of 2 x 3 x 4, .* Family.canvas is too small"):
            model(torch.randn(1, 16, 4, 6, 8))


def test_stack_sites():
    model = ToyTransformer(layers=3)
    model.blocks[1]["attn"].processor = OtherProcessor()
    sites = list(stack_sites(model, "blocks", "attn", (ToyProcessor, OtherProcessor), (ToySSTAProcessor, OtherSSTAProcessor)))
    assert [site.name for site in sites] == [f"blocks.{i}.attn" for i in range(3)]
    assert all(site.module is model.get_submodule(site.name) for site in sites)
    assert [site.replacement for site in sites] == [ToySSTAProcessor, OtherSSTAProcessor, ToySSTAProcessor]
    assert {site.replacement for site in stack_sites(model, "blocks", "attn", ToyProcessor, ToySSTAProcessor)} == {ToySSTAProcessor}
    with pytest.raises(ValueError, match="one for each of the 2 classes of stock, got 3"):
        list(stack_sites(model, "blocks", "attn", (ToyProcessor, OtherProcessor), (ToySSTAProcessor,) * 3))


@pytest.mark.parametrize("fields, error, message", [
    ({"name": 3}, TypeError, r"Site.name must be a str, got 3 \(int\)"),
    ({"name": ""}, ValueError, "Site.name must not be empty"),
    ({"module": "attn"}, TypeError, "Site.module must be the attention module 'attn', got 'attn'"),
    ({"stock": "ToyProcessor"}, TypeError, "Site.stock must be a processor class or a tuple of them, got 'ToyProcessor'"),
    ({"stock": (ToyProcessor, ToyProcessor())}, TypeError, "Site.stock must be a processor class"),
    ({"stock": ()}, TypeError, r"Site.stock must be a processor class or a tuple of them, got \(\)"),
    ({"replacement": None}, TypeError, "Site.replacement must be a function, got None"),
])
def test_a_site_checks_its_fields(fields, error, message):
    with pytest.raises(error, match=message):
        Site(**{"name": "attn", "module": nn.Linear(2, 2), "stock": ToyProcessor, "replacement": ToySSTAProcessor} | fields)


@pytest.mark.parametrize("field, value, error, message", [
    *[("model", value, TypeError, "Family.model must be a str, got") for value in (None, 3, ToyTransformer)],
    ("model", "", ValueError, "Family.model must not be empty"),
    *[("sites", value, TypeError, "Family.sites must be a function, got") for value in (None, [])],
    *[("canvas", value, TypeError, "Family.canvas must be a function, got") for value in (None, (1, 2, 3))],
    *[("default_config", value, TypeError, "Family.default_config must be a function, got") for value in (None, SSTAConfig())],
    *[("default_schedule", value, TypeError, "Family.default_schedule must be a function, got") for value in (None, Schedule())],
    ("presets", ["trained"], TypeError, "Family.presets must be a dict of functions by name, got ..trained"),
    ("presets", {3: SSTAConfig}, TypeError, "Family.presets must be a dict of functions by name, got .3"),
    ("presets", {"trained": SSTAConfig()}, TypeError, "Family.presets must be a dict of functions by name, got .'trained'"),
])
def test_a_family_checks_its_fields(field, value, error, message):
    with pytest.raises(error, match=message):
        Family(**{"model": "Model", "sites": lambda model: [], "canvas": lambda model, arguments: (1, 1, 1)} | {field: value})


def site(name="attn", module=lambda model: model.attn, stock=ToyProcessor, replacement=ToySSTAProcessor):
    return lambda model: [Site(name, module(model), stock, replacement)]


def the_same(context):
    """One processor for every site of a context."""
    if not hasattr(context, "the_same"):
        context.the_same = ToySSTAProcessor(context)
    return context.the_same


@pytest.mark.parametrize("fields, error, message", [
    ({"sites": site("atn")}, ValueError, "dotted name of Site.module in ToyTransformer, got 'atn', which is no module"),
    ({"sites": site("blocks.7.attn")}, ValueError, "got 'blocks.7.attn', which is no module"),
    ({"sites": site("blocks.0.attn")}, ValueError, "got 'blocks.0.attn', which is another module"),
    ({"sites": lambda model: 2 * site()(model)}, ValueError, "Family.sites must yield every module once, got 'attn' and 'attn'"),
    ({"sites": lambda model: None}, TypeError, "ToyTransformer's Family.sites must yield Sites, got NoneType"),
    ({"sites": lambda model: []}, ValueError, "ToyTransformer's Family.sites must yield at least one Site, got none"),
    ({"sites": lambda model: ["attn"]}, TypeError, "ToyTransformer's Family.sites must yield Sites, got str"),
    ({"sites": site("blocks", lambda model: model.blocks)}, ValueError, "blocks must have its original processor ToyProcessor, got none"),
    ({"sites": site(stock=OtherProcessor)}, ValueError, "attn must have its original processor OtherProcessor, got ToyProcessor"),
    ({"sites": site(replacement=lambda context: None)}, TypeError, "attn's Site.replacement must return an SSTAProcessor .*, got NoneType"),
    ({"sites": site(replacement=ToyProcessor)}, TypeError, r"attn's Site.replacement must take one argument, .*, got ToyProcessor\(\)"),
    ({"sites": site(replacement=lambda context, heads: None)}, TypeError, r"must take one argument, .*, got <lambda>\(context, heads\)"),
    ({"sites": site(replacement=lambda context: ToyProcessor())}, TypeError, "must return an SSTAProcessor .*, got ToyProcessor"),
    ({"sites": lambda model: [*site(replacement=the_same)(model), *stack_sites(model, "blocks", "attn", ToyProcessor, the_same)]},
     ValueError, "must return a processor of its own for each site"),
    ({"default_config": dict}, TypeError, "ToyTransformer's default configuration must be of class SSTAConfig, got dict"),
    ({"default_schedule": lambda: None}, TypeError, "ToyTransformer's default schedule must be of class Schedule, got NoneType"),
    ({"presets": {"trained": Schedule}}, TypeError, r"preset 'trained' must return \(SSTAConfig, Schedule\), got Schedule"),
    ({"presets": {"trained": lambda: (None, Schedule())}}, TypeError, "preset 'trained' configuration must be of class SSTAConfig"),
    ({"presets": {}}, ValueError, "preset must be one of 'near', .*, '4 steps' for ToyTransformer, got 'trained'"),
])
def test_a_mistaken_family_leaves_the_model_as_it_was(fields, error, message):
    model, x = ToyTransformer(), torch.randn(2, 16, *CANVAS)
    processors, before = [model.attn.processor, model.blocks[0]["attn"].processor], model(x)
    register_family(toy(**fields))
    for _ in range(2):
        with pytest.raises(error, match=message):
            apply_ssta(model, preset="trained" if "presets" in fields else None)
        assert [model.attn.processor, model.blocks[0]["attn"].processor] == processors
        assert not model._forward_pre_hooks and not model._forward_hooks and not any("ssta" in name for name in vars(model))
        with pytest.raises(ValueError, match="must have SSTA applied"):
            remove_ssta(model)
    assert torch.equal(model(x), before)


def test_what_fails_while_processors_are_exchanged_is_rolled_back():
    class Locked(ToyTransformer.Attention):
        def __setattr__(self, name, value):
            if isinstance(value, SSTAProcessor):
                raise RuntimeError("locked")
            super().__setattr__(name, value)

    first, second, x = ToyTransformer(2), ToyTransformer(2), torch.randn(2, 16, *CANVAS)
    second.blocks[1]["attn"] = Locked()
    second.blocks[1]["attn"].processor = ToyProcessor()
    register_family(toy(lambda model: [*site()(model), *stack_sites(model, "blocks", "attn", ToyProcessor, ToySSTAProcessor)]))

    class Pipeline:
        transformer, transformer_2 = first, second

    before = first(x), second(x)
    with pytest.raises(RuntimeError, match="locked"):
        apply_ssta(Pipeline())
    for model in (first, second):
        assert {type(module.processor) for module in (model.attn, *(block["attn"] for block in model.blocks))} == {ToyProcessor}
        hooks = [hook for module in model.modules() for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
        assert hooks == [] and not any("ssta" in name for name in vars(model))
    assert torch.equal(first(x), before[0]) and torch.equal(second(x), before[1])
