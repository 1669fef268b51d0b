"""A transformer of every supported family, small enough for tests, with its inputs for any canvas and any prompt lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import diffusers
import diffusers.models.transformers.transformer_sana_wm_refiner as refiner
import tiny_hunyuan
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ssta.pipelines import Schedule
from ssta.pipelines.patch.register import family_of, family_of_class

HEADS, HEAD_DIM, WIDTH, TEXT_LEN = 2, 16, 32, 7


def all_dense(model: nn.Module) -> Schedule:
    """Every layer dense."""
    return Schedule(dense_layers=range(len(list(family_of(model).sites(model)))))


def steps_at(*timesteps: float) -> SimpleNamespace:
    """A scheduler with these steps. A view of one of its timesteps says which step it is."""
    return SimpleNamespace(timesteps=torch.tensor(timesteps), begin_index=0)


@dataclass(frozen=True)
class Tiny:
    """One family's tiny model.

    Attributes:
        model: the transformer's class name.
        options: what it is built with, ``layers`` aside.
        layers: the options that say how many layers of each kind there are, for a given number.
        inputs: (canvas in tokens, prompt lengths, random) -> a forward's arguments.
        conditions: tokens besides the video in each attended sequence.
        before: how many of them stand before the video.
        dtype: the widest that the model computes in.
    """

    model: str
    options: dict
    layers: Callable[[int], dict]
    inputs: Callable[[tuple[int, int, int], tuple[int, ...], Callable[..., Tensor]], dict]
    conditions: int = 0
    before: int = 0
    dtype: torch.dtype = torch.float64

    def build(self, seed: int = 0, layers: int = 2, **options) -> nn.Module:
        torch.manual_seed(seed)
        model = getattr(diffusers, self.model)(**(self.options | self.layers(layers) | options))
        # Gates that start at zero would hide what attention gives.
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.data.normal_(std=0.2)
        # Attention is nearly uniform under the default initialisation; larger queries make the selected tiles matter.
        for site in family_of(model).sites(model):
            getattr(site.module, "norm_q", None) is None or site.module.norm_q.weight.data.mul_(3)
            getattr(site.module, "query_norm", None) is None or site.module.query_norm.weight.data.mul_(3)
        return model.eval()

    def call(self, thw=tiny_hunyuan.CANVAS, prompts=(4,), seed: int = 1) -> dict:
        generator = torch.Generator().manual_seed(seed)
        call = self.inputs(thw, prompts, lambda *shape: torch.randn(*shape, generator=generator))
        return {"timestep": torch.full((len(prompts),), 500.0), "return_dict": False, **call}


def valid(prompts: tuple[int, ...], length: int = TEXT_LEN) -> Tensor:
    return (torch.arange(length) < torch.tensor(prompts)[:, None]).long()


def hunyuan_video(thw, prompts, random):
    batch = len(prompts)
    return {"hidden_states": random(batch, 4, thw[0], 2 * thw[1], 2 * thw[2]), "encoder_hidden_states": random(batch, TEXT_LEN, 12),
            "encoder_attention_mask": valid(prompts), "pooled_projections": random(batch, 8), "guidance": torch.full((batch,), 1000.0)}


def histories(names, thw, batch, random):
    """Histories of a video at three scales, which the model pads to whole tokens."""
    call, first = {}, 0
    for name, frames in zip(names, (5, 3, 2)):
        call[name] = random(batch, 4, frames, 2 * thw[1], 2 * thw[2])
        call[f"indices_{name}"] = torch.arange(first, first + frames)
        first += frames
    return call | {"indices_latents": torch.arange(first, first + thw[0])}


def framepack(thw, prompts, random):
    return hunyuan_video(thw, prompts, random) | {"image_embeds": random(len(prompts), 3, 8)} | histories(
        ("latents_history_4x", "latents_history_2x", "latents_clean"), thw, len(prompts), random)


def wan(thw, prompts, random):
    return {"hidden_states": random(len(prompts), 4, thw[0], 2 * thw[1], 2 * thw[2]),
            "encoder_hidden_states": random(len(prompts), TEXT_LEN, 12)}


def wan_i2v(thw, prompts, random):
    """The text's length is fixed in the processor of the cross-attention."""
    return wan(thw, prompts, random) | {"encoder_hidden_states": random(len(prompts), 512, 12),
                                        "encoder_hidden_states_image": random(len(prompts), 5, 8)}


def wan_ti2v(thw, prompts, random):
    """Wan 2.2 TI2V has a timestep for every token."""
    return wan(thw, prompts, random) | {"timestep": torch.linspace(0, 900, math.prod(thw)).expand(len(prompts), -1).contiguous()}


def wan_vace(thw, prompts, random):
    return wan(thw, prompts, random) | {"control_hidden_states": random(len(prompts), 6, thw[0], 2 * thw[1], 2 * thw[2])}


def wan_animate(thw, prompts, random):
    """The first frame is the reference's; the others have a pose, and the face in four pixel frames each."""
    batch, (t, h, w) = len(prompts), thw
    return wan_i2v(thw, prompts, random) | {
        "hidden_states": random(batch, 12, t, 2 * h, 2 * w), "pose_hidden_states": random(batch, 4, t - 1, 2 * h, 2 * w),
        "face_pixel_values": random(batch, 3, 4 * (t - 2) + 1, 8, 8)}


def anyflow(thw, prompts, random):
    """From one timestep to another, for every frame."""
    batch, (t, h, w) = len(prompts), thw
    return wan(thw, prompts, random) | {"hidden_states": random(batch, t, 4, 2 * h, 2 * w), "timestep": torch.full((batch, t), 500.0),
                                        "r_timestep": torch.linspace(0, 400, t).expand(batch, -1).contiguous()}


def anyflow_far(thw, prompts, random):
    """The fourth chunk: the first is compressed, two of two frames are not."""
    batch, (t, h, w) = len(prompts), thw

    def kept(tokens):
        return random(2, batch, HEADS, tokens, HEAD_DIM)

    return anyflow(thw, prompts, random) | {
        "chunk_partition": [1, 2, 2, t], "kv_cache_flag": {"num_cached_chunks": 3, "is_cache_step": False},
        "kv_cache": [{"compressed_cache": kept((h // 2) * (w // 2)), "full_cache": kept(4 * h * w)} for _ in range(4)]}


def allegro(thw, prompts, random):
    t, h, w = thw
    *tables, t_at, h_at, w_at = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (h, w)), (h, w), t, device=torch.device("cpu"))
    positions = torch.cartesian_prod(t_at.long(), h_at.long(), w_at.long()).T[:, None].contiguous()
    return wan(thw, prompts, random) | {"encoder_attention_mask": valid(prompts), "image_rotary_emb": (tuple(tables), tuple(positions))}


def cosmos(thw, prompts, random):
    return wan(thw, prompts, random) | {"timestep": torch.full((len(prompts),), 0.5), "fps": 16}


def cosmos_conditioned(thw, prompts, random):
    """Conditioned frames have a timestep of their own."""
    timestep = torch.linspace(0.1, 0.5, thw[0]).view(1, 1, -1, 1, 1)
    return cosmos(thw, prompts, random) | {"timestep": timestep.repeat(len(prompts), 1, 1, 1, 1)}


def ltx(thw, prompts, random):
    return {"hidden_states": random(len(prompts), math.prod(thw), 4), "encoder_hidden_states": random(len(prompts), TEXT_LEN, 12),
            "encoder_attention_mask": valid(prompts), "num_frames": thw[0], "height": thw[1], "width": thw[2]}


def ltx2(thw, prompts, random):
    batch = len(prompts)
    return ltx(thw, prompts, random) | {
        "audio_hidden_states": random(batch, 5, 4), "audio_encoder_hidden_states": random(batch, TEXT_LEN, 16), "audio_num_frames": 5,
        "encoder_hidden_states": random(batch, TEXT_LEN, 32), "audio_encoder_attention_mask": valid(prompts), "fps": 25.0}


def sana_wm_refiner(thw, prompts, random, rope_type="interleaved"):
    """A block after a sink of one frame and two frames that were refined, in a model of two layers."""
    batch, (t, h, w) = len(prompts), thw
    rope = SimpleNamespace(rope=refiner.SanaWMLTX2AudioVideoRotaryPosEmbed(WIDTH, rope_type=rope_type, num_attention_heads=HEADS))
    angles = partial(refiner.SanaWMLTX2RefinerTransformer3DModel.build_rotary_emb_for_absolute_positions, rope, batch, height=h, width=w,
                     device=torch.device("cpu"), fps=8.0)
    cache = refiner.SanaWMRefinerKVCache(2)
    cache.sink_pe = angles([5])
    for layer in cache.layer_caches:
        layer.store_sink(*[random(batch, h * w, WIDTH) for _ in range(2)])
        layer.store_history(*[random(batch, 2 * h * w, WIDTH) for _ in range(2)])
    return {"hidden_states": random(batch, t * h * w, 4), "encoder_hidden_states": random(batch, TEXT_LEN, 12),
            "encoder_attention_mask": valid(prompts), "timestep": torch.full((batch, t * h * w), 500.0),
            "video_rotary_emb": angles(list(range(8, 8 + t))), "kv_cache": cache, "kv_cache_mode": "inject"}


def cogvideox(thw, prompts, random):
    return {"hidden_states": random(len(prompts), thw[0], 4, 2 * thw[1], 2 * thw[2]),
            "encoder_hidden_states": random(len(prompts), TEXT_LEN, 12),
            "image_rotary_emb": get_3d_rotary_pos_embed(HEAD_DIM, ((0, 0), thw[1:]), thw[1:], thw[0], device=torch.device("cpu"))}


def cogvideox_2b(thw, prompts, random):
    """The smallest one adds its positions to the tokens."""
    return cogvideox(thw, prompts, random) | {"image_rotary_emb": None}


def cogvideox_15(thw, prompts, random):
    """Version 1.5 patches two frames into one."""
    return cogvideox(thw, prompts, random) | {"hidden_states": random(len(prompts), 2 * thw[0], 4, 2 * thw[1], 2 * thw[2])}


def mochi(thw, prompts, random):
    return {"hidden_states": random(len(prompts), 4, thw[0], 2 * thw[1], 2 * thw[2]),
            "encoder_hidden_states": random(len(prompts), TEXT_LEN, 16),
            "encoder_attention_mask": valid(prompts).bool()}


def kandinsky5(thw, prompts, random):
    t, h, w = thw
    batch = len(prompts)
    return {"hidden_states": random(batch, t, 2 * h, 2 * w, 4), "encoder_hidden_states": random(batch, TEXT_LEN, 12),
            "pooled_projections": random(batch, 8), "visual_rope_pos": [torch.arange(t), torch.arange(h), torch.arange(w)],
            "text_rope_pos": torch.arange(TEXT_LEN)}


def kandinsky6(thw, prompts, random):
    """Audio goes through the same blocks; the last frame is the reference's, at the time of the first."""
    (t, h, w), batch = thw, len(prompts)
    at = torch.arange(t) % max(t - 1, 1), torch.arange(h), torch.arange(w)
    return {"hidden_states": random(batch, t, 2 * h, 2 * w, 4), "encoder_hidden_states": random(batch, TEXT_LEN, 12),
            "pooled_projections": random(batch, 8), "audio_hidden_states": random(batch, 6, 4), "visual_rope_pos": at}


def helios_with_histories(thw, prompts, random):
    batch = len(prompts)
    made = histories([f"latents_history_{name}" for name in ("long", "mid", "short")], thw, batch, random)
    made["indices_hidden_states"] = made.pop("indices_latents")
    return wan(thw, prompts, random) | {
        name: x.expand(batch, -1) if name.startswith("indices_") else x for name, x in made.items()}


def motif_video(thw, prompts, random):
    return {"hidden_states": random(len(prompts), 4, thw[0], 2 * thw[1], 2 * thw[2]),
            "encoder_hidden_states": random(len(prompts), TEXT_LEN, 12),
            "encoder_attention_mask": valid(prompts), "image_embeds": random(len(prompts), 3, 8)}


def minimax_h3(thw, prompts, random, text=4, audio=5, conditions=6):
    """[text | a condition frame | audio | video], with the coordinates that the pipeline gives them."""
    t, h, w = thw
    batch, before = len(prompts), text + conditions + audio
    frame = torch.cartesian_prod(torch.arange(h), torch.arange(w)).double()
    video = torch.cat([torch.arange(t).repeat_interleave(h * w)[:, None] + 10.0, frame.repeat(t, 1)], dim=1)
    points = torch.cat([torch.arange(before)[:, None] * torch.tensor([0.5, 0.0, 1.0]), video])
    video_rows = torch.cat([torch.arange(text, text + conditions), torch.arange(before, before + t * h * w)])
    audio_rows = torch.arange(text + conditions, before)
    tags = torch.zeros(before + t * h * w, dtype=torch.long)
    tags[:text], tags[audio_rows] = 1, 2
    return {"hidden_states": random(batch, conditions + t * h * w, 16), "audio_hidden_states": random(batch, audio, 4),
            "encoder_hidden_states": random(batch, text, 12), "timestep": torch.tensor([0.3]), "timestep_indices": torch.zeros_like(tags),
            "token_tags": tags, "position_ids": points, "video_indices": video_rows, "audio_indices": audio_rows,
            "text_indices": torch.arange(text)}


def blocks(layers: int) -> dict:
    return {"num_layers": layers}


HEADED = dict(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM)
HUNYUAN_VIDEO = HEADED | dict(in_channels=4, out_channels=4, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=12,
                              pooled_projection_dim=8, rope_axes_dim=(4, 6, 6))
WAN = HEADED | dict(in_channels=4, out_channels=4, text_dim=12, freq_dim=16, ffn_dim=64, rope_max_seq_len=32)
COSMOS = HEADED | dict(in_channels=4, out_channels=4, text_embed_dim=12, adaln_lora_dim=8, max_size=(16, 32, 32),
                       concat_padding_mask=False)
COGVIDEOX = HEADED | dict(in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=12, sample_width=16, sample_height=12,
                          sample_frames=9, max_text_seq_length=TEXT_LEN, use_rotary_positional_embeddings=True)
LTX2 = HEADED | dict(in_channels=4, out_channels=4, cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4,
                     audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16, caption_channels=12,
                     norm_elementwise_affine=True, use_prompt_embeddings=False)

TINY = {
    "hunyuan_video_15": Tiny(
        "HunyuanVideo15Transformer3DModel",
        HEADED | dict(in_channels=9, out_channels=4, num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=12, text_embed_2_dim=8,
                      image_embed_dim=8, rope_axes_dim=(4, 6, 6), target_size=16),
        blocks, lambda thw, prompts, random: tiny_hunyuan.inputs(thw, prompts), conditions=18),
    "hunyuan_video": Tiny(
        "HunyuanVideoTransformer3DModel", HUNYUAN_VIDEO,
        lambda n: {"num_layers": n // 2, "num_single_layers": n - n // 2}, hunyuan_video, conditions=TEXT_LEN),
    "hunyuan_video_i2v": Tiny(
        "HunyuanVideoTransformer3DModel", HUNYUAN_VIDEO | dict(image_condition_type="token_replace"),
        lambda n: {"num_layers": n // 2, "num_single_layers": n - n // 2}, hunyuan_video, conditions=TEXT_LEN),
    "framepack": Tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        HUNYUAN_VIDEO | dict(has_image_proj=True, image_proj_dim=8, has_clean_x_embedder=True),
        lambda n: {"num_layers": n // 2, "num_single_layers": n - n // 2}, framepack, conditions=TEXT_LEN + 3),
    "wan": Tiny("WanTransformer3DModel", WAN, blocks, wan),
    "wan_i2v": Tiny("WanTransformer3DModel", WAN | dict(image_dim=8, added_kv_proj_dim=WIDTH), blocks, wan_i2v),
    "wan_ti2v": Tiny("WanTransformer3DModel", WAN, blocks, wan_ti2v),
    "wan_vace": Tiny("WanVACETransformer3DModel", WAN | dict(vace_layers=[0], vace_in_channels=6), blocks, wan_vace),
    "wan_animate": Tiny(
        "WanAnimateTransformer3DModel",
        WAN | dict(in_channels=12, latent_channels=4, image_dim=8, added_kv_proj_dim=WIDTH, motion_encoder_size=8, motion_style_dim=8,
                   motion_encoder_channel_sizes={"4": 4, "8": 4}, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=8,
                   face_encoder_num_heads=2),
        lambda n: {"num_layers": n, "inject_face_latents_blocks": n}, wan_animate),
    # Its RoPE has whole pairs of channels for each axis only in heads of a multiple of 6.
    "chronoedit": Tiny("ChronoEditTransformer3DModel", WAN | dict(attention_head_dim=24, image_dim=8, added_kv_proj_dim=48), blocks,
                       wan_i2v),
    "anyflow": Tiny("AnyFlowTransformer3DModel", WAN, blocks, anyflow),
    "anyflow_far": Tiny("AnyFlowFARTransformer3DModel", WAN, blocks, anyflow_far),
    "allegro": Tiny("AllegroTransformer3DModel",
                    dict(num_attention_heads=HEADS, attention_head_dim=24, in_channels=4, out_channels=4, cross_attention_dim=48,
                         sample_height=12, sample_width=16, sample_frames=3, caption_channels=12), blocks, allegro),
    "cosmos": Tiny("CosmosTransformer3DModel", COSMOS, blocks, cosmos, dtype=torch.float32),
    "cosmos_2.5": Tiny("CosmosTransformer3DModel", COSMOS | dict(extra_pos_embed_type=None), blocks, cosmos_conditioned),
    "easyanimate": Tiny("EasyAnimateTransformer3DModel",
                        HEADED | dict(in_channels=4, out_channels=4, patch_size=2, time_embed_dim=8, text_embed_dim=12, mmdit_layers=1,
                                      sample_width=16, sample_height=12),
                        blocks, wan, conditions=TEXT_LEN),
    "skyreels_v2": Tiny("SkyReelsV2Transformer3DModel", WAN, blocks, wan),
    "ltx": Tiny("LTXVideoTransformer3DModel",
                HEADED | dict(in_channels=4, out_channels=4, cross_attention_dim=WIDTH, caption_channels=12), blocks, ltx),
    "ltx2": Tiny("LTX2VideoTransformer3DModel", LTX2, blocks, ltx2),
    "ltx2_gated": Tiny("LTX2VideoTransformer3DModel", LTX2 | dict(gated_attn=True, perturbed_attn=True, rope_type="split"), blocks, ltx2),
    "sana_wm_refiner": Tiny("SanaWMLTX2RefinerTransformer3DModel", LTX2 | dict(use_prompt_embeddings=True), blocks, sana_wm_refiner),
    "sana_wm_refiner_split": Tiny(
        "SanaWMLTX2RefinerTransformer3DModel", LTX2 | dict(use_prompt_embeddings=True, gated_attn=True, rope_type="split"), blocks,
        partial(sana_wm_refiner, rope_type="split")),
    "cogvideox": Tiny("CogVideoXTransformer3DModel", COGVIDEOX, blocks, cogvideox, conditions=TEXT_LEN, before=TEXT_LEN),
    "cogvideox_2b": Tiny("CogVideoXTransformer3DModel", COGVIDEOX | dict(use_rotary_positional_embeddings=False), blocks, cogvideox_2b,
                         conditions=TEXT_LEN, before=TEXT_LEN),
    "cogvideox_1.5": Tiny("CogVideoXTransformer3DModel", COGVIDEOX | dict(patch_size_t=2, patch_bias=False), blocks, cogvideox_15,
                          conditions=TEXT_LEN, before=TEXT_LEN),
    "consisid": Tiny("ConsisIDTransformer3DModel", COGVIDEOX, blocks, cogvideox, conditions=TEXT_LEN, before=TEXT_LEN),
    "mochi": Tiny("MochiTransformer3DModel",
                  HEADED | dict(pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8, max_sequence_length=TEXT_LEN),
                  blocks, mochi, conditions=TEXT_LEN, dtype=torch.float32),
    "kandinsky5": Tiny("Kandinsky5Transformer3DModel",
                       dict(in_text_dim=12, in_text_dim2=8, time_dim=16, model_dim=WIDTH, ff_dim=64, num_text_blocks=1,
                            axes_dims=(4, 6, 6)),
                       lambda n: {"num_visual_blocks": n}, kandinsky5, dtype=torch.float32),
    "kandinsky6": Tiny("Kandinsky6Transformer3DModel",
                       dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=12, in_text_dim2=8, time_dim=16, model_dim=WIDTH, ff_dim=64,
                            num_text_blocks=1, axes_dims=(4, 6, 6), visual_cond=False, in_audio_dim=4, out_audio_dim=4, ca_rope=True,
                            cross_gates=True, fix_modulation=True),
                       lambda n: {"num_visual_blocks": n}, kandinsky6, dtype=torch.float32),
    "helios": Tiny("HeliosTransformer3DModel",
                   HEADED | dict(in_channels=4, out_channels=4, text_dim=12, freq_dim=16, ffn_dim=64, rope_dim=(4, 6, 6),
                                 is_amplify_history=True), blocks, wan),
    "motif_video": Tiny("MotifVideoTransformer3DModel",
                        HEADED | dict(in_channels=4, out_channels=4, num_decoder_layers=1, mlp_ratio=2.0, text_embed_dim=12,
                                      image_embed_dim=8, rope_axes_dim=(4, 6, 6), enable_text_cross_attention_dual=True),
                        lambda n: {"num_layers": n // 2, "num_single_layers": n - n // 2 + 1}, motif_video, conditions=TEXT_LEN + 3,
                        dtype=torch.float32),
    "minimax_h3": Tiny("MiniMaxH3Transformer3DModel",
                       HEADED | dict(hidden_size=24, num_refiner_layers=1, ffn_dim=48, in_channels=4, audio_in_channels=4, text_dim=12,
                                     freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16, rope_freq_dim=2),
                       blocks, minimax_h3, conditions=15, before=15),
}

# Those that several ranks can share.
SPLIT = [name for name, tiny in TINY.items() if family_of_class(getattr(diffusers, tiny.model)).split is not None]

# Kandinsky rounds q and k to bfloat16 after RoPE, so a difference in the last bit before may become one of 2^-8 there.
TOLERANCE = {"kandinsky5": 1e-2}


@torch.no_grad()
def run(model: nn.Module, call: dict) -> Tensor:
    """The first of the model's outputs, which is the video."""
    out = model(**call)
    return out[0] if isinstance(out, tuple) else out


def cast(call: dict, dtype: torch.dtype) -> dict:
    """``call`` with its floating tensors in ``dtype``."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, call)


# An attention module's projections, and whether they make q, k or v.
PROJECTIONS = {**{name: name[3] for name in ("to_q", "to_k", "to_v", "to_query", "to_key", "to_value")},
               **{f"add_{kind}_proj": kind for kind in "qkv"}}


def note_projections(model: nn.Module, calls: list[tuple[nn.Module | None, str]]) -> int:
    """From now on ``calls`` gets each projection that was called, and what it makes. Returns how many there are; ``model`` has its stock
    processors still."""
    found = [(module, PROJECTIONS[name]) for site in family_of(model).sites(model) for name, module in site.module.named_children()
             if name in PROJECTIONS]
    for module, kind in found:
        module.register_forward_hook(lambda module, *_, kind=kind: calls.append((module, kind)))
    return len(found)
