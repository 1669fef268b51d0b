"""Motif-Video: as HunyuanVideo, and then blocks that decode: their sequence is the video twice, as decoded so far and as encoded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from diffusers.models.transformers.transformer_motif_video import MotifVideoAttnProcessor2_0
from torch import nn

from ssta import TokenLayout, VideoGrid

from ..patch.canvas import from_bcfhw
from ..ranks.split import gathered, split, split_outputs
from ..terms import Family, Site, Split, SplitPlan, stack_sites
from .joint import JointSSTAProcessor


class MotifVideoSSTAProcessor(JointSSTAProcessor):
    """Attends as ``MotifVideoAttnProcessor2_0`` does, which takes any mask, to selected tiles only."""

    valid_first = False


class MotifVideoDecoderSSTAProcessor(JointSSTAProcessor):
    """What stands in the conditions' place is a second video of the same canvas, split over ranks by itself."""

    def video_then(self, tokens: int, conditions: int | None = None) -> TokenLayout:
        assert conditions is not None
        first, second = (self.canvas(length) for length in (tokens - conditions, conditions))
        return TokenLayout((VideoGrid(*first), VideoGrid(*second)))


def _sites(model: nn.Module) -> Iterator[Site]:
    encoding = len(model.single_transformer_blocks) - model.num_decoder_layers
    yield from stack_sites(model, "transformer_blocks", "attn", MotifVideoAttnProcessor2_0, MotifVideoSSTAProcessor)
    singles = model, "single_transformer_blocks", "attn", MotifVideoAttnProcessor2_0
    yield from islice(stack_sites(*singles, MotifVideoSSTAProcessor), encoding)
    yield from islice(stack_sites(*singles, MotifVideoDecoderSSTAProcessor), encoding, None)


def _plan(model: nn.Module) -> SplitPlan:
    """The first block that decodes gets a video of its own, which was set aside before the first split."""
    plan: SplitPlan = {"rope": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
    if model.num_decoder_layers:
        first = len(model.single_transformer_blocks) - model.num_decoder_layers
        plan[f"single_transformer_blocks.{first}"] = {"hidden_states": split()}
    return plan


MOTIF_VIDEO = Family("MotifVideoTransformer3DModel", _sites, from_bcfhw,
                     split=Split(_plan, ("transformer_blocks.*.cross_attn", "single_transformer_blocks.*.cross_attn")))
