"""Rules: how much a key tile matters to a query tile.

A rule is a function of ``Facts`` that gives scores, and a row of RULES; ``SSTAConfig.sampling_type`` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import SSTAConfig
    from .kernels import Backend
    from .kernels.estimate import Estimate
    from .layout import TileLayout


class Facts(NamedTuple):
    """What a rule may know of a layer's tiles: N video tiles of queries, K of keys.

    Attributes:
        means: gives the descriptors of query and key tiles, float32 ``[B, H, N, C]`` and ``[B, Hkv, K, C]``; H = Hkv = 1 where heads share
            a pattern.
        estimate: of what will not be computed; None where it is dropped.
        backend: the kernels, ``backend.score`` among them.
        lambda_: the configuration's.
    """

    means: Callable[[], tuple[Tensor, Tensor]]
    estimate: Estimate | None
    backend: Backend
    lambda_: float


def _error(facts: Facts) -> Tensor:
    estimate = facts.estimate
    assert estimate is not None and estimate.scores is not None, "SSTAConfig wants a compensation for this rule"
    return estimate.scores


# By the names of ``sampling_type``, which ``config.SAMPLING_TYPES`` lists.
RULES: dict[str, Callable[[Facts], Tensor]] = {
    "similarity": lambda facts: facts.backend.score(*facts.means(), None),
    "importance": lambda facts: facts.backend.score(*facts.means(), facts.lambda_),
    "error": _error,
}


def rule_of(config: SSTAConfig) -> Callable[[Facts], Tensor]:
    """What ``config.scored_by`` stands for: ``facts -> float32 [B, H, N, K]``, higher is better; H = 1 where heads share."""
    scored_by = config.scored_by
    if isinstance(scored_by, str):
        return RULES[scored_by]
    return lambda facts: facts.backend.score_by(scored_by, *facts.means())


def descriptors(x: Tensor, layout: TileLayout, adaptive_pool: tuple[int, int, int] | None = None) -> Tensor:
    """The mean of each video tile's tokens, padding included, rounded to x's dtype: float32 ``[B, H, N, C]``.

    Args:
        x: ``[B, H, P, D]`` in ``layout``'s tiled order.
        layout: N video tiles.
        adaptive_pool: None gives one mean, C = D. (a, b, c) cuts the tile's own (t, h, w) box into a * b * c cells by the rule of
            ``torch.nn.AdaptiveAvgPool3d`` and concatenates their means, t-major: C = a * b * c * D.
    """
    return tile_means(x, layout, adaptive_pool).float()


def tile_means(x: Tensor, layout: TileLayout, adaptive_pool: tuple[int, int, int] | None = None) -> Tensor:
    """``descriptors`` in x's dtype."""
    grids = [_pool_grid(x.narrow(2, segment.first_slot, segment.num_slots), segment.padded, segment.tile, adaptive_pool)
             for segment in layout.video]
    return torch.cat(grids, 2)


def block_means(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, ceil(S / size), D]``; the last block may be shorter."""
    whole = x.shape[2] // size * size
    means = [x[:, :, :whole].unflatten(2, (-1, size)).mean(3, dtype=dtype)] if whole else []
    if whole < x.shape[2]:
        means.append(x[:, :, whole:].mean(2, keepdim=True, dtype=dtype))
    return torch.cat(means, 2)


def _pool_grid(x: Tensor, extent: tuple[int, int, int], tile: tuple[int, int, int], cells: tuple[int, int, int] | None) -> Tensor:
    """``[B, H, t * h * w, D]`` in tiled order -> ``[B, H, tiles, C]``.

    The whole tiles along an axis, and the partial one at its end, each form a regular box of views into x: nothing is copied.
    """
    t, h, w = extent
    layers = []
    for layer, t_len in _runs(x, 2, t, tile[0], h * w):
        rows = []
        for row, h_len in _runs(layer, 3, h, tile[1], t_len * w):
            boxes = [_pool_box(box.unflatten(5, (t_len, h_len, w_len)), cells) for box, w_len in _runs(row, 4, w, tile[2], t_len * h_len)]
            rows.append(torch.cat(boxes, 4))
        layers.append(torch.cat(rows, 3))
    return torch.cat(layers, 2).flatten(2, 4)


def _runs(x: Tensor, dim: int, extent: int, size: int, slots: int) -> list[tuple[Tensor, int]]:
    """(view, positions in a tile) of the whole tiles, then of the partial one, where there are any. ``dim`` has ``extent`` positions of
    ``slots`` slots each; in a view it is two: tiles, and slots of a tile."""
    whole, rest = extent // size, extent % size
    runs = []
    if whole:
        runs.append((x.narrow(dim, 0, whole * size * slots).unflatten(dim, (whole, size * slots)), size))
    if rest:
        runs.append((x.narrow(dim, whole * size * slots, rest * slots).unflatten(dim, (1, rest * slots)), rest))
    return runs


def _pool_box(box: Tensor, cells: tuple[int, int, int] | None) -> Tensor:
    """``[B, H, nt, nh, nw, t, h, w, D]`` -> ``[B, H, nt, nh, nw, C]``."""
    if cells is None:
        return box.mean((5, 6, 7))
    t_spans, h_spans, w_spans = (_spans(n, parts) for n, parts in zip(box.shape[5:8], cells))
    means = [box[..., t, h, w, :].mean((5, 6, 7)) for t in t_spans for h in h_spans for w in w_spans]
    return torch.cat(means, -1)


def _spans(n: int, parts: int) -> list[slice]:
    """Adaptive pooling's cells: from floor(i n / parts) up to ceil((i + 1) n / parts); they overlap where n is no multiple of parts."""
    return [slice(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
