"""HunyuanVideo 1.5: joint attention over [video | conditions], valid conditions first, in every block."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import nn

from ssta import SSTAConfig

from ..patch.canvas import from_bcfhw
from ..patch.family import Family, Site, stack_sites
from ..ranks.split import Plan, Split, gathered, split_outputs
from ..schedule.schedule import Schedule
from .joint import JointSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    return stack_sites(model, "transformer_blocks", "attn", HunyuanVideo15AttnProcessor2_0, JointSSTAProcessor)


def _trained() -> tuple[SSTAConfig, Schedule]:
    """As the published sparse checkpoint (720p, distilled) was trained: nothing is dense.

    A model's configuration does not say how its weights were trained, so this is for the user to choose.
    """
    return SSTAConfig.hunyuan_video_15(), Schedule()


def _plan(model: nn.Module) -> Plan:
    return {"rope": split_outputs(2, 0), "x_embedder": split_outputs(3, 1, count=1), "proj_out": gathered()}


HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _sites, from_bcfhw, presets={"hunyuan_video_15_sparse": _trained},
                          split=Split(_plan, ("context_embedder.token_refiner.refiner_blocks.*.attn",)))
