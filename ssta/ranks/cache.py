"""Around a cache whose chunks ranks share out: they agree on the call, and exchange tokens for heads before it and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache_checks import check_text
from ..inputs import check_tensors
from ..sequence import TokenLayout
from .agreement import said_to
from .shards import Shards

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# Keys and values of text.
Text = tuple[Tensor, Tensor]


def own_heads(query: Tensor, key: Tensor, layout: TokenLayout, group: ProcessGroup | DeviceMesh) -> tuple[int, int]:
    """How many heads, and key heads, of tensors of a chunk this rank has; raises as ``attend_between``."""
    shards, heads, kv_heads = _checked(query, key, key, layout, group)
    return shards.deal_heads(heads, kv_heads)[shards.rank], shards.deal_heads(kv_heads)[shards.rank]


def attend_between(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text: Text | None, room: int,
                   group: ProcessGroup | DeviceMesh, facts: dict[str, object],
                   attend: Callable[[Tensor, Tensor, Tensor, Text | None], Tensor]) -> Tensor:
    """``attend`` of all tokens of this rank's heads, and the way back of its result.

    Args:
        query, key, value: this rank's share of a chunk of ``layout``, all heads.
        text: all tokens and heads; room: how many tokens it may have.
        facts: what else must be the same on all ranks, by name.

    Raises:
        TypeError, ValueError: what the ranks were not given alike, and what one of them refused.
    """
    shards, heads, kv_heads = _checked(query, key, value, layout, group, text, room)
    shards.agreed(("cache", *facts.values()), lambda: facts)
    if text is not None:
        first, last = shards.heads(kv_heads)
        text = text[0].narrow(1, first, last - first), text[1].narrow(1, first, last - first)
    query, key, value = shards.to_heads(query, key, value, key_heads=kv_heads)
    out = attend(query, key, value, text)
    return shards.to_tokens(out, heads, key_heads=kv_heads)


def _checked(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, group: ProcessGroup | DeviceMesh, text: Text | None = None,
             room: int = 0) -> tuple[Shards, int, int]:
    """(how ranks share a chunk out, H, Hkv); what is wrong with the tensors is said on all ranks."""
    def made() -> tuple[Shards, int, int]:
        shards = Shards.of(group, layout, "all")
        heads, kv_heads, _ = check_tensors(query, key, value, layout, layout, share=shards)
        if text is not None:
            check_text(text, key, room)
        return shards, heads, kv_heads

    return said_to(group, made)
