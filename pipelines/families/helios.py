"""Helios: self-attention over a chunk of video and, before it, the histories of earlier chunks at three scales, each a grid of its own."""

from __future__ import annotations

from functools import partial

import torch
from diffusers.models.transformers.transformer_helios import HeliosAttnProcessor
from torch import Tensor, nn

from ..patch.canvas import from_bcfhw, histories_before
from ..patch.processor import SSTAProcessor
from ..patch.streams import apply_rope, fusible
from ..ranks.after_gather import shared_gradients
from ..ranks.split import gathered, split
from ..terms import Arguments, Call, Family, Hooks, Split, stack_sites


class HeliosSSTAProcessor(SSTAProcessor):
    """Attends as the self-attention of ``HeliosAttnProcessor`` does, to selected tiles only, of the chunk and of all histories."""

    projections = staticmethod(fusible)

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
        channels of a pair; original_context_length is t*h*w. On several ranks all are those of its part
        of the sequence."""
        layout = self.video_alone(hidden_states.shape[1])

        def turned(x: Tensor) -> Tensor:
            return x if rotary_emb is None else apply_rope(x, *rotary_emb[..., None, ::2].chunk(2, dim=-1))

        def amplified(x: Tensor) -> Tensor:
            x = turned(x)
            history = x.shape[1] - (layout.segments[-1].length if original_context_length is None else original_context_length)
            if not attn.is_amplify_history or history == 0:
                return x
            scale = 1 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1)
            return torch.cat([(x[:, :history] * scale.view(1, 1, -1, 1)).to(x.dtype), x[:, history:]], dim=1)

        return self.self_attention(attn, hidden_states, layout, attention_mask, turned=turned, turned_keys=amplified, across_heads=True)


def _tokens(arguments: Arguments, grids: int) -> int:
    return grids


def _hooks(model: nn.Module, call: Call) -> Hooks:
    for block in model.get_submodule("blocks").children():
        yield block.register_forward_pre_hook(partial(_own_context, call))
    yield from shared_gradients(model, call, "blocks")


def _own_context(call: Call, block: nn.Module, args: tuple) -> tuple | None:
    """How many of the tokens that a block is given are the chunk's, which is at the end."""
    ranks = call().ranks
    if ranks is None or ranks.tokens is None:
        return None
    *others, context = args
    end = ranks.start(ranks.tokens) + ranks.share(ranks.tokens)
    return *others, max(0, min(ranks.share(ranks.tokens), end - (ranks.tokens - context)))


# The chunk and its histories are one run of tokens, which the output's norm wants whole.
_PLAN = {"blocks.0": {"hidden_states": split()}, "blocks.*": {"temb": split(4), "rotary_emb": split()}, "blocks.-1": gathered()}
HELIOS = Family(
    "HeliosTransformer3DModel",
    partial(stack_sites, stack="blocks", attention="attn1", stock=HeliosAttnProcessor, replacement=HeliosSSTAProcessor), from_bcfhw,
    before=partial(histories_before, ("latents_history_long", "latents_history_mid", "latents_history_short")),
    split=Split(_PLAN, ("blocks.*.attn2",), _tokens, hooks=_hooks))
