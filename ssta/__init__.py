"""SSTA: attention for video diffusion transformers that looks only where it matters."""

from importlib import import_module
from typing import TYPE_CHECKING

from .attention import ssta_3d_attention, ssta_attention
from .cache import TileCache
from .config import SSTAConfig
from .dense import dense_attention
from .layout import TileLayout, tile_layout
from .sequence import DenseRun, TokenLayout, VideoGrid
from .text import TextMask
from .trained.sla import sparse_linear_attention
from .trained.vsa import video_sparse_attention

if TYPE_CHECKING:
    from .plot import plot_block_mask, plot_selection
    from .report import explain

__version__ = "0.1.0"

# Reports and plots are loaded when first asked for.
_LAZY = {"explain": "report", "plot_block_mask": "plot", "plot_selection": "plot"}

__all__ = ["DenseRun", "SSTAConfig", "TextMask", "TileCache", "TileLayout", "TokenLayout", "VideoGrid", "dense_attention", "explain",
           "plot_block_mask", "plot_selection", "sparse_linear_attention", "ssta_3d_attention", "ssta_attention", "tile_layout",
           "video_sparse_attention"]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
