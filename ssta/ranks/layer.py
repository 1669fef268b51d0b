"""Around a layer whose sequence ranks share out: they agree on the call, and exchange tokens for heads before it and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..op import run_layer, world_of
from ..result import LayerResult
from ..selection import Selection
from ..spec import LayerSpec
from ..text import TextMask
from .exchange import Exchange
from .shares import Sent, Shares

# Called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.
Note = Callable[[str], object]


def exchanged(query: Tensor | Sent, key: Tensor | Sent, value: Tensor | Sent, spec: LayerSpec, text_mask: Any, shares: Shares,
              note: Note) -> Exchange:
    """q, k and v with all tokens of this rank's heads, once the ranks agree on what they attend to.

    Args:
        query, key, value: this rank's ``[B, H, S_r, D]``, or all three as ``shares.start`` sent them; checked.
        spec: the layer of all ranks together.

    Raises:
        TypeError, ValueError: what the ranks were not given alike, and what another one refused.
    """
    batch = query.shape[0]

    def facts() -> dict[str, object]:
        return {"layout": spec.layout, "query's batch, heads and head_dim": (batch, spec.heads, spec.head_dim),
                "key's heads": spec.kv_heads, "dtype": spec.dtype, "device": spec.device.type, "config": spec.config, "scale": spec.scale,
                "deterministic": spec.deterministic, "impl": spec.impl, "gradients": spec.recorded,
                "text_mask": "none" if text_mask is None else "given"}

    shares.agreed(None if spec.config.holds_functions else (spec, batch, text_mask is None), facts)
    return shares.exchange(query, key, value, spec, note)


def attend_between(exchange: Exchange, text_mask: Tensor | TextMask | None, selection: Selection | None, note: Note) -> LayerResult:
    """The layer of this rank, and the way back of its result."""
    world = world_of(*exchange.arriving, text_mask)
    # Held here by nobody, what arrived is gone once the layer has read it.
    result = run_layer(*exchange.take(), exchange.spec, world, text_mask, selection)
    note("attended")
    result.out = exchange.back(result.out)
    return result


def unheard(step: str) -> None:
    """Nobody listens."""
