"""Cosmos 1, 2 and 2.5: self-attention over the video alone; text and images come in through cross-attention."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from torch import Tensor, nn

from ..patch.canvas import from_bcfhw
from ..patch.processor import SSTAProcessor
from ..patch.streams import apply_rope_of_halves
from ..ranks.after_gather import shared_gradients
from ..ranks.split import gathered, split, split_outputs
from ..terms import Family, Split, stack_sites


class CosmosSSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``CosmosAttnProcessor2_0`` does, to selected tiles only."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``, image_rotary_emb ``[t*h*w, D]`` each; the model gives no mask."""
        def turned(x: Tensor) -> Tensor:
            if image_rotary_emb is None:
                return x
            # The angles of both halves are the same.
            return apply_rope_of_halves(x, *(of[:, None, :x.shape[-1] // 2] for of in image_rotary_emb))

        return self.self_attention(attn, hidden_states, self.video_alone(hidden_states.shape[1]), attention_mask, turned=turned)


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=CosmosAttnProcessor2_0, replacement=CosmosSSTAProcessor)
# Conditioned frames have a timestep of their own, so that modulations are the tokens', also after the last block.
_OF_TOKENS = ("embedded_timestep", "temb", "extra_pos_emb", "controlnet_residual")
_PLAN = {"rope": split_outputs(2, 0), "transformer_blocks.0": {"hidden_states": split()},
         "transformer_blocks.*": {name: split() for name in _OF_TOKENS}, "transformer_blocks.-1": gathered()}
COSMOS = Family("CosmosTransformer3DModel", _SITES, from_bcfhw,
                split=Split(_PLAN, ("transformer_blocks.*.attn2",), hooks=partial(shared_gradients, gather="transformer_blocks")))
