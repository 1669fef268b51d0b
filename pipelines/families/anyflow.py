"""AnyFlow, all frames at once: Wan's self-attention with RoPE by complex numbers. FAR, which goes by chunks, is another model."""

from __future__ import annotations

from functools import partial

from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_anyflow import AnyFlowAttnProcessor
from torch import Tensor

from ..patch.canvas import from_bfchw
from ..ranks.after_gather import shared_gradients
from ..ranks.split import gathered, split
from ..terms import Family, Split, stack_sites
from .wan_attention import WanSSTAProcessor


class AnyFlowSSTAProcessor(WanSSTAProcessor):
    """Attends as ``AnyFlowAttnProcessor`` does, to selected tiles only."""

    norms = {**WanSSTAProcessor.norms, RMSNorm: True}

    def angles(self, rotary_emb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """rotary_emb's "query" and "key" are the same, complex ``[1, 1, t*h*w, D / 2]``."""
        turns = self.rank_share(rotary_emb["query"], 2).transpose(1, 2)
        return turns.real.float(), turns.imag.float()


_SITES = partial(stack_sites, stack="blocks", attention="attn1", stock=AnyFlowAttnProcessor, replacement=AnyFlowSSTAProcessor)
# Every token has a modulation, in each block and, from one that stays whole, after `norm_out`.
_PLAN = {"blocks.0": {"hidden_states": split()}, "blocks.*": {"temb": split(4, 1)}, "norm_out": gathered()}
ANYFLOW = Family("AnyFlowTransformer3DModel", _SITES, from_bfchw, split=Split(
    _PLAN, ("blocks.*.attn2",), hooks=partial(shared_gradients, gather="norm_out")))
