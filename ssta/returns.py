"""What a layer's operator returns: tensors by name, of which the spec says beforehand which there are and what they are like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import choose_backend
from .result import LayerResult, Tape
from .spec import LayerSpec

TAPE = tuple([f"tape_{name}" for name in Tape._fields])


class Like(NamedTuple):
    """What a tensor is like. strides: None = contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32
    strides: tuple[int, ...] | None = None

    def empty(self, device: torch.device | str) -> Tensor:
        """Such a tensor, uninitialised."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def results(spec: LayerSpec, query: Tensor, text_mask: Tensor | None, indices: Tensor | None) -> dict[str, Like]:
    """A layer's results: out, the lists of its selection and what is useful of it, exact_mass, the offsets of tiles that differ in length,
    and the means of the video tiles. ``indices``: of a selection to attend to; None = the layer selects."""
    config, batch, heads, (cut, kv_cut) = spec.config, query.shape[0], spec.heads, spec.cuts
    masked, whole = text_mask is not None and len(kv_cut.dense) > 0, config.pad_type != "none"
    room = spec.room if indices is None else indices.shape[3]
    if indices is not None:
        lists = indices.shape[0], indices.shape[1]
    elif spec.chooses:
        lists = batch, 1 if config.mask_share_within_head else heads
    else:
        lists = batch if masked and whole else 1, 1
    out = _tokens(spec, query, spec.layout.length)
    found = {"out": out, "counts": Like((*lists, cut.num_tiles)), "indices": Like((*lists, cut.num_tiles, room))}
    if masked and not whole:
        found["lengths"] = Like((batch, 1, kv_cut.num_tiles))
    if spec.estimates:
        found["useful"] = Like((batch, heads), torch.bool)
        found["exact_mass"] = Like((batch, heads, cut.num_video_tiles), _wide(spec))
    for name, of in (("q_offsets", cut), ("kv_offsets", kv_cut)):
        if of.tile_length is None:
            found[name] = Like((1, 1, of.num_tiles + 1))
    if spec.means:
        for name, of_heads, of in (("q_means", heads, cut), ("k_means", spec.kv_heads, kv_cut), ("v_means", spec.kv_heads, kv_cut)):
            found[name] = Like((batch, of_heads, of.num_video_tiles, spec.head_dim), spec.dtype)
    return found


def everything(spec: LayerSpec, query: Tensor, text_mask: Tensor | None, indices: Tensor | None) -> dict[str, Like]:
    """``results``, and of a layer that records a gradient the fields of its ``Tape``, by the names of TAPE."""
    found = results(spec, query, text_mask, indices)
    return found | {f"tape_{name}": like for name, like in _taped(spec, query).items()} if spec.recorded else found


def tensors(ran: LayerResult) -> dict[str, Tensor | None]:
    """What a run gave of ``everything``."""
    selection, mass, tape, (q_means, k_means, v_means) = ran.selection, ran.mass, ran.tape, ran.means or (None,) * 3
    blocks = selection.blocks
    q_offsets, kv_offsets = (x if isinstance(x, Tensor) else None for x in (blocks.q_offsets, blocks.kv_offsets))
    found = dict(out=ran.out, counts=blocks.counts, indices=blocks.indices, lengths=blocks.kv_lengths, useful=selection.useful,
                 exact_mass=None if mass is None else mass.tensor(), q_offsets=q_offsets, kv_offsets=kv_offsets, q_means=q_means,
                 k_means=k_means, v_means=v_means)
    return found if tape is None else found | dict(zip(TAPE, tape))


def own_tensors(found: dict[str, Tensor | None], expected: dict[str, Tensor], inputs: Iterable[Tensor | None]) -> list[Tensor]:
    """Those of ``found`` that are expected, as new tensors with the strides of those on the meta device."""
    own: list[Tensor] = []
    others = [x.data_ptr() for x in inputs if x is not None]
    for name, like in expected.items():
        x = found[name]
        assert x is not None and x.shape == like.shape and x.dtype == like.dtype, name
        if x.stride() != like.stride() or x.data_ptr() in others:
            x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=x.device).copy_(x)
        others.append(x.data_ptr())
        own.append(x)
    return own


def _taped(spec: LayerSpec, query: Tensor) -> dict[str, Like]:
    """The fields of the ``Tape`` of a layer that records a gradient; what is not there is None, or one of the layer's inputs."""
    batch, heads, kv_heads, dim, wide, (cut, kv_cut) = query.shape[0], spec.heads, spec.kv_heads, spec.head_dim, _wide(spec), spec.cuts
    slots, parts = cut.num_slots, spec.config.compensation_parts
    found = {"out": _tokens(spec, query, slots), "lse": Like((batch, heads, slots), wide)}
    if cut.moves or kv_cut.moves:
        found["q"] = _tokens(spec, query, slots)
        found["k"] = found["v"] = _tokens(spec, query, kv_cut.num_slots, kv_heads)
    if spec.estimates:
        plain = choose_backend(spec.impl, spec.device, spec.dtype, dim).by_torch("estimate")
        units = batch, kv_heads, kv_cut.num_video_tiles * parts
        pairs = batch, heads, cut.num_video_tiles, units[2]
        means = Like((*units, dim), wide if plain else spec.dtype)
        lse = Like((batch, heads, slots), wide)
        found |= {"merged": _tokens(spec, query, slots), "merged_lse": lse, "estimate_lse": lse, "bias": Like(pairs, wide),
                  "mixture": Like(pairs, wide if plain else torch.bfloat16), "log_count": Like(units, wide), "k_mean": means,
                  "v_mean": means}
        if parts > 1:
            found["order"] = Like((batch, kv_heads, kv_cut.num_slots))
    return found


def _tokens(spec: LayerSpec, query: Tensor, number: int, heads: int | None = None) -> Like:
    """``[B, heads, number, D]`` in query's memory order."""
    heads, dim = spec.heads if heads is None else heads, spec.head_dim
    row = heads * dim
    strides = (number * row, dim, row, 1) if query.stride(1) < query.stride(2) else (number * row, number * dim, dim, 1)
    return Like((query.shape[0], heads, number, dim), spec.dtype, strides)


def _wide(spec: LayerSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == torch.float64 else torch.float32
