"""Mochi: joint attention over [video | text]; the text's padding takes no part."""

from __future__ import annotations

from functools import partial

from diffusers.models.attention_processor import MochiAttnProcessor2_0
from diffusers.models.normalization import MochiRMSNorm
from torch import Tensor, nn

from ..patch.canvas import from_bcfhw
from ..patch.family import Family, stack_sites
from ..patch.processor import SSTAProcessor
from ..patch.streams import Stream, later
from ..ranks.split import Split, gathered, split, split_outputs


class MochiSSTAProcessor(SSTAProcessor):
    """Attends as ``MochiAttnProcessor2_0`` does, to selected tiles only, for the whole batch at once and without waiting for the device to
    say which text is valid. Rows of invalid text are zero before their projection, as there."""

    norms = {**SSTAProcessor.norms, MochiRMSNorm: False}

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
        # The angles are learned, ``[S, H, D / 2]``.
        angles, text = image_rotary_emb, encoder_hidden_states
        layout = self.around(video_len + text.shape[1], after=text.shape[1])
        query, key, value = self.joined(
            [Stream(later(attn.to_q, hidden_states), attn.norm_q, angles), Stream(later(attn.add_q_proj, text), attn.norm_added_q)],
            [Stream(later(attn.to_k, hidden_states), attn.norm_k, angles), Stream(later(attn.add_k_proj, text), attn.norm_added_k)],
            [Stream(later(attn.to_v, hidden_states)), Stream(later(attn.add_v_proj, text))], layout, heads=attn.heads)
        out = self.attend(query, key, value, layout, text_mask=attention_mask.bool()).flatten(2, 3)
        video, text = out[:, :video_len], out[:, video_len:]
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


def _noise(timestep: Tensor | float) -> Tensor | float:
    """Mochi's time runs from noise at 0 to the video at 1000."""
    return 1 - timestep / 1000


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=MochiAttnProcessor2_0, replacement=MochiSSTAProcessor)
_PLAN = {"rope": split_outputs(3, 0), "transformer_blocks.0": {"hidden_states": split()}, "proj_out": gathered()}
MOCHI = Family("MochiTransformer3DModel", _SITES, from_bcfhw, noise=_noise, split=Split(_PLAN))
