"""EasyAnimate: joint attention over the video and the text, in blocks with projections for each or with shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_easyanimate import EasyAnimateAttnProcessor2_0
from torch import nn

from ..patch.canvas import from_bcfhw
from ..patch.family import Family, Site, stack_sites
from ..ranks.split import Plan, Split, gathered, split, split_outputs
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    """The model's own order, [text | video], is another one of the same tokens."""
    return stack_sites(model, "transformer_blocks", "attn1", EasyAnimateAttnProcessor2_0, JointSSTAProcessor)


def _plan(model: nn.Module) -> Plan:
    return {"rope_embedding": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}


EASYANIMATE = Family("EasyAnimateTransformer3DModel", _sites, from_bcfhw, split=Split(_plan))
