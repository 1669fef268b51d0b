"""A HunyuanVideo 1.5 transformer small enough for tests, its inputs, and configurations that cut its canvas into several tiles."""

from __future__ import annotations

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from ssta import SSTAConfig, pipelines
from ssta.pipelines import Schedule

CANVAS = (3, 6, 8)
EVERYTHING = SSTAConfig(tile_thw=(2, 4, 4), sparse_type="block_attn", topk=10_000)
SPARSE = SSTAConfig(tile_thw=(2, 4, 4), kernel_thw=(1, 1, 1), topk=2)
WINDOW = SSTAConfig(tile_thw=(2, 2, 4), kernel_thw=(1, 3, 1), sparse_type="sta")


def tiny_transformer(seed: int = 0, layers: int = 2, **options) -> HunyuanVideo15Transformer3DModel:
    torch.manual_seed(seed)
    model = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=layers, num_refiner_layers=1, mlp_ratio=2.0,
        text_embed_dim=12, text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(4, 6, 6), target_size=16, **options)
    # Attention is nearly uniform under the default initialisation; larger queries make the selected tiles matter.
    for block in model.transformer_blocks:
        block.attn.norm_q.weight.data.mul_(3)
    return model.eval()


def inputs(thw=CANVAS, prompts=(4,), seed: int = 1, image: bool = False, text_len: int = 7) -> dict:
    """A forward's arguments, with ``prompts`` valid text tokens per batch element."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(prompts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor(prompts)[:, None]
    return {
        "hidden_states": random(batch, 9, *thw), "timestep": torch.full((batch,), 500.0), "return_dict": False,
        "encoder_hidden_states": random(batch, text_len, 12), "encoder_attention_mask": (torch.arange(text_len) < lengths).long(),
        "encoder_hidden_states_2": random(batch, 5, 8), "encoder_attention_mask_2": (torch.arange(5) < lengths - 2).long(),
        "image_embeds": random(batch, 6, 8) if image else torch.zeros(batch, 6, 8),
    }


def apply_ssta(model, config=None, **options) -> pipelines.SSTAHandle:
    """As the library's; but a configuration that a test gives is for every step and layer unless it gives a schedule too."""
    return pipelines.apply_ssta(model, config, **({} if config is None else {"schedule": Schedule()}) | options)


@torch.no_grad()
def run(model, **call) -> torch.Tensor:
    return model(**(call or inputs()))[0]
