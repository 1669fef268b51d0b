"""Helios: self-attention over a chunk of video and, before it, the histories of earlier chunks at three scales, each a grid of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_helios import HeliosAttnProcessor
from torch import Tensor, nn

from ssta import VideoGrid

from ..patch.canvas import from_bcfhw
from ..patch.family import Family, Site, stack_sites
from ..patch.processor import SSTAProcessor
from ..patch.rope import apply_rope
from ..patch.streams import Projected, projection_of, projections


class HeliosSSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``HeliosAttnProcessor`` does, to selected tiles only, of the chunk and of all histories."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        """hidden_states ``[B, histories + t*h*w, C]``, rotary_emb ``[B, histories + t*h*w, 2 * D]``, cosines and then sines, of both
        channels of a pair; original_context_length is t*h*w."""
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None under SSTA, got shape {tuple(attention_mask.shape)}")
        layout = self.around(hidden_states.shape[1], before=self.context.call.before)
        q, k, v = projections(attn, hidden_states)

        def finished(projected: Projected, norm: nn.Module) -> Tensor:
            x = norm(projection_of(projected)).unflatten(2, (attn.heads, -1))
            return x if rotary_emb is None else apply_rope(x, *rotary_emb[..., None, ::2].chunk(2, dim=-1))

        def amplified() -> Tensor:
            x = finished(k, attn.norm_k)
            history = x.shape[1] - layout.segments[-1].length
            if not attn.is_amplify_history or history == 0:
                return x
            scale = 1 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1)
            return torch.cat([(x[:, :history] * scale.view(1, 1, -1, 1)).to(x.dtype), x[:, history:]], dim=1)

        query, key, value = self.made(partial(finished, q, attn.norm_q), amplified,
                                      lambda: projection_of(v).unflatten(2, (attn.heads, -1)), layout, attn.heads)
        out = self.attend(query, key, value, layout).flatten(2, 3).to(query.dtype)
        return attn.to_out[1](attn.to_out[0](out))


def _histories(model: nn.Module, arguments: Mapping[str, Any], thw: tuple[int, int, int]) -> tuple[VideoGrid, ...]:
    """The oldest first, in tokens of four, two and one times the chunk's size along each axis; rounded up, as the model pads them."""
    config: Any = model.config
    found = []
    for name, scale in (("long", 4), ("mid", 2), ("short", 1)):
        latents = arguments.get(f"latents_history_{name}")
        if latents is not None and arguments.get(f"indices_latents_history_{name}") is not None:
            found.append(VideoGrid(*(-(-size // (scale * patch)) for size, patch in zip(latents.shape[2:], config.patch_size))))
    return tuple(found)


def _sites(model: nn.Module) -> Iterator[Site]:
    return stack_sites(model, "blocks", "attn1", HeliosAttnProcessor, HeliosSSTAProcessor)


HELIOS = Family("HeliosTransformer3DModel", _sites, from_bcfhw, before=_histories)
