"""BranchedProcessor: an SSTAProcessor that lets a method attend which others trained, with a layer of its own in the attention module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ssta import TokenLayout
from ssta.ranks import Sent, Shards
from ssta.result import LayerResult

from ...patch.processor import SSTAProcessor
from ...patch.streams import Operand


class BranchedProcessor(SSTAProcessor):
    """Base of the processors that ``apply_vsa`` and ``apply_sla`` know, which call ``self_attention``.

    Attributes:
        method: attends in its place: (processor, attention module, what came into it, query, key, value, layout) -> ``[B, S, H, D]``; None
            = no method of others.
    """

    method: Callable[..., Tensor] | None = None

    def attending(self, attn: Any, x: Tensor) -> Callable[..., Tensor]:
        return self.attend if self.method is None else partial(self.method, self, attn, x)

    def attend_by(
        self, attended: Callable[..., LayerResult], query: Operand, key: Operand, value: Operand, layout: TokenLayout, *others: Tensor,
    ) -> Tensor:
        """``[B, S, H, D]`` of what ``attended`` gives in another way than ``attend``; notes what ran.

        Args:
            attended: called with a selection, to which it then attends, or None, and with query, key, value and ``others`` as
                ``[B, H, S, D]``, on several ranks all tokens of the rank's own heads.
            query, key, value, layout: as ``attend`` takes them.
            others: tensors like query.
        """
        shards = self._sharded(query, layout) if isinstance(query, Sent) else None
        if shards is None:
            self.last.begins(query.device)
        given: list[Any] = [x.wait() if isinstance(x, Sent) else x.transpose(1, 2) if isinstance(x, Tensor) else x
                            for x in (query, key, value, *others)]
        if shards is not None:
            given[3:] = map(shards.to_heads, given[3:])
            self.last.exchange.note("arrived")
        result = self._selecting(lambda selection: attended(selection, *given), tuple(given[0].shape))
        if isinstance(query, Sent) and shards is not None:
            self.last.exchange.note("attended")
            result.out = shards.to_tokens(result.out, query.heads)
        return self._ended(result, None, layout, False, query)

    def _sharded(self, query: Sent, layout: TokenLayout) -> Shards:
        """How the ranks share the sequence out, once they agree on what they attend to."""
        shards, context = query.shards, self.context
        shards.agreed({"method": context.method, "config": self.ruling.config, "impl": context.impl, "layout": layout})
        return shards
