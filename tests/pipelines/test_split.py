"""What families say about several ranks, checked without any: plans fit the models, and what does not is said."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks.context_parallel import _get_submodule_by_name
from tiny_hunyuan import SPARSE, apply_ssta, tiny_transformer
from tiny_models import SPLIT, TINY, run

from ssta.pipelines import Family, Split, cp_plan
from ssta.pipelines.patch.register import family_of
from ssta.pipelines.ranks.split import gathered
from ssta.pipelines.terms import Ranks

# By diffusers' own exchange: in LTX-2 audio's queries, which are whole, look at the video's keys, which are split; in Kandinsky 6 both are.
LEFT_TO_DIFFUSERS = {"ltx2": ("transformer_blocks.*.video_to_audio_attn",),
                     "kandinsky6": ("*.audio_dec_block.self_attention", "*.va_cross_attention", "*.av_cross_attention")}


@pytest.mark.parametrize("name", SPLIT)
def test_a_plan_names_modules_and_arguments_that_there_are(name):
    model = TINY[name].build()
    plan = cp_plan(model)
    gathers = 0
    for module, part in plan.items():
        found = _get_submodule_by_name(model, module)
        for one in found if isinstance(found, list) else [found]:
            if not isinstance(part, dict):
                gathers += 1
                continue
            parameters = inspect.signature(type(one).forward).parameters
            for argument, how in part.items():
                if isinstance(argument, str):
                    assert argument in parameters, (module, argument)
                else:
                    assert how.split_output
    assert gathers == 2 if name == "minimax_h3" else gathers == 1


@pytest.mark.parametrize("name", SPLIT)
def test_every_attention_is_a_site_or_whole_or_known(name):
    model = TINY[name].build()
    family = family_of(model)
    sites = {site.name for site in family.sites(model)}
    for module, attention in model.named_modules():
        if getattr(attention, "processor", None) is not None and module not in sites:
            left = LEFT_TO_DIFFUSERS.get(name.removesuffix("_gated"), ())
            assert sum(fnmatchcase(module, pattern) for pattern in (*family.split.whole, *left)) == 1, module


@pytest.mark.parametrize("name", ["hunyuan_video_15", "ltx", "wan"])
def test_the_plan_is_left_on_the_model_while_ssta_is(name):
    model = TINY[name].build()
    before = model._cp_plan
    with apply_ssta(model, SPARSE):
        assert model._cp_plan == cp_plan(model) and ("_cp_plan" in vars(model)) == (name != "wan")
        with pytest.raises(ValueError, match="SSTA applied already"):
            apply_ssta(model, SPARSE)
        assert model._cp_plan == cp_plan(model)
    assert model._cp_plan is before and "_cp_plan" not in vars(model)
    model._cp_plan = own = {"proj_out": gathered()}
    with apply_ssta(model, SPARSE):
        assert model._cp_plan == cp_plan(model)
    assert model._cp_plan is own


@pytest.mark.parametrize("name", ["hunyuan_video_i2v", "skyreels_v2", "kandinsky5", "wan"])
def test_a_copy_asks_for_its_own_ranks(name):
    model = TINY[name].build()
    with apply_ssta(model, SPARSE):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            context = twin._ssta_installation.context
            held = [hook.args[0] for module in twin.modules()
                    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()) if isinstance(hook, partial)]
            assert all(getattr(found, "__self__", found) is context for found in held)
            assert any(hasattr(found, "__self__") for found in held) == (name != "wan")
            run(twin, TINY[name].call())


def test_shares_are_dealt_out_in_order():
    for tokens, size in ((192, 4), (315, 4), (3, 4), (7, 2)):
        pieces = torch.arange(tokens).tensor_split(size)
        for rank, piece in enumerate(pieces):
            ranks = Ranks(None, rank, size, None)
            assert ranks.share(tokens) == len(piece) and (not len(piece) or ranks.start(tokens) == piece[0])


def test_tensor_parallelism_is_refused_before_and_after():
    by_tensors = SimpleNamespace(context_parallel_config=None, tensor_parallel_config=SimpleNamespace(tp_degree=2))
    model = tiny_transformer(layers=1)
    model._parallel_config = by_tensors
    with pytest.raises(ValueError, match="without tensor parallelism under SSTA, got HunyuanVideo15Transformer3DModel with tp_degree = 2"):
        apply_ssta(model, SPARSE)
    model._parallel_config = None
    with apply_ssta(model, SPARSE):
        model._parallel_config = by_tensors
        with pytest.raises(ValueError, match="tp_degree = 2"):
            model(**TINY["hunyuan_video_15"].call())
    assert model._parallel_config is by_tensors


def test_models_that_cannot_be_split_say_so():
    with pytest.raises(ValueError, match="model must be one of .*CogVideoX"):
        cp_plan(torch.nn.Linear(2, 2))
    small = TINY["kandinsky5"].build(layers=1)
    with pytest.raises(ValueError, match="at least 2 visual_transformer_blocks to be split over ranks, got 1"):
        cp_plan(small)
    with apply_ssta(small, SPARSE):
        assert small._cp_plan is None


@pytest.mark.parametrize("options, message", [
    ({"plan": 3}, r"Split.plan must be a dict or a function, got 3 \(int\)"),
    ({"tokens": 3}, r"Split.tokens must be a function or None, got 3"),
    ({"trains": False}, "Split.trains must be True, or a sentence that says why not, got False"),
    ({"trains": ""}, "Split.trains must be True"), ({"hooks": None}, "Split.hooks must be a function, got None"),
    ({"whole": "blocks"}, "Split.whole must be a tuple of names, got 'blocks'")])
def test_a_split_of_the_wrong_kinds(options, message):
    with pytest.raises(TypeError, match=message):
        Split(**({"plan": lambda model: {}} | options))


def test_a_family_without_a_split():
    with pytest.raises(TypeError, match="Family.split must be a Split or None, got {}"):
        Family("Mine", lambda model: [], lambda model, arguments: (1, 1, 1), split={})


def test_one_rank_needs_nothing_of_several(monkeypatch):
    monkeypatch.setitem(sys.modules, "ssta.pipelines.ranks.parallel", None)
    model, call = TINY["wan"].build(), TINY["wan"].call()
    stock = run(model, call)
    with apply_ssta(model, SPARSE):
        run(copy.deepcopy(model), call)
    assert torch.equal(run(model, call), stock)
