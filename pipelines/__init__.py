"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back."""

from .apply import SSTAHandle, apply_ssta, remove_ssta
from .cogvideox import COGVIDEOX, CONSISID
from .family import Family, Site, register_family, supported_models
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video_15 import HUNYUAN_VIDEO_15
from .kandinsky5 import KANDINSKY5
from .ltx import LTX_VIDEO
from .ltx2 import LTX2
from .minimax_h3 import MINIMAX_H3
from .mochi import MOCHI
from .motif_video import MOTIF_VIDEO
from .processor import ModelContext, SSTAProcessor
from .report import LayerRun, RunReport
from .schedule import Schedule
from .wan import SKYREELS_V2, WAN, WAN_VACE

for _family in (HUNYUAN_VIDEO_15, HUNYUAN_VIDEO, WAN, WAN_VACE, SKYREELS_V2, LTX_VIDEO, LTX2, COGVIDEOX, CONSISID, MOCHI, KANDINSKY5,
                MINIMAX_H3, MOTIF_VIDEO):
    register_family(_family)

__all__ = [
    "Family", "LayerRun", "ModelContext", "RunReport", "SSTAHandle", "SSTAProcessor", "Schedule", "Site",
    "apply_ssta", "register_family", "remove_ssta", "supported_models",
]
