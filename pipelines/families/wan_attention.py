"""The processor of the Wan line, whose self-attention is over the video alone, q and k normed over all heads at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..patch.streams import fusible
from .trained.branched import BranchedProcessor


class WanSSTAProcessor(BranchedProcessor):
    """Attends as the self-attention of ``WanAttnProcessor`` does, to selected tiles only. q and k are normed over all heads at once."""

    projections = staticmethod(fusible)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; a self-attention is called without conditions."""
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None, got shape {tuple(attention_mask.shape)}; SSTA does not attend causally: "
                             "call remove_ssta, or generate with a causal_block_size of 1")
        angles = None if rotary_emb is None else self.angles(rotary_emb)
        return self.self_attention(attn, hidden_states, self.video_alone(hidden_states.shape[1]), angles=angles, across_heads=True)

    def angles(self, rotary_emb: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines, as a ``Stream`` takes them, which Wan's rotary embedding is already."""
        return rotary_emb
