"""Calls of a cache in whatever world they come: plain, or seen by a compiler, as two operators that write to its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cached_layer import Storage, cached_layer
from .kernels.operators import NAMESPACE, on_device, watched


class Chunk(NamedTuple):
    """What calls for a chunk of some frames need of a cache beside its memory.

    Attributes:
        plan: the geometry and the spec as text.
        known: what ``CachedLayer.known`` gives; written in place.
    """

    plan: str
    known: list[Tensor]


def compiling() -> bool:
    """Whether a compiler traces."""
    return torch.compiler.is_compiling()


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, storage: Storage, chunk: Chunk, dense: bool, describe: bool) -> Tensor:
    """``CachedLayer.attend`` in whatever world."""
    if watched(query, key, value, storage.k):
        return _attend(query, key, value, storage.tensors, chunk.known, chunk.plan, dense, describe)
    with on_device(query), torch.no_grad():
        layer = cached_layer(chunk.plan, query.device)
        return layer.attend(query, key, value, storage, *chunk.known, dense=dense, describe=describe)


def keep_chunk(storage: Storage, chunks: Sequence[Chunk], fill: bool, cut: bool, settled: bool) -> None:
    """``CachedLayer.keep`` of the first chunk in whatever world; what is known for each of them is written anew unless that is settled."""
    if watched(storage.k):
        _keep(storage.tensors, [x for chunk in chunks for x in chunk.known], "\n".join([chunk.plan for chunk in chunks]), fill, cut,
              settled)
        return
    with on_device(storage.k), torch.no_grad():
        cached_layer(chunks[0].plan, storage.k.device).keep(storage, fill, cut, settled)
        if not settled:
            recount(storage, chunks)


def recount(storage: Storage, chunks: Iterable[Chunk]) -> None:
    """Writes what is known for chunks anew."""
    for plan, known in chunks:
        for x, new in zip(known, cached_layer(plan, storage.k.device).known(storage)):
            x.copy_(new)


@torch.library.custom_op(f"{NAMESPACE}::attend_cached", mutates_args=("storage",))
def _attend(query: Tensor, key: Tensor, value: Tensor, storage: list[Tensor], known: list[Tensor], plan: str, dense: bool, describe: bool
            ) -> Tensor:
    held = cached_layer(plan, query.device).storage(storage)
    out = attend_chunk(query, key, value, held, Chunk(plan, known), dense, describe)
    like = torch.empty_like(query)
    return out if out.stride() == like.stride() else like.copy_(out)


@_attend.register_vmap
def _(info, in_dims, *args):
    raise ValueError("TileCache.attend must not be called under torch.func.vmap, whose entries would all be put into one cache: the "
                     "batch is a dimension of query, key and value")


@_attend.register_fake
def _(query, key, value, storage, known, plan, dense, describe):
    return torch.empty_like(query)


@torch.library.custom_op(f"{NAMESPACE}::keep_cached", mutates_args=("storage", "known"))
def _keep(storage: list[Tensor], known: list[Tensor], plans: str, fill: bool, cut: bool, settled: bool) -> None:
    found = plans.split("\n")
    each, held = len(known) // len(found), cached_layer(found[0], storage[0].device).storage(storage)
    keep_chunk(held, [Chunk(plan, known[i * each:(i + 1) * each]) for i, plan in enumerate(found)], fill, cut, settled)


@_keep.register_fake
def _(storage, known, plans, fill, cut, settled):
    return None
