"""The default of ``apply_ssta(pipe)``: each step of a generation is the step of the same model by the reference."""

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from tiny_models import TINY, cast
from tiny_pipelines import PIPELINES, embeds, latents
from torch.utils._pytree import tree_map
from uninitialised import poison_free_memory

from ssta.kernels import choose_route
from ssta.pipelines import apply_ssta
from ssta.pipelines.patch.register import family_of

# How much farther from the truth kernels may be than the reference in the same dtype, whose selections are rounded alike.
FACTOR = 2.0


@dataclass(frozen=True)
class Place:
    """Where a model runs, and how large it is.

    Attributes:
        device, dtype: of the model; ``wide`` is the truth's dtype.
        thw: the canvas. It has several tiles along each axis, and the last ones are short.
        heads: so many that dense attention has more tiles of queries than a GPU has multiprocessors.
        steps: of the scheduler.
        image: tokens of HunyuanVideo's missing image, all invalid.
    """

    device: str
    dtype: torch.dtype
    wide: torch.dtype
    thw: tuple[int, int, int]
    heads: int
    steps: int
    image: int


ON_GPU = Place("cuda", torch.bfloat16, torch.float32, (7, 14, 36), 8, 4, 729)
ON_CPU = Place("cpu", torch.bfloat16, torch.float32, (5, 6, 12), 2, 2, 20)
# Pixels of a token, frames of pixels for one of tokens; whether attention is given a mask, by which it is dense in kernels of ours.
PIXELS = {"wan": (16, 4), "hunyuan_video_15": (16, 4), "ltx": (32, 8)}
MASKED = {"hunyuan_video_15"}
ATTENTION = 20
MODELS = {"wan": 128, "hunyuan_video_15": 128, "ltx": 64}


def pipeline_of(name, place, dim):
    """A pipeline of three layers, and a call's arguments."""
    (t, h, w), (spatial, temporal), width = place.thw, PIXELS[name], place.heads * dim
    options = {"wan": dict(rope_max_seq_len=64), "hunyuan_video_15": dict(rope_axes_dim=(dim // 8, dim * 7 // 16, dim * 7 // 16)),
               "ltx": dict(cross_attention_dim=width)}[name]
    if dim == 16:
        options.pop("rope_axes_dim", None)

    def prepare_latents(pipe, *_):
        return embeds(t * h * w, 4, 5).mT.reshape(1, 4, t, h, w).to(pipe.device, pipe.transformer.dtype)

    tiny = replace(PIPELINES[name], options=options | dict(num_attention_heads=place.heads, attention_head_dim=dim),
                   **(dict(methods=dict(prepare_latents=prepare_latents), settings=dict(vision_num_semantic_tokens=place.image))
                      if name == "hunyuan_video_15" else {}))
    pipe = tiny.build(layers=3)
    for site in family_of(pipe.transformer).sites(pipe.transformer):
        # Tiny models have queries of three times the size, by which tokens of noise differ too much to be estimated together.
        site.module.norm_q.weight.data.div_(2)
        # Attention to noise is small, and would not show beside the other layers' part.
        site.module.to_out[0].weight.data.mul_(ATTENTION)
    pipe.transformer.to(place.device, place.dtype)
    call = tiny.call | dict(height=spatial * h, width=spatial * w, num_frames=temporal * (t - 1) + 1)
    return pipe, tree_map(lambda x: x.to(place.device) if isinstance(x, torch.Tensor) else x, cast(call, place.dtype))


def recorded(model):
    """From now on the arguments of each forward of ``model`` and its output; memory that is free before one is NaN."""
    forwards = []

    def before(module, args, kwargs):
        poison_free_memory()
        forwards.append([tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))])

    handles = [model.register_forward_pre_hook(before, with_kwargs=True),
               model.register_forward_hook(lambda module, args, out: forwards[-1].append(out[0].clone()))]
    return forwards, handles


def distances(x, truth):
    """The root mean square of x's error in each hundredth of the numbers."""
    off = (x.to(truth.dtype) - truth).flatten()
    return torch.stack([piece.square().mean().sqrt() for piece in off.tensor_split(100)])


def expected_implementations(place, dim, masked):
    """Of the dense first layer and of a sparse one."""
    name = choose_route("auto", torch.device(place.device), place.dtype, dim).name
    if place.device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        assert name == "hopper"
    return "dense, " + (name if masked or name == "hopper" else "default backend"), name


def check(name, place, dim, backend):
    pipe, call = pipeline_of(name, place, dim)
    model = pipe.transformer
    exact, plain = deepcopy(model).to(place.wide), deepcopy(model)
    with apply_ssta(pipe) as handle:
        assert (handle.config.density, handle.config.compensation_parts, handle.schedule.dense_layers) == (0.15, 2, (0,))
        if backend is not None:
            torch._dynamo.reset()
            model.compile_repeated_blocks(fullgraph=True, backend=backend)
        forwards, hooks = recorded(model)
        latents(pipe, steps=place.steps, **call)
        for hook in hooks:
            hook.remove()
        runs = handle.report()
    # Two prompts, in one forward or in two.
    assert len(forwards) in (place.steps, 2 * place.steps) and [run.steps for run in runs] == [place.steps] * 3
    dense, sparse = expected_implementations(place, dim, name in MASKED)
    assert [run.implementation for run in runs] == [dense, sparse, sparse]
    for run in runs[1:]:
        assert run.without_estimate[0] == 0 and (sparse != "hopper" or {("estimate", "triton"), ("merge", "hopper")} <= set(run.by))
    errors, allowed = [], []
    with apply_ssta(exact, impl="reference"), apply_ssta(plain, impl="reference"), torch.no_grad():
        for (args, kwargs), out in forwards:
            truth = exact(*cast(args, place.wide), **cast(kwargs, place.wide))[0]
            errors.append(distances(out, truth))
            allowed.append(FACTOR * distances(plain(*args, **kwargs)[0], truth))
    # One tile that is selected in another's place counts in a single forward: the worst of all is the limit of each.
    limits = {"in the mean": max(x.square().mean().sqrt() for x in allowed), "in one piece": max(x.max() for x in allowed)}
    for number, error in enumerate(errors):
        for where, size in (("in the mean", error.square().mean().sqrt()), ("in one piece", error.max())):
            # NaN is not below anything.
            assert size <= limits[where], f"forward {number + 1} is off by {size / limits[where]:.2f} of the limit {where}"


# Inductor, which compiles for ten seconds a graph, is run of the smallest model.
@pytest.mark.gpu
@pytest.mark.parametrize("name, compiled", [("wan", None), ("wan", "aot_eager"), ("hunyuan_video_15", None),
                                            ("hunyuan_video_15", "aot_eager"), ("ltx", None), ("ltx", "inductor")])
def test_the_default_in_a_model(name, compiled):
    check(name, ON_GPU, MODELS[name], compiled)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where the test above runs larger models")
@pytest.mark.parametrize("name", MODELS)
def test_the_default_in_a_model_on_a_cpu(name):
    assert TINY[PIPELINES[name].tiny].options["attention_head_dim"] == 16
    check(name, ON_CPU, 16, None)
