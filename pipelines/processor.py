"""SSTAProcessor: what stands in a stock attention processor's place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, dense_attention, ssta_attention
from ssta.kernels import PatternFacts, choose_route
from ssta.layout import Input

from .backends import default_is_sdpa
from .context import ModelContext
from .progress import is_fake
from .report import LayerRun, Stopwatch
from .streams import TORCH_NORMS, Norms, Stream, joined

# Canvases alternate in few ways (guidance, two resolutions); a server's must not pile up.
_LAYOUTS_KEPT = 16


class SSTAProcessor:
    """Base of the processors that take a stock processor's place.

    A subclass spells out ``__call__`` with exactly the stock processor's parameters (diffusers drops the arguments that are not
    in the signature), makes q, k and v as the stock processor does, and calls ``attend``. It is a plain object, so state dicts
    and saved models do not change.
    """

    # Set by diffusers' set_attention_backend and enable_parallelism on processors that have them.
    _attention_backend = None
    _parallel_config = None
    # Norms that `joined` may compute in its one kernel; a family whose norms are of other classes adds them.
    norms: Norms = TORCH_NORMS

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        # None = dense at every step.
        self.config: SSTAConfig | None = context.config
        self._stopwatch = Stopwatch()
        self._last: tuple | None = None

    def canvas(self, video_tokens: int) -> tuple[int, int, int]:
        """The canvas (t, h, w) of the forward in progress.

        Raises:
            ValueError: it does not have ``video_tokens`` tokens, or there was no forward of the whole model.
        """
        thw = self.context.thw
        if math.prod(thw) != video_tokens:
            raise ValueError(f"hidden_states must have the canvas' {' x '.join(map(str, thw))} tokens, got {video_tokens} video tokens")
        return thw

    def around(self, tokens: int, *, before: int | None = 0, after: int | None = 0) -> TokenLayout:
        """The layout of a sequence of ``tokens`` that holds the canvas of the forward in progress.

        Args:
            tokens: of the whole sequence.
            before: how many of them stand before the video and are dense; None = all that are not video.
            after: the same after the video.

        Raises:
            ValueError: the rest is not the canvas, or there was no forward of the whole model.
        """
        thw, layouts, compiling = self.context.thw, self.context.layouts, torch.compiler.is_compiling()
        key = thw, tokens, before, after
        if not compiling and key in layouts:
            return layouts[key]
        others = (before or 0) + (after or 0)
        if before is None or after is None:
            others = max(tokens - math.prod(thw), others)
            before, after = (others - after, after) if before is None else (before, others - before)
        grid = VideoGrid(*self.canvas(tokens - others))
        runs = [DenseRun(length) if length else None for length in (before, after)]
        layout = TokenLayout(tuple(segment for segment in (runs[0], grid, runs[1]) if segment is not None))
        if not compiling:
            if len(layouts) >= _LAYOUTS_KEPT:
                layouts.clear()
            layouts[key] = layout
        return layout

    @property
    def dense(self) -> bool:
        """Whether the forward in progress attends densely here."""
        return self.config is None or self.context.dense_step

    def joined(self, queries: Sequence[Stream], keys: Sequence[Stream], values: Sequence[Stream], *, heads: int,
               across_heads: bool = False) -> tuple[Input, Input, Input]:
        """q, k and v for ``attend`` out of projections, by norm, RoPE and joining; see ``streams.joined``."""
        return joined(queries, keys, values, heads=heads, across_heads=across_heads, norms=self.norms, tiles=not self.dense)

    def attend(self, query: Input, key: Input, value: Input, layout: TokenLayout, text_mask: Tensor | None = None) -> Tensor:
        """Attention over ``layout``, sparse or, where the schedule says so, dense; notes what ran, for ``SSTAHandle.report``.

        Args:
            query: ``[B, S, H, D]``, with S = ``layout.length``; memory order as diffusers' processors have it. Or what ``joined`` returned,
                and so are then key and value.
            key: ``[B, S, Hkv, D]``.
            value: ``[B, S, Hkv, D]``.
            layout: where the video and the conditions lie in the sequence.
            text_mask: bool or integer ``[B, layout.dense_length]``, nonzero = valid, in each dense run the valid tokens first.

        Returns:
            ``[B, S, H, D]`` in query's dtype.

        Raises:
            TypeError, ValueError: what ``ssta_attention`` raises, or context parallelism.
        """
        if self._parallel_config is not None:
            raise ValueError(f"SSTA must run without context parallelism, got _parallel_config = {self._parallel_config}")
        timed = not torch.compiler.is_compiling()
        if timed:
            self._stopwatch.start(query.device)
        if self.dense:
            out, *ran = self._attend_densely(query, key, value, layout, text_mask)
        else:
            out, *ran = self._attend_sparsely(query, key, value, layout, text_mask)
        if timed:
            self._stopwatch.stop()
        # Counts of lists stay on the device until somebody asks for the report.
        implementation, tiles, counts = ran
        self._last = (implementation, self.context.thw, layout.length, tiles, counts)
        return out

    def _attend_sparsely(self, query: Input, key: Input, value: Input, layout: TokenLayout, text_mask: Tensor | None) -> tuple:
        """(output, implementation, tiles, how many of them each of them attends to)."""
        impl = self.context.impl
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) else x for x in (query, key, value))
        out, blocks = ssta_attention(q, k, v, layout, self.config, text_mask=text_mask, impl=impl, return_blocks=True)
        ran = choose_route(impl, out.device, out.dtype, out.shape[-1], PatternFacts.of(blocks)).name
        return out.transpose(1, 2), ran, blocks.num_q_blocks, blocks.counts

    def _attend_densely(self, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | None) -> tuple:
        """The same, exactly. With a mask through lists of blocks, whose last ones are short, because diffusers' attention backends would
        want a mask for every token and leave their fast kernels for it; without one through whichever is faster."""
        if text_mask is None and not self._blocks_are_faster(query):
            backend = self._attention_backend
            out = dispatch_attention_fn(query, key, value, backend=backend)
            name = "default backend" if backend is None else AttentionBackendName(backend).value
            return out, f"dense, {name}", None, None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, _, route = dense_attention(q, k, v, layout, text_mask, impl=self.context.impl)
        return out.transpose(1, 2), "dense" if route is None else f"dense, {route.name}", None, None

    def _blocks_are_faster(self, query: Tensor) -> bool:
        """Whether exact attention runs faster through lists of blocks than through torch's SDPA, which is diffusers' default backend.

        On an H200 with 46,080 tokens and 16 heads, all blocks listed, Hopper's kernel takes 21.0 ms with heads of 128 and 13.8 with heads
        of 64, SDPA through cuDNN 26.1 and 17.9 (benchmark/results/kernels_h200.csv and sweep_h200.csv). Models that are trained keep SDPA,
        whose backward needs less memory. A backend that somebody chose is used.
        """
        if self._attention_backend is not None or not default_is_sdpa():
            return False
        if torch.is_grad_enabled() and query.requires_grad:
            return False
        return choose_route(self.context.impl, query.device, query.dtype, query.shape[-1]).outruns_dense

    def last_run(self, layer: str) -> LayerRun | None:
        """What ran last, under the name ``layer``; None if nothing did, or only on fake tensors. Synchronises the device."""
        if self._last is None:
            return None
        *facts, tiles, counts = self._last
        if counts is not None and is_fake(counts):
            return None
        density = 1.0 if counts is None else float(counts.double().mean()) / tiles
        steps = self.context.steps
        dense = steps if self.config is None or steps is None else self.context.dense_steps
        seconds, whole = self._stopwatch.seconds(), self.context.stopwatch.seconds()
        share = None if seconds is None or not whole else seconds / whole
        return LayerRun(layer, *facts, tiles, density, steps, dense, seconds, share)
