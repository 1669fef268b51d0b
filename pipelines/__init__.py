"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back."""

from .apply import SSTAHandle, apply_ssta, remove_ssta
from .family import Family, LayerRun, ModelContext, Site, SSTAProcessor, register_family, supported_models
from .hunyuan_video_15 import HUNYUAN_VIDEO_15

register_family(HUNYUAN_VIDEO_15)

__all__ = [
    "Family", "LayerRun", "ModelContext", "SSTAHandle", "SSTAProcessor", "Site",
    "apply_ssta", "register_family", "remove_ssta", "supported_models",
]
