"""What a TileCache holds, and what its calls make of that."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .cache_checks import Kind
from .cache_op import Chunk, compiling
from .cached_layer import CachedLayer, Storage, cached_layer, plan_of
from .kernels.operators import on_device
from .ring import Geometry, Ring, ring_of
from .sequence import TokenLayout
from .spec import LayerSpec


class Memory:
    """What a cache holds, for chunks of one kind of tensors.

    Attributes:
        geometry: where frames lie.
        spec: of the layer for the longest chunk; its kv_layout is what is held.
        raw_sink: the sink's keys without positions; None where keys come with them, and without a sink.
        kind: of the tensors.
        chunks: what calls need, by the frames of their chunk.
    """

    def __init__(self, geometry: Geometry, spec: LayerSpec, kind: Kind, rotary: bool) -> None:
        self.geometry, self.spec, self.kind, self.chunks = geometry, spec, kind, dict[int, Chunk]()
        tokens = geometry.sink * geometry.frame
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad(), on_device(torch.empty(0, device=spec.device)):
            self.storage: Storage = self.layer.new(kind.batch)
            self.raw_sink = self.storage.k.new_zeros(kind.batch, spec.kv_heads, tokens, spec.head_dim) if rotary and tokens else None

    @property
    def layer(self) -> CachedLayer:
        return cached_layer(plan_of(self.geometry, self.spec), self.spec.device)

    @property
    def ring(self) -> Ring:
        return ring_of(self.geometry, self.spec.device)

    @property
    def state(self) -> dict[str, Tensor]:
        """All that is not known from something else, by name; these tensors themselves."""
        raw = {} if self.raw_sink is None else {"raw_sink": self.raw_sink}
        return {"key": self.storage.k, "value": self.storage.v, **raw, **self.storage.counts._asdict()}

    def spec_of(self, frames: int) -> LayerSpec:
        """For a chunk of so many frames; a window is that of the longest."""
        config = self.spec.config
        if frames < self.geometry.chunk and config.selected_by == "ssta":
            config = replace(config, sparse_type="block_attn", kernel_thw=None)
        return self.spec._replace(layout=TokenLayout.video_text(self.geometry.thw(frames)), config=config)

    def chunk(self, frames: int) -> Chunk:
        """What calls for a chunk of so many frames need."""
        found = self.chunks.get(frames)
        if found is None:
            if compiling():
                raise ValueError(f"the cache must know of chunks of {frames} frames before a compiler sees one; cache.allocate(query, key, "
                                 "thw) tells it")
            plan = plan_of(self.geometry, self.spec_of(frames))
            with torch.inference_mode(False), torch.no_grad(), on_device(self.storage.k):
                found = self.chunks[frames] = Chunk(plan, cached_layer(plan, self.spec.device).known(self.storage))
        return found

    def put_text(self, key: Tensor, value: Tensor) -> None:
        ring, storage = self.ring, self.storage
        with torch.no_grad():
            for x, own in ((key, storage.k), (value, storage.v)):
                ring.tokens(own)[3].narrow(2, 0, x.shape[2]).copy_(x)
            storage.counts.text.fill_(key.shape[2])
            for chunk in self.chunks.values():
                ring.count_text(chunk.known[0], key.shape[2])

    def text(self) -> list[Tensor]:
        """Room for text: keys, values, and how many tokens there are."""
        return [*[self.ring.tokens(x)[3] for x in (self.storage.k, self.storage.v)], self.storage.counts.text]
