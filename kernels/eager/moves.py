"""Tokens in another order, in plain torch: the specification of the step "gather" and of the step "take"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..prologue.projection import Deferred, Move


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[:, :, index]``, zeros where the index is -1; see ``Backend.take``."""
    if x.stride(1) < x.stride(2):
        taken = x.transpose(1, 2).index_select(1, index.clamp(min=0))
        return taken.masked_fill((index < 0)[:, None, None], 0).transpose(1, 2)
    return x.index_select(2, index.clamp(min=0)).masked_fill((index < 0)[:, None], 0)


def gather(q: Tensor | Deferred, k: Tensor | Deferred, v: Tensor | Deferred, q_move: Move, kv_move: Move
           ) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """q, k and v in the order of blocks. Means would be a pass of their own here, so there are none."""
    return one(q, q_move)[0], one(k, kv_move)[0], one(v, kv_move)[0], None, None


def gather_into(q: Tensor, k: Tensor, v: Tensor, move: Move, k_out: Tensor, v_out: Tensor) -> tuple[Tensor, None, None]:
    """The same with keys and values written to places of their own."""
    k_out.copy_(take(k, move[0]))
    v_out.copy_(take(v, move[0]))
    return take(q, move[0]), None, None


def one(x: Tensor | Deferred, move: Move) -> tuple[Tensor, None]:
    """One tensor by itself, as ``gather`` brings it into order."""
    return take(x if isinstance(x, Tensor) else x.materialize(), move[0]), None
