"""HunyuanVideo 1.5: joint attention over [video | conditions], valid conditions first, in every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssta import SSTAConfig

from ..call import CallState
from ..canvas import from_bcfhw
from ..family import Family, Site, stack_sites
from ..schedule import Schedule
from ..split import Plan, Split, gathered, split_outputs
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    return stack_sites(model, "transformer_blocks", "attn", HunyuanVideo15AttnProcessor2_0, JointSSTAProcessor)


def _trained() -> tuple[SSTAConfig, Schedule]:
    """As the published sparse checkpoint (720p, distilled) was trained: nothing is dense.

    A model's configuration does not say how its weights were trained, so this is for the user to choose.
    """
    return SSTAConfig.hunyuan_video_15(), Schedule()


def _plan(model: nn.Module) -> Plan:
    return {"rope": split_outputs(2, 0), "x_embedder": split_outputs(3, 1, count=1), "proj_out": gathered()}


def _conditions(model: nn.Module, call: Callable[[], CallState]) -> Iterator[RemovableHandle]:
    """Every block computes its conditions token by token, and none of them is asked for after the last."""
    blocks: Any = model.transformer_blocks
    yield blocks[0].register_forward_pre_hook(partial(_shared_out, call), with_kwargs=True)


def _shared_out(call: Callable[[], CallState], block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    ranks = call().ranks
    if ranks is None or not ranks.conditions:
        return None
    name = "encoder_hidden_states"
    whole = kwargs[name] if name in kwargs else args[1]
    share = whole.narrow(1, ranks.start(whole.shape[1]), ranks.share(whole.shape[1]))
    return (args, {**kwargs, name: share}) if name in kwargs else ((args[0], share, *args[2:]), kwargs)


HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _sites, from_bcfhw, presets={"hunyuan_video_15_sparse": _trained},
                          split=Split(_plan, ("context_embedder.token_refiner.refiner_blocks.*.attn",), conditions=True, hooks=_conditions))
