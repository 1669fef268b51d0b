"""The processor of models that attend jointly over [video | conditions]: the HunyuanVideo line and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssta import TokenLayout

from .processor import SSTAProcessor
from .streams import Stream, finished


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
        # Both angles of a pair are given.
        angles = None if image_rotary_emb is None else tuple(of[:, None] for of in image_rotary_emb)
        if encoder_hidden_states is None:
            query, key = (finished(Stream(linear(hidden_states), norm, angles), heads=attn.heads)
                          for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)))
            value = attn.to_v(hidden_states)
        elif attn.add_q_proj is None:
            both = torch.cat([hidden_states, encoder_hidden_states], dim=1)
            query, key = (_of_both(linear(both), norm, angles, video_len, attn.heads)
                          for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)))
            value = attn.to_v(both)
        else:
            query = finished(Stream(attn.to_q(hidden_states), attn.norm_q, angles),
                             Stream(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q), heads=attn.heads)
            key = finished(Stream(attn.to_k(hidden_states), attn.norm_k, angles),
                           Stream(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k), heads=attn.heads)
            value = torch.cat([attn.to_v(hidden_states), attn.add_v_proj(encoder_hidden_states)], dim=1)
        value = value.unflatten(2, (attn.heads, -1))

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


def _of_both(x: Tensor, norm: nn.Module | None, angles: tuple[Tensor, Tensor] | None, video_len: int, heads: int) -> Tensor:
    return finished(Stream(x[:, :video_len], norm, angles), Stream(x[:, video_len:], norm), heads=heads)
