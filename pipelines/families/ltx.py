"""LTX-Video: self-attention over the video alone, which arrives as tokens; its condition pipelines put condition tokens before it."""

from __future__ import annotations

from collections.abc import Iterator

from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import Tensor, nn

from ssta import SSTAConfig

from ..canvas import from_numbers
from ..family import Family, Site
from ..processor import SSTAProcessor
from ..streams import Stream


class LTXVideoSSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``LTXVideoAttnProcessor`` does, to selected tiles only. Norms and RoPE come before the heads."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states ``[B, conditions + t*h*w, C]``; a self-attention is called without a mask."""
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None in self-attention, got shape {tuple(attention_mask.shape)}")
        # Every head has channels of the angles for itself.
        angles = None if image_rotary_emb is None else tuple(of.unflatten(2, (attn.heads, -1)) for of in image_rotary_emb)
        query, key, value = self.joined(
            [Stream(attn.to_q(hidden_states), attn.norm_q, angles)], [Stream(attn.to_k(hidden_states), attn.norm_k, angles)],
            [Stream(attn.to_v(hidden_states))], heads=attn.heads, across_heads=True)
        out = self.attend(query, key, value, self.around(hidden_states.shape[1], before=None))
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(query.dtype)))


def _sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.transformer_blocks):
        yield Site(f"transformer_blocks.{index}.attn1", block.attn1, LTXVideoAttnProcessor, LTXVideoSSTAProcessor)


def small_tiles() -> SSTAConfig:
    """No settings are published. The VAE compresses so much that 121 frames of 1216 x 704 are 16 x 22 x 38 tokens, of which tiles of 384
    would make 45; tiles of 128 make 120, and Hopper's kernel still runs at full speed."""
    return SSTAConfig(tile_thw=(4, 4, 8), kernel_thw=(3, 3, 3), topk=24)


LTX_VIDEO = Family("LTXVideoTransformer3DModel", _sites, from_numbers, small_tiles)
