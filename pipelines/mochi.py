"""Mochi: joint attention over [video | text]; the text's padding takes no part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers.models.attention_processor import MochiAttnProcessor2_0
from torch import Tensor, nn

from ssta import TokenLayout

from .canvas import from_bcfhw
from .family import Family, Site
from .processor import SSTAProcessor
from .rope import turn_pairs


class MochiSSTAProcessor(SSTAProcessor):
    """Attends as ``MochiAttnProcessor2_0`` does, to selected tiles only, for the whole batch at once and without waiting for the device to
    say which text is valid. Rows of invalid text are zero before their projection, as there."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden_states ``[B, t*h*w, C]``, encoder_hidden_states ``[B, L, C]``, attention_mask ``[B, L]`` with the valid text first."""
        video_len = hidden_states.shape[1]
        layout = TokenLayout.video_text(self.canvas(video_len), encoder_hidden_states.shape[1])
        query, key, value = (linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            # Learned angles ``[S, H, D / 2]``.
            query, key = turn_pairs(query, *image_rotary_emb), turn_pairs(key, *image_rotary_emb)
        text_query, text_key, text_value = (linear(encoder_hidden_states).unflatten(2, (attn.heads, -1))
                                            for linear in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        query = torch.cat([query, attn.norm_added_q(text_query)], dim=1)
        key = torch.cat([key, attn.norm_added_k(text_key)], dim=1)
        value = torch.cat([value, text_value], dim=1)
        out = self.attend(query, key, value, layout, text_mask=attention_mask.bool()).flatten(2, 3)
        video, text = out[:, :video_len], out[:, video_len:]
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


def _sites(model: nn.Module) -> Iterator[Site]:
    for index, block in enumerate(model.transformer_blocks):
        yield Site(f"transformer_blocks.{index}.attn1", block.attn1, MochiAttnProcessor2_0, MochiSSTAProcessor)


def _noise(timestep: Tensor | float) -> Tensor | float:
    """Mochi's time runs from noise at 0 to the video at 1000."""
    return 1 - timestep / 1000


MOCHI = Family("MochiTransformer3DModel", _sites, from_bcfhw, noise=_noise)
