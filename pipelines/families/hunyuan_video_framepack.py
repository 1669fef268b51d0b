"""HunyuanVideo Framepack: joint attention over a section of video, text, and histories at three scales, each a grid of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssta import VideoGrid

from ..patch.canvas import from_bcfhw, histories_before
from ..ranks.split import gathered
from ..terms import Call, Family, Hooks, Ranks, Split
from .hunyuan_video import two_stacks


def _hooks(model: Any, call: Call) -> Hooks:
    """They split the tokens, each grid's by themselves, and leave the section's alone behind the last block."""
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    for number, block in enumerate(blocks):
        yield block.register_forward_pre_hook(partial(_own_tokens, call, number == 0))
    yield blocks[-1].register_forward_hook(partial(_own_section, call))


def _own_tokens(call: Call, first: bool, block: nn.Module, args: tuple) -> tuple | None:
    state = call()
    if state.ranks is None:
        return None
    tokens, *others, angles = args
    own = partial(_shares, [grid.length for grid in (*state.before, VideoGrid(*state.thw))], state.ranks)
    return own(tokens, 1) if first else tokens, *others, tuple([own(of, 0) for of in angles])


def _shares(grids: list[int], ranks: Ranks, x: Tensor, dim: int) -> Tensor:
    """This rank's share of each grid, of whose so many tokens x has entries along ``dim``."""
    return torch.cat([part.narrow(dim, ranks.start(tokens), ranks.share(tokens)) for tokens, part in zip(grids, x.split(grids, dim))], dim)


def _own_section(call: Call, block: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple | None:
    ranks, section = call().ranks, VideoGrid(*call().thw).length
    return None if ranks is None else (output[0][:, output[0].shape[1] - ranks.share(section):], output[1])


HUNYUAN_VIDEO_FRAMEPACK = Family(
    "HunyuanVideoFramepackTransformer3DModel", two_stacks, from_bcfhw,
    before=partial(histories_before, ("latents_history_4x", "latents_history_2x", "latents_clean")),
    split=Split({"proj_out": gathered()}, ("context_embedder.token_refiner.refiner_blocks.*.attn",), hooks=_hooks))
