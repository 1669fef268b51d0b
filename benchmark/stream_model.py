"""A streaming transformer for timings: blocks of a video model's width with random weights, whose self-attention has a full cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention

# q, k, v ``[1, H, S, D]`` of a chunk -> what they attend to.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
TEXT = 512


@dataclass(frozen=True)
class Width:
    """Of a published transformer.

    Attributes:
        ffn: of the hidden layer.
        depth: blocks; measured: how many of them are built.
    """

    ffn: int
    depth: int
    measured: int


class Block(nn.Module):
    """Wan's: self-attention with norm and rotary positions, attention to text whose keys and values are known, and two linear layers, each
    behind a norm whose scale and shift come with the noise level."""

    def __init__(self, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.q, self.k, self.v, self.out, self.text_q, self.text_out = (nn.Linear(width, width) for _ in range(6))
        self.wide, self.narrow = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.norms = nn.Parameter(torch.ones(4, width))
        self.levels = nn.Parameter(0.1 * torch.randn(6, width))
        self.register_buffer("text", torch.randn(2, 1, heads, TEXT, head_dim))

    def forward(self, x: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """``[1, S, W]`` of a chunk."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.levels
        width = (x.shape[2],)
        y = layer_norm(x, width) * (1 + scale) + shift
        q, k = (_turned(self._heads(rms_norm(of(y), width, norm)), turns) for of, norm in zip((self.q, self.k), self.norms))
        x = x + self.out(_joined(attend(q, k, self._heads(self.v(y))))) * gate
        q = self._heads(rms_norm(self.text_q(layer_norm(x, width, self.norms[3])), width, self.norms[2]))
        x = x + self.text_out(_joined(scaled_dot_product_attention(q, *self.text)))
        y = layer_norm(x, width) * (1 + ffn_scale) + ffn_shift
        return x + self.narrow(gelu(self.wide(y), approximate="tanh")) * ffn_gate

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """By rotary positions ``turns``, cosines and sines ``[2, S, D / 2]`` of a channel of the first half and its partner."""
    a, b = x.chunk(2, -1)
    cos, sin = turns
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class StreamModel:
    """Its blocks, and a chunk's tokens.

    Args:
        tokens: of a chunk.
    """

    def __init__(self, width: Width, heads: int, head_dim: int, tokens: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self.blocks = [Block(heads, head_dim, width.ffn).to(dtype).eval() for _ in range(width.measured)]
            self.x = torch.randn(1, tokens, heads * head_dim, dtype=dtype)
            angles = torch.rand(tokens, head_dim // 2)
        self.turns = torch.stack([angles.cos(), angles.sin()]).to(dtype)
        self.width = width

    def step(self, attends: list[Attend], number: int) -> Callable[[], Tensor]:
        """A forward of the first blocks, of which each has a way to attend of its own."""
        def call() -> Tensor:
            x = self.x
            for block, attend in zip(self.blocks[:number], attends):
                x = block(x, self.turns, attend)
            return x

        return call

    def whole(self, times: dict[int, float]) -> float:
        """A forward of all blocks, from the times of 1 and of all that there are."""
        return times[1] + (self.width.depth - 1) * (times[self.width.measured] - times[1]) / (self.width.measured - 1)


def in_graph(call: Callable[[], Tensor]) -> Callable[[], object]:
    """The same from a CUDA graph; without a GPU as it is."""
    if not torch.cuda.is_available():
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
