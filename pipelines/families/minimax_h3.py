"""MiniMax-H3: one packed sequence of text, conditions and audio, and the video that is made at its end; full attention throughout."""

from __future__ import annotations

import math
from functools import partial

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import Tensor, nn

from ssta import DenseRun

from ..patch.canvas import from_coordinates
from ..patch.streams import fusible
from ..ranks.split import stock_plan
from ..terms import Arguments, Family, Split, stack_sites
from .trained.branched import BranchedProcessor


class MiniMaxH3SSTAProcessor(BranchedProcessor):
    """Attends as ``MiniMaxH3AttnProcessor`` does, to selected tiles of the video only; everything before the video stays dense."""

    projections = staticmethod(fusible)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states ``[B, others + t*h*w, C]``; the model gives no mask."""
        turned = None if rotary_emb is None else partial(_rotated, rotary_emb)
        return self.self_attention(attn, hidden_states, self.video_after(hidden_states.shape[1]), attention_mask, turned=turned)


def _rotated(angles: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """RoPE on the leading channels of ``[B, S, H, D]``, as many as cos and sin ``[S, R]`` have: channel i pairs with i + R / 2."""
    half = angles[0].shape[-1] // 2
    cos, sin = (angle.to(x.dtype)[None, :, None, :half] for angle in angles)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _canvas(model: nn.Module, arguments: Arguments) -> tuple[int, int, int]:
    points = arguments["position_ids"]
    return from_coordinates(points, lambda: points)


def _tokens(arguments: Arguments, grids: int) -> int:
    return arguments["position_ids"].shape[0]


def _before(model: nn.Module, arguments: Arguments, thw: tuple[int, int, int]) -> tuple[DenseRun, ...]:
    """Text, conditions and audio, in the order of a generation without references."""
    conditions = arguments["video_indices"].shape[0] - math.prod(thw)
    lengths = arguments["text_indices"].shape[0], conditions, arguments["audio_indices"].shape[0]
    return tuple([DenseRun(length) for length in lengths if length])


_SITES = partial(stack_sites, stack="transformer_blocks", attention="attn", stock=MiniMaxH3AttnProcessor,
                 replacement=MiniMaxH3SSTAProcessor)
MINIMAX_H3 = Family("MiniMaxH3Transformer3DModel", _SITES, _canvas, before=_before,
                    split=Split(stock_plan, ("token_refiner.refiner_blocks.*.attn",), _tokens, stock=True))
