"""Real diffusers pipelines around the tiny transformers: no VAE and no text encoder, embeddings go in and latents come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import diffusers
import torch
from diffusers import CogVideoXDDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from tiny_models import TEXT_LEN, TINY, valid
from torch import Tensor


def embeds(length: int, width: int, seed: int) -> Tensor:
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(seed))


def two_prompts(width: int, masks: bool = False) -> dict:
    """A prompt and a negative one; with ``masks`` of different lengths."""
    call = {f"{name}_embeds": embeds(TEXT_LEN, width, seed) for seed, name in enumerate(("prompt", "negative_prompt"))}
    if masks:
        call |= {"prompt_attention_mask": valid((5,)).bool(), "negative_prompt_attention_mask": valid((2,)).bool()}
    return call


def hunyuan_prompts() -> dict:
    call = {}
    for seed, name in enumerate(("", "negative_")):
        call |= {f"{name}prompt_embeds": embeds(TEXT_LEN, 12, seed), f"{name}pooled_prompt_embeds": embeds(1, 8, seed)[0],
                 f"{name}prompt_attention_mask": valid((5 - 3 * seed,))}
    return call | {"true_cfg_scale": 4.0}


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline whose canvas is (3, 6, 8).

    Attributes:
        pipeline: its class name.
        tiny: the model, a name in TINY.
        scheduler: makes one.
        call: the call's arguments besides steps and seed.
        two: with a second transformer.
        missing: components that it does without, the VAE aside.
    """

    pipeline: str
    tiny: str
    scheduler: Callable
    call: dict
    two: bool = False
    missing: tuple[str, ...] = ("text_encoder", "tokenizer")

    def build(self, layers: int = 2) -> DiffusionPipeline:
        parts = {"transformer": TINY[self.tiny].build(layers=layers), "scheduler": self.scheduler(),
                 "vae": None, **dict.fromkeys(self.missing)}
        if self.two:
            parts |= {"transformer_2": TINY[self.tiny].build(seed=1, layers=layers), "boundary_ratio": 0.875}
        pipe = getattr(diffusers, self.pipeline)(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def latents(pipe: DiffusionPipeline, steps: int = 4, **call) -> Tensor:
    """What the pipeline generates from one seed."""
    return pipe(num_inference_steps=steps, generator=torch.Generator().manual_seed(2), output_type="latent", return_dict=False, **call)[0]


def flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


SIZE = dict(height=96, width=128, num_frames=9)
PIPELINES = {
    "wan": TinyPipeline("WanPipeline", "wan", unipc, SIZE | two_prompts(12)),
    "wan_2.2": TinyPipeline("WanPipeline", "wan", unipc, SIZE | two_prompts(12), two=True),
    "hunyuan_video": TinyPipeline("HunyuanVideoPipeline", "hunyuan_video", flow, SIZE | hunyuan_prompts(),
                                  missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    "ltx": TinyPipeline("LTXPipeline", "ltx", flow, dict(height=192, width=256, num_frames=17) | two_prompts(12, masks=True)),
    "cogvideox": TinyPipeline("CogVideoXPipeline", "cogvideox", CogVideoXDDIMScheduler, SIZE | two_prompts(12)),
    "mochi": TinyPipeline("MochiPipeline", "mochi", lambda: FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
                          dict(height=96, width=128, num_frames=13) | two_prompts(16, masks=True)),
    "skyreels_v2": TinyPipeline("SkyReelsV2Pipeline", "skyreels_v2", unipc, SIZE | two_prompts(12)),
    "skyreels_v2_forcing": TinyPipeline("SkyReelsV2DiffusionForcingPipeline", "skyreels_v2", unipc,
                                        SIZE | two_prompts(12) | {"prompt": None}),
}


def wan_with_frames() -> DiffusionPipeline:
    """A Wan pipeline that takes prompts and gives frames: with a VAE, and with random embeddings where the text encoder would be."""
    pipe = PIPELINES["wan"].build()
    torch.manual_seed(3)
    vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
                                     latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    pipe.register_modules(vae=vae.eval())
    pipe.encode_prompt = lambda **_: (embeds(TEXT_LEN, 12, 0), embeds(TEXT_LEN, 12, 1))
    return pipe
