"""SSTA as a kernel of the Hugging Face Hub, for programs that hold q, k and v: the ``__init__.py`` of what hub/layout.py lays out."""

from . import interfaces
from .attention import ssta_3d_attention, ssta_attention
from .cache import TileCache
from .config import SSTAConfig
from .dense import dense_attention
from .kernels import BlockLists, block_sparse_attention, merge_attention
from .layout import TileLayout, tile_layout
from .report import explain
from .sequence import DenseRun, TokenLayout, VideoGrid
from .text import TextMask

__all__ = ["BlockLists", "DenseRun", "SSTAConfig", "TextMask", "TileCache", "TileLayout", "TokenLayout", "VideoGrid",
           "block_sparse_attention", "dense_attention", "explain", "interfaces", "merge_attention", "ssta_3d_attention",
           "ssta_attention", "tile_layout"]
