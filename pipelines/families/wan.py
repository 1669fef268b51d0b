"""Wan 2.1 and 2.2, VACE, Animate and ChronoEdit: self-attention over the video alone; all else comes in through cross-attention."""

from __future__ import annotations

import math
from functools import partial

from diffusers.models.transformers import transformer_chronoedit, transformer_wan_animate
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from ..patch.canvas import from_bcfhw
from ..ranks.split import gathered, split, split_outputs, stock_plan
from ..schedule.schedule import Schedule
from ..terms import Call, Family, Hooks, Split, stack_sites
from .wan_attention import WanSSTAProcessor

# The classes that diffusers has copied this one into have a processor each, which does the same.
_STOCK = WanAttnProcessor, transformer_chronoedit.WanAttnProcessor, transformer_wan_animate.WanAttnProcessor
_SITES = partial(stack_sites, stack="blocks", attention="attn1", stock=_STOCK, replacement=WanSSTAProcessor)
_VACE_SITES = partial(_SITES, stack=("blocks", "vace_blocks"))
# The first layer of each of the two stacks is dense.
_VACE_SCHEDULE = partial(Schedule, dense_layers=("blocks.0.attn1", "vace_blocks.0.attn1"))


def _face_frames(model: nn.Module, call: Call) -> Hooks:
    """The face blocks' tokens look at the face of their own frame: on several ranks, at that of the frames that a rank has a part of."""
    for block in model.get_submodule("face_adapter").children():
        yield block.register_forward_pre_hook(partial(_whole_frames, call))
        yield block.register_forward_hook(partial(_own_tokens, call))


def _whole_frames(call: Call, block: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    state, (hidden_states, motion) = call(), args
    if state.ranks is None:
        return None
    area = math.prod(state.thw) // motion.shape[1]
    start = state.ranks.start(math.prod(state.thw))
    end = start + hidden_states.shape[1]
    first, last = start // area, -(-end // area)
    return nn.functional.pad(hidden_states, (0, 0, start - first * area, last * area - end)), motion[:, first:last]


def _own_tokens(call: Call, block: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> Tensor | None:
    ranks, tokens = call().ranks, math.prod(call().thw)
    if ranks is None:
        return None
    area = args[0].shape[1] // args[1].shape[1]
    return output.narrow(1, ranks.start(tokens) % area, ranks.share(tokens))


_PLAN = {"rope": split_outputs(4, 1), "blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
# The control's blocks take the video's tokens too.
_VACE_PLAN = _PLAN | {"vace_blocks.0": {"hidden_states": split(), "control_hidden_states": split()}}
WAN = Family("WanTransformer3DModel", _SITES, from_bcfhw, split=Split(stock_plan, ("blocks.*.attn2",), stock=True))
WAN_VACE = Family("WanVACETransformer3DModel", _VACE_SITES, from_bcfhw, default_schedule=_VACE_SCHEDULE,
                  split=Split(_VACE_PLAN, ("blocks.*.attn2", "vace_blocks.*.attn2"), stock=True))
WAN_ANIMATE = Family("WanAnimateTransformer3DModel", _SITES, from_bcfhw,
                     split=Split(_PLAN, ("blocks.*.attn2", "face_adapter.*"), hooks=_face_frames))
CHRONOEDIT = Family("ChronoEditTransformer3DModel", _SITES, from_bcfhw, split=Split(stock_plan, ("blocks.*.attn2",), stock=True))
