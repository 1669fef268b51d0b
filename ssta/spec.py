"""LayerSpec: all that a layer of attention is, beside its tensors, as plain values that can be hashed and written as text."""

from __future__ import annotations

import ast
from operator import index
from typing import NamedTuple

import torch

from .budget import most_tiles
from .config import SSTAConfig
from .cut import Cut, cut_of
from .kernels.memo import remember_plain
from .sequence import TokenLayout


class LayerSpec(NamedTuple):
    """What decides how a layer runs. Equal specs are the same layer.

    Attributes:
        layout: the queries' sequence.
        kv_layout: the keys' and values' sequence.
        config: what is attended to, without variants.
        scale: factor on the scores.
        dtype, device: of query, key and value.
        heads, kv_heads, head_dim: H, Hkv and D; H is a multiple of Hkv.
        impl: which kernels, as ``choose_backend`` takes it.
        deterministic: whether gradients are the same bits every time.
        recorded: whether a gradient is wanted, for which the layer keeps what its backward needs.
        means: whether the means of the video tiles of query, key and value are given too, through which gradients flow.
    """

    layout: TokenLayout
    kv_layout: TokenLayout
    config: SSTAConfig
    scale: float
    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    impl: str
    deterministic: bool
    recorded: bool
    means: bool = False

    @property
    def cuts(self) -> tuple[Cut, Cut]:
        """How the queries' and the keys' sequence are cut into tiles."""
        of = self.config
        return cut_of(self.layout, of.tile_thw, of.pad_type), cut_of(self.kv_layout, of.tile_thw, of.pad_type)

    @property
    def chooses(self) -> bool:
        """Whether the layer has tiles to choose and does not attend to fixed ones."""
        return self.config.selected_by != "sta" and all([cut.num_video_tiles > 0 for cut in self.cuts])

    @property
    def room(self) -> int:
        """How many of the keys' tiles a list of the selection has room for."""
        return most_tiles(self.config, *self.cuts) if self.chooses else self.cuts[1].num_tiles

    @property
    def estimates(self) -> bool:
        """Whether the layer has tiles to leave out and estimates what those are worth."""
        return self.config.compensation != "none" and all([cut.num_video_tiles > 0 for cut in self.cuts])

    @property
    def text(self) -> str:
        """The spec but for its device as text, which ``from_text`` reads, in another process too unless the config holds functions."""
        return repr((self.layout.plain, self.kv_layout.plain, self.config.plain, self.scale.hex(), str(self.dtype), index(self.heads),
                     index(self.kv_heads), index(self.head_dim), self.impl, self.deterministic, self.recorded, self.means))

    @classmethod
    def from_text(cls, text: str, device: torch.device) -> LayerSpec:
        """The spec that ``text`` was made of, for tensors on ``device``."""
        return _from_text(text, device)


@remember_plain
def _from_text(text: str, device: torch.device) -> LayerSpec:
    layout, kv_layout, config, scale, dtype, heads, kv_heads, dim, impl, deterministic, recorded, means = ast.literal_eval(text)
    return LayerSpec(TokenLayout.from_plain(layout), TokenLayout.from_plain(kv_layout), SSTAConfig.from_plain(config), float.fromhex(scale),
                     getattr(torch, dtype.removeprefix("torch.")), device, heads, kv_heads, dim, impl, deterministic, recorded, means)
