"""What attends where others trained sparse: video sparse attention, and sparse-linear attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ssta import TokenLayout
from ssta.kernels import Deferred
from ssta.op import LayerResult
from ssta.selection import Selection
from ssta.trained.sla import sla_layer
from ssta.trained.vsa import vsa_layer

from ...patch.branched import BranchedProcessor
from ...patch.processor import Given


def attend_vsa(processor: BranchedProcessor, attn: Any, hidden_states: Tensor, query: Given, key: Given, value: Given, layout: TokenLayout
               ) -> Tensor:
    """As VSA does; the attention module has the trained gate ``to_gate_compress``, a projection of what comes into it."""
    gate = attn.to_gate_compress(hidden_states).unflatten(2, (attn.heads, -1))
    # Text, conditions and audio, which the layout may count as one, are pooled apart.
    layout, config = processor.around(hidden_states.shape[1], before=processor.context.call.before), processor.config_now

    def attended(selection: Selection | None, q: Any, k: Any, v: Any, gate: Tensor) -> LayerResult:
        return vsa_layer(q, k, v, gate, layout, config, impl=processor.context.impl, selection=selection)

    return processor.attend_by(attended, query, key, value, layout, gate)


def attend_sla(processor: BranchedProcessor, attn: Any, hidden_states: Tensor, query: Given, key: Given, value: Given, layout: TokenLayout
               ) -> Tensor:
    """As SLA does, over the tokens in the order that the model has them; the attention module may have the projection ``proj_l``."""
    projection, density = getattr(attn, "proj_l", None), processor.config_now.density
    weight, bias = (None, None) if projection is None else (projection.weight, projection.bias)
    assert density is not None

    def attended(selection: Selection | None, *qkv: Any) -> LayerResult:
        q, k, v = (x.materialize() if isinstance(x, Deferred) else x for x in qkv)
        return sla_layer(q, k, v, weight, bias, density=density, impl=processor.context.impl, selection=selection)

    return processor.attend_by(attended, query, key, value, layout)
