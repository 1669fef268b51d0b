"""Allegro: self-attention over the video alone, RoPE for each axis in a third of the channels."""

from __future__ import annotations

from functools import partial

import torch
from diffusers.models.attention_processor import AllegroAttnProcessor2_0
from torch import Tensor, nn

from ..patch.canvas import from_bcfhw
from ..patch.processor import SSTAProcessor
from ..patch.streams import apply_rope_of_halves
from ..ranks.split import gathered, split
from ..terms import Family, Split, stack_sites

# For each axis a table of cosines and one of sines, ``[positions, D / 3]``; and for each axis every token's position, ``[1, t*h*w]``.
RotaryEmb = tuple[tuple[tuple[Tensor, Tensor], ...], tuple[Tensor, ...]]


class AllegroSSTAProcessor(SSTAProcessor):
    """Attends as ``AllegroAttnProcessor2_0`` does, to selected tiles only."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        image_rotary_emb: RotaryEmb | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; the pipeline gives no mask."""
        turned = None if image_rotary_emb is None else partial(self._turned, image_rotary_emb)
        return self.self_attention(attn, hidden_states, self.video_alone(hidden_states.shape[1]), attention_mask, turned=turned)

    def _turned(self, image_rotary_emb: RotaryEmb, x: Tensor) -> Tensor:
        tables, positions = image_rotary_emb
        half = x.shape[-1] // 6
        # [1, S, 1, axis, D / 6]
        cos, sin = (torch.stack([nn.functional.embedding(self.rank_share(of, 1), axis[kind][:, :half])
                                 for axis, of in zip(tables, positions)], dim=2).unsqueeze(2) for kind in (0, 1))
        return apply_rope_of_halves(x.unflatten(-1, (3, -1)), cos, sin).flatten(-2)


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=AllegroAttnProcessor2_0,
                 replacement=AllegroSSTAProcessor)
_PLAN = {"transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
ALLEGRO = Family("AllegroTransformer3DModel", _SITES, from_bcfhw, split=Split(_PLAN, ("transformer_blocks.*.attn2",)))
