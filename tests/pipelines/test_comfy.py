"""ComfyUI: the laws of the model patch, on a stand-in for its interfaces; tests/tools/comfy_laws.py has them for a checkout."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from comfy_stand_in import SIGMAS, HunyuanVideo, LTXVModel, Patcher, WanModel, optimized_attention
from torch import nn

from ssta import SSTAConfig, TokenLayout, VideoGrid
from ssta.kernels import notices
from ssta.pipelines import Schedule
from ssta.pipelines.plugs.comfy import KEY, OVERRIDE, patch_model, report_model, unpatch_model
from ssta.pipelines.plugs.comfy_models import Sequence, comfy_model
from ssta.pipelines.schedule.presets import small_tiles

TILE = {"tile_thw": (2, 4, 4), "kernel_thw": (1, 1, 1)}
ALL, FEW = SSTAConfig(**TILE, topk=4096), SSTAConfig(**TILE, topk=2)
ALWAYS = Schedule()
VIDEO = torch.Generator().manual_seed(7)
make = partial(torch.randn, generator=VIDEO)
PREFIX = torch.tensor([[1, 1, 1, 0, 0]])
KINDS = {
    "wan": (WanModel, (4, 16, 15), 128, {}),
    "wan without indices": (partial(WanModel, indexed=False), (4, 16, 16), 128, {}),
    "wan with a reference": (WanModel, (4, 16, 16), 128, {"reference_latent": make(1, 4, 16, 16)}),
    "wan with frames appended": (WanModel, (2, 16, 16), 128, {"time_dim_concat": make(1, 4, 2, 16, 16)}),
    "hunyuan 1.5": (HunyuanVideo, (4, 8, 8), 64, {}),
    "hunyuan 1.5, masked": (HunyuanVideo, (4, 8, 8), 64, {"attention_mask": PREFIX}),
    "hunyuan 1.5, masked by bias": (HunyuanVideo, (4, 8, 8), 64, {"attention_mask": (PREFIX - 1) * 1e9}),
    "hunyuan 1.5, glyphs": (HunyuanVideo, (4, 8, 8), 64, {"txt_byt5": make(1, 3, 64)}),
    "hunyuan, masked": (partial(HunyuanVideo, patch=(1, 2, 2), flipped=True), (4, 16, 16), 64, {"attention_mask": PREFIX}),
    "ltx": (LTXVModel, (4, 8, 8), 64, {"attention_mask": torch.zeros(1, 1, 5)}),
    "ltx, guided": (LTXVModel, (5, 8, 8), 64, {"keyframe_idxs": torch.zeros(1, 3, 64)}),
    "ltx, guided, some left out": (LTXVModel, (5, 8, 8), 64, {"keyframe_idxs": torch.zeros(1, 3, 64), "dropped": 9}),
    "ltx, guided, all left out": (LTXVModel, (5, 8, 8), 64, {"keyframe_idxs": torch.zeros(1, 3, 64), "dropped": 64}),
}


class Case:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        build, thw, width, self.conditions = KINDS[kind]
        self.model = Patcher(build().eval())
        self.x, self.context = torch.randn(1, 4, *thw), torch.randn(1, 5, width)

    def run(self, model: Patcher, sigma: float = 0.5, **changes) -> torch.Tensor:
        x, context = changes.pop("x", self.x), changes.pop("context", self.context)
        return model.run(x, context, sigma, **{**self.conditions, **changes})


@pytest.fixture
def said(monkeypatch, caplog):
    """What was said since the last look, but for what configurations of one's own are told; nothing was said before."""
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level(logging.WARNING, logger="ssta")

    def look() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [message for message in messages if not message.startswith("config drops the tiles")]
    return look


@pytest.fixture(params=KINDS)
def case(request):
    return Case(request.param)


def test_all_tiles_are_dense_attention(case, said):
    torch.testing.assert_close(case.run(patch_model(case.model, ALL, ALWAYS)), case.run(case.model), rtol=1e-4, atol=1e-5)
    assert said() == []


def test_few_tiles_are_not_and_every_block_says_so(case, said):
    patched = patch_model(case.model, FEW, Schedule(dense_layers=(0,)))
    assert not torch.allclose(case.run(patched), case.run(case.model), atol=1e-6)
    report = report_model(patched)
    names = comfy_model(case.model.diffusion).block_names(case.model.diffusion)
    assert [run.layer for run in report] == names
    assert [run.density < 1 for run in report] == [False] + [True] * (len(names) - 1)
    assert said() == []


def test_the_canvas_is_the_latents_in_patches():
    case = Case("wan")
    patched = patch_model(case.model, FEW, ALWAYS)
    case.run(patched)
    assert {run.thw for run in report_model(patched)} == {(4, 8, 8)}
    assert {run.tokens for run in report_model(patched)} == {256}


@pytest.mark.parametrize("flipped", [False, True])
def test_text_stands_where_the_version_of_comfyui_has_it(flipped):
    model = HunyuanVideo(flipped=flipped)
    found = comfy_model(model).sequence(model, {"x": torch.zeros(1, 4, 3, 4, 5), "context": torch.zeros(1, 7, 64)})
    assert isinstance(found, Sequence)
    kinds = [type(segment).__name__ for segment in found.layout.segments]
    assert kinds == (["VideoGrid", "DenseRun"] if flipped else ["DenseRun", "VideoGrid"]) and found.layout.dense_length == 7


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "masked" in kind])
def test_invalid_text_changes_nothing_and_valid_text_does(kind):
    case = Case(kind)
    patched, invalid, valid = patch_model(case.model, FEW, ALWAYS), case.context.clone(), case.context.clone()
    out = case.run(patched)
    invalid[:, 3:], valid[:, 2:3] = 9, 9
    torch.testing.assert_close(case.run(patched, context=invalid), out)
    assert not torch.allclose(case.run(patched, context=valid), out)


def test_warm_up_steps_and_dense_blocks_are_the_models_own(case):
    patched = patch_model(case.model, FEW, Schedule(dense_steps=0.5))
    for sigma, dense in zip(SIGMAS, (True, True, False, False)):
        assert torch.equal(case.run(patched, sigma), case.run(case.model, sigma)) == dense
    assert {(run.dense_steps, run.steps) for run in report_model(patched)} == {(2, 4)}
    count = len(comfy_model(case.model.diffusion).block_names(case.model.diffusion))
    assert torch.equal(case.run(patch_model(case.model, FEW, Schedule(dense_layers=tuple(range(count))))), case.run(case.model))
    assert not torch.equal(case.run(patch_model(case.model, FEW, Schedule(dense_layers=tuple(range(count - 1))))), case.run(case.model))


def test_a_new_generation_counts_anew():
    case = Case("wan")
    patched = patch_model(case.model, FEW, Schedule(dense_steps=0.5))
    for _ in range(2):
        patched.pre_run()
        assert report_model(patched) == []
        case.run(patched, 0.2)
        assert {(run.dense_steps, run.steps) for run in report_model(patched)} == {(0, 1)}


def test_the_incoming_model_is_left_alone_and_removal_takes_all_back(case):
    dense = case.run(case.model)
    patched = patch_model(case.model, FEW, ALWAYS)
    sparse = case.run(patched)
    assert torch.equal(case.run(case.model), dense)
    assert torch.equal(case.run(unpatch_model(patched.clone())), dense)
    assert torch.equal(case.run(patched), sparse)
    assert torch.equal(case.run(patch_model(patched, FEW, ALWAYS)), sparse), "once, not twice"
    assert unpatch_model(patched).get_attachment(KEY) is None


@pytest.mark.parametrize("after", [False, True])
def test_other_overrides_get_what_is_not_ours(case, after):
    calls = []

    def other(func, *args, **kwargs):
        calls.append((args, sorted(kwargs)))
        return func(*args, **kwargs)

    before = case.model.clone()
    before.model_options["transformer_options"][OVERRIDE] = other
    dense = case.run(before)
    assert torch.equal(dense, case.run(case.model))
    whole, calls[:] = len(calls), []
    patched = patch_model(case.model if after else before, FEW, Schedule(dense_layers=(0,)))
    if after:
        patched.model_options["transformer_options"][OVERRIDE] = other
    case.run(patched)
    ours = [run for run in report_model(patched) if run.density < 1]
    assert len(calls) == whole - len(ours) and all("transformer_options" in names for _, names in calls)


def test_single_frames_and_images_are_the_models_own(said):
    for kind, x in (("wan", make(1, 4, 1, 16, 16)), ("hunyuan 1.5", make(1, 4, 1, 8, 8))):
        case = Case(kind)
        patched = patch_model(case.model, FEW, ALWAYS)
        with pytest.warns(RuntimeWarning, match="single frame"):
            assert torch.equal(case.run(patched, x=x), case.run(case.model, x=x))
        assert torch.equal(case.run(patched, x=x), case.run(case.model, x=x))
        assert len(said()) == 1
    image = Patcher(HunyuanVideo(patch=(2, 2)).eval())
    x, context = make(1, 4, 16, 16), make(1, 5, 64)
    with pytest.warns(RuntimeWarning, match=r"\(1, 4, 16, 16\), which is no video"):
        assert torch.equal(patch_model(image, FEW, ALWAYS).run(x, context), image.run(x, context))


@pytest.mark.parametrize("mask, found", [
    ([[1, 0, 1, 1, 0]], "of 5 3 are valid, and token 1 is not"),
    ([[2, 1, 1, 0, 0]], "values from 0 to 2"),
    ([[0.0, -0.7, 0.0, 0.0, 0.0]], "weighs tokens"),
])
def test_masks_that_are_no_prefix_leave_the_model_its_own_attention(mask, found, said):
    case = Case("hunyuan 1.5")
    mask = torch.tensor(mask)
    with pytest.warns(RuntimeWarning, match=found):
        out = case.run(patch_model(case.model, FEW, ALWAYS), attention_mask=mask)
    assert torch.equal(out, case.run(case.model, attention_mask=mask))
    assert len(said()) == 1


@pytest.mark.parametrize("changes, found", [
    ({"grid": (4, 4, 16)}, r"canvas is \(4, 4, 16\), where \(4, 8, 8\) was expected"),
    ({"context": make(1, 256, 128)}, "cannot be told from its cross-attention"),
])
def test_a_canvas_that_is_not_certain_leaves_the_model_its_own_attention(changes, found, said):
    case = Case("wan")
    with pytest.warns(RuntimeWarning, match=found):
        out = case.run(patch_model(case.model, FEW, ALWAYS), **changes)
    assert torch.equal(out, case.run(case.model, **changes))
    assert len(said()) == 1


def test_guides_that_are_no_whole_frames_leave_the_model_its_own_attention():
    case = Case("ltx, guided")
    with pytest.warns(RuntimeWarning, match="63 guiding tokens are no whole frames"):
        case.run(patch_model(case.model, FEW, ALWAYS), keyframe_idxs=torch.zeros(1, 3, 63))


def test_a_model_that_never_asks_is_said(monkeypatch, said):
    case = Case("wan")
    monkeypatch.setattr(WanModel, "_forward", lambda self, x, timestep, context, clip, more, transformer_options, **_: x)
    patched = patch_model(Case("wan").model, FEW, ALWAYS)
    patched.get_attachment(KEY).arguments = ("x", "timestep", "context", "clip_fea", "time_dim_concat", "transformer_options")
    with pytest.warns(RuntimeWarning, match="none of its calls is self-attention over"):
        case.run(patched)


def test_steps_that_cannot_be_counted_are_said(said):
    case = Case("wan")
    with pytest.warns(RuntimeWarning, match="without sample_sigmas"):
        out = case.run(patch_model(case.model, FEW, Schedule(dense_steps=1.0)), sigmas=None)
    assert not torch.equal(out, case.run(case.model))


def test_models_and_settings_that_do_not_fit_are_refused():
    wan = Case("wan").model
    for make_it, error, match in (
            (lambda: patch_model(nn.Linear(1, 1)), TypeError, "ModelPatcher of ComfyUI's, got Linear"),
            (lambda: patch_model(Patcher(nn.Linear(1, 1))), ValueError, "WanModel, HunyuanVideo, LTXVModel.*got Linear"),
            (lambda: patch_model(wan, "fast"), TypeError, "config must be an SSTAConfig"),
            (lambda: patch_model(wan, FEW, 0.15), TypeError, "schedule must be a Schedule"),
            (lambda: patch_model(wan, FEW, Schedule(densities=(1, 0.5))), ValueError, "schedule must have the same density at all steps"),
            (lambda: patch_model(wan, densty=0.15), TypeError, "unexpected keyword 'densty'"),
            (lambda: patch_model(wan, FEW, density=0.15), ValueError, "config must be left out where fields by keyword"),
            (lambda: patch_model(wan, FEW, Schedule(dense_layers=(3,))), ValueError, r"\[-3, 3\) for this model's 3 layers, got 3"),
            (lambda: report_model(wan), ValueError, "must have SSTA to report on")):
        with pytest.raises(error, match=match):
            make_it()


def test_fields_change_the_default_and_a_configuration_that_gives_up_the_estimate_or_its_density_is_told(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    case = Case("wan")
    configs = patch_model(case.model, density=0.3, compensation_parts=2).get_attachment(KEY).configs
    assert configs[1] == replace(small_tiles(), density=0.3, compensation_parts=2)
    own = SSTAConfig(tile_thw=(2, 4, 4), density=0.15)
    with pytest.warns(RuntimeWarning, match="config drops the tiles .* the default of WanModel estimates them"):
        patched = patch_model(case.model, own, ALWAYS)
    with pytest.warns(RuntimeWarning, match="its window of 3 x 3 x 3 tiles, .* is 100.0% of the tile pairs .* of WanModel"):
        case.run(patched)


def test_versions_of_comfyui_that_are_not_known_are_refused():
    lacking = WanModel()
    del lacking.blocks
    with pytest.raises(ValueError, match="must have blocks as ComfyUI's WanModel does"):
        patch_model(Patcher(lacking))

    class Other(WanModel):
        def _forward(self, x, timestep, text, options):
            return x

    with pytest.raises(ValueError, match="got one that takes x, timestep, text, options"):
        patch_model(Patcher(Other()))


def test_attention_without_a_model_is_comfyuis():
    q = make(1, 8, 16)
    assert optimized_attention(q, q, q, 2).shape == q.shape


def test_a_sequence_may_lack_droppable_tokens_only():
    layout = TokenLayout.video_text((2, 3, 4), 6)
    assert Sequence(layout).of_length(30) is layout and Sequence(layout).of_length(29) is None
    assert Sequence(layout, 6).of_length(27) == TokenLayout.video_text((2, 3, 4), 3)
    assert Sequence(layout, 6).of_length(24) == TokenLayout((VideoGrid(2, 3, 4),))
    assert Sequence(layout, 6).of_length(23) is None and Sequence(layout, 6).of_length(31) is None


@pytest.mark.slow
def test_it_compiles_to_one_graph_and_says_what_it_has_to(said):
    case = Case("hunyuan 1.5, masked")
    patched = patch_model(case.model, FEW, ALWAYS)
    expected = case.run(patched)
    torch._dynamo.reset()
    patched.diffusion = torch.compile(case.model.diffusion, fullgraph=True, backend="eager")
    torch.testing.assert_close(case.run(patched), expected, rtol=1e-4, atol=1e-5)
    x = make(1, 4, 1, 8, 8)
    with pytest.warns(RuntimeWarning, match="single frame"):
        out = case.run(patched, x=x)
    torch.testing.assert_close(out, case.run(case.model, x=x))
