"""The Wan line's processors for checkpoints that others trained sparse: video sparse attention, and sparse-linear attention."""

from __future__ import annotations

from torch import Tensor, nn

from ssta import TokenLayout
from ssta.kernels import Deferred
from ssta.layout import Input
from ssta.op import LayerResult
from ssta.selection import Selection
from ssta.trained.sla import sla_layer
from ssta.trained.vsa import vsa_layer

from ..wan_attention import WanSSTAProcessor


class WanVSAProcessor(WanSSTAProcessor):
    """Attends as VSA does; the attention module has the trained gate ``to_gate_compress``, a projection of what comes into it."""

    def attend_in(self, attn: nn.Module, hidden_states: Tensor, query: Input, key: Input, value: Input, layout: TokenLayout) -> Tensor:
        gate = attn.to_gate_compress(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        q, k, v = (x if isinstance(x, Deferred) else x.transpose(1, 2) for x in (query, key, value))
        config = self.context.config

        def attended(selection: Selection | None) -> LayerResult:
            return vsa_layer(q, k, v, gate, layout, config, impl=self.context.impl, selection=selection)

        return self.attend_by(attended, query, layout)


class WanSLAProcessor(WanSSTAProcessor):
    """Attends as SLA does, over the tokens in the order that the model has them; the attention module has the projection ``proj_l``."""

    def attend_in(self, attn: nn.Module, hidden_states: Tensor, query: Input, key: Input, value: Input, layout: TokenLayout) -> Tensor:
        q, k, v = (x.materialize() if isinstance(x, Deferred) else x.transpose(1, 2) for x in (query, key, value))
        projection, density = attn.proj_l, self.context.config.density
        assert density is not None

        def attended(selection: Selection | None) -> LayerResult:
            return sla_layer(q, k, v, projection.weight, projection.bias, density=density, impl=self.context.impl, selection=selection)

        return self.attend_by(attended, query, layout)
