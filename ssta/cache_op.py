"""Calls of a cache in whatever world they come: plain, or seen by a compiler, as an operator that writes to its memory."""

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


def run_chunk(query: Tensor, key: Tensor, value: Tensor, storage: Storage, chunks: Sequence[Chunk], dense: bool, keep: Sequence[bool] = ()
              ) -> Tensor:
    """``CachedLayer.attend`` of the first of ``chunks`` in whatever world.

    Args:
        chunks: with ``keep`` all that a cache knows, each of which then knows what is held.
        keep: fill, cut and settled of ``CachedLayer.keep``; none = the chunk does not stay.
    """
    if watched(query, key, value, storage.k):
        return _run(query, key, value, storage.tensors, [x for chunk in chunks for x in chunk.known],
                    "\n".join([chunk.plan for chunk in chunks]), dense, keep)
    with on_device(query), torch.no_grad():
        layer = cached_layer(chunks[0].plan, query.device)
        out = layer.attend(query, key, value, storage, *chunks[0].known, dense=dense, describe=len(keep) > 0)
        if keep:
            layer.keep(storage, *keep)
            *_, settled = keep
            if not settled:
                recount(storage, chunks)
    return out


def recount(storage: Storage, chunks: Iterable[Chunk]) -> None:
    """Writes what is known for chunks anew."""
    for plan, known in chunks:
        for x, new in zip(known, cached_layer(plan, storage.k.device).known(storage)):
            x.copy_(new)


@torch.library.custom_op(f"{NAMESPACE}::attend_cached", mutates_args=("storage", "known"))
def _run(query: Tensor, key: Tensor, value: Tensor, storage: list[Tensor], known: list[Tensor], plans: str, dense: bool,
         keep: Sequence[bool]) -> Tensor:
    found = plans.split("\n")
    each, held = len(known) // len(found), cached_layer(found[0], query.device).storage(storage)
    out = run_chunk(query, key, value, held, [Chunk(plan, known[i * each:(i + 1) * each]) for i, plan in enumerate(found)], dense, keep)
    like = torch.empty_like(query)
    return out if out.stride() == like.stride() else like.copy_(out)


@_run.register_vmap
def _(info, in_dims, *args):
    raise ValueError("TileCache.attend must not be called under torch.func.vmap, whose entries would all be put into one cache: the "
                     "batch is a dimension of query, key and value")


@_run.register_fake
def _(query, key, value, storage, known, plans, dense, keep):
    return torch.empty_like(query)
