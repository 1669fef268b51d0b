"""LTX-2: self-attention over the video, keyframe tokens after it or Echo's memory before it; audio's own attention stays as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoAttnProcessor,
    LTX2PerturbedAttnProcessor,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from torch import Tensor, nn

from ..patch.canvas import from_numbers, memory_before
from ..patch.processor import SSTAProcessor
from ..patch.streams import Stream, later
from ..ranks.split import CROSS_LENGTHS, gathered, split, split_outputs
from ..terms import Family, Split, SplitPlan, stack_sites
from .ltx import tokens_given

ROPE = {"interleaved": apply_interleaved_rotary_emb, "split": apply_split_rotary_emb}


class LTX2SSTAProcessor(SSTAProcessor):
    """Attends as the video's self-attention under ``LTX2AudioVideoAttnProcessor`` does, to selected tiles only, gates per head included;
    and under ``LTX2PerturbedAttnProcessor``, whose guidance replaces the attention's result by the values. Blocks without that guidance
    are called without its two arguments."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: bool | None = None,
    ) -> Tensor:
        """hidden_states ``[B, memory + t*h*w + keyframes, C]``; there is memory or keyframes, not both. perturbation_mask: 0 where the
        values stand for the attention's result, 1 elsewhere; all_perturbed: whether it is 0 throughout, looked up on the device where it is
        not told, as in the original processor."""
        value = attn.to_v(hidden_states)
        if all_perturbed is None:
            all_perturbed = perturbation_mask is not None and bool((perturbation_mask == 0).all())
        if all_perturbed:
            return self._project_out(attn, hidden_states, value)
        out = self._attended(attn, hidden_states, value, attention_mask, query_rotary_emb)
        if perturbation_mask is not None:
            out = torch.lerp(value, out, perturbation_mask)
        return self._project_out(attn, hidden_states, out)

    def _attended(self, attn: nn.Module, hidden_states: Tensor, value: Tensor, attention_mask: Tensor | None,
                  rotary_emb: tuple[Tensor, Tensor] | None) -> Tensor:
        if attention_mask is not None:
            raise ValueError(f"video_self_attention_mask must be None under SSTA, got shape {tuple(attention_mask.shape)}; "
                             "call remove_ssta for pipelines that need it")
        layout = self.video_then(hidden_states.shape[1])

        def turned(x: Tensor) -> Tensor:
            return x if rotary_emb is None else ROPE[attn.rope_type](x.flatten(2), rotary_emb).unflatten(2, (attn.heads, -1))

        # v comes from outside, where it may be all that is asked for.
        query, key, v = self.joined(
            [Stream(later(attn.to_q, hidden_states), attn.norm_q, then=turned)],
            [Stream(later(attn.to_k, hidden_states), attn.norm_k, then=turned)], [Stream(value)], layout, heads=attn.heads,
            across_heads=True)
        return self.attend(query, key, v, layout).flatten(2, 3).to(query.dtype)

    def _project_out(self, attn: nn.Module, hidden_states: Tensor, out: Tensor) -> Tensor:
        if attn.to_gate_logits is not None:
            # Logits of zero leave the heads as they are.
            gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))
            out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out))


def _plan(model: Any) -> SplitPlan:
    """Audio and text are whole. diffusers' own splits them, and three of its four angles are not."""
    angles = split_outputs(4, 2) if model.config.rope_type == "split" else split_outputs(3, 1)
    return {"": {"hidden_states": split(), "timestep": split(2)}, "rope": angles, "cross_attn_rope": angles, "proj_out": gathered()}


# Queries of audio, which are whole, look at keys of the video, which is split: `video_to_audio_attn` is left to diffusers.
_WHOLE = tuple(f"transformer_blocks.*.{name}" for name in ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"))
_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1",
                 stock=(LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor), replacement=LTX2SSTAProcessor)
LTX2 = Family("LTX2VideoTransformer3DModel", _SITES, from_numbers, before=memory_before, split=Split(
    _plan, _WHOLE, tokens_given, trains=CROSS_LENGTHS))
