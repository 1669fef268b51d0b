"""Kandinsky 6: self-attention over the video alone, in blocks that audio shares; audio's own attention stays as it is."""

from __future__ import annotations

from functools import partial

from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6AttnProcessor
from torch import Tensor, nn

from ..patch.canvas import from_bfhwc
from ..patch.processor import SSTAProcessor
from ..patch.streams import Stream, later
from ..ranks.split import CROSS_LENGTHS, gathered, split
from ..terms import Call, Family, Hooks, Split, stack_sites


class Kandinsky6SSTAProcessor(SSTAProcessor):
    """Attends as the video's self-attention under ``Kandinsky6AttnProcessor`` does, to selected tiles only."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        rotary_emb_kv: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; rotary_emb, matrices of 2 x 2, ``[t*h*w, 1, D / 2, 2, 2]``, is the keys' too; the model gives no
        mask. A reference frame behind the video is one more frame of the canvas."""
        if attn_mask is not None:
            raise ValueError(f"attn_mask must be None under SSTA, got shape {tuple(attn_mask.shape)}")
        layout = self.video_alone(hidden_states.shape[1])
        angles = None if rotary_emb is None else (rotary_emb[..., 0, 0], rotary_emb[..., 1, 0])
        query, key, value = self.joined(
            [Stream(later(attn.to_query, hidden_states), attn.query_norm, angles)],
            [Stream(later(attn.to_key, hidden_states), attn.key_norm, angles)], [Stream(later(attn.to_value, hidden_states))], layout,
            heads=attn.num_heads)
        return attn.out_layer(self.attend(query, key, value, layout).flatten(-2, -1))


def _needs_audio(call: Call, block: nn.Module, args: tuple) -> None:
    """In the place of what diffusers says of outputs that are no tensors, after the last block."""
    if call().ranks is not None and args[1] is None:
        raise ValueError("audio_hidden_states must be given on several ranks, got None")


def _hooks(model: nn.Module, call: Call) -> Hooks:
    yield model.get_submodule("visual_transformer_blocks.0").register_forward_pre_hook(partial(_needs_audio, call))


_SITES = partial(stack_sites, stack="visual_transformer_blocks", attention="video_dec_block.self_attention", stock=Kandinsky6AttnProcessor,
                 replacement=Kandinsky6SSTAProcessor)
# Video and audio, each by itself: they attend to one another by diffusers' own exchange. Between the first and the last block, because the
# output layer wants the video in its frames.
_PLAN = {"visual_transformer_blocks.0": {"vis": split(), "aud": split()},
         "visual_transformer_blocks.*": {"vis_rope": split(5, 0), "aud_rope": split(5, 0)},
         "visual_transformer_blocks.-1": [gathered()] * 2}
KANDINSKY6 = Family("Kandinsky6Transformer3DModel", _SITES, from_bfhwc, split=Split(
    _PLAN, ("*_text_transformer_blocks.*.attn", "visual_transformer_blocks.*.cross_attention"), trains=CROSS_LENGTHS, hooks=_hooks))
