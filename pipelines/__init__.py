"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back."""

from .apply import SSTAHandle, apply_ssta, remove_ssta
from .context import ModelContext
from .families.cogvideox import COGVIDEOX, CONSISID
from .families.hunyuan_video import HUNYUAN_VIDEO
from .families.hunyuan_video_15 import HUNYUAN_VIDEO_15
from .families.kandinsky5 import KANDINSKY5
from .families.ltx import LTX_VIDEO
from .families.ltx2 import LTX2
from .families.minimax_h3 import MINIMAX_H3
from .families.mochi import MOCHI
from .families.motif_video import MOTIF_VIDEO
from .families.wan import SKYREELS_V2, WAN, WAN_VACE
from .family import Family, Site, register_family, supported_models
from .processor import SSTAProcessor
from .report import LayerRun, RunReport
from .schedule import Schedule

for _family in (HUNYUAN_VIDEO_15, HUNYUAN_VIDEO, WAN, WAN_VACE, SKYREELS_V2, LTX_VIDEO, LTX2, COGVIDEOX, CONSISID, MOCHI, KANDINSKY5,
                MINIMAX_H3, MOTIF_VIDEO):
    register_family(_family)

__all__ = [
    "Family", "LayerRun", "ModelContext", "RunReport", "SSTAHandle", "SSTAProcessor", "Schedule", "Site",
    "apply_ssta", "register_family", "remove_ssta", "supported_models",
]
