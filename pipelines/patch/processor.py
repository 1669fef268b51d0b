"""SSTAProcessor: what stands in a stock attention processor's place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from torch import Tensor

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, dense_attention
from ssta.attention import attend
from ssta.dense import EXACT
from ssta.kernels import Deferred, PatternFacts, Route, choose_backend, choose_route
from ssta.kernels.checks import autocast_inputs
from ssta.kernels.notices import warn_once
from ssta.layout import Input
from ssta.ranks import Sent, Shards
from ssta.ranks.layer import enter
from ssta.report import heads_without_estimate, mass_summary
from ssta.result import ExactMass, LayerResult
from ssta.selection import Selection

from ..schedule.changes import at_density, warn_of_the_window
from ..schedule.progress import is_fake
from .context import ModelContext
from .holder import Holder
from .report import ExchangeTimer, LayerRun, Stopwatch
from .streams import TORCH_NORMS, Norms, Stream, apart, joined

# Attention is given q, k and v themselves, their projections, or what other ranks send.
Given = Input | Sent
# Canvases alternate in few ways (guidance, two resolutions); a server's must not pile up.
_LAYOUTS_KEPT = 16


class _LastRun(NamedTuple):
    """A layer's last attention, for the report."""

    dense: bool
    backend: str | None  # of diffusers, where that attended
    route: Route | None  # of the library's kernels; None while torch.compile traces
    kind: tuple | None   # what the route follows from, where lists were attended to
    thw: tuple[int, int, int]
    tokens: int
    tiles: int | None
    counts: Tensor | None
    mass: ExactMass | None     # as in a LayerResult
    part: tuple[int, int, int, int] | None  # rank, ranks, own heads, all heads


class SSTAProcessor:
    """Base of the processors that take a stock processor's place.

    A subclass spells out ``__call__`` with exactly the stock processor's parameters (diffusers drops the arguments that are not
    in the signature), makes q, k and v as the stock processor does, and calls ``attend``. It is a plain object, so state dicts
    and saved models do not change.
    """

    # Set by diffusers' set_attention_backend on processors that have it.
    _attention_backend = None
    # Norms that `joined` may compute in its one kernel; a family whose norms are of other classes adds them.
    norms: Norms = TORCH_NORMS
    # How `self_attention` projects; `fusible` and `fused` for families whose projections can be one.
    projections = staticmethod(apart)

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        # The attention's dotted name when SSTA was applied.
        self.site = ""
        # None = dense at every step.
        self.config: SSTAConfig | None = context.config
        self.holder = Holder()
        self._stopwatch = Stopwatch()
        self._exchange = ExchangeTimer()
        self._last: _LastRun | None = None
        self._last_dense: _LastRun | None = None

    def canvas(self, video_tokens: int) -> tuple[int, int, int]:
        """The canvas (t, h, w) of the forward in progress.

        Raises:
            ValueError: it does not have ``video_tokens`` tokens, or this rank's share of it has not; or there was no forward of the whole
                model.
        """
        thw, ranks, own = self.context.thw, self.context.call.ranks, self._own_tokens
        if own != video_tokens:
            whose = "" if ranks is None or ranks.tokens is not None else f"rank {ranks.rank} of {ranks.size}'s {own} of "
            raise ValueError(f"hidden_states must have {whose}the canvas' {' x '.join(map(str, thw))} tokens, got {video_tokens} video "
                             "tokens")
        return thw

    @property
    def _own_tokens(self) -> int:
        """How many of the canvas' tokens hidden_states hold, where they do not hold just a rank's share of the whole sequence."""
        tokens, ranks = math.prod(self.context.thw), self.context.call.ranks
        return tokens if ranks is None or ranks.tokens is not None else ranks.share(tokens)

    def rank_share(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, which has an entry along ``dim`` for each token of the canvas; x where one rank has all of them."""
        ranks, tokens = self.context.call.ranks, math.prod(self.context.thw)
        return x if ranks is None else x.narrow(dim, ranks.start(tokens), ranks.share(tokens))

    def around(self, tokens: int, *, before: int | tuple[VideoGrid | DenseRun, ...] | None = 0, after: int | None = 0) -> TokenLayout:
        """The layout of a sequence of ``tokens`` that holds the canvas of the forward in progress.

        Args:
            tokens: of the whole sequence; on several ranks, of this rank's part of it.
            before: how many of them stand before the video and are dense, or what stands there; None = all that are not video are dense.
            after: how many stand after the video and are dense; None as for ``before``.

        Raises:
            ValueError: the rest is not the canvas, or there was no forward of the whole model.
        """
        thw, ranks = self.context.thw, self.context.call.ranks
        layouts, compiling = self.context.layouts, torch.compiler.is_compiling()
        key = thw, None if ranks is None else (ranks.size, ranks.rank, ranks.tokens), tokens, before, after
        if not compiling and key in layouts:
            return layouts[key]
        if ranks is not None and ranks.tokens is not None:
            if tokens != ranks.share(ranks.tokens):
                raise ValueError(f"hidden_states must have rank {ranks.rank} of {ranks.size}'s {ranks.share(ranks.tokens)} of "
                                 f"{ranks.tokens} tokens, got {tokens}")
            tokens = ranks.tokens
        leading = before if isinstance(before, tuple) else None
        if isinstance(before, tuple):
            by = ranks if ranks is not None and ranks.tokens is None else None
            before = sum([by.share(of.length) if by is not None and isinstance(of, VideoGrid) else of.length for of in before])
        others, counted = (before or 0) + (after or 0), before is None or after is None
        if counted:
            others = max(tokens - self._own_tokens, others)
            # At most one of them is None.
            before, after = (others - after, after) if before is None else (before, others - before)  # type: ignore[operator]
        grid = VideoGrid(*self.canvas(tokens - others))
        runs = [(DenseRun(length),) if length else () for length in (before, after)]
        layout = TokenLayout((*(runs[0] if leading is None else leading), grid, *runs[1]))
        if not compiling:
            if len(layouts) >= _LAYOUTS_KEPT:
                layouts.clear()
            layouts[key] = layout
            # The layer that asks first may be dense, so all configurations are looked at.
            for config in dict.fromkeys(self.context.parallel.configs):
                warn_of_the_window(self.context.family.model, config, thw)
            if counted and others > math.prod(thw):
                model, canvas = self.context.family.model, " x ".join(map(str, thw))
                warn_once(f"canvas of {model}", f"{others:,} tokens of {model} stand beside its canvas of {canvas}, more than that has, "
                          "and attend densely: if they are the video's, Family.canvas is too small")
        return layout

    @property
    def dense(self) -> bool:
        """Whether the forward in progress attends densely here."""
        return self.config is None or self.context.dense_step

    @property
    def config_now(self) -> SSTAConfig:
        """The configuration of the forward in progress; where the layer is dense, the model's with all tiles."""
        config, density = self.config, self.context.call.density
        if config is None or self.dense:
            return at_density(self.context.config, 1.0)
        return config if density is None or config is not self.context.config else at_density(config, density)

    def joined(self, queries: Sequence[Stream], keys: Sequence[Stream], values: Sequence[Stream], layout: TokenLayout, *, heads: int,
               across_heads: bool = False) -> tuple[Given, Given, Given]:
        """q, k and v for ``attend`` out of projections, by norm, RoPE and joining; see ``streams.joined``. On several ranks v is on its way
        to them while k is made, and k while q is, from their projections on where streams have functions for them."""
        shards, kinds = self._shards(layout), (queries, keys, values)
        join = partial(joined, heads=heads, across_heads=across_heads, norms=self.norms, impl=self.context.impl)
        if shards is not None:
            return self._sent(shards, heads, *(lambda kind=kind: join((kind,))[0] for kind in kinds))
        # The kernel runs while the sparse layer makes tiles.
        q, k, v = (x.materialize().transpose(1, 2) if self.dense and isinstance(x, Deferred) else x for x in join(kinds))
        return q, k, v

    def self_attention(
        self, attn: Any, x: Tensor, layout: TokenLayout, mask: Tensor | None = None, *, angles: tuple[Tensor, Tensor] | None = None,
        turned: Callable[[Tensor], Tensor] | None = None, turned_keys: Callable[[Tensor], Tensor] | None = None, across_heads: bool = False,
    ) -> Tensor:
        """What a module with the projections, norms and output of diffusers' ``Attention`` makes of tokens that attend to one another.

        Args:
            attn: the module.
            x: ``[B, S, C]``, and so is what is returned.
            layout: as ``attend`` takes it.
            mask: what the stock processor was given; it must be None.
            angles, turned: RoPE, as a ``Stream``'s ``angles`` or ``then``.
            turned_keys: for the keys in ``turned``'s place.
            across_heads: whether the norms take all heads of a token at once.
        """
        if mask is not None:
            raise ValueError(f"attention_mask must be None under SSTA, got shape {tuple(mask.shape)}")
        attend, (q, k, v) = self.attending(attn, x), self.projections(attn, x)
        query, key, value = self.joined([Stream(q, attn.norm_q, angles, then=turned)],
                                        [Stream(k, attn.norm_k, angles, then=turned_keys or turned)], [Stream(v)], layout,
                                        heads=attn.heads, across_heads=across_heads)
        # Not kept while they attend.
        del q, k, v, x
        out = attend(query, key, value, layout)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(query.dtype)))

    def attending(self, attn: Any, x: Tensor) -> Callable[..., Tensor]:
        """``attend``, or what attends in its place by what the module has and by what came into it."""
        return self.attend

    def _sent(self, shards: Shards, key_heads: int, query: Callable[[], Input], key: Callable[[], Input], value: Callable[[], Input]
              ) -> tuple[Sent, Sent, Sent]:
        """q, k and v, made one after the other, each packed while the one before it is on its way."""
        sent = []
        for make in (value, key, query):
            x = make()
            if not torch.compiler.is_compiling():
                # q's start is the last, and the one that counts.
                self._stopwatch.start(x.device)
            self._exchange.begin(x.device)
            if isinstance(x, Tensor):
                # Attention would do it, but later.
                x, = autocast_inputs(x=x)
                x = x.transpose(1, 2)
            sent.append(shards.start(x, key_heads=key_heads))
            del x
        value_sent, key_sent, query_sent = sent
        return query_sent, key_sent, value_sent

    def _shards(self, layout: TokenLayout) -> Shards | None:
        """How the ranks share ``layout`` out; None on one rank."""
        ranks = self.context.call.ranks
        return None if ranks is None else Shards.of(ranks.group, layout, "video" if ranks.tokens is None else "all")

    def attend(self, query: Given, key: Given, value: Given, layout: TokenLayout, text_mask: Tensor | None = None,
               kv_layout: TokenLayout | None = None) -> Tensor:
        """Attention over ``layout``, sparse or, where the schedule says so, dense; notes what ran, for ``SSTAHandle.report``.

        Args:
            query: ``[B, S, H, D]``, with S = ``layout.length``, or on several ranks this rank's part of it; memory order as diffusers'
                processors have it. Or what ``joined`` returned, and so are then key and value.
            key: ``[B, S, Hkv, D]``.
            value: ``[B, S, Hkv, D]``.
            layout: where the video and the conditions lie in the sequence.
            text_mask: bool or integer ``[B, layout.dense_length]``, nonzero = valid, in each dense run the valid tokens first.
            kv_layout: where the keys lie in a sequence of their own, of which key and value are then; on one rank, without text_mask.

        Returns:
            ``[B, S, H, D]`` in query's dtype.

        Raises:
            TypeError, ValueError: what ``ssta_attention`` raises, or fewer heads than ranks.
        """
        dense = self.dense
        if not isinstance(query, Sent):
            key_heads = key.shape[2 if isinstance(key, Tensor) else 1]
            shards = self._shards(layout)
            if shards is not None:
                # Before anything that ranks might disagree about.
                query, key, value = self._sent(shards, key_heads, *(lambda x=x: x for x in (query, key, value)))
            elif not torch.compiler.is_compiling():
                self._stopwatch.start(query.device)
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) else x for x in (query, key, value))
        attended: Callable[..., tuple[LayerResult | Tensor, str | None]] = self._attend_densely if dense else self._attend_sparsely
        result, backend = attended(q, k, v, layout, text_mask, kv_layout)
        return self._noted(result, backend, layout, dense, q)

    def _selecting(self, attended: Callable[[Selection | None], LayerResult], shape: tuple[int, ...]) -> LayerResult:
        """What ``attended`` gives: with the selection that was kept for a query of ``shape``, or with one that is kept now, where
        ``frozen_checkpoint`` asks for that."""
        kept = self.holder.frozen
        selection = None if kept is None else kept.selection(shape)
        result = attended(selection)
        if kept is not None and selection is None:
            kept.keep(result.selection, shape)
        return result

    def _noted(self, result: LayerResult | Tensor, backend: str | None, layout: TokenLayout, dense: bool, query: Given) -> Tensor:
        """``[B, S, H, D]`` of a result ``[B, H, S, D]``; keeps what the report asks for, and stops the time."""
        out, selection, route = (result, None, None) if isinstance(result, Tensor) else (result.out, result.selection, result.route)
        if not torch.compiler.is_compiling():
            self._exchange.note("returned")
            self._stopwatch.stop()
        # Counts of lists stay on the device until somebody asks for the report.
        blocks = None if selection is None else selection.blocks
        kind = None if blocks is None else (out.device, out.dtype, out.shape[3], PatternFacts.of(blocks))
        mass = None if dense or isinstance(result, Tensor) else result.mass
        tiles, counts = (None, None) if dense or blocks is None else (blocks.num_kv_blocks or blocks.num_q_blocks, blocks.counts)
        part = (query.shards.rank, query.shards.ranks, query.shape[1], query.heads) if isinstance(query, Sent) else None
        self._last = _LastRun(dense, backend, route, kind, self.context.thw, layout.length, tiles, counts, mass, part)
        if dense:
            self._last_dense = self._last
        return out.transpose(1, 2)

    def _attend_sparsely(self, q: Any, k: Any, v: Any, layout: TokenLayout, text_mask: Tensor | None, kv_layout: TokenLayout | None
                         ) -> tuple[LayerResult | Tensor, str | None]:
        """The result, and diffusers' backend where that attended. q, k and v have heads before tokens."""
        config = self.config_now

        def attended(selection: Selection | None) -> LayerResult:
            return attend(q, k, v, layout, config, kv_layout=kv_layout, text_mask=text_mask, impl=self.context.impl, selection=selection,
                          shards=q.shards if isinstance(q, Sent) else None, note=self._exchange.note)

        return self._selecting(attended, tuple(q.shape)), None

    def _attend_densely(self, q: Any, k: Any, v: Any, layout: TokenLayout, text_mask: Tensor | None, kv_layout: TokenLayout | None
                        ) -> tuple[LayerResult | Tensor, str | None]:
        """The same, exactly; diffusers' backend gives the output alone."""
        if not isinstance(q, Sent):
            return self._densely(q, k, v, layout, text_mask, kv_layout)
        exchange = enter(q, k, v, layout, EXACT, q.shards, text_mask=text_mask, impl=self.context.impl, note=self._exchange.note)
        result, name = self._densely(*exchange.tensors(), layout, text_mask)
        if isinstance(result, Tensor):
            return exchange.back(result), name
        result.out = exchange.back(result.out)
        return result, name

    def _densely(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, text_mask: Tensor | None, kv_layout: TokenLayout | None = None,
    ) -> tuple[LayerResult | Tensor, str | None]:
        """With a mask through lists of blocks, because diffusers' backends would want one for every token and leave their fast kernels for
        it; without one through whichever is faster.
        """
        if kv_layout is not None or text_mask is None and not self._blocks_are_faster(q):
            backend = self._attention_backend
            name = "default backend" if backend is None else AttentionBackendName(backend).value
            query, key, value = (x.transpose(1, 2) for x in (q, k, v))
            return dispatch_attention_fn(query, key, value, backend=backend).transpose(1, 2), name
        return dense_attention(q, k, v, layout, text_mask, impl=self.context.impl), None

    def _blocks_are_faster(self, query: Tensor) -> bool:
        """Whether exact attention runs faster through lists of blocks than through torch's SDPA, which is diffusers' default backend; see
        ``Route.outruns_dense``. Models that are trained keep SDPA, whose backward needs less memory. A backend that somebody chose is used.
        """
        chosen = self._attention_backend is not None or _AttentionBackendRegistry.get_active_backend()[0] != AttentionBackendName.NATIVE
        if chosen or torch.is_grad_enabled() and query.requires_grad:
            return False
        return choose_route(self.context.impl, query.device, query.dtype, query.shape[-1]).outruns_dense

    def last_run(self, layer: str) -> LayerRun | None:
        """What ran last, under the name ``layer``; None if nothing did, or only on fake tensors. Synchronises the device."""
        run = self._last
        if run is None or run.counts is not None and is_fake(run.counts):
            return None
        route, name = self._implementation(run)
        density = 1.0 if run.counts is None or run.tiles is None else float(run.counts.double().mean()) / run.tiles
        count = self.context.count
        # Nothing leaves a trace in a model that is compiled whole.
        steps, dense = (count.seen, count.seen if self.config is None else count.dense) if count.seen else (None, None)
        masses = None if run.mass is None else run.mass.tensor()
        rank, ranks, own, heads = run.part or (0, 1, None, None)
        by: tuple[tuple[str, str], ...] = ()
        if not run.dense and self.config is not None and run.kind is not None:
            device, dtype, dim, _ = run.kind
            by = choose_backend(self.context.impl, device, dtype, dim).names
        return LayerRun(
            layer, f"dense, {name}" if run.dense else name, run.thw, run.tokens, run.tiles, density, steps, dense,
            self._stopwatch.seconds(), () if route is None else route.explain(),
            exact_mass=None if masses is None else mass_summary(masses),
            without_estimate=None if masses is None else heads_without_estimate(masses),
            by=by, rank=rank, ranks=ranks, own_heads=own, heads=heads,
            exchange_seconds=None if run.part is None else self._exchange.seconds(),
            dense_by=None if self._last_dense is None else self._implementation(self._last_dense)[1])

    def _implementation(self, run: _LastRun) -> tuple[Route | None, str]:
        """The library's route, None where a backend of diffusers attended, and the name of either."""
        route = run.route
        if route is None and run.kind is not None:
            # Inside a compiled graph, which asked for the same when it ran.
            route = choose_route(self.context.impl, *run.kind)
        return route, (run.backend or "") if route is None else str(route)
