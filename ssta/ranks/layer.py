"""A layer on ranks: exchange, layer, exchange. The layer itself is one process', of a rank's heads and of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..config import SSTAConfig
from ..inputs import described
from ..kernels.operators import on_device
from ..layer import Layer, Tiled
from ..op import layer_of, run_layer, world_of
from ..result import LayerResult
from ..selection import Selection
from ..sequence import TokenLayout
from ..spec import LayerSpec
from ..text import TextMask
from .shards import Sent, Shards
from .world import in_graph

# Up to so many bytes of queries a rank q, k and v go together: they are on their way for no longer than the host needs for one exchange
# (benchmark/NOTES.md).
TOGETHER = 16 * 2**20


class Exchange:
    """q, k and v of one call on their way to heads, and the way back of its result. Made by ``enter``.

    Args:
        shards: how the ranks share the sequence out.
        spec: the layer of all ranks together.
        sent: q, k and v as they were sent: all three together, or three by themselves.
        note: called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.

    Attributes:
        spec: the layer of this rank's heads.
        plain: whether each of q, k and v may be waited for where it is read; see ``Sent.plain``.
    """

    def __init__(self, shards: Shards, spec: LayerSpec, sent: list[Sent], note: Callable[[str], object]) -> None:
        q_deal, kv_deal = shards.deal_heads(spec.heads, spec.kv_heads), shards.deal_heads(spec.kv_heads)
        self.spec = spec._replace(heads=q_deal[shards.rank], kv_heads=kv_deal[shards.rank])
        self.plain = all([x.plain for x in sent])
        self._shards, self._whole, self._sent, self._note = shards, spec, sent, note

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, all tokens of this rank's heads; once, and the caller's from then on."""
        sent, self._sent = self._sent, []
        if len(sent) == 1:
            q, k, v = sent[0].wait()
        else:
            v, k, q = [x.wait() for x in sent[::-1]]
        self._note("arrived")
        return q, k, v

    def tiled(self, layer: Layer) -> Tiled:
        """``tensors`` in the order of the layer's tiles: each is tiled while those sent after it are on their way."""
        if len(self._sent) == 1 or not layer.moves:
            return layer.gather(*self.tensors())
        (q, k, v), self._sent = self._sent, []
        v_tiled = layer.backend.take(v.wait(), layer.kv_tiles.source)
        k_tiled, k_means = layer.backend.gather_one(k.wait(), layer.kv_tiles.move)
        arrived = q.wait()
        self._note("arrived")
        q_tiled, q_means = layer.backend.gather_one(arrived, layer.tiles.move)
        return Tiled(q_tiled, k_tiled, v_tiled, q_means, k_means)

    def back(self, out: Tensor) -> Tensor:
        """``[B, H_r, S, D]`` that this rank's heads gave -> its ``[B, H, S_r, D]``."""
        self._note("attended")
        return self._shards.to_tokens(out, self._whole.heads, key_heads=self._whole.kv_heads)


def enter(query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, shards: Shards, *, text_mask: Any = None,
          note: Callable[[str], object] = lambda step: None, **options: Any) -> Exchange:
    """The exchange of a call, once it is checked and the ranks agree on it.

    Args:
        query, key, value: this rank's tensors ``[B, H, S_r, D]``, or all three as ``shards.start`` sent them.
        options: as ``inputs.described`` takes them.

    Raises:
        TypeError, ValueError: a mistake here or on another rank, or facts in which the ranks differ.
    """
    try:
        spec = described(query, key, value, layout, config, text_mask=text_mask, recorded=world_of(query, key, value, text_mask).recorded,
                         whole=shards.whole, **options)
        deals = shards.deal_heads(spec.heads, spec.kv_heads), *[shards.deal_heads(spec.kv_heads)] * 2
        if spec.config.mask_share_within_head:
            raise ValueError("mask_share_within_head must be False with a group, each rank of which has some of the heads, got True")
    except (TypeError, ValueError) as error:
        shards.refuse(error)
    shards.agreed({
        "layout": spec.layout, "query's batch, heads and head_dim": (query.shape[0], spec.heads, spec.head_dim),
        "key's heads": spec.kv_heads, "dtype": spec.dtype, "device": spec.device.type, "config": spec.config, "scale": spec.scale,
        "deterministic": spec.deterministic, "impl": spec.impl, "gradients": spec.recorded,
        "text_mask": "none" if text_mask is None else "given"})
    if isinstance(query, Sent):
        shards.check_sent(query, key, value)
        return Exchange(shards, spec, [query, key, value], note)
    # Tokens of ranks may differ in number, and all of them must do the same.
    bytes_a_rank = query.shape[0] * spec.heads * shards.length * spec.head_dim * query.dtype.itemsize / shards.ranks
    if spec.recorded or bytes_a_rank <= TOGETHER or in_graph(query, key, value):
        return Exchange(shards, spec, [shards.send((query, key, value), deals)], note)
    sent = [shards.send((x,), (deal,)) for x, deal in zip((value, key, query), deals[::-1])]
    return Exchange(shards, spec, sent[::-1], note)


def attend_on_ranks(query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, shards: Shards, *,
                    text_mask: Tensor | TextMask | None = None, selection: Selection | None = None, **options: Any) -> LayerResult:
    """``attention.attend`` of a sequence that ranks share out: exchange, layer, exchange. The arguments as ``enter`` takes them, and a
    selection of this rank's heads."""
    exchange = enter(query, key, value, layout, config, shards, text_mask=text_mask, **options)
    spec = exchange.spec
    if exchange.plain:
        layer = layer_of(spec)
        with on_device(query):
            result = layer.run(partial(exchange.tiled, layer), text_mask=text_mask, selection=selection)
    else:
        q, k, v = exchange.tensors()
        result = run_layer(q, k, v, spec, world_of(q, k, v, text_mask), text_mask, selection)
    result.out = exchange.back(result.out)
    return result
