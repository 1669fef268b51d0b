"""LTX-Video: self-attention over the video alone, which arrives as tokens; its condition pipelines put condition tokens before it."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import Tensor, nn

from ..patch.canvas import from_numbers
from ..patch.processor import SSTAProcessor
from ..ranks.split import gathered, split, split_outputs
from ..terms import Arguments, Family, Split, stack_sites


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
        # Every head has channels of the angles for itself.
        angles = None if image_rotary_emb is None else tuple(of.unflatten(2, (attn.heads, -1)) for of in image_rotary_emb)
        layout = self.video_after(hidden_states.shape[1])
        return self.self_attention(attn, hidden_states, layout, attention_mask, angles=angles, across_heads=True)


def tokens_given(arguments: Arguments, grids: int) -> int:
    """How many tokens of conditions and video there are."""
    return arguments["hidden_states"].shape[1]


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=LTXVideoAttnProcessor, replacement=LTXVideoSSTAProcessor)
# diffusers' own splits the text and its mask too, which its attention does not take, and no timesteps of tokens.
_PLAN = {"": {"hidden_states": split(), "timestep": split(2)}, "rope": split_outputs(3, 1), "proj_out": gathered()}
LTX_VIDEO = Family("LTXVideoTransformer3DModel", _SITES, from_numbers, split=Split(_PLAN, ("transformer_blocks.*.attn2",), tokens_given))
