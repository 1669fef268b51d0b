"""HunyuanVideo: joint attention over [video | text], in blocks with two streams and then in blocks with one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import nn

from ..patch.canvas import from_bcfhw
from ..ranks.split import gathered, split, split_outputs
from ..terms import Call, Family, Hooks, Split, stack_sites
from .joint import JointSSTAProcessor

# Blocks with two streams, and those with one.
two_stacks = partial(stack_sites, stack=("transformer_blocks", "single_transformer_blocks"), attention="attn",
                     stock=HunyuanVideoAttnProcessor2_0, replacement=JointSSTAProcessor)


def _first_frame(model: Any, call: Call) -> Hooks:
    """The weights for images modulate the first frame's tokens by themselves, and count them from the first token that a block is given."""
    if model.config.image_condition_type == "token_replace":
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            yield block.register_forward_pre_hook(partial(_counted, call))


def _counted(call: Call, block: nn.Module, args: tuple) -> tuple | None:
    state = call()
    if state.ranks is None:
        return None
    *others, frame = args
    video = math.prod(state.thw)
    return *others, min(max(frame - state.ranks.start(video), 0), state.ranks.share(video))


_PLAN = {"rope": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
HUNYUAN_VIDEO = Family("HunyuanVideoTransformer3DModel", two_stacks, from_bcfhw,
                       split=Split(_PLAN, ("context_embedder.token_refiner.refiner_blocks.*.attn",), hooks=_first_frame))
