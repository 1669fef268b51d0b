"""The nodes, in the form that ComfyUI has had since its first versions; what they do is ssta.pipelines.plugs.comfy."""

import re

from ssta import SSTAConfig
from ssta.pipelines import Schedule
from ssta.pipelines.plugs.comfy import patch_model, report_model, unpatch_model
from ssta.pipelines.schedule.presets import PRESETS, apply_preset, small_tiles

CATEGORY = "model_patches/SSTA"


def parse_tile(text: str) -> tuple[int, int, int]:
    """``"2x8x8"`` as (2, 8, 8).

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+)\s*[x,]\s*(\d+)\s*[x,]\s*(\d+)\s*", text)
    if found is None:
        raise ValueError(f'tile must be three numbers of tokens along time, height and width, such as "2x8x8", got {text!r}')
    t, h, w = map(int, found.groups())
    return t, h, w


def parse_blocks(text: str) -> tuple[int, ...]:
    """``"0, 2-4, -1"`` as (0, 2, 3, 4, -1), each once.

    Raises:
        ValueError: anything else.
    """
    blocks: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(-?\d+)|(\d+)\s*-\s*(\d+)", part)
        if found is None or found[2] and int(found[3]) < int(found[2]):
            raise ValueError(f'dense_blocks must be numbers of blocks, such as "0, 2-4, -1", got {text!r}')
        blocks += [int(found[1])] if found[1] else range(int(found[2]), int(found[3]) + 1)
    return tuple(dict.fromkeys(blocks))


class SSTAPreset:
    """Sparse attention for models that were trained densely, by the name of what it is to be: as ``apply_ssta(preset=...)``."""

    CATEGORY = CATEGORY
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = ("Selective and sliding tile attention for Wan, HunyuanVideo, HunyuanVideo 1.5 and LTX, by name: near the dense video, "
                   "balanced, or fast. All estimate what they leave out. The node SSTA has every setting.")

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        means = "; ".join(f"{name}: {density:.0%} of the pairs of tiles exactly" for name, density in PRESETS.items())
        return {"required": {"model": ("MODEL",), "preset": (list(PRESETS), {"default": "balanced", "tooltip": means})}}

    def apply(self, model, preset: str) -> tuple:
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))}, got {preset!r}")
        return (patch_model(model, apply_preset(preset, small_tiles())),)


class SSTA:
    """Sparse attention for models that were trained densely."""

    CATEGORY = CATEGORY
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = ("Selective and sliding tile attention for Wan, HunyuanVideo, HunyuanVideo 1.5 and LTX. Only the pairs of tiles of the "
                   "video that matter most are computed exactly; the rest is estimated or left out. Long videos gain most.")

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {
            "model": ("MODEL",),
            "density": ("FLOAT", {"default": 0.15, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip":
                        "Share of the pairs of tiles that is computed exactly, whatever the resolution. 0 where top_k says it."}),
            "top_k": ("INT", {"default": 0, "min": 0, "max": 4096, "tooltip":
                      "Tiles that each tile attends to. 0 where density says it."}),
            "tile": ("STRING", {"default": "4x4x8", "tooltip": "Tokens of a tile along time, height and width. 128 in all do well."}),
            "dense_steps": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip":
                            "First share of the sampler's steps with the model's own attention; without compensation 0.15 does well. Where "
                            "two samplers share a generation, as for Wan 2.2, the second one's model can have 0."}),
            "dense_blocks": ("STRING", {"default": "0", "tooltip":
                             "Blocks with the model's own attention, such as 0, 2-4, -1. Negative ones count from the end."}),
            "compensation": (["linear", "none"], {"tooltip":
                             "What tiles that are not computed contribute: an estimate with a first-order correction, or nothing. "
                             "With nothing, the window of 3 x 3 x 3 tiles around each is always computed."}),
        }}

    def apply(self, model, density: float, top_k: int, tile: str, dense_steps: float, dense_blocks: str, compensation: str) -> tuple:
        if (density > 0) == (top_k > 0):
            raise ValueError(f"one of density and top_k must be above 0 and the other one 0, got {density} and {top_k}")
        schedule = Schedule(dense_steps=float(dense_steps), dense_layers=parse_blocks(dense_blocks))
        budget = {"density": density} if density else {"topk": top_k}
        window = {"sparse_type": "ssta", "kernel_thw": (3, 3, 3)} if compensation == "none" else {}
        return (patch_model(model, schedule=schedule, tile_thw=parse_tile(tile), compensation=compensation, **budget, **window),)


class SSTATrained:
    """The pattern that HunyuanVideo 1.5's sparse checkpoint was trained with."""

    CATEGORY = CATEGORY
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = ("For the 720p checkpoint of HunyuanVideo 1.5 that was trained with SSTA (sparse, distilled): its own tiles, window and "
                   "top-k, at every step and in every block. For all other checkpoints use SSTA.")

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model) -> tuple:
        diffusion = model.get_model_object("diffusion_model")
        # HunyuanVideo 1.5 is the one whose text may come with a picture's features and whose patches are single tokens.
        if not hasattr(diffusion, "vision_in") or tuple(diffusion.patch_size) != (1, 1, 1):
            raise ValueError(f"model must be HunyuanVideo 1.5, which was trained with SSTA, got another {type(diffusion).__name__}")
        return (patch_model(model, SSTAConfig.hunyuan_video_15(), Schedule()),)


class SSTAReport:
    """What ran."""

    CATEGORY = CATEGORY
    FUNCTION = "report"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_NODE = True
    DESCRIPTION = "What each block of the model ran in the last generation: kernels, canvas, density, dense steps, share computed exactly."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {
            "model": ("MODEL", {"tooltip": "The model that the sampler got."}),
            "samples": ("LATENT", {"tooltip": "What the sampler gave, so that the report comes after it."}),
        }}

    def report(self, model, samples) -> dict:
        text = str(report_model(model))
        return {"ui": {"text": [text]}, "result": (text,)}


class SSTARemove:
    """The model without SSTA, wherever on the way it got it."""

    CATEGORY = CATEGORY
    FUNCTION = "remove"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "The model without SSTA, with everything else that was applied to it before or after."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"model": ("MODEL",)}}

    def remove(self, model) -> tuple:
        return (unpatch_model(model),)


NODE_CLASS_MAPPINGS = {"SSTAPreset": SSTAPreset, "SSTA": SSTA, "SSTATrained": SSTATrained, "SSTAReport": SSTAReport,
                       "SSTARemove": SSTARemove}
NODE_DISPLAY_NAME_MAPPINGS = {"SSTAPreset": "SSTA preset", "SSTA": "SSTA", "SSTATrained": "SSTA (checkpoint trained with it)",
                              "SSTAReport": "SSTA report", "SSTARemove": "SSTA remove"}
