"""TiledQKV: q, k and v of a layer in tile order, and who owns their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .layout import TileLayout


@dataclass(slots=True, eq=False)
class TiledQKV:
    """q, k and v in tile order, with the means of their video tiles. Made by ``TileLayout.tile_qkv``; owns q's memory.

    Args:
        layout: the order; N video tiles, P slots.
        q: ``[B, H, P, D]``; None once ``release_q`` has given it away.
        k, v: ``[B, Hkv, P, D]``.
        q_mean, k_mean: float32 ``[B, H, N, D]`` and ``[B, Hkv, N, D]``, those of ``scoring.descriptors``. None where plain torch runs, to
            which they would be a pass of their own.
    """

    layout: TileLayout
    q: Tensor | None
    k: Tensor
    v: Tensor
    q_mean: Tensor | None = None
    k_mean: Tensor | None = None

    def held_q(self) -> Tensor:
        """q.

        Raises:
            RuntimeError: it was released, and its memory may hold something else.
        """
        if self.q is None:
            raise RuntimeError("q was released by release_q(): whoever took it may have written over its memory")
        return self.q

    def release_q(self) -> Tensor:
        """q, which is the caller's from now on, to be written over; nobody finds it here any more.

        Raises:
            RuntimeError: it was released before.
        """
        q, self.q = self.held_q(), None
        return q
