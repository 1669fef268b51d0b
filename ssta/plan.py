"""Plan: what a layer's checks, look-ups and launches come to for inputs of one kind; found by their first call, followed by the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .budget import row_counts
from .compensation import compensate, estimate_tiles
from .config import SSTAConfig
from .kernels import BlockLists, Deferred, Route, Steps, attend_again, attend_owned, kernels_run, watched
from .layout import Input, TiledQKV, TileLayout
from .memo import captured
from .selection import Selection, fixed_tiles, select_tiles
from .sequence import TokenLayout
from .text import TextMask, tile_places, tile_starts


def kind_of(query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, text_mask: Tensor | TextMask | None,
            scale: float | None, impl: str) -> tuple | None:
    """All that a layer's arguments are checked for and that its steps depend on beside values; None where every call has to look anew.

    That is where kernels do not run, where somebody watches or wants a gradient, under autocast, while a CUDA graph is captured, on a GPU
    other than the current one, and with functions of the user's own, which may hold what memory there is.
    """
    if torch.compiler.is_compiling() or not (type(layout) is TokenLayout and type(config) is SSTAConfig and type(impl) is str
                                             and (scale is None or type(scale) is float)):
        return None
    if type(query) is type(key) is type(value) is Tensor:
        tensors = [query, key, value]
    elif type(query) is type(key) is type(value) is Deferred:
        tensors = [projection.x for x in (query, key, value) for projection in x.projections]
    else:
        return None
    first = tensors[0]
    if text_mask is None:
        mask = first
    elif type(text_mask) is TextMask:
        mask = text_mask.valid
    elif type(text_mask) is Tensor:
        mask = text_mask
    else:
        return None
    if watched(*tensors, mask) or not kernels_run(first) or torch.is_autocast_enabled(first.device.type) or captured():
        return None
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        return None
    if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]) or callable(config.sampling_type) or config.budget is not None:
        return None
    # Of a mask that is checked, whose strides nobody asks for; and of deferred ones, how many belong to which.
    tokens = None if text_mask is None else text_mask.tokens if isinstance(text_mask, TextMask) else mask.stride()
    parts = None if query is first else (len(query.projections), len(key.projections))
    return (layout, config, scale, impl, tokens, mask.dtype, mask.get_device(), mask.shape, parts,
            *[of for x in tensors for of in (x.dtype, x.get_device(), x.shape, x.stride())])


class Plan:
    """A layer without gradients over inputs of one kind: the steps of ``ssta_layer``, without finding out again what the kind decides.

    Args:
        config: without variants.
        scale: attention's factor on the scores.
        tiles: N video and M dense tiles.
        impl: as ``ssta_attention`` takes it.
    """

    def __init__(self, config: SSTAConfig, scale: float, tiles: TileLayout, impl: str) -> None:
        self.config, self.scale, self.tiles, self.impl = config, scale, tiles, impl
        self.fixed = fixed_tiles(tiles, config.kernel_thw, config.selected_by)
        self.estimates = config.compensation != "none" and tiles.num_video_tiles > 0
        # Whether ``_select`` is for this config, whose scores are then of the tiles' means or given.
        self.selects = (config.selected_by != "sta" and tiles.num_video_tiles > 0 and config.threshold == 0 and config.pool_cells is None)
        self.by_error = self.estimates and config.scored_by == "error" and config.selected_by != "sta"
        self.lambda_ = config.lambda_ if config.scored_by == "importance" else None
        self.k_per_row: int | Tensor = min(config.row_topk, tiles.num_video_tiles)
        if self.selects and config.density is not None:
            self.k_per_row = row_counts(tiles.tile_grids, self.fixed.window, config.density, tiles.device)
        self.places = tile_places(tiles)
        # What the first calls settle: the steps around attention, the tiles' first slots for each batch element, the facts of the lists
        # that are selected, the route for lists of such facts, and the strides of the result.
        self.steps = Steps()
        self.starts: Tensor | None = None
        self.facts: tuple | None = None
        self.route: tuple[tuple, Route] | None = None
        self.strides: tuple[int, ...] | None = None

    def run(self, query: Input, key: Input, value: Input, text_mask: Tensor | TextMask | None, selection: Selection | None,
            keep_scores: bool) -> tuple[Tensor, Selection, Route, Tensor | None]:
        """What ``ssta_layer`` returns for inputs of this kind."""
        config, scale, tiles = self.config, self.scale, self.tiles
        if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
            tiled = TiledQKV(tiles, *self.steps.gather(query, key, value, tiles.source, tiles.offsets, tiles.num_video_tiles))
        else:
            tiled = tiles.tile_qkv(query, key, value)
        estimates = scores = None
        if self.estimates:
            estimates = estimate_tiles(tiled, config, scale, None if selection is None else selection.useful)
            scores = estimates.scores() if self.by_error and selection is None else None
        if selection is None:
            if self.selects and not keep_scores:
                selection = Selection(self._select(tiled, text_mask, scores), useful=None if estimates is None else estimates.useful)
            else:
                selection = select_tiles(tiled, config, text_mask, scores=scores, keep_scores=keep_scores)
                if estimates is not None:
                    selection = replace(selection, useful=estimates.useful)
        q, k, v = tiled.release_q(), tiled.k, tiled.v
        # As in ssta_layer: nothing is held longer than it is read.
        del tiled, scores
        out, lse, route = self._attend(q, k, v, selection.blocks, keep_q=estimates is not None)
        exact_mass = None
        if estimates is not None:
            out, _, exact_mass = compensate(out, lse, q, k, v, tiles, selection.blocks, estimates, scale)
        del q, k, v, lse
        strides = out.stride()
        if self.strides is None:
            self.strides = strides
        # Only with a selection of another kind of lists may other kernels have run.
        out = self.steps.take(out, tiles.inverse) if strides == self.strides else tiles.untile(out)
        return out, selection, route, exact_mass

    def _select(self, tiled: TiledQKV, text_mask: Tensor | TextMask | None, scores: Tensor | None) -> BlockLists:
        """The lists of ``select_tiles``."""
        tiles, fixed, steps = self.tiles, self.fixed, self.steps
        if scores is None:
            q_means, k_means = tiled.q_mean, tiled.k_mean
            assert q_means is not None and k_means is not None
            if self.config.mask_share_within_head:
                q_means, k_means = q_means.mean(1, keepdim=True), k_means.mean(1, keepdim=True)
            scores = steps.scores(q_means, k_means, self.lambda_)
        active = lengths = None
        if text_mask is not None and tiles.dense:
            whole = tiles.padding != "none"
            if isinstance(text_mask, TextMask):
                left = text_mask.active_tiles(tiles) if whole else text_mask.tile_lengths(tiles)
            else:
                valid = text_mask if text_mask.dtype == torch.bool else text_mask != 0
                left = steps.lengths(valid, self.places.ends, self.places.starts, tiles.lengths, int(whole))
            # With padding a tile counts whole or not at all.
            active, lengths = (left, None) if whole else (None, left)
        counts, indices = steps.lists(fixed.forced, scores, self.k_per_row, active, self.config.density is not None)
        if lengths is not None and self.starts is None:
            self.starts = tile_starts(tiles, len(lengths))
        blocks = fixed.blocks.relisted(counts, indices, lengths, self.starts, tiles.num_slots, self.facts)
        self.facts = blocks.facts
        return blocks

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, keep_q: bool) -> tuple[Tensor, Tensor, Route]:
        """``attend_owned``."""
        if self.route is not None and self.route[0] == blocks.facts:
            route = self.route[1]
            return *attend_again(route, q, k, v, blocks, scale=self.scale, keep_q=keep_q), route
        out, lse, found = attend_owned(q, k, v, blocks, scale=self.scale, impl=self.impl, keep_q=keep_q)
        assert found is not None
        if self.route is None and found.forward is not None:
            self.route = blocks.facts, found
        return out, lse, found
