"""HunyuanVideo 1.5: joint attention over [video | conditions], valid conditions first, in every block."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0

from ssta import SSTAConfig

from ..patch.canvas import from_bcfhw
from ..ranks.split import gathered, split_outputs
from ..schedule.schedule import Schedule
from ..terms import Family, Split, stack_sites
from .joint import JointSSTAProcessor


def _trained() -> tuple[SSTAConfig, Schedule]:
    """As the published sparse checkpoint (720p, distilled) was trained: nothing is dense.

    A model's configuration does not say how its weights were trained, so this is for the user to choose.
    """
    return SSTAConfig.hunyuan_video_15(), Schedule()


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn", stock=HunyuanVideo15AttnProcessor2_0,
                 replacement=JointSSTAProcessor)
_PLAN = {"rope": split_outputs(2, 0), "x_embedder": split_outputs(3, 1, count=1), "proj_out": gathered()}
HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _SITES, from_bcfhw, presets={"hunyuan_video_15_sparse": _trained},
                          split=Split(_PLAN, ("context_embedder.token_refiner.refiner_blocks.*.attn",)))
