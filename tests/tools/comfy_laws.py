"""Runs the laws of ssta.pipelines.plugs.comfy against a checkout of ComfyUI, with tiny models of its own on the CPU and its own sampler.

    COMFYUI_PATH=path/to/ComfyUI python tests/tools/comfy_laws.py

In an environment that has what ComfyUI and SSTA need. Prints a line for each model and law, and exits with 1 if one does not hold or a
model cannot be built: so a change of ComfyUI's interfaces is seen.
"""

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import torch

from ssta import SSTAConfig
from ssta.pipelines import Schedule
from ssta.pipelines.plugs.comfy import OVERRIDE, patch_model, report_model, unpatch_model
from ssta.pipelines.plugs.comfy_models import comfy_model

TILE = {"tile_thw": (2, 4, 4), "kernel_thw": (1, 1, 1)}
ALL = SSTAConfig(**TILE, topk=4096)
FEW = SSTAConfig(**TILE, topk=2)
ALWAYS = Schedule()
WAN = {"image_model": "wan2.1", "model_type": "t2v", "dim": 96, "ffn_dim": 64, "freq_dim": 32, "text_dim": 16, "in_dim": 16, "out_dim": 16,
       "num_heads": 2, "num_layers": 3, "patch_size": (1, 2, 2), "qk_norm": True, "cross_attn_norm": True, "text_len": 8}
HUNYUAN = {"image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "vec_in_dim": 12, "context_in_dim": 16, "hidden_size": 64,
           "mlp_ratio": 1.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 256,
           "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": False, "byt5": False, "meanflow": False,
           "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}
# With channels for a first frame and for its mask.
HUNYUAN_15 = HUNYUAN | {"vec_in_dim": None, "patch_size": [1, 1, 1], "in_channels": 65, "out_channels": 32, "vision_in_dim": 24,
                        "byt5": True, "use_cond_type_embedding": True}
LTX = {"image_model": "ltxv", "in_channels": 16, "cross_attention_dim": 64, "attention_head_dim": 32, "num_attention_heads": 2,
       "caption_channels": 16, "num_layers": 3}
LTX_2 = LTX | {"image_model": "ltxav", "audio_in_channels": 128, "audio_cross_attention_dim": 32, "audio_attention_head_dim": 16,
               "audio_num_attention_heads": 2}


def comfy() -> SimpleNamespace:
    """ComfyUI's modules, on the CPU."""
    path = os.environ.get("COMFYUI_PATH", "")
    if not os.path.isdir(os.path.join(path, "comfy")):
        raise SystemExit(f"COMFYUI_PATH must be a checkout of ComfyUI, got {path!r}")
    sys.path.insert(0, path)
    import comfy.cli_args
    comfy.cli_args.args.cpu = True
    import comfy.model_patcher
    import comfy.patcher_extension
    import comfy.samplers
    import comfy.supported_models
    return SimpleNamespace(models=comfy.supported_models, samplers=comfy.samplers, patcher=comfy.model_patcher,
                           extension=comfy.patcher_extension)


class Case:
    """One model in a patcher, and how it is sampled."""

    def __init__(self, ui: SimpleNamespace, kind: str, unet: dict, channels: int, thw: tuple[int, int, int], **conditions: object) -> None:
        torch.manual_seed(0)
        config = getattr(ui.models, kind)(dict(unet))
        config.set_inference_dtype(torch.float32, None)
        base = config.get_model({}, "")
        with torch.no_grad():
            for parameter in base.parameters():
                torch.nn.init.normal_(parameter, std=0.08)
        cpu = torch.device("cpu")
        self.ui, self.base, self.conditions = ui, base.eval(), conditions
        self.model = ui.patcher.ModelPatcher(base, cpu, cpu)
        self.blocks = comfy_model(base.diffusion_model).block_names(base.diffusion_model)
        self.noise = torch.randn(1, channels, *thw)
        self.context = torch.randn(1, 5, 16)
        # Whether one frame of the same makes sense.
        self.images = "keyframe_idxs" not in conditions
        self.sigmas = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])

    def forward(self, model, sigma: float = 0.5) -> torch.Tensor:
        """One evaluation by ComfyUI's own batching of conditions."""
        made = self.base.extra_conds(cross_attn=self.context, noise=self.noise, device=self.noise.device, **self.conditions)
        cond = [[{"model_conds": made, "uuid": 0}]]
        self.base.current_patcher = model
        options = self.ui.extension.copy_nested_dicts(model.model_options)
        for kind in ("apply_model", "diffusion_model"):
            for key, wrappers in model.wrappers.get(kind, {}).items():
                for wrapper in wrappers:
                    self.ui.extension.add_wrapper_with_key(kind, key, wrapper, options, is_model_options=True)
        options["transformer_options"]["sample_sigmas"] = self.sigmas
        with torch.no_grad():
            return self.ui.samplers.calc_cond_batch(self.base, cond, self.noise, torch.tensor([sigma]), options)[0]


    def sample(self, model) -> torch.Tensor:
        """A generation of four steps by ComfyUI's own guider and sampler."""
        guider = self.ui.samplers.CFGGuider(model)
        condition = [[self.context, dict(self.conditions)]]
        guider.set_conds(condition, condition)
        with torch.no_grad():
            return guider.sample(self.noise, torch.zeros_like(self.noise), self.ui.samplers.sampler_object("euler"), self.sigmas, seed=0,
                                 disable_pbar=True)


def laws(case: Case) -> Iterator[tuple[str, Callable[[], None]]]:
    model, dense = case.model, case.forward(case.model)
    early = case.forward(model, 1.0)

    def everything() -> None:
        torch.testing.assert_close(case.forward(patch_model(model, ALL, ALWAYS)), dense, rtol=1e-4, atol=1e-5)

    def sparse() -> None:
        patched = patch_model(model, FEW, Schedule(dense_layers=(0,)))
        patched.pre_run()
        assert not torch.allclose(case.forward(patched), dense, atol=1e-6), "nothing changed"
        runs = report_model(patched)
        assert [run.density < 1 for run in runs] == [False] + [True] * (len(runs) - 1), runs
        assert len(runs) == len(report_model(patched)) > 2

    def warm_up() -> None:
        patched = patch_model(model, FEW, Schedule(dense_steps=0.25))
        assert torch.equal(case.forward(patched, 1.0), early), "the first of four steps is dense"
        assert not torch.equal(case.forward(patched, 0.8), case.forward(model, 0.8)), "the second is not"

    def blocks() -> None:
        count = len(case.blocks)
        assert torch.equal(case.forward(patch_model(model, FEW, Schedule(dense_layers=range(count)))), dense), "every block is dense"
        assert not torch.equal(case.forward(patch_model(model, FEW, Schedule(dense_layers=range(count - 1)))), dense), "the last one is not"

    def alone() -> None:
        patched = patch_model(model, FEW, ALWAYS)
        case.forward(patched)
        assert torch.equal(case.forward(model), dense), "the model that came in"
        assert torch.equal(case.forward(unpatch_model(patched.clone())), dense), "SSTA remove"

    def chained() -> None:
        for after in (False, True):
            calls = []

            def other(func, *args, calls=calls, **kwargs):
                calls.append(args[0].shape)
                return func(*args, **kwargs)
            before = model.clone()
            before.model_options["transformer_options"][OVERRIDE] = other
            case.forward(before)
            whole = len(calls)
            calls.clear()
            if after:
                patched = patch_model(model, FEW, ALWAYS)
                patched.model_options["transformer_options"][OVERRIDE] = other
            else:
                patched = patch_model(before, FEW, ALWAYS)
            patched.pre_run()
            case.forward(patched)
            assert len(calls) == whole - len(report_model(patched)), (len(calls), whole)

    def image() -> None:
        noise, case.noise = case.noise, case.noise[:, :, :1]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(case.forward(patch_model(model, FEW, ALWAYS)), case.forward(model)), "a single frame"
        finally:
            case.noise = noise

    def generation() -> None:
        whole = case.sample(model)
        torch.testing.assert_close(case.sample(patch_model(model, ALL, ALWAYS)), whole, rtol=1e-3, atol=1e-4)
        patched = patch_model(model, FEW, Schedule(dense_steps=0.3))
        for _ in range(2):
            assert not torch.allclose(case.sample(patched), whole, atol=1e-6)
            assert {(run.dense_steps, run.steps) for run in report_model(patched)} == {(2, 4)}, report_model(patched)
        assert torch.equal(case.sample(model), whole)

    for law in (everything, sparse, warm_up, blocks, alone, chained, generation, *([image] if case.images else [])):
        yield law.__name__, law


def with_sound(ui: SimpleNamespace) -> Case:
    """LTX-2, with as many tokens of sound as of video."""
    pair = torch.randn(1, 16, 4, 8, 8), torch.randn(1, 8, 256, 16)
    packed, shapes = import_module("comfy.utils").pack_latents(pair)
    case = Case(ui, "LTXAV", LTX_2, 16, (4, 8, 8), frame_rate=25, latent_shapes=shapes)
    case.noise, case.context, case.images = packed, torch.randn(1, 5, 32), False
    return case


def cases(ui: SimpleNamespace) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Models by name; a mask has two invalid tokens of five."""
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    pooled = torch.randn(1, 12)
    # Before HunyuanVideo 1.5 it had fewer parameters.
    known = {field.name for field in fields(import_module("comfy.ldm.hunyuan_video.model").HunyuanVideoParams)} | {"image_model"}
    first = {name: value for name, value in HUNYUAN.items() if name in known}
    yield "Wan", partial(Case, ui, "WAN21_T2V", WAN, 16, (4, 16, 15))
    if hasattr(ui.models, "WAN22_T2V"):
        # With a first frame whose tokens are at no noise level, every token has a time of its own.
        kept = torch.ones(1, 1, 4, 16, 16)
        kept[:, :, 0] = 0
        for conditions, parts in (({}, ""), ({"denoise_mask": kept}, ", from a picture")):
            yield f"Wan 2.2, 5B{parts}", partial(Case, ui, "WAN22_T2V", WAN | {"in_dim": 48, "out_dim": 48}, 48, (4, 16, 16), **conditions)
    yield "HunyuanVideo", partial(Case, ui, "HunyuanVideo", first, 16, (4, 16, 16), pooled_output=pooled)
    yield "HunyuanVideo, masked text", partial(Case, ui, "HunyuanVideo", first, 16, (4, 16, 16), pooled_output=pooled, attention_mask=mask)
    yield "LTX", partial(Case, ui, "LTXV", LTX, 16, (4, 8, 8), attention_mask=mask, frame_rate=25)
    if "denoise_mask" in inspect.signature(import_module("comfy.ldm.lightricks.model").LTXVModel._forward).parameters:
        # A guiding frame after four of the video; the model leaves out nine of its tokens.
        left = torch.zeros(1, 1, 5, 8, 8)
        left.view(-1)[-9:] = -1
        yield "LTX, guided", partial(Case, ui, "LTXV", LTX, 16, (5, 8, 8), frame_rate=25, concat_mask=left,
                                     attention_mask=mask, keyframe_idxs=torch.zeros(1, 3, 64, 2))
    if hasattr(ui.models, "LTXAV"):
        yield "LTX-2 with sound", partial(with_sound, ui)
    if hasattr(ui.models, "HunyuanVideo15"):
        states = torch.randn(1, 4, 24)
        extra = {"conditioning_byt5small": torch.randn(1, 3, 1472), "clip_vision_output": SimpleNamespace(
            penultimate_hidden_states=states, last_hidden_state=states)}
        for conditions, parts in (({"attention_mask": mask}, "masked text"), (extra, "glyphs and a picture")):
            yield f"HunyuanVideo 1.5, {parts}", partial(Case, ui, "HunyuanVideo15", HUNYUAN_15, 32, (4, 8, 8), pooled_output=pooled,
                                                        **conditions)


def main() -> int:
    warnings.simplefilter("error", RuntimeWarning)
    # Few tiles without an estimate are what the laws are about.
    warnings.filterwarnings("ignore", "config drops the tiles", RuntimeWarning)
    ui, failed, held = comfy(), 0, 0
    for name, make in cases(ui):
        try:
            case = make()
            found = list(laws(case))
        except Exception:
            traceback.print_exc()
            print(f"{name}: cannot be built")
            failed += 1
            continue
        for law, check in found:
            try:
                check()
                held += 1
                print(f"{name}: {law} holds")
            except Exception:
                traceback.print_exc()
                print(f"{name}: {law} does not hold")
                failed += 1
    print(f"{held} passed, {failed} failed")
    return 1 if failed or not held else 0


if __name__ == "__main__":
    sys.exit(main())
