"""Layer: what a LayerSpec comes to on a device, made once; its steps, one after the other, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .budget import budget_of
from .kernels import BlockLists, Deferred, PatternFacts, Route, choose_backend, choose_route
from .kernels.memo import remember
from .layout import Input, checked_layout
from .result import ExactMass, LayerResult, Tape
from .scoring import Facts, descriptors, rule_of, tile_means
from .selection import Left, Selection, fixed_tiles, text_lengths
from .spec import LayerSpec
from .text import TextMask

if TYPE_CHECKING:
    from .kernels.estimate import Estimate


class HeldKeys(NamedTuple):
    """What is known of keys in the order of the tiles that a cache holds, and follows them where they are written to.

    Attributes:
        lengths: int32 ``[1, 1, T']``, how many of each key tile's tokens count, from its first one on.
        statistics: of the video tiles; None where nothing is estimated.
        k_per_row: int32 ``[1, 1, N]``, the budget beyond the window; None where it does not depend on what is held.
    """

    lengths: Tensor
    statistics: Estimate | None
    k_per_row: Tensor | None


class Tiled(NamedTuple):
    """q, k and v in the order of the tiles.

    Attributes:
        q: ``[B, H, P, D]``; k, v: ``[B, Hkv, P', D]``.
        q_means, k_means: float32 means of the video tiles, ``[B, H, N, D]`` and ``[B, Hkv, K, D]``; None from plain torch.
        held: of keys that a cache holds; else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_means: Tensor | None
    k_means: Tensor | None
    held: HeldKeys | None = None


class Layer:
    """A layer of attention, ready to run. Made by calls of ``ssta_attention``, which keep the 64 used last.

    ``run`` and ``backward`` are for plain tensors that nobody watches, on the current device, without autocast; ``op.attend`` sees to that.

    Args:
        spec: what it is.
    """

    def __init__(self, spec: LayerSpec) -> None:
        config, device = spec.config, spec.device
        self.spec = spec
        self.tiles = checked_layout(spec.layout, config.tile_thw, config.pad_type, device)
        self.kv_tiles = self.tiles if spec.kv_layout == spec.layout else checked_layout(
            spec.kv_layout, config.tile_thw, config.pad_type, device)
        self.backend = choose_backend(spec.impl, device, spec.dtype, spec.head_dim)
        self.fixed = fixed_tiles(self.tiles, self.kv_tiles, config.window, config.selected_by)
        # The steps that this layer has, as values: a layer without a choice has no rule, one that drops what it leaves out no estimate.
        self.rule = rule_of(config) if spec.chooses else None
        self.budget = None
        if spec.chooses:
            grids = tuple(zip(map(prod, self.tiles.tile_grids), self.fixed.window))
            self.budget = budget_of(config, grids, self.kv_tiles.num_video_tiles, device)
        self.estimates = spec.estimates
        self.room = spec.room
        # As the steps "estimate" and "merge" take them.
        self.q_blocks, self.kv_blocks = ((tiles.offsets, tiles.num_video_tiles, tiles.longest_video_tile)
                                         for tiles in (self.tiles, self.kv_tiles))
        self.moves = self.tiles.moves or self.kv_tiles.moves

    @torch.no_grad()
    def run(self, q: Input | Tiled | Callable[[], Tiled], k: Input | None = None, v: Input | None = None,
            text_mask: TextMask | Tensor | None = None, selection: Selection | None = None) -> LayerResult:
        """Attention over the layer's sequences: all steps, one after the other.

        Args:
            q: ``[B, H, S, D]`` in the order of the layout; k, v: ``[B, Hkv, S', D]`` in that of kv_layout. Or all three as one Tiled, or
                a function that makes it, of which nobody else then holds the tensors.
            text_mask: of the keys' dense runs, checked.
            selection: attend to what an earlier run selected, instead of selecting.
        """
        left = self.left(text_mask)
        if isinstance(q, Tiled):
            tiled = q
        elif isinstance(q, (Tensor, Deferred)):
            assert k is not None and v is not None, "a Tiled has all three"
            tiled = self.gather(q, k, v)
        else:
            tiled = q()
        del q, k, v
        means = self.means(tiled)
        # Estimates of the video tiles that will not be computed; None where these are dropped.
        estimates = self.estimate(tiled, None if selection is None else selection.useful) if self.estimates else None
        if selection is None:
            selection = self.select(tiled, estimates, left)
        estimates = estimates and replace(estimates, scores=None)
        q, k, v = tiled.q, tiled.k, tiled.v
        # Nothing is held longer than it is read: beside the inputs there are never more than three copies, and with an estimate the result.
        del tiled
        out, lse, route = self.attend(q, k, v, selection.blocks)
        tape = Tape(q, k, v, out, lse) if self.spec.recorded else None
        mass = None
        if estimates is not None:
            out, lse, mass, kept = self.merge(out, lse, q, k, v, selection.blocks, estimates)
            if tape is not None:
                tape = tape._replace(merged=out, merged_lse=lse, **kept)
        del q, k, v, estimates
        return LayerResult(self.take(out), route, selection, mass, tape, means)

    # The steps

    def gather(self, q: Input, k: Input, v: Input) -> Tiled:
        """Tokens into tiles."""
        if isinstance(q, Deferred) and (not self.moves or self.backend.by_torch("gather")):
            q, k, v = (x.materialize() if isinstance(x, Deferred) else x for x in (q, k, v))
        if not self.moves:
            return Tiled._make([q, k, v, None, None, None])
        return Tiled(*self.backend.gather(q, k, v, self.tiles.move, self.kv_tiles.move))

    def means(self, tiled: Tiled) -> tuple[Tensor, ...]:
        """The means of the video tiles of q, k and v, in their dtype; none where the spec wants none."""
        if not self.spec.means:
            return ()
        of = (tiled.q, tiled.q_means, self.tiles), (tiled.k, tiled.k_means, self.kv_tiles), (tiled.v, None, self.kv_tiles)
        return tuple([tile_means(x, tiles) if known is None else known.to(x.dtype) for x, known, tiles in of])

    def estimate(self, tiled: Tiled, useful: Tensor | None) -> Estimate:
        """What the video tiles are worth that will not be computed; of layers that do not drop them."""
        return self.backend.estimate(tiled.q, tiled.k, tiled.v, self.q_blocks, self.kv_blocks, self.spec.scale,
                                     self.spec.config.compensation_parts, useful, None if tiled.held is None else tiled.held.statistics)

    def score(self, tiled: Tiled, estimates: Estimate | None) -> Tensor:
        """How much each video tile wants each of the keys'; of layers that choose."""
        assert self.rule is not None, "the layer attends to fixed tiles"
        return self.rule(Facts(partial(self.descriptors, tiled), estimates, self.backend, self.spec.config.lambda_))

    def descriptors(self, tiled: Tiled) -> tuple[Tensor, Tensor]:
        """The descriptors of query and key tiles; ``Facts`` describes them."""
        config, q_means, k_means = self.spec.config, tiled.q_means, tiled.k_means
        if q_means is None or config.pool_cells is not None:
            q_means = descriptors(tiled.q, self.tiles, config.pool_cells)
        if k_means is None or config.pool_cells is not None:
            k_means = descriptors(tiled.k, self.kv_tiles, config.pool_cells)
        if config.mask_share_within_head:
            q_means, k_means = q_means.mean(1, keepdim=True), k_means.mean(1, keepdim=True)
        return q_means, k_means

    def left(self, text_mask: TextMask | Tensor | None) -> Left:
        """What a mask leaves of the keys' dense runs."""
        return text_lengths(self.kv_tiles, text_mask, self.backend)

    def select(self, tiled: Tiled, estimates: Estimate | None, left: Left) -> Selection:
        """The tiles that each tile attends to."""
        held = tiled.held
        active, lengths = left if held is None else (None, held.lengths)
        useful = None if estimates is None else estimates.useful
        scores = budget = None
        if self.budget is not None:
            scores = self.score(tiled, estimates)
            budget = self.budget(scores)
            if held is not None and held.k_per_row is not None:
                budget = budget._replace(k_per_row=held.k_per_row)
        return self.fixed.chosen(self.backend, scores, budget, self.room, active, lengths, useful)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists) -> tuple[Tensor, Tensor, Route]:
        """Attention to the listed tiles. q is written over where it is the layer's own and nobody asks for it again."""
        route = self._route(blocks)
        owned = self.moves and not self.estimates and not self.spec.recorded
        return *route.run(q, k, v, blocks, self.spec.scale, in_place=owned), route

    def _route(self, blocks: BlockLists) -> Route:
        spec = self.spec
        return choose_route(spec.impl, spec.device, spec.dtype, spec.head_dim, PatternFacts.of(blocks), heads=spec.heads,
                            kv_heads=spec.kv_heads, deterministic=spec.deterministic)

    def merge(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, estimates: Estimate
              ) -> tuple[Tensor, Tensor, ExactMass, dict[str, Any]]:
        """(out, lse, exact mass, what else a tape has) of attention with what the lists leave out estimated."""
        spec = self.spec
        if spec.recorded:
            out, lse = out.clone(), lse.clone()
        shares, estimate_lse, bias, mixture = self.backend.merge(out, lse, q, k, v, self.q_blocks, self.kv_blocks, blocks.counts,
                                                                 blocks.indices, estimates, spec.scale, spec.recorded)
        mass = ExactMass(shares, blocks.counts, estimates.useful, self.kv_tiles.num_tiles)
        return out, lse, mass, dict(
            estimate_lse=estimate_lse, bias=bias, mixture=mixture, log_count=estimates.log_count, order=estimates.order,
            k_mean=estimates.k_mean, v_mean=estimates.v_mean)

    def take(self, out: Tensor) -> Tensor:
        """Back to the order of the sequence."""
        return self.backend.take(out, self.tiles.inverse) if self.moves else out

    def backward(self, tape: Tape, dout: Tensor, blocks: BlockLists, dmeans: Sequence[Tensor | None] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in the orders of the layouts; the steps of ``run`` in reverse.

        Args:
            tape: what ``run`` gave.
            dout: ``[B, H, S, D]``, the gradient of the result.
            blocks: of the selection, which is a constant.
            dmeans: the gradients of the means.
        """
        spec, backend = self.spec, self.backend
        q, k, v, out, lse, *_ = tape
        route = self._route(blocks)
        dlse = of_estimate = None
        given = dout
        if tape.merged is None:
            dout = backend.take(dout, self.tiles.returned) if self.moves else dout
        else:
            dout, dlse, *of_estimate = self._merge_backward(tape, backend.take(dout, self.tiles.returned))
        dq, dk, dv = route.run_backward(dout, dlse, q, k, v, out, lse, blocks, spec.scale, False, spec.deterministic,
                                        in_place=dout is not given)
        # As in ``run``: one gradient after another goes back to its order, and nothing that was read is there meanwhile.
        del dout, dlse, given
        grads = [dq, dk, dv]
        del dq, dk, dv
        for number, tiles in enumerate((self.tiles, self.kv_tiles, self.kv_tiles)):
            x = grads[number]
            if of_estimate:
                x.add_(of_estimate.pop(0))
            if dmeans and dmeans[number] is not None:
                x.add_(tiles.spread((dmeans[number] / tiles.lengths[:tiles.num_video_tiles, None]).to(x.dtype), backend.take))
            grads[number] = tiles.collect(x, backend.take) if self.moves else x
            del x
        dq, dk, dv = grads
        return dq, dk, dv

    def _merge_backward(self, tape: Tape, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of the exact part's out and lse, and of q, k and v."""
        return self.backend.merge_backward(
            dout, tape.out, tape.lse, tape.merged, tape.merged_lse, tape.estimate_lse, tape.q, tape.k, tape.v,
            self.q_blocks, self.kv_blocks, tape.bias, tape.mixture, tape.log_count, tape.order, tape.k_mean, tape.v_mean, self.spec.scale)


@remember(64)
def prepared(spec: LayerSpec) -> Layer:
    """The layer of a spec; the 64 used last are remembered."""
    return Layer(spec)
