"""What cases of several ranks share: tiny models that divide evenly, one process to compare with, and what every rank must raise."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace
from functools import partial

import diffusers
import diffusers.hooks.context_parallel as hooks
import tiny_models
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from tiny_models import TINY, cast
from torch import nn

from ssta import SSTAConfig
from ssta.pipelines import Schedule, apply_ssta

SPARSE = SSTAConfig(tile_thw=(2, 3, 4), kernel_thw=(1, 1, 1), topk=2)
EVEN, ODD = (4, 6, 8), (5, 7, 9)
# 4 heads need these, too.
WIDER = {"ltx": {"cross_attention_dim": 64}, "kandinsky5": {"model_dim": 64}, "wan_i2v": {"added_kv_proj_dim": 64},
         "ltx2": {"cross_attention_dim": 64, "audio_num_attention_heads": 4, "audio_cross_attention_dim": 32, "caption_channels": 12}}


def run_all(rank: int, ranks: int, cases: dict) -> dict[str, str | None]:
    """By each case's name the traceback of what it raised, or None."""
    torch.manual_seed(0)
    # diffusers divides ranks by the number of accelerators, of which a CPU has none; gloo gathers equal lengths only.
    torch.accelerator.device_count = lambda: 1
    hooks._all_gather_anything = _gathered
    diffusers.logging.set_verbosity_error()
    found: dict[str, str | None] = {}
    for name, case in cases.items():
        try:
            case(rank, ranks)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    return found


def _gathered(tensor, dim, group):
    sizes = hooks.gather_size_by_comm(tensor.shape[dim], group)
    padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, max(sizes) - tensor.shape[dim]]
    mine = nn.functional.pad(tensor, padding).contiguous()
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim)


def tiny(name: str, thw=EVEN, prompts=(4,), heads: int = 2, **options):
    """(the model, a call of it), of which ranks can share everything out evenly if the canvas lets them."""
    made = TINY[name]
    if name == "minimax_h3":
        made = replace(made, inputs=partial(tiny_models.minimax_h3, audio=6))
    if heads != 2 and name != "kandinsky5":
        options |= {"num_attention_heads": heads}
    if heads == 4:
        options |= WIDER.get(name, {})
    call = made.call(thw, prompts)
    if heads == 4 and name == "ltx2":
        call |= {of: call[of].repeat(1, 1, 2) for of in ("encoder_hidden_states", "audio_encoder_hidden_states")}
    return made.build(**options).to(made.dtype), cast(call, made.dtype)


def forward(model, call):
    out = model(**call)
    return out[0] if isinstance(out, tuple) else out


def alone(model, call, config=SPARSE, schedule=None):
    """What one process gives."""
    with torch.no_grad(), apply_ssta(model, config, schedule=schedule or Schedule()):
        return forward(model, call)


def parallel(ranks: int, anything: bool = False) -> ContextParallelConfig:
    return ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=anything)


def distance(got, want) -> float:
    return float((got - want).abs().max() / want.abs().max())


def close(name, got, want):
    """As one process, to rounding: a rank's matrix products have other shapes, and a CPU adds up what it will in its own order."""
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}[want.dtype] if name != "kandinsky5" else tiny_models.TOLERANCE[name]
    assert got.dtype == want.dtype and distance(got, want) < bound, distance(got, want)


def refused(kind, message, function):
    try:
        function()
    except kind as error:
            assert re.search(message, str(error)), str(error)
    else:
        raise AssertionError(f"nothing was raised that says {message!r}")
    # Had a collective begun on some ranks only, this one would not fit it.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size()
