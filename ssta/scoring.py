"""How alike tiles are: tile descriptors, and the scores of key tiles for each query tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .config import SSTAConfig
from .kernels import kernels_run, score_blocks
from .layout import TileLayout


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


def similarity(q_descriptors: Tensor, k_descriptors: Tensor) -> Tensor:
    """Dot products: ``[B, H, N, C]`` twice -> ``[B, H, N, N]``, query tiles by key tiles."""
    return q_descriptors @ k_descriptors.mT


def importance(q_descriptors: Tensor, k_descriptors: Tensor, lambda_: float) -> Tensor:
    """Similarity against redundancy: ``[B, H, N, C]`` twice -> ``[B, H, N, N]``.

    With cosines mapped to [0, 1] by (x + 1) / 2: lambda * cos(q_a, k_b) - (1 - lambda) * mean over c != b of cos(k_c, k_b), the score of
    HunyuanVideo-1.5. A zero descriptor has cosine 0 with everything; a lone tile has redundancy 0.
    """
    q, k = _unit(q_descriptors), _unit(k_descriptors)
    alike = (q @ k.mT + 1) / 2
    # The sum of cosines with all tiles is one product with the sum of their directions; the tile's own is taken out again.
    others = k.shape[2] - 1
    cosines = ((k.sum(2, keepdim=True) - k) * k).sum(-1) / max(others, 1)
    redundancy = (cosines + 1) / 2 if others else torch.zeros_like(cosines)
    return lambda_ * alike - (1 - lambda_) * redundancy[..., None, :]


def tile_scores(q_descriptors: Tensor, k_descriptors: Tensor, config: SSTAConfig) -> Tensor:
    """The scores that ``config.scored_by`` stands for: descriptors ``[B, H, N, C]`` and ``[B, Hkv, N, C]`` -> float32 ``[B, H, N, N]``.

    The two named ones run in a kernel of their own on a GPU. Everything else is ``score_tiles``.
    """
    scored_by = config.scored_by
    assert scored_by != "error", "the scores of 'error' are no descriptors': BlockEstimates.scores() must be given"
    lambda_ = config.lambda_ if scored_by == "importance" else None
    if not callable(scored_by) and kernels_run(q_descriptors):
        return score_blocks(q_descriptors, k_descriptors, lambda_)
    k_descriptors = k_descriptors.repeat_interleave(q_descriptors.shape[1] // k_descriptors.shape[1], 1)
    if callable(scored_by):
        scorer = scored_by
    else:
        scorer = similarity if lambda_ is None else partial(importance, lambda_=lambda_)
    return score_tiles(q_descriptors, k_descriptors, scorer)


def score_tiles(q_descriptors: Tensor, k_descriptors: Tensor, scorer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``scorer``'s scores, float32 ``[B, H, N, N]``, from which NaN and inf in one tile cannot spread to another.

    A descriptor that is not finite counts as zero. As a key tile it scores -inf: it is taken only when nothing else is left. A score that
    is NaN counts as -inf too.

    Raises:
        TypeError, ValueError: what a scorer of the user's own returned does not fit.
    """
    q_finite, k_finite = q_descriptors.isfinite().all(-1), k_descriptors.isfinite().all(-1)
    q = q_descriptors.masked_fill(~q_finite[..., None], 0)
    k = k_descriptors.masked_fill(~k_finite[..., None], 0)
    scores = scorer(q, k)
    expected = (*q.shape[:3], k.shape[2])
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"sampling_type's scores must be a floating-point tensor, got {getattr(scores, 'dtype', type(scores).__name__)}")
    if tuple(scores.shape) != expected:
        raise ValueError(f"sampling_type's scores must have shape {expected}, got {tuple(scores.shape)}")
    if scores.device != q.device:
        raise ValueError(f"sampling_type's scores must be on the descriptors' device {q.device}, got {scores.device}")
    return scores.float().masked_fill(scores.isnan() | ~k_finite[..., None, :], -torch.inf)


def _unit(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1)


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
    """Dimension ``dim``, ``extent`` positions of ``slots`` slots each, as (tiles, slots of a tile): the whole tiles, then the partial one.

    Returns (view, positions in a tile) of each that exists.
    """
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
