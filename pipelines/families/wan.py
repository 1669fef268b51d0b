"""Wan 2.1 and 2.2, VACE, and SkyReels V2: self-attention over the video alone; text and images come in through cross-attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from ..canvas import from_bcfhw
from ..family import Family, Site
from ..processor import SSTAProcessor
from ..schedule import Schedule
from ..streams import Stream


class WanSSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``WanAttnProcessor`` does, to selected tiles only. q and k are normed over all heads at once."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; a self-attention is called without conditions."""
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None, got shape {tuple(attention_mask.shape)}; SSTA does not attend causally: "
                             "call remove_ssta, or generate with a causal_block_size of 1")
        layout = self.around(hidden_states.shape[1])
        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key, value = self.joined([Stream(query, attn.norm_q, rotary_emb)], [Stream(key, attn.norm_k, rotary_emb)], [Stream(value)],
                                        heads=attn.heads, across_heads=True)
        out = self.attend(query, key, value, layout)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(query.dtype)))


def _sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.blocks):
        yield Site(f"blocks.{index}.attn1", block.attn1, WanAttnProcessor, WanSSTAProcessor)


def _vace_sites(model: nn.Module) -> Iterator[Site]:
    yield from _sites(model)
    for index, block in enumerate(model.vace_blocks):
        yield Site(f"vace_blocks.{index}.attn1", block.attn1, WanAttnProcessor, WanSSTAProcessor)


def _vace_schedule() -> Schedule:
    """Both stacks have a first layer."""
    return replace(Schedule.warm_up(), dense_layers=("blocks.0.attn1", "vace_blocks.0.attn1"))


def _skyreels_sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.blocks):
        yield Site(f"blocks.{index}.attn1", block.attn1, SkyReelsV2AttnProcessor, WanSSTAProcessor)


WAN = Family("WanTransformer3DModel", _sites, from_bcfhw)
WAN_VACE = Family("WanVACETransformer3DModel", _vace_sites, from_bcfhw, default_schedule=_vace_schedule)
SKYREELS_V2 = Family("SkyReelsV2Transformer3DModel", _skyreels_sites, from_bcfhw)
