"""What a generation runs besides the transformer: text encoders and VAEs of the published sizes, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import diffusers
import torch
import transformers
from torch import nn


@dataclass(frozen=True)
class TextEncoder:
    """One text encoder of transformers.

    Attributes:
        model: its class.
        options: what differs from the defaults of its configuration, where that is not the published one.
        tokens: of a prompt.
    """

    model: str
    options: dict
    tokens: int

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        kind = getattr(transformers, self.model)
        with torch.device(device), default_dtype(dtype):
            return kind(kind.config_class(**self.options)).eval().requires_grad_(False)

    def call(self, device: str, dtype: torch.dtype) -> Callable[[], object]:
        """Encodes a prompt."""
        model = self.build(device, dtype)
        ids = torch.randint(1, model.config.vocab_size, (1, self.tokens), device=device)
        mask = torch.ones_like(ids)
        return lambda: model(input_ids=ids, attention_mask=mask)


@dataclass(frozen=True)
class Around:
    """What surrounds the steps of a model's transformer.

    Attributes:
        steps: of a generation.
        forwards: of the transformer in each step, and prompts to encode: two with classifier-free guidance.
        encoders: of the text.
        vae: class of the VAE in diffusers, whose defaults are the published sizes.
        channels: of the latents that it decodes.
        patch: latent frames, rows and columns of one token.
        options: what differs from the VAE's defaults.
    """

    steps: int
    forwards: int
    encoders: tuple[TextEncoder, ...]
    vae: str
    channels: int
    patch: tuple[int, int, int] = (1, 2, 2)
    options: dict = field(default_factory=dict)

    def encode(self, device: str, dtype: torch.dtype) -> Callable[[], object]:
        """Encodes all prompts of a generation."""
        calls = [encoder.call(device, dtype) for encoder in self.encoders]
        return lambda: [call() for call in calls for _ in range(self.forwards)]

    def decode(self, thw: tuple[int, int, int], device: str, dtype: torch.dtype, tiled: bool) -> Callable[[], object]:
        """Decodes the video of a canvas of ``thw`` tokens, in overlapping tiles as diffusers cuts them, or in one piece."""
        with torch.device(device), default_dtype(dtype):
            vae = getattr(diffusers, self.vae)(**self.options).eval().requires_grad_(False)
        if tiled:
            vae.enable_tiling()
        latents = torch.randn(1, self.channels, *(n * patch for n, patch in zip(thw, self.patch)), device=device, dtype=dtype)
        return lambda: vae.decode(latents, return_dict=False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of ``dtype``, so that none is made wider first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_XXL = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
_UMT5 = TextEncoder("UMT5EncoderModel", dict(_XXL, vocab_size=256384), 512)
_WAN = Around(50, 2, (_UMT5,), "AutoencoderKLWan", 16)
# Qwen2.5-VL 7B sees the prompt behind 108 tokens of instructions; ByT5 what is to be written in the video.
_QWEN = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
             vocab_size=152064)
_BYT5 = dict(d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu", vocab_size=1510)
AROUND = {
    "Wan 2.1 14B, 720p, 81 frames": _WAN,
    "Wan 2.1 1.3B, 480p, 81 frames": Around(30, 2, (_UMT5,), "AutoencoderKLWan", 16),
    "HunyuanVideo 1.5, 720p, 121 frames": Around(
        50, 2, (TextEncoder("Qwen2_5_VLTextModel", _QWEN, 1108), TextEncoder("T5EncoderModel", _BYT5, 256)),
        "AutoencoderKLHunyuanVideo15", 32, (1, 1, 1)),
    "LTX-Video, 1216 x 704, 121 frames": Around(
        50, 2, (TextEncoder("T5EncoderModel", dict(_XXL, vocab_size=32128), 256),), "AutoencoderKLLTXVideo", 128, (1, 1, 1)),
    "Wan 2.1, small": Around(
        3, 2, (TextEncoder("UMT5EncoderModel", dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64), 7),),
        "AutoencoderKLWan", 4, (1, 1, 1), dict(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1))}
