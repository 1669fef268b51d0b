"""HunyuanVideo Framepack: joint attention over a section of video, text, and histories at three scales, each a grid of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import nn

from ..patch.canvas import from_bcfhw, histories_before
from ..patch.family import Family, Site, stack_sites
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        yield from stack_sites(model, blocks, "attn", HunyuanVideoAttnProcessor2_0, JointSSTAProcessor)


HUNYUAN_VIDEO_FRAMEPACK = Family(
    "HunyuanVideoFramepackTransformer3DModel", _sites, from_bcfhw,
    before=partial(histories_before, ("latents_history_4x", "latents_history_2x", "latents_clean")))
