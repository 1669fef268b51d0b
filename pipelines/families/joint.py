"""The processor of models that attend jointly over [video | conditions]: the HunyuanVideo line, its relatives, and Mochi."""

from __future__ import annotations

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from ..patch.processor import SSTAProcessor
from ..patch.streams import Stream, later


class JointSSTAProcessor(SSTAProcessor):
    """Attends to selected tiles only where the original processor attends over [video | conditions], and builds no mask of S x S tokens.

    The module's ``add_*_proj`` make q, k and v of the conditions; where it has none, video and conditions share their projections.
    RoPE is for the video alone.
    """

    norms = {**SSTAProcessor.norms, RMSNorm: True}
    # Whether the model itself puts valid conditions first; where not, they are put first for attention, and back after it.
    valid_first = True
    # Whether they stay where attention had them.
    stays_first = False

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states ``[B, t*h*w, C]``, encoder_hidden_states ``[B, L, C]``, attention_mask ``[B, L]`` over the conditions or
        ``[B, 1, 1, t*h*w + L]`` over all keys, or the same of batch 1; nonzero = valid."""
        video_len = hidden_states.shape[1]
        after = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        layout = self.video_then(video_len + after, after)
        valid, order = None, None
        if attention_mask is not None and layout.dense:
            # Over the whole sequence, of which `hidden_states` may be a rank's share.
            valid = attention_mask[:, 0, 0, layout.length - after:] if attention_mask.dim() == 4 else attention_mask
            # Mochi's is of the activations' dtype.
            valid = valid.bool().expand(len(hidden_states), -1)
        if valid is not None and encoder_hidden_states is not None and not self.valid_first:
            # By a sort on the device, because asking whether it is needed would wait for the device.
            order = valid.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            valid, encoder_hidden_states = valid.gather(1, order), torch.take_along_dim(encoder_hidden_states, order[..., None], 1)
        # Mochi's are each head's own, EasyAnimate's are on the CPU.
        angles = None if image_rotary_emb is None else tuple(
            (of if of.dim() == 3 else of[:, None]).to(hidden_states.device, non_blocking=True) for of in image_rotary_emb)
        both = hidden_states
        if encoder_hidden_states is not None and attn.add_q_proj is None:
            both = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        rotated = None if both is hidden_states else video_len
        queries = [Stream(later(attn.to_q, both), attn.norm_q, angles, rotated)]
        keys = [Stream(later(attn.to_k, both), attn.norm_k, angles, rotated)]
        values = [Stream(later(attn.to_v, both))]
        if encoder_hidden_states is not None and both is hidden_states:
            queries.append(Stream(later(attn.add_q_proj, encoder_hidden_states), attn.norm_added_q))
            keys.append(Stream(later(attn.add_k_proj, encoder_hidden_states), attn.norm_added_k))
            values.append(Stream(later(attn.add_v_proj, encoder_hidden_states)))
        query, key, value = self.joined(queries, keys, values, layout, heads=attn.heads)

        out = self.attend(query, key, value, layout, text_mask=valid)
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out, None
        video, conditions = out[:, :video_len], out[:, video_len:]
        if order is not None and not self.stays_first:
            conditions = torch.take_along_dim(conditions, order.argsort(dim=1)[..., None], 1)
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            conditions = attn.to_add_out(conditions)
        return video, conditions
