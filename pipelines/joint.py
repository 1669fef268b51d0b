"""The processor of models that attend jointly over [video | conditions]: the HunyuanVideo line and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssta import TokenLayout

from .processor import SSTAProcessor
from .rope import turn_pairs


class JointSSTAProcessor(SSTAProcessor):
    """Attends to selected tiles only where the stock processor attends over [video | conditions], and builds no mask of S x S tokens.

    The module's ``add_*_proj`` make q, k and v of the conditions; where it has none, video and conditions share their projections.
    RoPE turns the video alone.
    """

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states ``[B, t*h*w, C]``, encoder_hidden_states ``[B, L, C]``, attention_mask ``[B, L]`` over the conditions or
        ``[B, 1, 1, t*h*w + L]`` over all keys, with the valid conditions first."""
        video_len = hidden_states.shape[1]
        thw = self.canvas(video_len)
        shared = attn.add_q_proj is None and encoder_hidden_states is not None
        if shared:
            hidden_states = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        query, key, value = (linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        query, key = _normed(attn.norm_q, query), _normed(attn.norm_k, key)
        if image_rotary_emb is not None:
            # Both angles of a pair are given, and are the same.
            cos, sin = (angles[:, None, 0::2] for angles in image_rotary_emb)
            query, key = (_turned(x, cos, sin, video_len) for x in (query, key))
        if encoder_hidden_states is not None and not shared:
            own = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            more_query, more_key, more_value = (linear(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for linear in own)
            query = torch.cat([query, _normed(attn.norm_added_q, more_query)], dim=1)
            key = torch.cat([key, _normed(attn.norm_added_k, more_key)], dim=1)
            value = torch.cat([value, more_value], dim=1)
            del more_query, more_key, more_value

        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = attention_mask[:, 0, 0, video_len:]
        layout = self.layout(thw, query.shape[1] - video_len)
        out = self.attend(query, key, value, layout, text_mask=attention_mask if layout.dense else None)
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out, None
        video, conditions = out[:, :video_len], out[:, video_len:]
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            conditions = attn.to_add_out(conditions)
        return video, conditions

    def layout(self, thw: tuple[int, int, int], conditions: int) -> TokenLayout:
        """What the sequence consists of: the canvas, and ``conditions`` tokens after it."""
        return TokenLayout.video_text(thw, conditions)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, video_len: int) -> Tensor:
    video = turn_pairs(x[:, :video_len], cos, sin)
    return video if video_len == x.shape[1] else torch.cat([video, x[:, video_len:]], dim=1)
