"""Wan 2.1 and 2.2, and VACE: self-attention over the video alone; text and images come in through cross-attention."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from ..patch.canvas import from_bcfhw
from ..patch.family import Family, Site, stack_sites
from ..ranks.split import Plan, Split, gathered, split, split_outputs, stock_plan
from ..schedule.schedule import Schedule
from .wan_attention import WanSSTAProcessor


def _sites(model: nn.Module) -> Iterator[Site]:
    return stack_sites(model, "blocks", "attn1", WanAttnProcessor, WanSSTAProcessor)


def _vace_sites(model: nn.Module) -> Iterator[Site]:
    yield from _sites(model)
    yield from stack_sites(model, "vace_blocks", "attn1", WanAttnProcessor, WanSSTAProcessor)


def _vace_schedule() -> Schedule:
    """The first layer of each of the two stacks is dense."""
    return Schedule(dense_layers=("blocks.0.attn1", "vace_blocks.0.attn1"))


def _vace_plan(model: nn.Module) -> Plan:
    """The control's blocks take the video's tokens too."""
    return {"rope": split_outputs(4, 1), "vace_blocks.0": {"hidden_states": split(), "control_hidden_states": split()},
            "blocks.0": {"hidden_states": split()}, "proj_out": gathered()}


WAN = Family("WanTransformer3DModel", _sites, from_bcfhw, split=Split(stock_plan, ("blocks.*.attn2",), stock=True))
WAN_VACE = Family("WanVACETransformer3DModel", _vace_sites, from_bcfhw, default_schedule=_vace_schedule,
                  split=Split(_vace_plan, ("blocks.*.attn2", "vace_blocks.*.attn2"), stock=True))
