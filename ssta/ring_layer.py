"""A layer on rings: rows stay where they are and attend to the own keys while the others' arrive, then to these; both are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compensation import compensate
from .config import SSTAConfig
from .exchange import wants_gradient
from .kernels import (
    BlockEstimates,
    BlockLists,
    Route,
    attend_owned,
    gather_blocks,
    kernels_run,
    merge_attention,
    partial_gradients,
    take_tokens,
)
from .layout import TiledQKV, TileLayout
from .parallel import Exchanged
from .ring_rows import RingTiles, Rows
from .rings import Arrival, Rings
from .selection import Selection, select_tiles
from .text import TextMask


def keys_may_follow(config: SSTAConfig, impl: str) -> bool:
    """Whether a layer can begin before it has all keys: its selection then follows from tiles' means alone, nothing is estimated, and
    merging needs no gradient of its own. A graph has no exchange that runs beside it."""
    scored = config.scored_by != "error" and config.pool_cells is None
    return scored and config.compensation == "none" and impl != "reference" and not torch.compiler.is_compiling()


def ring_layer(
    rings: Rings, share: tuple[Tensor, Tensor, Tensor], text_mask: TextMask | None, config: SSTAConfig, scale: float, tiles: TileLayout,
    deterministic: bool, impl: str, selection: Selection | None, keep_scores: bool, note: Callable[[str], object] | None,
) -> tuple[Tensor, Selection, Route | None]:
    """(out, selection, route) of ``ssta_layer`` on rings, where ``keys_may_follow``; its arguments after their checks, and this rank's
    share of q, k and v."""
    q, k, v, exchanged = rings.pieces(*share)
    if note is not None:
        note("arrived")
    of_ring = rings.tiles(tiles, q)
    with torch.no_grad():
        rows, means = tile_own(of_ring, q, k, v)
        if selection is None and means is not None:
            # Before the keys, which the ring would let pass first.
            means = rings.sum(means)
        arriving = rings.send(k, v)
        if selection is None:
            selection = _selected(rows, means, tiles, config, text_mask, keep_scores, exchanged)
    run = _Run(rings, of_ring, rows, arriving, of_ring.lists(selection.blocks), dict(scale=scale, deterministic=deterministic, impl=impl))
    if wants_gradient(q, k, v):
        out, route = _Attention.apply(q, k, v, run)
    else:
        # What has been taken apart into tiles is not needed any more.
        del q, k, v
        out, _, route = attend_in_turn(run, keep=False)[:3]
        out = take_tokens(out, of_ring.of_token)
    if note is not None:
        note("attended")
    out = rings.join(out)
    return (exchanged.to_tokens(out) if rings.inner.ranks > 1 else out), selection, route


def attend_own_rows(rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: TileLayout, selection: Selection, estimates: BlockEstimates | None,
                    options: dict[str, Any]) -> tuple[Tensor, Route | None]:
    """(out, route) of some rows of a layer that is all here, ``[B, H, n, D]`` in the sequence's order; all its rows are estimated."""
    out, lse, route = attend_owned(take_tokens(q, rows.slots), k, v, rows.lists(selection.blocks), **options)
    if estimates is not None:
        out, lse = rows.spread(out, lse)
        out = take_tokens(compensate(out, lse, q, k, v, tiles, selection.blocks, estimates, options["scale"])[0], rows.slots)
    return take_tokens(out, rows.of_token), route


class _Own(NamedTuple):
    """The own slots of q, k and v ``[B, H_r, n, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Run(NamedTuple):
    """All that attention needs beside its inputs; ``lists`` are those of the own keys, and of the rest."""

    rings: Rings
    of_ring: RingTiles
    own: _Own
    arriving: Arrival
    lists: tuple[BlockLists, BlockLists]
    options: dict[str, Any]


def tile_own(of_ring: RingTiles, q: Tensor, k: Tensor, v: Tensor) -> tuple[_Own, Tensor | None]:
    """The own slots, and this place's part of the video tiles' means ``[B, Hq + Hkv, N, D]``, which over the ring add up to them."""
    number, kernels = of_ring.tiles.num_video_tiles, kernels_run(q)
    if kernels:
        q, k, v, *means = gather_blocks(q.detach(), k.detach(), v.detach(), of_ring.source, of_ring.offsets, number)
    else:
        q, k, v = (take_tokens(x.detach(), of_ring.source) for x in (q, k, v))
    if not number:
        return _Own(q, k, v), None
    parts = []
    for x, mean in zip((q, k), means if kernels else (None, None)):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # Of a tile that is another's alone nothing is here to take the mean of.
        part = x.new_zeros(*x.shape[:2], number, x.shape[3], dtype=wide) if mean is None else mean.masked_fill(
            ~of_ring.own[:number, None], 0.0)
        if len(of_ring.summed) and x.shape[2]:
            sums = take_tokens(x, of_ring.summed_slots).unflatten(2, (len(of_ring.summed), -1)).sum(3, dtype=wide)
            part = part.index_copy(2, of_ring.summed, sums / of_ring.tiles.lengths[of_ring.summed, None])
        parts.append(part)
    return _Own(q, k, v), torch.cat(parts, 1)


def _selected(own: _Own, means: Tensor | None, tiles: TileLayout, config: SSTAConfig, text_mask: TextMask | None,
              keep_scores: bool, exchanged: Exchanged) -> Selection:
    q_means = k_means = None
    if means is not None:
        # As ``scoring.descriptors`` has them.
        q_means, k_means = means.to(own.q.dtype).float().split([own.q.shape[1], own.k.shape[1]], 1)
    return select_tiles(TiledQKV(tiles, own.q, own.k, own.v, q_means, k_means), config, text_mask, keep_scores=keep_scores,
                        exchanged=exchanged)


def attend_in_turn(run: _Run, keep: bool) -> tuple[Tensor, Tensor, Route | None, Tensor, Tensor]:
    """(out, lse) of the own rows, route, and the rest's k and v. Unless they are to be kept, q is written over."""
    q, k, v = run.own
    near, far = run.lists
    own_out, own_lse, _ = attend_owned(q, k, v, near, **run.options, keep_q=True)
    k_rest, v_rest = (take_tokens(x, run.of_ring.rest) for x in run.arriving.wait())
    out, lse, route = attend_owned(q, k_rest, v_rest, far, **run.options, keep_q=keep)
    return *merge_attention((out, own_out), (lse, own_lse)), route, k_rest, v_rest


class _Attention(torch.autograd.Function):
    """``attend_in_turn`` of the pieces' tokens, in their order. Backward the rest's keys come first, so that their gradients are on their
    way to the others while the own ones are computed."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, run: _Run) -> tuple[Tensor, Route | None]:
        out, lse, route, k_rest, v_rest = attend_in_turn(run, keep=True)
        ctx.save_for_backward(*run.own, k_rest, v_rest, out, lse)
        ctx.rings, ctx.of_ring, ctx.lists, ctx.options = run.rings, run.of_ring, run.lists, run.options
        return take_tokens(out, run.of_ring.of_token), route

    @staticmethod
    def backward(ctx, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, k_rest, v_rest, out, lse = ctx.saved_tensors
        rings, of_ring, (near, far), options = ctx.rings, ctx.of_ring, ctx.lists, ctx.options
        dout = take_tokens(grads[0], of_ring.token_of)
        dq, dk, dv = partial_gradients(dout, q, k_rest, v_rest, out, lse, far, **options)
        back = rings.send_back(*(of_ring.to_tokens(x, of_ring.rest_of_slot) for x in (dk, dv)))
        own_dq, own_dk, own_dv = partial_gradients(dout, q, k, v, out, lse, near, **options)
        dk, dv = (rings.piece(of_ring.to_tokens(x, of_ring.of_slot)) for x in (own_dk, own_dv))
        dq = rings.piece(of_ring.to_tokens(dq + own_dq, of_ring.of_slot))
        return dq, *(x + y for x, y in zip((dk, dv), back.wait())), None
