"""SkyReels V2: Wan's attention under a class of its own."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor

from ..patch.canvas import from_bcfhw
from ..ranks.after_gather import shared_gradients
from ..ranks.split import gathered, split, split_outputs
from ..terms import Family, Split, stack_sites
from .wan_attention import WanSSTAProcessor

_SITES = partial(stack_sites, stack="blocks", attention="attn1", stock=SkyReelsV2AttnProcessor, replacement=WanSSTAProcessor)
# Diffusion forcing modulates every token, in each block and, from a modulation that stays whole, after `norm_out`.
_PLAN = {"rope": split_outputs(4, 1), "blocks.0": {"hidden_states": split()}, "blocks.*": {"temb": split(4, 2)}, "norm_out": gathered()}
SKYREELS_V2 = Family(
    "SkyReelsV2Transformer3DModel", _SITES, from_bcfhw,
    split=Split(_PLAN, ("blocks.*.attn2",), stock=True, hooks=partial(shared_gradients, gather="norm_out")))
