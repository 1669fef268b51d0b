"""The video transformers whose denoising step is measured: at their published width, with a few blocks and random weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import diffusers
import torch
from torch import Tensor, nn

from ssta import SSTAConfig
from ssta.pipelines.patch.family import family_of

Canvas = tuple[int, int, int]
# What makes the inputs: random(*shape).
Random = Callable[..., Tensor]


@dataclass(frozen=True)
class ModelShape:
    """One model at one size of video.

    Attributes:
        name: as rows have it.
        model: the transformer's class in diffusers, whose defaults are the published sizes.
        options: what differs from those defaults.
        thw: the canvas in tokens.
        depth: blocks of the published model.
        blocks: how many are built and measured.
        stock_blocks: how many where diffusers' own processors run.
        inputs: (thw, random) -> the forward's arguments, timestep aside.
        config: SSTA without a compensation; the sparse checkpoint's, or as many tiles where there is none.
    """

    name: str
    model: str
    options: dict
    thw: Canvas
    depth: int
    blocks: int
    stock_blocks: int
    inputs: Callable[[Canvas, Random], dict]
    config: SSTAConfig = SSTAConfig(topk=32)

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        """The transformer with random weights in the dtypes that ``from_pretrained(dtype=dtype)`` gives them."""
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(diffusers, self.model)(**self.options, num_layers=self.blocks).eval().requires_grad_(False)
        wide = model._keep_in_fp32_modules or ()
        for name, parameter in model.named_parameters():
            if not any(part in name.split(".") for part in wide):
                parameter.data = parameter.data.to(dtype)
        # Attention is nearly uniform under the default initialisation, and the norms' weights all 1: neither would show a mistake.
        for site in family_of(model).sites(model):
            for norm in (site.module.norm_q, site.module.norm_k):
                norm.weight.uniform_(1, 3)
        return model

    def call(self, device: str, dtype: torch.dtype) -> dict:
        """A forward's arguments, for a batch of one."""
        call = self.inputs(self.thw, lambda *shape: torch.randn(*shape, device=device, dtype=dtype))
        return {"timestep": torch.full((1,), 500.0, device=device, dtype=dtype), "return_dict": False, **call}


def twin(model: nn.Module, blocks: int) -> nn.Module:
    """A copy of ``model`` with its first blocks only, on the very same weights."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    name = blocks_of(other)[0]
    setattr(other, name, getattr(other, name)[:blocks])
    return other


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's blocks, with the attribute's name."""
    name = next(name for name in ("transformer_blocks", "blocks") if hasattr(model, name))
    return name, getattr(model, name)


def _hunyuan(image: int, llm: int, byt5: int, valid_llm: int, valid_byt5: int, model: dict) -> Callable[[Canvas, Random], dict]:
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


def _wan(text: int, text_dim: int) -> Callable[[Canvas, Random], dict]:
    def inputs(thw: Canvas, random: Random) -> dict:
        t, h, w = thw
        return {"hidden_states": random(1, 16, t, 2 * h, 2 * w), "encoder_hidden_states": random(1, text, text_dim)}

    return inputs


def _ltx(text: int, text_dim: int) -> Callable[[Canvas, Random], dict]:
    def inputs(thw: Canvas, random: Random) -> dict:
        video = random(1, prod(thw), 128)
        return {"hidden_states": video, "encoder_hidden_states": random(1, text, text_dim),
                "encoder_attention_mask": torch.ones(1, text, dtype=torch.long, device=video.device),
                **dict(zip(("num_frames", "height", "width"), thw))}

    return inputs


_HUNYUAN = dict(in_channels=65, text_embed_dim=3584, text_embed_2_dim=1472, image_embed_dim=1152)
_HUNYUAN_SMALL = dict(in_channels=9, text_embed_dim=12, text_embed_2_dim=8, image_embed_dim=8)
# HunyuanVideo 1.5 at 121 frames has 31 latent frames, 16 x smaller in space, and 1,985 condition tokens, here 900 valid. The mask over
# all pairs of tokens that diffusers makes for it takes tens of GiB, so there one block has to do. LTX-Video is measured whole.
MODELS = (
    ModelShape("HunyuanVideo 1.5, 720p, 121 frames", "HunyuanVideo15Transformer3DModel", {}, (31, 45, 80), 54, 4, 1,
               _hunyuan(729, 1000, 256, 800, 100, _HUNYUAN), SSTAConfig.hunyuan_video_15()),
    ModelShape("Wan 2.1 14B, 720p, 81 frames", "WanTransformer3DModel", {}, (21, 45, 80), 40, 2, 2, _wan(512, 4096)),
    ModelShape("LTX-Video, 1216 x 704, 121 frames", "LTXVideoTransformer3DModel", {}, (16, 22, 38), 28, 28, 28, _ltx(256, 4096),
               SSTAConfig(tile_thw=(4, 4, 8), topk=24)))
MODELS_CPU = (
    ModelShape("HunyuanVideo 1.5, small", "HunyuanVideo15Transformer3DModel",
               dict(_HUNYUAN_SMALL, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_refiner_layers=1, mlp_ratio=2.0,
                    rope_axes_dim=(8, 12, 12), target_size=16), (7, 12, 16), 4, 2, 1, _hunyuan(6, 7, 5, 4, 2, _HUNYUAN_SMALL),
               SSTAConfig.hunyuan_video_15()),
    ModelShape("Wan 2.1, small", "WanTransformer3DModel",
               dict(num_attention_heads=2, attention_head_dim=32, text_dim=12, freq_dim=16, ffn_dim=64), (5, 12, 16), 4, 2, 2, _wan(7, 12)),
    ModelShape("LTX-Video, small", "LTXVideoTransformer3DModel",
               dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=12), (5, 12, 16), 2, 2, 2,
               _ltx(7, 12), SSTAConfig(tile_thw=(4, 4, 8), topk=24)))
