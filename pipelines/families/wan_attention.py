"""The processor of the Wan line, whose self-attention is over the video alone, q and k normed over all heads at once."""

from __future__ import annotations

from torch import Tensor, nn

from ..patch.branched import BranchedProcessor
from ..patch.streams import Stream, projections


class WanSSTAProcessor(BranchedProcessor):
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
        q, k, v = projections(attn, hidden_states)
        query, key, value = self.joined([Stream(q, attn.norm_q, rotary_emb)], [Stream(k, attn.norm_k, rotary_emb)], [Stream(v)], layout,
                                        heads=attn.heads, across_heads=True)
        del q, k, v
        out = self.attend_in(attn, hidden_states, query, key, value, layout)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(query.dtype)))
