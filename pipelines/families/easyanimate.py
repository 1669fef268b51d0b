"""EasyAnimate: joint attention over the video and the text, in blocks with projections for each or with shared ones."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_easyanimate import EasyAnimateAttnProcessor2_0

from ..patch.canvas import from_bcfhw
from ..ranks.split import gathered, split, split_outputs
from ..terms import Family, Split, stack_sites
from .joint import JointSSTAProcessor

# The model's own order, [text | video], is another one of the same tokens.
_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=EasyAnimateAttnProcessor2_0,
                 replacement=JointSSTAProcessor)
_PLAN = {"rope_embedding": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
EASYANIMATE = Family("EasyAnimateTransformer3DModel", _SITES, from_bcfhw, split=Split(_PLAN))
