"""Kandinsky 5: self-attention over the video alone; only checkpoints that attend densely themselves (attention_type "regular")."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5AttnProcessor
from torch import Tensor, nn

from ..patch.canvas import from_bfhwc
from ..patch.processor import SSTAProcessor
from ..patch.streams import Stream, later
from ..ranks.after_gather import shared_gradients
from ..ranks.split import gathered, split
from ..terms import Family, Site, Split, stack_sites


class Kandinsky5SSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``Kandinsky5AttnProcessor`` does, to selected tiles only."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: dict | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``, rotary_emb ``[B, t*h*w, 1, D / 2, 2, 2]``."""
        if sparse_params is not None:
            raise ValueError("sparse_params must be None under SSTA, which is a sparsity of its own; call remove_ssta to use the model's")
        layout = self.video_alone(hidden_states.shape[1])

        turned = None if rotary_emb is None else partial(_rotated, rotary_emb)
        query, key, value = self.joined(
            [Stream(later(attn.to_query, hidden_states), partial(_normed, attn.query_norm), then=turned)],
            [Stream(later(attn.to_key, hidden_states), partial(_normed, attn.key_norm), then=turned)],
            [Stream(later(attn.to_value, hidden_states))], layout, heads=attn.num_heads)
        return attn.out_layer(self.attend(query, key, value, layout).flatten(-2, -1))


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.float()).type_as(x)


def _rotated(rotary_emb: Tensor, x: Tensor) -> Tensor:
    """RoPE by matrices of 2 x 2 on neighbouring channels. The model was trained with its result rounded to bfloat16, whatever x is."""
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (rotary_emb * pairs).sum(dim=-1).reshape(x.shape).to(torch.bfloat16).type_as(x)


def _sites(model: nn.Module) -> Iterator[Site]:
    if model.config.attention_type != "regular":
        raise ValueError(f"model must have attention_type 'regular', got {model.config.attention_type!r}, which is sparse itself")
    return stack_sites(model, "visual_transformer_blocks", "self_attention", Kandinsky5AttnProcessor, Kandinsky5SSTAProcessor)


# Tokens are made, and put back in their places, by functions, which are no modules: so between the first and the last block.
_PLAN = {"visual_transformer_blocks.0": {"visual_embed": split()}, "visual_transformer_blocks.*": {"rope": split(6, 1)},
         "visual_transformer_blocks.-1": gathered()}
KANDINSKY5 = Family("Kandinsky5Transformer3DModel", _sites, from_bfhwc, split=Split(
    _PLAN, ("text_transformer_blocks.*.self_attention", "visual_transformer_blocks.*.cross_attention"), stock=True,
    hooks=partial(shared_gradients, gather="visual_transformer_blocks")))
