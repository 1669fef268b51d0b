"""HunyuanVideo: joint attention over [video | text], in blocks with two streams and then in blocks with one."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import nn

from ..canvas import from_bcfhw
from ..family import Family, Site, stack_sites
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        yield from stack_sites(model, blocks, "attn", HunyuanVideoAttnProcessor2_0, JointSSTAProcessor)


HUNYUAN_VIDEO = Family("HunyuanVideoTransformer3DModel", _sites, from_bcfhw)
