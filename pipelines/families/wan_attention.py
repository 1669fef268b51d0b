"""The processor of the Wan line, whose self-attention is over the video alone, q and k normed over all heads at once."""

from __future__ import annotations

from torch import Tensor, nn

from ..processor import SSTAProcessor
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
                                        layout, heads=attn.heads, across_heads=True)
        out = self.attend(query, key, value, layout)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(query.dtype)))
