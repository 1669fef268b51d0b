"""Video transformers as they were published: their width and depth, with random weights and inputs, for what measures time and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from .patch.register import family_of

Canvas = tuple[int, int, int]
# random(*shape) makes an input.
Random = Callable[..., Tensor]


@dataclass(frozen=True)
class Published:
    """One model at one size of video.

    Attributes:
        name: as tables have it.
        model: the transformer's class in diffusers, whose defaults are the published sizes.
        options: what differs from those defaults.
        thw: the canvas in tokens.
        depth: blocks of the published model.
        inputs: (thw, random) -> the forward's arguments, timestep aside.
        scale: frames, rows and columns of pixels that become one token.
        steps: of a generation, as the pipeline has them by default; each takes a forward with the prompt and one without.
    """

    name: str
    model: str
    options: dict
    thw: Canvas
    depth: int
    inputs: Callable[[Canvas, Random], dict]
    scale: Canvas = (4, 16, 16)
    steps: int = 50

    def canvas(self, frames: int, height: int, width: int) -> Canvas:
        """The canvas in tokens of a video of so many frames and pixels, whose first frame is a latent frame of its own.

        Raises:
            ValueError: smaller than one token.
        """
        t, h, w = self.scale
        thw = (frames - 1) // t + 1, height // h, width // w
        if min(thw) < 1:
            raise ValueError(f"a video must have at least 1 x {h} x {w} frames, rows and columns, got {frames} x {height} x {width}")
        return thw

    def build(self, device: str, dtype: torch.dtype, blocks: int) -> nn.Module:
        """The transformer with its first ``blocks`` blocks, random weights in the dtypes that ``from_pretrained(dtype=dtype)`` gives."""
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(diffusers, self.model)(**self.options, num_layers=blocks).eval().requires_grad_(False)
        wide = model._keep_in_fp32_modules or ()
        for name, parameter in model.named_parameters():
            if not any(part in name.split(".") for part in wide):
                parameter.data = parameter.data.to(dtype)
        # Norms' weights that are all 1 would show no mistake. With larger ones tokens differ more inside tiles than those of videos, and no
        # head would be estimated.
        for site in family_of(model).sites(model):
            attention: Any = site.module
            for norm in (attention.norm_q, attention.norm_k):
                norm.weight.uniform_(1, 1.5)
        return model

    def call(self, device: str, dtype: torch.dtype, thw: Canvas | None = None) -> dict:
        """A forward's arguments, for a batch of one, on another canvas where one is given."""
        call = self.inputs(thw or self.thw, lambda *shape: torch.randn(*shape, device=device, dtype=dtype))
        return {"timestep": torch.full((1,), 500.0, device=device, dtype=dtype), "return_dict": False, **call}


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's blocks, with the attribute's name."""
    name = next(name for name in ("transformer_blocks", "blocks") if hasattr(model, name))
    return name, getattr(model, name)


def hunyuan_inputs(image: int, llm: int, byt5: int, valid_llm: int, valid_byt5: int, model: dict) -> Callable[[Canvas, Random], dict]:
    """Text to video: the image's tokens are zeros and not valid. The last two text lengths count valid tokens."""

    def inputs(thw: Canvas, random: Random) -> dict:
        def mask(length: int, valid: int) -> Tensor:
            return (torch.arange(length, device=video.device) < valid).long()[None]

        video = random(1, model["in_channels"], *thw)
        return {"hidden_states": video, "encoder_hidden_states": random(1, llm, model["text_embed_dim"]),
                "encoder_attention_mask": mask(llm, valid_llm), "encoder_hidden_states_2": random(1, byt5, model["text_embed_2_dim"]),
                "encoder_attention_mask_2": mask(byt5, valid_byt5),
                "image_embeds": torch.zeros_like(random(1, image, model["image_embed_dim"]))}

    return inputs


def wan_inputs(text: int, text_dim: int) -> Callable[[Canvas, Random], dict]:
    def inputs(thw: Canvas, random: Random) -> dict:
        t, h, w = thw
        return {"hidden_states": random(1, 16, t, 2 * h, 2 * w), "encoder_hidden_states": random(1, text, text_dim)}

    return inputs


def ltx_inputs(text: int, text_dim: int) -> Callable[[Canvas, Random], dict]:
    def inputs(thw: Canvas, random: Random) -> dict:
        video = random(1, prod(thw), 128)
        return {"hidden_states": video, "encoder_hidden_states": random(1, text, text_dim),
                "encoder_attention_mask": torch.ones(1, text, dtype=torch.long, device=video.device),
                **dict(zip(("num_frames", "height", "width"), thw))}

    return inputs


HUNYUAN_WIDTHS = dict(in_channels=65, text_embed_dim=3584, text_embed_2_dim=1472, image_embed_dim=1152)
# HunyuanVideo 1.5 at 121 frames has 1,985 condition tokens, here 900 of them valid.
PUBLISHED = {
    "hunyuan-video-1.5": Published("HunyuanVideo 1.5, 720p, 121 frames", "HunyuanVideo15Transformer3DModel", {}, (31, 45, 80), 54,
                                   hunyuan_inputs(729, 1000, 256, 800, 100, HUNYUAN_WIDTHS)),
    "wan-14b": Published("Wan 2.1 14B, 720p, 81 frames", "WanTransformer3DModel", {}, (21, 45, 80), 40, wan_inputs(512, 4096)),
    "wan-1.3b": Published("Wan 2.1 1.3B, 480p, 81 frames", "WanTransformer3DModel", dict(num_attention_heads=12, ffn_dim=8960),
                          (21, 30, 52), 30, wan_inputs(512, 4096)),
    "ltx": Published("LTX-Video, 1216 x 704, 121 frames", "LTXVideoTransformer3DModel", {}, (16, 22, 38), 28, ltx_inputs(256, 4096),
                     scale=(8, 32, 32))}
