"""Layer: what a LayerSpec comes to on a device, prepared once; its steps, one after the other, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .kernels import BlockLists, Deferred, Route, choose_backend
from .kernels.memo import Kept, remember
from .layout import Input, checked_layout
from .mass import ExactMass
from .rows import all_rows, some_rows
from .scoring import Facts, rule_of, tile_means
from .selection import Selection, fixed_tiles, text_lengths
from .spec import LayerSpec
from .text import TextMask

if TYPE_CHECKING:
    from .kernels.tail import BlockEstimates, KeyStatistics


class Held(NamedTuple):
    """What is known of keys in the order of the tiles that a cache holds, and follows them where they are written to.

    Attributes:
        lengths: int32 ``[1, 1, T']``, how many of each key tile's tokens count, from its first one on.
        statistics: of the video tiles; None where nothing is estimated.
        k_per_row: int32 ``[1, 1, N]``, the budget beyond the window; None where it does not depend on what is held.
    """

    lengths: Tensor
    statistics: KeyStatistics | None
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
    held: Held | None = None


class Tape(NamedTuple):
    """What a layer's backward needs of its forward, all in the order of the tiles.

    Attributes:
        q, k, v: as of ``Tiled``; q of the computed rows.
        out, lse: attention of the computed rows; with an estimate of all rows, of which the others attend to nothing exactly.
        tail_lse, bias, mixture, log_count, halves, k_mean, v_mean: of the estimate, see ``kernels.eager.tail``; None where nothing is
            estimated, or blocks have one unit.
        q_all: q of all rows; None where all are computed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    tail_lse: Tensor | None = None
    bias: Tensor | None = None
    mixture: Tensor | None = None
    log_count: Tensor | None = None
    halves: Tensor | None = None
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None
    q_all: Tensor | None = None


class Ran(NamedTuple):
    """What one run of a layer gives: ``LayerResult``'s, and the tape if the spec says so."""

    out: Tensor
    selection: Selection
    route: Route
    mass: ExactMass | None
    means: tuple[Tensor, ...]
    tape: Tape | None


class Layer:
    """A layer of attention, ready to run. Made by ``prepare``, or by calls of ``ssta_attention``, which keep the 64 used last.

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
        self.fixed = fixed_tiles(self.tiles, self.kv_tiles, config.kernel_thw, config.selected_by)
        # The steps that this layer has, as values: a layer without a choice has no rule, one that drops what it leaves out no estimate.
        self.rule = rule_of(config, self) if spec.chooses else None
        self.estimates = spec.estimates
        # As the steps "estimate" and "combine" take them.
        self.q_blocks, self.kv_blocks = ((tiles.offsets, tiles.num_video_tiles, tiles.longest_video_tile)
                                         for tiles in (self.tiles, self.kv_tiles))
        self.moves = self.tiles.moves or self.kv_tiles.moves
        self.rows = all_rows(self.tiles) if spec.rows is None else some_rows(self.tiles, spec.rows)
        self._routes: dict[tuple, Route] = Kept(64)

    def run(self, q: Input | Tiled, k: Input | None = None, v: Input | None = None, text_mask: TextMask | Tensor | None = None,
            selection: Selection | None = None, *, keep_scores: bool = False, returned: Tensor | None = None) -> Ran:
        """Attention over the layer's sequences.

        Args:
            q: ``[B, H, S, D]`` in the order of the layout; k, v: ``[B, Hkv, S', D]`` in that of kv_layout. Or all three as one Tiled.
            text_mask: of the keys' dense runs, checked.
            selection: attend to what an earlier run selected, instead of selecting.
            keep_scores: the selection keeps its scores.
            returned: int64, the slots that the result takes, in its order; None = the sequence's.
        """
        if isinstance(q, Tiled):
            tiled = q
        else:
            assert k is not None and v is not None, "a Tiled has all three"
            tiled = self.gather(q, k, v)
        del q, k, v
        means = self.means(tiled)
        # What the video tiles are worth that will not be computed; None where they are dropped.
        estimates = self.estimate(tiled, None if selection is None else selection.useful) if self.estimates else None
        if selection is None:
            selection = self.select(tiled, estimates, text_mask, keep_scores)
        q, k, v = tiled.q, tiled.k, tiled.v
        # Nothing is held longer than it is read: beside the inputs there are never more than three copies, and with an estimate the result.
        del tiled
        rows = self.rows.take(self.backend, q)
        out, lse, route = self.attend(rows, k, v, selection.blocks)
        mass, kept = None, dict[str, Any]()
        if estimates is not None:
            out, lse, mass, kept = self.combine(out, lse, q, k, v, selection.blocks, estimates)
        tape = Tape(rows, k, v, out, lse, **kept) if self.spec.recorded else None
        del rows, q, k, v
        return Ran(self.take(out, returned), selection, route, mass, means, tape)

    # The steps

    def gather(self, q: Input, k: Input, v: Input) -> Tiled:
        """Tokens into tiles."""
        if isinstance(q, Deferred) and (not self.moves or self.backend.by_torch("gather")):
            q, k, v = (x.materialize() if isinstance(x, Deferred) else x for x in (q, k, v))
        if not self.moves:
            return Tiled._make([*[x.wait() if hasattr(x, "wait") else x for x in (q, k, v)], None, None, None])
        if hasattr(q, "wait"):
            return self._gather_arriving(q, k, v)
        return Tiled(*self.backend.gather(q, k, v, self.tiles.move, self.kv_tiles.move))

    def _gather_arriving(self, q, k, v) -> Tiled:
        """The same of what other ranks send: each is moved while those after it are on their way."""
        v_out = self.backend.take(v.wait(), self.kv_tiles.source)
        k_out, k_means = self.backend.gather_one(k.wait(), self.kv_tiles.move)
        q_out, q_means = self.backend.gather_one(q.wait(), self.tiles.move)
        return Tiled(q_out, k_out, v_out, q_means, k_means)

    def means(self, tiled: Tiled) -> tuple[Tensor, ...]:
        """The means of the video tiles of q, k and v, in their dtype; none where the spec wants none."""
        if not self.spec.means:
            return ()
        of = (tiled.q, tiled.q_means, self.tiles), (tiled.k, tiled.k_means, self.kv_tiles), (tiled.v, None, self.kv_tiles)
        return tuple([tile_means(x, tiles) if known is None else known.to(x.dtype) for x, known, tiles in of])

    def estimate(self, tiled: Tiled, useful: Tensor | None) -> BlockEstimates:
        """What the video tiles are worth that will not be computed; of layers that do not drop them."""
        return self.backend.estimate(tiled.q, tiled.k, tiled.v, self.q_blocks, self.kv_blocks, self.spec.scale,
                                     self.spec.config.compensation_parts, useful, None if tiled.held is None else tiled.held.statistics)

    def score(self, tiled: Tiled, estimates: BlockEstimates | None) -> Tensor:
        """How much each video tile wants each of the keys'; of layers that choose."""
        assert self.rule is not None, "the layer attends to fixed tiles"
        return self.rule.scores(Facts(tiled, estimates, self))

    def select(self, tiled: Tiled, estimates: BlockEstimates | None, text_mask: TextMask | Tensor | None, keep_scores: bool) -> Selection:
        """The tiles that each tile attends to."""
        held = tiled.held
        active, lengths = text_lengths(self.kv_tiles, text_mask, self.backend) if held is None else (None, held.lengths)
        useful = None if estimates is None else estimates.useful
        if self.rule is None:
            return self.fixed.selection(self.backend, active, lengths, useful)
        scores = self.score(tiled, estimates)
        budget = self.rule.budget(scores)
        if held is not None and held.k_per_row is not None:
            budget = budget._replace(k_per_row=held.k_per_row)
        return self.fixed.chosen(self.backend, scores, budget, active, lengths, useful, keep_scores)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists) -> tuple[Tensor, Tensor, Route]:
        """Attention to the listed tiles. q is written over where it is the layer's own and nobody asks for it again."""
        blocks = self.rows.lists(blocks)
        route = self._routes.get(blocks.facts)
        if route is None:
            route = self._routes[blocks.facts] = self.backend.route(q, k, blocks, self.spec.deterministic)
        owned = self.moves and not self.estimates and not self.spec.recorded
        return *route.run(q, k, v, blocks, self.spec.scale, in_place=owned), route

    def combine(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, estimates: BlockEstimates
                ) -> tuple[Tensor, Tensor, ExactMass, dict[str, Any]]:
        """(out, lse, exact mass, what else a tape has) of attention with what the lists leave out estimated."""
        spec = self.spec
        out, lse = self.rows.spread(self.backend, out, lse)
        shares, tail_lse, bias, mixture = self.backend.combine(out, lse, q, k, v, self.q_blocks, self.kv_blocks, blocks.counts,
                                                               blocks.indices, estimates, spec.scale, spec.recorded)
        mass = ExactMass(shares, blocks.counts, estimates.useful, self.kv_tiles.num_tiles)
        return out, lse, mass, dict(
            tail_lse=tail_lse, bias=bias, mixture=mixture, log_count=estimates.log_count, halves=estimates.halves, k_mean=estimates.k_mean,
            v_mean=estimates.v_mean, q_all=None if spec.rows is None else q)

    def take(self, out: Tensor, returned: Tensor | None = None) -> Tensor:
        """Back to the order of the sequence."""
        if returned is None:
            if not self.moves and self.spec.rows is None:
                return out
            returned = self.rows.returned if not self.estimates else self.rows.slot_of_token
        return self.backend.take(out, returned)

    def backward(self, tape: Tape, dout: Tensor, blocks: BlockLists, dmeans: Sequence[Tensor | None] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in the orders of the layouts; the steps of ``run`` in reverse.

        Args:
            tape: what ``run`` gave.
            dout: ``[B, H, S, D]``, the gradient of the result.
            blocks: of the selection, which is a constant.
            dmeans: the gradients of the means.
        """
        spec, backend, rows = self.spec, self.backend, self.rows
        q, k, v, out, lse, *_ = tape
        lists = rows.lists(blocks)
        route = backend.route(q, k, lists, spec.deterministic)
        of_tail = None
        if self.estimates:
            dout = rows.of_tokens(backend, dout)
            of_tail = backend.combine_backward(
                dout, out, lse, tape.tail_lse, q if tape.q_all is None else tape.q_all, k, v, self.q_blocks, self.kv_blocks, tape.bias,
                tape.mixture, tape.log_count, tape.halves, tape.k_mean, tape.v_mean, spec.scale)
            dout, (out, lse) = rows.take(backend, dout), rows.gathered(backend, out, lse)
        elif self.moves or spec.rows is not None:
            dout = backend.take(dout, rows.held)
        flipped = lists.transpose() if route.needs_transpose else None
        dq, dk, dv = route.run_backward(dout, None, q, k, v, out, lse, lists, flipped, spec.scale, False, spec.deterministic)
        dq = rows.to_slots(backend, dq)
        if of_tail is not None:
            dq, dk, dv = (x.add_(y) for x, y in zip((dq, dk, dv), of_tail))
        for x, dmean, tiles in zip((dq, dk, dv), dmeans, (self.tiles, self.kv_tiles, self.kv_tiles)):
            if dmean is not None:
                x.add_(tiles.spread((dmean / tiles.lengths[:tiles.num_video_tiles, None]).to(x.dtype), backend.take))
        if not self.moves:
            return dq, dk, dv
        return self.tiles.collect(dq, backend.take), self.kv_tiles.collect(dk, backend.take), self.kv_tiles.collect(dv, backend.take)


@remember(64)
def prepared(spec: LayerSpec) -> Layer:
    """The layer of a spec; the 64 used last are remembered."""
    return Layer(spec)
