"""AnyFlow FAR: chunk after chunk, whose queries look at a kept copy of earlier chunks, the older of these compressed to a coarser grid."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowCausalAttnProcessor, apply_rotary_emb
from torch import Tensor, cat, nn
from torch.nn.functional import pad

from ssta import DenseRun, TokenLayout, VideoGrid

from ..patch.canvas import from_bfchw
from ..patch.processor import SSTAProcessor
from ..terms import Family, stack_sites

_STOCK = AnyFlowCausalAttnProcessor()


class AnyFlowFARSSTAProcessor(SSTAProcessor):
    """Attends as ``AnyFlowCausalAttnProcessor`` does where a chunk is denoised, to selected tiles of it and of earlier chunks that were not
    compressed, and to all that was. The pass that keeps a chunk, and training, whose chunks lie side by side under a mask, stay as they
    are."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        rotary_emb: dict[str, Tensor] | None = None,
        kv_cache: dict[str, Tensor] | None = None,
        kv_cache_flag: dict[str, Any] | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; kv_cache's ``[2, B, H, S, D]`` are keys without RoPE, and values; rotary_emb's "query" and "key"
        are complex, ``[1, 1, S, D / 2]``."""
        if kv_cache is None or kv_cache_flag is None or kv_cache_flag["is_cache_step"]:
            return _STOCK(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, kv_cache, kv_cache_flag)
        layout = self.video_alone(hidden_states.shape[1])
        compressed, full = kv_cache_flag["num_cached_compressed_tokens"], kv_cache_flag["num_cached_full_tokens"]
        # The stock processor fills up its queries to blocks of 128, and the keys alike, without a mask: all look at these zeros too.
        zeros = -hidden_states.shape[1] % 128
        query, key, value = (norm(linear(hidden_states)).to(hidden_states.dtype).unflatten(2, (attn.heads, -1)).transpose(1, 2)
                             for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k), (attn.to_v, nn.Identity())))
        key, value = (cat([kv_cache["compressed_cache"][i, :, :, :compressed], kv_cache["full_cache"][i, :, :, :full], x], 2)
                      for i, x in enumerate((key, value)))
        if rotary_emb is not None:
            query, key = apply_rotary_emb(query, rotary_emb["query"]), apply_rotary_emb(key, rotary_emb["key"])
        grid, = layout.video
        kv_layout = TokenLayout((*([DenseRun(compressed)] if compressed else []),
                                 *([VideoGrid(full // (grid.h * grid.w), grid.h, grid.w)] if full else []),
                                 grid, *([DenseRun(zeros)] if zeros else [])))
        query, key, value = query.transpose(1, 2), *(pad(x, (0, 0, 0, zeros)).transpose(1, 2) for x in (key, value))
        out = self.attend(query, key, value, layout, kv_layout=kv_layout)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))

    def _densely(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, str]:
        """By diffusers' default: the stock processor's own backend is FlexAttention, which is for masks and waits for the device."""
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        return dispatch_attention_fn(query, key, value).transpose(1, 2), "default backend"


_SITES = partial(stack_sites, stack="blocks", attention="attn1", stock=AnyFlowCausalAttnProcessor, replacement=AnyFlowFARSSTAProcessor)
ANYFLOW_FAR = Family("AnyFlowFARTransformer3DModel", _SITES, from_bfchw)
