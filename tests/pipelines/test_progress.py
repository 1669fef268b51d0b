"""Counting steps: every pipeline that diffusers has for the supported models, under the schedulers it comes with, agrees on what the first
steps are; generations that start in the middle; loops of a user's own; a schedule that cannot count says so."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LTXEulerAncestralRFScheduler,
)
from diffusers.schedulers import MiniMaxH3Scheduler
from tiny_hunyuan import SPARSE
from tiny_models import TINY, run
from tiny_pipelines import PIPELINES, flow, hunyuan_vae, latents, unipc, video

from ssta.kernels import notices
from ssta.pipelines import Schedule, apply_ssta, supported_models

THIRD = Schedule(dense_steps=0.3)


def dpm() -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


FLOW = dict(flow=flow, unipc=unipc, dpm=dpm)
COGVIDEOX = dict(ddim=CogVideoXDDIMScheduler, cogvideox_dpm=CogVideoXDPMScheduler)
# The schedulers that pipelines are published with or that people exchange them for; the others take what PIPELINES gives them.
SCHEDULERS = dict(wan=FLOW, skyreels_v2=FLOW, wan_video_to_video=FLOW, wan_image_to_video=FLOW, wan_vace=FLOW, cogvideox=COGVIDEOX,
                  allegro=dict(euler=EulerAncestralDiscreteScheduler, ddim=DDIMScheduler), consisid=COGVIDEOX,
                  cogvideox_image_to_video=COGVIDEOX, cogvideox_video_to_video=COGVIDEOX)
CASES = [(name, each) for name in PIPELINES for each in SCHEDULERS.get(name, [None]) if name != "wan_2.2"]


class Trail:
    """What the transformer's layers did from now on: for each forward, whether its step was dense."""

    def __init__(self, model: torch.nn.Module):
        self.dense: list[bool] = []
        context = next(module.processor.context for module in model.modules() if hasattr(getattr(module, "processor", None), "context"))
        # After the hook that finds the step.
        self.hook = model.register_forward_pre_hook(lambda *_: self.dense.append(context.call.ruling.dense))

    def steps(self, count: int) -> list[bool]:
        """For each of ``count`` steps, which all take as many forwards."""
        forwards, rest = divmod(len(self.dense), count)
        assert forwards and not rest, (len(self.dense), count)
        steps = [self.dense[i * forwards:(i + 1) * forwards] for i in range(count)]
        assert all(len(set(step)) == 1 for step in steps)
        self.dense.clear()
        return [step[0] for step in steps]


def expected(count: int, fraction: float = 0.3) -> list[bool]:
    dense = min(math.ceil(fraction * count - 1e-9), count - 1)
    return [True] * dense + [False] * (count - dense)


@pytest.mark.parametrize("name, each", CASES)
def test_the_first_steps_of_every_pipeline_are_dense(name, each):
    tiny = PIPELINES[name]
    pipe = tiny.build(layers=1, scheduler=each and SCHEDULERS[name][each])
    with apply_ssta(pipe, SPARSE, schedule=THIRD) as handle, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trail = Trail(pipe.transformer)
        # Twice in a row, with more steps, and with a single one, which stays sparse.
        for steps in (2, 2, 4) + ((1,) if name not in ("mochi", "cogvideox_video_to_video") else ()):
            whole = {"strength": 1.0} if name.endswith("video_to_video") else {}
            latents(pipe, steps=steps, **tiny.call | whole)
            assert trail.steps(steps) == expected(steps)
            assert (handle.report()[-1].steps, handle.report()[-1].dense_steps) == (steps, sum(expected(steps)))


@pytest.mark.parametrize("name, each", [case for case in CASES if case[0].endswith("video_to_video")])
@pytest.mark.parametrize("strength", [0.3, 0.6])
def test_a_generation_that_starts_in_the_middle_has_its_own_first_steps(name, each, strength):
    tiny = PIPELINES[name]
    pipe = tiny.build(layers=2, scheduler=SCHEDULERS[name][each])
    with apply_ssta(pipe, SPARSE, schedule=THIRD) as handle:
        trail, count = Trail(pipe.transformer), int(10 * strength)
        for _ in range(2):
            latents(pipe, steps=10, **tiny.call | {"strength": strength})
            assert trail.steps(count) == expected(count)
            assert (handle.report()[0].steps, handle.report()[0].dense_steps) == (count, sum(expected(count)))


def test_an_ltx_video_that_starts_in_the_middle_has_its_own_first_steps():
    """Its pipeline leaves timesteps out without telling the scheduler where it begins."""
    tiny = PIPELINES["ltx_condition"]
    pipe = tiny.build()
    with apply_ssta(pipe, SPARSE, schedule=THIRD) as handle:
        trail = Trail(pipe.transformer)
        for _ in range(2):
            latents(pipe, steps=10, **tiny.call | {"denoise_strength": 0.6})
            assert trail.steps(6) == expected(6)
            assert (handle.report()[0].steps, handle.report()[0].dense_steps) == (6, 2)


def test_both_transformers_of_wan_2_2_share_a_beginning():
    """Also under a scheduler that nobody told where to begin, as Wan 2.2's image-to-video pipeline leaves it."""
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    pipe.scheduler.set_begin_index = lambda index: None
    with apply_ssta(pipe, SPARSE, schedule=THIRD):
        first, second = Trail(pipe.transformer), Trail(pipe.transformer_2)
        for _ in range(2):
            latents(pipe, steps=10, **tiny.call)
            assert first.steps(4) == [True] * 3 + [False] and second.steps(6) == [False] * 6
    pipe = tiny.build()
    # The second alone knows from the scheduler that the generation began before it.
    with apply_ssta(pipe.transformer_2, SPARSE, schedule=THIRD, scheduler=pipe.scheduler):
        trail = Trail(pipe.transformer_2)
        latents(pipe, steps=10, **tiny.call)
        assert trail.steps(6) == [False] * 6


@pytest.mark.parametrize("scheduler, entries", [
    (FlowMatchHeunDiscreteScheduler, lambda n: 2 * n - 1), (HeunDiscreteScheduler, lambda n: 2 * n - 1),
    (LTXEulerAncestralRFScheduler, lambda n: n), (FlowMatchEulerDiscreteScheduler, lambda n: n), (MiniMaxH3Scheduler, lambda n: n - 1)])
@pytest.mark.parametrize("says", ["timestep", "step_index"])
def test_a_loop_of_one_s_own(scheduler, entries, says):
    """Whichever tells: the timestep that the model is given, or the scheduler; second order has two calls to a step but the last."""
    model, call, scheduler = TINY["wan"].build(), TINY["wan"].call(), scheduler()
    with apply_ssta(model, SPARSE, schedule=THIRD, scheduler=scheduler):
        trail = Trail(model)
        for steps in (6, 6, 9):
            scheduler.set_timesteps(steps)
            x = call["hidden_states"]
            for t in scheduler.timesteps:
                timestep = t.expand(1) if says == "timestep" else t.reshape(1).clone().float()
                # Guidance: two forwards.
                run(model, call | {"timestep": timestep})
                out = run(model, call | {"timestep": timestep})
                x = scheduler.step(out, t, x, return_dict=False)[0]
            assert trail.steps(entries(steps)) == expected(entries(steps))


def test_minimax_h3_s_denoising_blocks():
    """Its pipeline is modular, and calls the model with timesteps of its own for each row."""
    from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopDenoiser, MiniMaxH3LoopSchedulerStep

    call = TINY["minimax_h3"].call()

    class Parts:
        transformer, scheduler, audio_scheduler = TINY["minimax_h3"].build(), MiniMaxH3Scheduler(), MiniMaxH3Scheduler()

    parts = Parts()
    layout = {name: call[name] for name in ("token_tags", "position_ids", "video_indices", "audio_indices", "text_indices")}
    blocks = MiniMaxH3LoopDenoiser(), MiniMaxH3LoopSchedulerStep()
    with apply_ssta(parts, SPARSE, schedule=THIRD):
        trail = Trail(parts.transformer)
        for steps in (5, 8):
            parts.scheduler.set_timesteps(steps), parts.audio_scheduler.set_timesteps(steps)
            timesteps = parts.scheduler.timesteps
            state = SimpleNamespace(
                latents=call["hidden_states"][0, :, :4].repeat(1, 4), audio_latents=call["audio_hidden_states"][0].clone(),
                prompt_embeds=call["encoder_hidden_states"], attention_kwargs=None, denoiser_input_fields=layout,
                row_timestep_plan=[(t.reshape(1).clone(), call["timestep_indices"]) for t in timesteps],
                num_condition_video_rows=0, num_condition_audio_rows=0, audio_timesteps=parts.audio_scheduler.timesteps)
            for i, t in enumerate(timesteps):
                blocks[0](parts, state, i, t)
                state.noise_pred = torch.zeros_like(state.latents)[None]
                blocks[1](parts, state, i, t)
            assert trail.steps(len(timesteps)) == expected(len(timesteps))


def test_framepack_counts_the_steps_of_each_section():
    prompts = {name: x for name, x in PIPELINES["hunyuan_video"].call.items() if not name.startswith(("negative", "true"))}
    pipeline = replace(
        PIPELINES["hunyuan_video"], pipeline="HunyuanVideoFramepackPipeline", tiny="framepack", parts=hunyuan_vae,
        missing=(*PIPELINES["hunyuan_video"].missing, "image_encoder", "feature_extractor"),
        methods={"encode_image": lambda pipe, *_, **__: torch.zeros(1, 3, 8), "prepare_image_latents": lambda *_, **__: video()[:, :, :1]})
    pipe = pipeline.build()
    with apply_ssta(pipe, SPARSE, schedule=THIRD):
        trail = Trail(pipe.transformer)
        parts = latents(pipe, steps=5, **prompts | dict(num_frames=18, latent_window_size=3, image=torch.zeros(1, 3, 96, 128)))
        assert [part.shape[2] for part in parts] == [3, 7] and trail.dense == 2 * expected(5)


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())


def test_a_schedule_that_cannot_count_says_so_once(unsaid):
    model, call, scheduler = TINY["cogvideox"].build(), TINY["cogvideox"].call(), CogVideoXDDIMScheduler()
    with apply_ssta(model, SPARSE, schedule=THIRD, scheduler=scheduler):
        scheduler.set_timesteps(4)
        with pytest.warns(RuntimeWarning, match=r"dense_steps = 0.3, but nothing says .*CogVideoXTransformer3DModel.*CogVideoXDDIMSche"):
            run(model, call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, call)
    with apply_ssta(TINY["wan"].build(), SPARSE, schedule=Schedule()) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(handle._installed[0][1], TINY["wan"].call())


def test_forwards_after_a_generation_are_no_steps_of_it(unsaid):
    """As when training goes on after a video was made to look at."""
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    with apply_ssta(pipe, SPARSE, schedule=THIRD):
        latents(pipe, steps=4, **tiny.call)
        trail = Trail(pipe.transformer)
        with pytest.warns(RuntimeWarning, match="nothing says which step"):
            run(pipe.transformer, TINY["wan"].call() | {"timestep": torch.tensor([900.0])})
        assert trail.dense == [False]


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_scheduler_that_nobody_steps_is_told(unsaid, forwards):
    """A loop of one's own with the values of the timesteps alone; guidance, and generations of one step, are no such loop."""
    model, call, scheduler = TINY["wan"].build(layers=1), TINY["wan"].call(), flow()
    with apply_ssta(model, SPARSE, schedule=THIRD, scheduler=scheduler):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for steps in (1,) * 7 + (2, 2, 2):
                scheduler.set_timesteps(steps)
                for t in scheduler.timesteps:
                    for _ in range(4):
                        run(model, call | {"timestep": torch.tensor([float(t)])})
                    scheduler.step(call["hidden_states"], t, call["hidden_states"])
        scheduler.set_timesteps(6)
        with pytest.warns(RuntimeWarning, match="FlowMatchEulerDiscreteScheduler, which has not moved in 5 forwards, .* scheduler.step"):
            for t in [float(t) for t in scheduler.timesteps for _ in range(forwards)][:5]:
                run(model, call | {"timestep": torch.tensor([t])})


def pipelines() -> dict[str, type]:
    """Every pipeline class of diffusers with a supported transformer, by name."""
    found, packages = {}, ("allegro", "anyflow", "chronoedit", "cogvideo", "consisid", "cosmos", "easyanimate", "helios", "hunyuan_video",
                           "hunyuan_video1_5", "kandinsky5", "kandinsky6", "ltx", "ltx2", "mochi", "motif_video", "skyreels_v2", "wan")
    for package in packages:
        package = importlib.import_module(f"diffusers.pipelines.{package}")
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("pipeline_") or module.name == "pipeline_output":
                continue
            module = importlib.import_module(f"{package.__name__}.{module.name}")
            for name, kind in vars(module).items():
                if not inspect.isclass(kind) or kind.__module__ != module.__name__ or not issubclass(kind, diffusers.DiffusionPipeline):
                    continue
                transformer = inspect.signature(kind.__init__).parameters.get("transformer")
                if transformer is not None and any(model in str(transformer.annotation) for model in supported_models()):
                    found[name] = kind
    return found


def tellers(kind: type) -> set[str]:
    """How the denoising loop of a pipeline says which step it is, one of the ways that Progress finds; from its source, because most of
    them need VAEs, image encoders and files to run."""
    ways, loops = set(), 0
    for loop in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(kind)))):
        if not isinstance(loop, ast.For) or "timesteps" not in ast.unparse(loop.iter) and "step_matrix" not in ast.unparse(loop.iter):
            continue
        text = ast.unparse(loop)
        if ".step(" not in text:
            continue
        loops += 1
        if "self._current_timestep = t\n" in text:
            ways.add("current")
        elif "timestep = t.expand(" in text and "timestep=timestep," in text:
            ways.add("timestep")
        elif "self.scheduler.step(" in text and hasattr(inspect.signature(kind.__init__).parameters["scheduler"].annotation, "step_index"):
            ways.add("step_index")
        else:
            ways.add("none")
    assert loops, kind
    return ways


def test_every_pipeline_of_diffusers_says_which_step_it_is():
    found = {name: tellers(kind) for name, kind in pipelines().items()}
    assert len(found) >= 35 and {tiny.pipeline.rpartition(":")[2] for tiny in PIPELINES.values()} <= set(found)
    # Mochi keeps 1000 - t.
    assert {name: ways for name, ways in found.items() if "none" in ways} == {}
    others = {f"{name}Pipeline" for name in (
        "AnyFlow", "AnyFlowFAR", "ConsisID", "Cosmos2_5_PredictBase", "Cosmos2_5_Transfer", "EasyAnimate", "EasyAnimateControl",
        "EasyAnimateInpaint", "HeliosPyramid", "Kandinsky5I2I", "Kandinsky5I2V", "Kandinsky5T2I", "Kandinsky5T2V", "Mochi")}
    assert {name for name, ways in found.items() if ways != {"current"}} == others
