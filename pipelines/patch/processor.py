"""SSTAProcessor: what stands in a stock attention processor's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from torch import Tensor

from ssta import SSTAConfig, TokenLayout
from ssta.attention import attend
from ssta.dense import EXACT, exact_attention
from ssta.kernels import Deferred, choose_route
from ssta.kernels.checks import autocast_inputs
from ssta.ranks import Sent, Shards
from ssta.ranks.layer import enter
from ssta.result import LayerResult
from ssta.selection import Selection

from ..terms import Ruling
from .context import ModelContext
from .holder import Holder
from .last_run import LastRun
from .report import LayerRun
from .sequence import VideoSequence
from .streams import TORCH_NORMS, Norms, Operand, Stream, apart, joined


class SSTAProcessor(VideoSequence):
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
        super().__init__(context)
        # The attention's dotted name when SSTA was applied.
        self.site = ""
        # None = dense at every step.
        self.config: SSTAConfig | None = context.config
        self.holder = Holder()
        self.last = LastRun()

    @property
    def ruling(self) -> Ruling:
        """How the forward in progress attends here."""
        return self.context.ruling(self.config)

    def joined(self, queries: Sequence[Stream], keys: Sequence[Stream], values: Sequence[Stream], layout: TokenLayout, *, heads: int,
               across_heads: bool = False) -> tuple[Operand, Operand, Operand]:
        """q, k and v for ``attend`` out of projections, by norm, RoPE and joining; see ``streams.joined``. On several ranks v is on its way
        to them while k is made, and k while q is, from their projections on where streams have functions for them."""
        shards, kinds = self._shards(layout), (queries, keys, values)
        join = partial(joined, heads=heads, across_heads=across_heads, norms=self.norms, impl=self.context.impl)
        if shards is not None:
            return self._sent(shards, heads, *(lambda kind=kind: join((kind,))[0] for kind in kinds))
        # The kernel runs while the sparse layer makes tiles.
        dense = self.ruling.dense
        q, k, v = (x.materialize().transpose(1, 2) if dense and isinstance(x, Deferred) else x for x in join(kinds))
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

    def _sent(self, shards: Shards, key_heads: int, *makers: Callable[[], Tensor | Deferred]) -> tuple[Sent, Sent, Sent]:
        """q, k and v, each made by its maker and packed while the one before it is on its way: v is made first."""
        sent = []
        for make in reversed(makers):
            x = make()
            self.last.begins(x.device)
            self.last.exchange.begin(x.device)
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

    def attend(self, query: Operand, key: Operand, value: Operand, layout: TokenLayout, text_mask: Tensor | None = None,
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
        ruling = self.ruling
        if not isinstance(query, Sent):
            key_heads = key.shape[2 if isinstance(key, Tensor) else 1]
            shards = self._shards(layout)
            if shards is not None:
                # Before anything that ranks might disagree about.
                query, key, value = self._sent(shards, key_heads, *(lambda x=x: x for x in (query, key, value)))
            else:
                self.last.begins(query.device)
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) else x for x in (query, key, value))
        result: LayerResult | Tensor
        if ruling.dense:
            result, backend = self._attend_densely(q, k, v, layout, text_mask, kv_layout)
        else:
            result, backend = self._attend_sparsely(q, k, v, layout, text_mask, kv_layout, ruling.config), None
        return self._ended(result, backend, layout, ruling.dense, q)

    def _ended(self, result: LayerResult | Tensor, backend: str | None, layout: TokenLayout, dense: bool, query: Operand) -> Tensor:
        """``[B, S, H, D]`` of a result ``[B, H, S, D]``, which reports are told of."""
        self.last.ends(result, backend, self.context.thw, layout, dense, query)
        return (result if isinstance(result, Tensor) else result.out).transpose(1, 2)

    def _selecting(self, attended: Callable[[Selection | None], LayerResult], shape: tuple[int, ...]) -> LayerResult:
        """What ``attended`` gives: with the selection that was kept for a query of ``shape``, or with one that is kept now, where
        ``frozen_checkpoint`` asks for that."""
        kept = self.holder.frozen
        selection = None if kept is None else kept.selection(shape)
        result = attended(selection)
        if kept is not None and selection is None:
            kept.keep(result.selection, shape)
        return result

    def _attend_sparsely(self, q: Any, k: Any, v: Any, layout: TokenLayout, text_mask: Tensor | None, kv_layout: TokenLayout | None,
                         config: SSTAConfig) -> LayerResult:
        """The result; q, k and v have heads before tokens."""
        def attended(selection: Selection | None) -> LayerResult:
            return attend(q, k, v, layout, config, kv_layout=kv_layout, text_mask=text_mask, impl=self.context.impl, selection=selection,
                          shards=q.shards if isinstance(q, Sent) else None, note=self.last.exchange.note)

        return self._selecting(attended, tuple(q.shape))

    def _attend_densely(self, q: Any, k: Any, v: Any, layout: TokenLayout, text_mask: Tensor | None, kv_layout: TokenLayout | None
                        ) -> tuple[LayerResult | Tensor, str | None]:
        """The same, exactly, and the name of diffusers' backend where that attended, which gives the output alone."""
        if not isinstance(q, Sent):
            return self._densely(q, k, v, layout, text_mask, kv_layout)
        exchange = enter(q, k, v, layout, EXACT, q.shards, text_mask=text_mask, impl=self.context.impl, note=self.last.exchange.note)
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
        return exact_attention(q, k, v, layout, text_mask, impl=self.context.impl), None

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
        return self.last.told(layer, self.context.impl, self.config is None, self.context.count)
