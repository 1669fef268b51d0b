"""HunyuanVideo, in blocks with two streams and then in blocks with one, and 1.5: joint attention over [video | text]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssta import SSTAConfig

from ..patch.call import CallState
from ..patch.canvas import from_bcfhw
from ..patch.family import Family, Site, stack_sites
from ..ranks.split import Split, gathered, split, split_outputs
from ..schedule.schedule import Schedule
from .joint import JointSSTAProcessor


def two_stacks(model: nn.Module) -> Iterator[Site]:
    """The sites of blocks with two streams, and of those with one."""
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        yield from stack_sites(model, blocks, "attn", HunyuanVideoAttnProcessor2_0, JointSSTAProcessor)


def _first_frame(model: nn.Module, call: Callable[[], CallState]) -> Iterator[RemovableHandle]:
    """The weights for images modulate the first frame's tokens by themselves, and count them from the first token that a block is given."""
    found: Any = model
    if found.config.image_condition_type == "token_replace":
        for block in (*found.transformer_blocks, *found.single_transformer_blocks):
            yield block.register_forward_pre_hook(partial(_counted, call))


def _counted(call: Callable[[], CallState], block: nn.Module, args: tuple) -> tuple | None:
    state = call()
    if state.ranks is None:
        return None
    *others, frame = args
    video = math.prod(state.thw)
    return *others, min(max(frame - state.ranks.start(video), 0), state.ranks.share(video))


def _trained() -> tuple[SSTAConfig, Schedule]:
    """As the published sparse checkpoint of 1.5 (720p, distilled) was trained: nothing is dense.

    A model's configuration does not say how its weights were trained, so this is for the user to choose.
    """
    return SSTAConfig.hunyuan_video_15(), Schedule()


_PLAN = {"rope": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
_PLAN_15 = {"rope": split_outputs(2, 0), "x_embedder": split_outputs(3, 1, count=1), "proj_out": gathered()}
_REFINER = ("context_embedder.token_refiner.refiner_blocks.*.attn",)
_SITES_15 = partial(stack_sites, stack="transformer_blocks", attention="attn", stock=HunyuanVideo15AttnProcessor2_0,
                    replacement=JointSSTAProcessor)
HUNYUAN_VIDEO = Family("HunyuanVideoTransformer3DModel", two_stacks, from_bcfhw, split=Split(_PLAN, _REFINER, hooks=_first_frame))
HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _SITES_15, from_bcfhw, presets={"hunyuan_video_15_sparse": _trained},
                          split=Split(_PLAN_15, _REFINER))
