"""The video transformers whose denoising step is measured: at their published width, with a few blocks and random weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch
from torch import nn

from ssta import SSTAConfig
from ssta.pipelines.published import (
    PUBLISHED,
    Published,
    blocks_of,
    hunyuan_inputs,
    ltx_inputs,
    wan_inputs,
)


@dataclass(frozen=True, kw_only=True)
class ModelShape(Published):
    """A model of which a few blocks are measured.

    Attributes:
        blocks: how many are built and measured.
        stock_blocks: how many where diffusers' own processors run.
        config: SSTA without a compensation; the sparse checkpoint's, or as many tiles where there is none.
    """

    blocks: int
    stock_blocks: int
    config: SSTAConfig = SSTAConfig(topk=32)

    @classmethod
    def of(cls, published: Published, **more) -> ModelShape:
        return cls(**{of.name: getattr(published, of.name) for of in fields(published)}, **more)

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        """The transformer with as many blocks as are measured."""
        return super().build(device, dtype, self.blocks)


def twin(model: nn.Module, blocks: int) -> nn.Module:
    """A copy of ``model`` with its first blocks only, on the very same weights."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    name = blocks_of(other)[0]
    setattr(other, name, getattr(other, name)[:blocks])
    return other


_HUNYUAN_SMALL = dict(in_channels=9, text_embed_dim=12, text_embed_2_dim=8, image_embed_dim=8)
# The mask over all pairs of tokens that diffusers makes for HunyuanVideo 1.5 takes tens of GiB, so there one block has to do. LTX-Video is
# measured whole.
MODELS = (
    ModelShape.of(PUBLISHED["hunyuan-video-1.5"], blocks=4, stock_blocks=1, config=SSTAConfig.hunyuan_video_15()),
    ModelShape.of(PUBLISHED["wan-14b"], blocks=4, stock_blocks=2),
    ModelShape.of(PUBLISHED["ltx"], blocks=28, stock_blocks=28, config=SSTAConfig(tile_thw=(4, 4, 8), topk=24)))
MODELS_CPU = (
    ModelShape("HunyuanVideo 1.5, small", "HunyuanVideo15Transformer3DModel",
               dict(_HUNYUAN_SMALL, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_refiner_layers=1, mlp_ratio=2.0,
                    rope_axes_dim=(8, 12, 12), target_size=16), (7, 12, 16), 4, hunyuan_inputs(6, 7, 5, 4, 2, _HUNYUAN_SMALL),
               blocks=2, stock_blocks=1, config=SSTAConfig.hunyuan_video_15()),
    ModelShape("Wan 2.1, small", "WanTransformer3DModel",
               dict(num_attention_heads=2, attention_head_dim=32, text_dim=12, freq_dim=16, ffn_dim=64), (5, 12, 16), 4, wan_inputs(7, 12),
               blocks=2, stock_blocks=2),
    ModelShape("LTX-Video, small", "LTXVideoTransformer3DModel",
               dict(num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=12), (5, 12, 16), 2,
               ltx_inputs(7, 12), blocks=2, stock_blocks=2, config=SSTAConfig(tile_thw=(4, 4, 8), topk=24)))
