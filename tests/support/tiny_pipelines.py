"""Real diffusers pipelines around the tiny transformers: no VAE and no text encoder, embeddings go in and latents come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace

import diffusers
import torch
from diffusers import CogVideoXDDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from PIL import Image
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


def hunyuan_15_prompts() -> dict:
    call = {}
    for seed, name in enumerate(("", "negative_")):
        call |= {f"{name}prompt_embeds": embeds(TEXT_LEN, 12, seed), f"{name}prompt_embeds_mask": valid((5 - 3 * seed,)),
                 f"{name}prompt_embeds_2": embeds(5, 8, seed), f"{name}prompt_embeds_mask_2": valid((3,), 5)}
    return call


def kandinsky_prompts() -> dict:
    call = {}
    for seed, name in enumerate(("", "negative_")):
        call |= {f"{name}prompt_embeds_qwen": embeds(TEXT_LEN, 12, seed), f"{name}prompt_embeds_clip": embeds(1, 8, seed)[0],
                 f"{name}prompt_cu_seqlens": torch.tensor([0, TEXT_LEN])}
    return call


class Settings(SimpleNamespace):
    """A VAE that neither encodes nor decodes, and only says what a pipeline asks about it."""


class Connectors(Settings):
    """LTX-2's, between the text encoder and the transformer."""

    def __call__(self, prompts: Tensor, mask: Tensor, **_) -> tuple[Tensor, Tensor, Tensor]:
        return embeds(TEXT_LEN, 32, 0), embeds(TEXT_LEN, 16, 1), mask


def normed(temporal: int, spatial: int) -> Settings:
    """LTX-2's VAEs, which latents are normed back for."""
    return Settings(config=Settings(scaling_factor=1.0, sample_rate=16000, mel_hop_length=160, mel_bins=16, latent_channels=1),
                    dtype=torch.float32, latents_mean=torch.zeros(4), latents_std=torch.ones(4), temporal_compression_ratio=temporal,
                    spatial_compression_ratio=spatial, mel_compression_ratio=4)


def video(channels: int = 4, seed: int = 5) -> Tensor:
    """Latents of the canvas, two by two in each token."""
    return embeds(3 * 12 * 16, channels, seed).mT.reshape(1, channels, 3, 12, 16)


def frames(*_, **__) -> tuple[Tensor, Tensor]:
    """Latents as CogVideoX has them, frames before channels, and those of an image or a video to go by."""
    return video().transpose(1, 2), video(seed=6).transpose(1, 2)


def rows(*_, **__) -> tuple[Tensor, Tensor]:
    """Latents as LTX packs them, and which tokens are given: the first frame's."""
    return embeds(3 * 6 * 8, 4, 5), (torch.arange(3 * 6 * 8) < 6 * 8).float()[None]


def vae(**config) -> Settings:
    return Settings(config=Settings(**config), temporal_compression_ratio=4, spatial_compression_ratio=16)


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline whose canvas is (3, 6, 8).

    Attributes:
        pipeline: its class name, after its module where diffusers gives a placeholder for want of some other library.
        tiny: the model, a name in TINY.
        scheduler: makes one.
        call: the call's arguments besides steps and seed.
        two: with a second transformer.
        missing: components that it does without, the VAE aside.
        options: of the transformer, besides its own.
        parts: what it has besides, made for each pipeline.
        settings: attributes of it to change, and to what.
        methods: methods that need what is missing, and what stands in for them: (pipe, the method's arguments) -> its result.
    """

    pipeline: str
    tiny: str
    scheduler: Callable
    call: dict
    two: bool = False
    missing: tuple[str, ...] = ("text_encoder", "tokenizer")
    options: Mapping = field(default_factory=dict)
    parts: Callable[[], dict] = dict
    settings: Mapping = field(default_factory=dict)
    methods: Mapping[str, Callable] = field(default_factory=dict)

    def build(self, layers: int = 2, scheduler: Callable | None = None) -> DiffusionPipeline:
        parts = {"transformer": TINY[self.tiny].build(layers=layers, **self.options), "scheduler": (scheduler or self.scheduler)(),
                 "vae": None, **dict.fromkeys(self.missing), **self.parts()}
        if self.two:
            parts |= {"transformer_2": TINY[self.tiny].build(seed=1, layers=layers), "boundary_ratio": 0.875}
        pipe = resolve_name(self.pipeline if ":" in self.pipeline else f"diffusers:{self.pipeline}")(**parts)
        pipe.set_progress_bar_config(disable=True)
        vars(pipe).update(self.settings)
        for name, method in self.methods.items():
            setattr(pipe, name, partial(method, pipe))
        return pipe


def latents(pipe: DiffusionPipeline, steps: int = 4, **call) -> Tensor:
    """What the pipeline generates from one seed."""
    return pipe(num_inference_steps=steps, generator=torch.Generator().manual_seed(2), output_type="latent", return_dict=False, **call)[0]


def flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def hunyuan_vae() -> dict:
    return {"vae": Settings(config=Settings(scaling_factor=1.0), dtype=torch.float32, temporal_compression_ratio=4,
                            spatial_compression_ratio=8)}


def wan_vae() -> dict:
    return {"vae": Settings(config=Settings(z_dim=4, scale_factor_temporal=4, scale_factor_spatial=8), dtype=torch.float32,
                            temperal_downsample=[False, True, True])}


def standardised_vae() -> dict:
    """Wan's, whose latents have a mean and a spread, and which decodes to the latents themselves."""
    return {"vae": Settings(config=Settings(z_dim=4, scale_factor_temporal=4, scale_factor_spatial=8, latents_mean=[0.0] * 4,
                                            latents_std=[1.0] * 4),
                            dtype=torch.float32, temperal_downsample=[False, True, True], decode=lambda x, return_dict: (x,))}


def unchecked() -> dict:
    """Cosmos' guardrail, which lets everything pass."""
    return {"safety_checker": Settings(to=lambda device: None)}


def ltx2_parts() -> dict:
    return {"vae": normed(8, 32), "audio_vae": normed(4, 4), "connectors": Connectors()}


def audio(pipe: DiffusionPipeline, *_, audio_latent_length: int, **__) -> Tensor:
    return embeds(audio_latent_length, 4, 5)


SIZE, LONG = dict(height=96, width=128, num_frames=9), dict(height=192, width=256, num_frames=17)
LTX2 = LONG | dict(guidance_scale=1.0, audio_guidance_scale=1.0, stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0,
                   audio_modality_scale=1.0) | two_prompts(12, masks=True)
COARSE = dict(vae_scale_factor_spatial=128)
IMAGE = dict(image=torch.zeros(1, 3, 96, 128))
LONG_PROMPTS = {f"{name}_embeds": embeds(512, 12, seed) for seed, name in enumerate(("prompt", "negative_prompt"))}
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
    # These need no VAE where the video's or the image's latents are given.
    "wan_video_to_video": TinyPipeline("WanVideoToVideoPipeline", "wan", unipc,
                                       dict(height=96, width=128, latents=embeds(3 * 12 * 16, 4, 5).mT.reshape(1, 4, 3, 12, 16))
                                       | two_prompts(12)),
    "cogvideox_video_to_video": TinyPipeline(
        "CogVideoXVideoToVideoPipeline", "cogvideox", CogVideoXDDIMScheduler,
        dict(height=96, width=128, video=range(9), latents=embeds(3 * 12 * 16, 4, 5).reshape(1, 3, 4, 12, 16)) | two_prompts(12),
        methods={"check_inputs": lambda pipe, *_, **__: None}),
    "consisid": TinyPipeline(
        "diffusers.pipelines.consisid.pipeline_consisid:ConsisIDPipeline", "consisid", diffusers.CogVideoXDPMScheduler,
        SIZE | dict(image=torch.zeros(1, 3, 96, 128)) | two_prompts(12),
        methods={"prepare_latents": lambda pipe, *_: embeds(3 * 12 * 16, 4, 5).reshape(1, 3, 4, 12, 16).split((4, 0), dim=2)}),
    "hunyuan_video_15": TinyPipeline(
        "HunyuanVideo15Pipeline", "hunyuan_video_15", flow, SIZE | hunyuan_15_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(), "vae": vae(latent_channels=4)},
        methods={"prepare_latents": lambda pipe, *_: embeds(3 * 6 * 8, 4, 5).mT.reshape(1, 4, 3, 6, 8)}),
    "kandinsky5": TinyPipeline(
        "Kandinsky5T2VPipeline", "kandinsky5", flow, SIZE | kandinsky_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    "motif_video": TinyPipeline(
        "MotifVideoPipeline", "motif_video", flow, SIZE | two_prompts(12, masks=True),
        missing=("text_encoder", "tokenizer", "feature_extractor"), options={"in_channels": 9},
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(), "vae": vae(z_dim=4, scale_factor_temporal=4, scale_factor_spatial=8)}),
    "wan_vace": TinyPipeline(
        "WanVACEPipeline", "wan_vace", unipc, SIZE | two_prompts(12),
        parts=wan_vae,
        methods={"preprocess_conditions": lambda pipe, *_: (None, None, [[]]),
                 "prepare_video_latents": lambda pipe, *_: embeds(3 * 12 * 16, 4, 5).mT.reshape(1, 4, 3, 12, 16),
                 "prepare_masks": lambda pipe, *_: torch.ones(1, 2, 3, 12, 16)}),
    "ltx2": TinyPipeline("LTX2Pipeline", "ltx2", flow, LTX2, missing=("text_encoder", "tokenizer", "audio_vae", "vocoder"),
                         parts=ltx2_parts, methods={"prepare_audio_latents": audio}),
    # These take an image, whose latents stand in for its encoder's.
    "wan_image_to_video": TinyPipeline(
        "WanImageToVideoPipeline", "wan", unipc, SIZE | IMAGE | two_prompts(12), options={"in_channels": 8}, parts=wan_vae,
        methods={"prepare_latents": lambda pipe, *_: (video(), video(seed=6))}),
    "hunyuan_video_image_to_video": TinyPipeline(
        "HunyuanVideoImageToVideoPipeline", "hunyuan_video", flow, SIZE | IMAGE | hunyuan_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_processor"),
        options={"in_channels": 9, "image_condition_type": "latent_concat"}, parts=hunyuan_vae,
        methods={"prepare_latents": lambda pipe, *_: (video(), video(seed=6))}),
    "hunyuan_video_token_replace": TinyPipeline(
        "HunyuanVideoImageToVideoPipeline", "hunyuan_video_i2v", flow, SIZE | IMAGE | hunyuan_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_processor"), parts=hunyuan_vae,
        methods={"prepare_latents": lambda pipe, *_: (video(), video(seed=6)[:, :, :1])}),
    "hunyuan_skyreels": TinyPipeline(
        "HunyuanSkyreelsImageToVideoPipeline", "hunyuan_video", flow, SIZE | IMAGE | hunyuan_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), options={"in_channels": 8}, parts=hunyuan_vae,
        methods={"prepare_latents": lambda pipe, *_: (video(), video(seed=6))}),
    "cogvideox_image_to_video": TinyPipeline(
        "CogVideoXImageToVideoPipeline", "cogvideox", CogVideoXDDIMScheduler, SIZE | IMAGE | two_prompts(12), options={"in_channels": 8},
        methods={"prepare_latents": frames}),
    "cogvideox_fun_control": TinyPipeline(
        "CogVideoXFunControlPipeline", "cogvideox", CogVideoXDDIMScheduler,
        dict(height=96, width=128, latents=frames()[0], control_video_latents=video(seed=6)) | two_prompts(12), options={"in_channels": 8},
        methods={"prepare_control_latents": lambda pipe, *_: (None, video(seed=6))}),
    "ltx_image_to_video": TinyPipeline(
        "LTXImageToVideoPipeline", "ltx", flow, LONG | dict(image=torch.zeros(1, 3, 192, 256)) | two_prompts(12, masks=True),
        methods={"prepare_latents": rows}),
    "ltx_condition": TinyPipeline(
        "LTXConditionPipeline", "ltx", flow, LONG | dict(image=torch.zeros(1, 3, 192, 256)) | two_prompts(12, masks=True),
        parts=lambda: {"vae": normed(8, 32)},
        methods={"prepare_latents": lambda pipe, *_, **__: (*rows(), torch.zeros(1, 3, 3 * 6 * 8), 0)}),
    "ltx2_image_to_video": TinyPipeline(
        "LTX2ImageToVideoPipeline", "ltx2", flow, LTX2 | dict(image=torch.zeros(1, 3, 192, 256), image_crf=0),
        missing=("text_encoder", "tokenizer", "audio_vae", "vocoder"), parts=ltx2_parts,
        methods={"prepare_latents": rows, "prepare_audio_latents": audio}),
    "ltx2_condition": TinyPipeline(
        "LTX2ConditionPipeline", "ltx2", flow, LTX2, missing=("text_encoder", "tokenizer", "audio_vae", "vocoder"), parts=ltx2_parts,
        methods={"prepare_latents": lambda pipe, *_, **__: (rows()[0], rows()[1][..., None], rows()[0], None),
                 "prepare_audio_latents": audio}),
    "ltx2_in_context": TinyPipeline(
        "LTX2InContextPipeline", "ltx2", flow, LTX2, missing=("text_encoder", "tokenizer", "audio_vae", "vocoder"), parts=ltx2_parts,
        methods={"prepare_audio_latents": audio}),
    "ltx2_hdr": TinyPipeline(
        "LTX2HDRPipeline", "ltx2", flow, LONG | two_prompts(12, masks=True),
        missing=("text_encoder", "tokenizer", "audio_vae", "vocoder"), parts=ltx2_parts, methods={"prepare_audio_latents": audio}),
    "kandinsky5_image_to_video": TinyPipeline(
        "Kandinsky5I2VPipeline", "kandinsky5", flow, SIZE | IMAGE | kandinsky_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), options={"visual_cond": True},
        methods={"prepare_latents": lambda pipe, *_, **__: video(9).movedim(1, -1).contiguous()}),
    # Kandinsky's images are about 1024 wide whatever was asked for: 8 latents here.
    "kandinsky5_text_to_image": TinyPipeline(
        "Kandinsky5T2IPipeline", "kandinsky5", flow, dict(height=1024, width=1024) | kandinsky_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), settings=COARSE),
    "kandinsky5_image_to_image": TinyPipeline(
        "Kandinsky5I2IPipeline", "kandinsky5", flow, dict(height=1024, width=1024) | IMAGE | kandinsky_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), settings=COARSE, options={"visual_cond": True},
        methods={"prepare_latents": lambda pipe, *_, **__: embeds(8 * 8, 9, 5).reshape(1, 1, 8, 8, 9)}),
    "hunyuan_video_15_image_to_video": TinyPipeline(
        "HunyuanVideo15ImageToVideoPipeline", "hunyuan_video_15", flow, dict(num_frames=9, image=Image.new("RGB", (128, 96)))
        | hunyuan_15_prompts(),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_encoder", "feature_extractor"),
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(), "vae": vae(latent_channels=4)},
        methods={"encode_image": lambda pipe, *_, **__: embeds(5, 8, 7),
                 "prepare_latents": lambda pipe, *_, **__: video()[..., ::2, ::2],
                 "prepare_cond_latents_and_mask": lambda pipe, *_, **__: video(5, seed=6)[..., ::2, ::2].split((4, 1), dim=1)}),
    "motif_video_image_to_video": TinyPipeline(
        "MotifVideoImage2VideoPipeline", "motif_video", flow, SIZE | IMAGE | {"prompt": None} | two_prompts(12, masks=True),
        missing=("text_encoder", "tokenizer", "feature_extractor"), options={"in_channels": 9},
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(), "vae": vae(z_dim=4, scale_factor_temporal=4, scale_factor_spatial=8)},
        methods={"_prepare_first_frame_conditioning": lambda pipe, *_, **__: (video(seed=6), video(1, seed=7), embeds(3, 8, 8))}),
    "skyreels_v2_image_to_video": TinyPipeline(
        "SkyReelsV2ImageToVideoPipeline", "skyreels_v2", unipc,
        SIZE | IMAGE | LONG_PROMPTS,
        missing=("text_encoder", "tokenizer", "image_encoder", "image_processor"),
        options={"in_channels": 8, "image_dim": 8, "added_kv_proj_dim": 32}, parts=wan_vae,
        methods={"encode_image": lambda pipe, *_: embeds(5, 8, 7), "prepare_latents": lambda pipe, *_: (video(), video(seed=6))}),
    "skyreels_v2_forcing_image_to_video": TinyPipeline(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline", "skyreels_v2", unipc, SIZE | IMAGE | two_prompts(12), parts=wan_vae,
        methods={"prepare_latents": lambda pipe, *_, **__: (video(), 3, video(seed=6)[:, :, :1], 1)}),
    "skyreels_v2_forcing_of_a_video": TinyPipeline(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline", "skyreels_v2", unipc,
        SIZE | dict(video=torch.zeros(1, 9, 3, 96, 128), overlap_history=5, base_num_frames=9) | two_prompts(12), parts=wan_vae,
        methods={"check_inputs": lambda pipe, *_: None,
                 "prepare_latents": lambda pipe, *_, **__: (video(), 3, video(seed=6)[:, :, :1], 1)}),
    "wan_animate": TinyPipeline(
        "WanAnimatePipeline", "wan_animate", unipc,
        dict(height=96, width=128, segment_frame_length=5, image=Image.new("RGB", (128, 96)), guidance_scale=2.0,
             pose_video=[Image.new("RGB", (128, 96))] * 5, face_video=[Image.new("RGB", (8, 8))] * 5) | LONG_PROMPTS,
        missing=("text_encoder", "tokenizer", "image_encoder", "image_processor"), parts=standardised_vae,
        methods={"encode_image": lambda pipe, *_: embeds(5, 8, 7),
                 "prepare_reference_image_latents": lambda pipe, *_, **__: video(8)[:, :, :1],
                 "prepare_pose_latents": lambda pipe, *_, **__: video(seed=6)[:, :, 1:],
                 "prepare_prev_segment_cond_latents": lambda pipe, *_, **__: video(8, seed=7)[:, :, 1:]}),
    "chronoedit": TinyPipeline(
        "ChronoEditPipeline", "chronoedit", unipc, dict(height=96, width=128) | IMAGE | LONG_PROMPTS,
        missing=("text_encoder", "tokenizer", "image_encoder", "image_processor"), options={"in_channels": 8}, parts=wan_vae,
        methods={"encode_image": lambda pipe, *_: embeds(5, 8, 7), "prepare_latents": lambda pipe, *_: (video(), video(seed=6))}),
    "anyflow": TinyPipeline("AnyFlowPipeline", "anyflow", diffusers.FlowMapEulerDiscreteScheduler,
                            SIZE | dict(guidance_scale=2.0) | two_prompts(12)),
    "allegro": TinyPipeline("AllegroPipeline", "allegro", diffusers.EulerAncestralDiscreteScheduler,
                            SIZE | dict(negative_prompt=None) | two_prompts(12, masks=True)),
    "kandinsky6": TinyPipeline(
        "Kandinsky6TI2VAPipeline", "kandinsky6", flow,
        SIZE | two_prompts(12) | dict(pooled_prompt_embeds=embeds(1, 8, 0)[0], negative_pooled_prompt_embeds=embeds(1, 8, 1)[0]),
        missing=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        parts=lambda: {"audio_vae": Settings(config=Settings(sample_rate=44100), latent_hop_length=1024), "vocoder": Settings()}),
    "helios": TinyPipeline(
        "HeliosPipeline", "helios", lambda: diffusers.HeliosScheduler(stages=1),
        SIZE | dict(num_latent_frames_per_chunk=3) | two_prompts(12), parts=standardised_vae),
    "easyanimate": TinyPipeline(
        "EasyAnimatePipeline", "easyanimate", flow, SIZE | two_prompts(12, masks=True),
        parts=lambda: {"vae": Settings(config=Settings(latent_channels=4), temporal_compression_ratio=4, spatial_compression_ratio=8)}),
    "cosmos": TinyPipeline("CosmosTextToWorldPipeline", "cosmos", diffusers.EDMEulerScheduler,
                           dict(height=96, width=128, num_frames=17) | two_prompts(12), parts=unchecked),
    "cosmos_2.5": TinyPipeline("Cosmos2_5_PredictBasePipeline", "cosmos", unipc, SIZE | two_prompts(12),
                               options={"in_channels": 5, "extra_pos_embed_type": None}, parts=lambda: standardised_vae() | unchecked()),
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


def wan_with_prompts() -> DiffusionPipeline:
    """The same, with embeddings that differ by the prompt's length."""
    pipe = wan_with_frames()
    stock = pipe.encode_prompt()
    pipe.encode_prompt = lambda prompt, **_: (stock[0] + len(prompt) / 10, stock[1])
    return pipe
