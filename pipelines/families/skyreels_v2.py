"""SkyReels V2: Wan's attention under a class of its own."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from torch import nn

from ..canvas import from_bcfhw
from ..family import Family, Site, stack_sites
from .wan_attention import WanSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    return stack_sites(model, "blocks", "attn1", SkyReelsV2AttnProcessor, WanSSTAProcessor)


SKYREELS_V2 = Family("SkyReelsV2Transformer3DModel", _sites, from_bcfhw)
