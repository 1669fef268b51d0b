"""HunyuanVideo 1.5: joint attention over [video | conditions], valid conditions first, in every block; trained with SSTA."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import nn

from ssta import SSTAConfig

from ..canvas import from_bcfhw
from ..family import Family, Site
from ..schedule import Schedule
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.transformer_blocks):
        yield Site(f"transformer_blocks.{index}.attn", block.attn, HunyuanVideo15AttnProcessor2_0, JointSSTAProcessor)


HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _sites, from_bcfhw, SSTAConfig.hunyuan_video_15, Schedule)
