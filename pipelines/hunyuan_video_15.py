"""HunyuanVideo 1.5: joint attention over [video | conditions], valid conditions first, in every block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from torch import Tensor, nn

from ssta import SSTAConfig, TokenLayout

from .family import Family, Site, SSTAProcessor


class HunyuanVideo15SSTAProcessor(SSTAProcessor):
    """Attends as ``HunyuanVideo15AttnProcessor2_0`` does, to selected tiles only, and without building a mask of S x S tokens."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, t*h*w, C], encoder_hidden_states [B, L, C], attention_mask [B, L] with the valid conditions first."""
        video_len = hidden_states.shape[1]
        thw = self.canvas(video_len)
        query, key, value = (linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)

        if encoder_hidden_states is not None:
            text_query, text_key, text_value = (linear(encoder_hidden_states).unflatten(2, (attn.heads, -1))
                                                for linear in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
            if attn.norm_added_q is not None:
                text_query = attn.norm_added_q(text_query)
            if attn.norm_added_k is not None:
                text_key = attn.norm_added_k(text_key)
            query = torch.cat([query, text_query], dim=1)
            key = torch.cat([key, text_key], dim=1)
            value = torch.cat([value, text_value], dim=1)
            del text_query, text_key, text_value

        out = self.attend(query, key, value, TokenLayout.video_text(thw, query.shape[1] - video_len), text_mask=attention_mask)
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out, None
        video, text = out[:, :video_len], out[:, video_len:]
        if attn.to_out is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if attn.to_add_out is not None:
            text = attn.to_add_out(text)
        return video, text


def _sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.transformer_blocks):
        yield Site(f"transformer_blocks.{index}.attn", block.attn, HunyuanVideo15AttnProcessor2_0, HunyuanVideo15SSTAProcessor)


def _canvas(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    shape = tuple(arguments["hidden_states"].shape)
    if len(shape) != 5:
        raise ValueError(f"hidden_states must be [batch, channels, frames, height, width], got shape {shape}")
    return shape[2] // model.config.patch_size_t, shape[3] // model.config.patch_size, shape[4] // model.config.patch_size


HUNYUAN_VIDEO_15 = Family("HunyuanVideo15Transformer3DModel", _sites, _canvas, SSTAConfig.hunyuan_video_15)
