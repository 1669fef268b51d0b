"""CogVideoX 1.0 and 1.5, and ConsisID: joint attention over [text | video] with one set of projections."""

from __future__ import annotations

from functools import partial

import torch
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0
from torch import Tensor, nn

from ..patch.canvas import from_bfchw
from ..patch.processor import SSTAProcessor
from ..patch.streams import apply_rope, fused
from ..ranks.split import gathered, split
from ..terms import Family, Split, stack_sites


class CogVideoXSSTAProcessor(SSTAProcessor):
    """Attends as ``CogVideoXAttnProcessor2_0`` does, to selected tiles only. RoPE, where there is any, is for the video alone."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states ``[B, t*h*w, C]``, encoder_hidden_states ``[B, L, C]``; the pipelines give no mask."""
        text_len = encoder_hidden_states.shape[1]
        layout = self.video_after(text_len + hidden_states.shape[1], text_len)
        # Both angles of a pair are given, and are the same.
        angles = None if image_rotary_emb is None else tuple(of[:, None, 0::2] for of in image_rotary_emb)

        def turned(x: Tensor) -> Tensor:
            return x if angles is None else torch.cat([x[:, :text_len], apply_rope(x[:, text_len:], *angles)], dim=1)

        out = self.self_attention(attn, torch.cat([encoder_hidden_states, hidden_states], dim=1), layout, attention_mask, turned=turned)
        return out[:, text_len:], out[:, :text_len]


class FusedCogVideoXSSTAProcessor(CogVideoXSSTAProcessor):
    """The processor for models whose projections are fused by ``fuse_qkv_projections``."""

    projections = staticmethod(fused)


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1",
                 stock=(CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0),
                 replacement=(CogVideoXSSTAProcessor, FusedCogVideoXSSTAProcessor))
_SPLIT = Split({"": {"image_rotary_emb": [split(2, 0), split(2, 0)]}, "transformer_blocks.0": {"hidden_states": split()},
                "proj_out": gathered()})
COGVIDEOX = Family("CogVideoXTransformer3DModel", _SITES, from_bfchw, split=_SPLIT)
CONSISID = Family("ConsisIDTransformer3DModel", _SITES, from_bfchw, split=_SPLIT)
