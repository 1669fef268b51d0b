"""SANA-WM's refiner: block after block, whose queries look at a sink, at blocks before them, which its pipeline keeps, and at their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMLTX2RefinerAttnProcessor, SanaWMRefinerKVLayerCache
from torch import Tensor, nn

from ssta import DenseRun, TokenLayout, VideoGrid

from ..patch.canvas import from_frames
from ..terms import Family, stack_sites
from .ltx2 import ROPE, LTX2SSTAProcessor


class SanaWMRefinerSSTAProcessor(LTX2SSTAProcessor):
    """Attends as ``SanaWMLTX2RefinerAttnProcessor`` does, to the whole sink and to selected tiles of the rest."""

    def __call__(  # type: ignore[override]
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        sink_rotary_emb: tuple[Tensor, Tensor] | None = None,
        kv_cache: SanaWMRefinerKVLayerCache | None = None,
        kv_cache_mode: str | None = None,
    ) -> Tensor:
        """hidden_states ``[B, t*h*w, C]``; what is kept is ``[B, S, C]``, the sink's keys without RoPE."""
        layout, turned = self.video_alone(hidden_states.shape[1]), partial(ROPE[attn.rope_type], freqs=query_rotary_emb)
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states)), attn.to_v(hidden_states)
        if kv_cache is not None and kv_cache_mode == "capture_pre_rope":
            kv_cache.store_captured_pre_rope(key.detach().clone(), value.detach().clone())
        query, key = turned(query), turned(key)
        if kv_cache is not None and kv_cache_mode == "inject_and_capture_post_rope":
            kv_cache.store_captured_post_rope(key.detach().clone(), value.detach().clone())
        before, grid = [], layout.video[0]
        if kv_cache is not None and kv_cache_mode in ("inject", "inject_and_capture_post_rope"):
            sink, history = kv_cache.get_sink(), kv_cache.get_history()
            if sink is not None:
                before.append((DenseRun(sink[1].shape[1]), turned(sink[0].to(key.dtype), freqs=sink_rotary_emb), sink[1]))
            if history is not None:
                before.append((VideoGrid(history[0].shape[1] // (grid.h * grid.w), grid.h, grid.w), *history))
        segments, keys, values = zip(*before, (grid, key, value))
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (
            query, *[torch.cat([of.to(query.dtype) for of in xs], 1) for xs in (keys, values)]))
        out = self.attend(query, key, value, layout, kv_layout=TokenLayout(segments))
        return self._project_out(attn, hidden_states, out.flatten(2, 3).to(query.dtype))


def _canvas(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """By the rotary positions, which alone say where a block's tokens are."""
    config: Any = model.config
    cos, sin = arguments["video_rotary_emb"]

    def points() -> Tensor:
        angles = torch.atan2(sin[0], cos[0])
        angles = angles.transpose(0, 1).flatten(1) if config.rope_type == "split" else angles[:, ::2]
        # The angles of the lowest frequency come after the channels that only fill up.
        return angles[:, config.num_attention_heads * config.attention_head_dim % 6 // 2:][:, :3]

    return from_frames(cos, points)


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn1", stock=SanaWMLTX2RefinerAttnProcessor,
                 replacement=SanaWMRefinerSSTAProcessor)
SANA_WM_REFINER = Family("SanaWMLTX2RefinerTransformer3DModel", _SITES, _canvas)
