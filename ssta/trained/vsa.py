"""Video sparse attention: attention between the means of tiles, times a trained gate, added to exact attention to each tile's best tiles.

The method and its formulas are those of Zhang et al., "VSA: Faster Video Diffusion with Trainable Sparse Attention" (arXiv 2505.13389), as
FastVideo computes them for the FastWan checkpoints (``video_sparse_attn``) and, of sequences that are not video alone, for FastH3
(``video_sparse_attn_h3``, whose mode is "exempt"). With tiles i, j of n_i real tokens each, for one head,

    qb_i, kb_i, vb_i = means over the n_i tokens of tile i, rounded to their dtype
    A_ij = s qb_i . kb_j                                        the coarse scores
    c_i  = sum over j of softmax_j(A_ij) vb_j                   the pooled branch
    K_i  = the ceil((1 - sparsity) N) of the N video tiles j with the largest A_ij, and all tiles of text, conditions and audio;
           of their own queries all tiles
    o_q  = softmax attention of token q of tile i to the tokens of the tiles in K_i
    out_q = o_q + gate_q * c_i

Each run of text, conditions or audio is cut into tiles of as many tokens as a video tile has, of which the last may be shorter. Coarse
scores are kept in float32, where FastVideo rounds Wan's to the inputs' dtype: of tiles whose scores differ by less than that rounding it
may keep others. Gradients flow through both branches; which tiles are kept is a constant, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ..attention import attend
from ..checks import require_kind, require_share
from ..config import SSTAConfig
from ..cut import Cut, TiledSegment, cut_of
from ..dense import exact_attention
from ..kernels import Deferred, take_tokens
from ..kernels.checks import autocast_inputs, check_tensor, require_int
from ..kernels.memo import remember, remember_plain
from ..layout import Input, checked_layout, heads_by_row
from ..result import LayerResult
from ..scoring import block_means
from ..selection import Selection
from ..sequence import DenseRun, TokenLayout

# The tile that the published checkpoints were trained with.
TILE = (4, 4, 4)


def video_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, thw: tuple[int, int, int], sparsity: float, *,
    before: Sequence[int] = (), tile_thw: tuple[int, int, int] = TILE, scale: float | None = None, deterministic: bool = True,
    impl: str = "auto",
) -> Tensor:
    """Video sparse attention (VSA) over a video of (t, h, w) tokens, for checkpoints that were trained with it.

    Args:
        query: ``[B, H, S, D]``, S = t * h * w and what stands before; any strides whose last is 1. Under autocast all four are cast to its
            dtype.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        gate: ``[B, H, S, D]`` in query's dtype, what the pooled branch is multiplied by: a projection of the layer's input. None adds it
            as it is.
        thw: tokens of the video along t, h, w. The last tile along an axis may be partial: nothing is padded.
        sparsity: in [0, 1). Each tile attends to ceil((1 - sparsity) N) of the N tiles.
        before: tokens of each run that stands before the video, such as text, conditions and audio: they attend to everything, and
            everything to them.
        tile_thw: tokens of a tile along t, h, w.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which kernel runs; "auto" chooses by device, dtype and shape.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable once in query, key, value and gate, not by torch.func; the selection is
        a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    video, config = TokenLayout.video_text(thw), vsa_config(sparsity, tile_thw)
    require_kind("before", before, "a sequence of ints", isinstance(before, Sequence) and not isinstance(before, (str, bytes)))
    runs = [DenseRun(require_int(f"before[{i}]", length, 1)) for i, length in enumerate(before)]
    layout = TokenLayout((*runs, *video.segments)) if runs else video
    return vsa_layer(query, key, value, gate, layout, config, scale=scale, deterministic=deterministic, impl=impl).out


def vsa_config(sparsity: float, tile_thw: tuple[int, int, int] = TILE) -> SSTAConfig:
    """What VSA attends to exactly, as a configuration."""
    sparsity = require_share("sparsity", sparsity, "[0, 1)", "the share of the tiles that is left out")
    return SSTAConfig(tile_thw=tile_thw, sparse_type="block_attn", sampling_type="similarity", density=1 - sparsity)


def vsa_layer(
    query: Input, key: Input, value: Input, gate: Tensor | None, layout: TokenLayout, config: SSTAConfig, *, scale: float | None = None,
    deterministic: bool = True, impl: str = "auto", selection: Selection | None = None,
) -> LayerResult:
    """``video_sparse_attention`` with all that it knows of itself. For use inside the package.

    Args:
        query, key, value: as there, or all three deferred.
        layout: one video grid, and dense runs around it.
        config: what ``vsa_config`` makes.
        selection: as ``attend`` takes it.
    """
    if not isinstance(query, Deferred):
        inputs = dict(query=query, key=key, value=value) if gate is None else dict(query=query, key=key, value=value, gate=gate)
        query, key, value, *rest = autocast_inputs(**inputs)
        gate = rest[0] if rest else None
    if len(layout.video) != 1:
        raise ValueError(f"layout must have one video grid, got {layout}")
    if gate is not None:
        check_tensor("gate", gate, (query.dtype,), tuple(query.shape), "[B, H, S, D]", query.device)
    assert config.density is not None
    cut = cut_of(layout, config.tile_thw, "none")
    if cut.dense:
        query, key, value = (x.materialize() if isinstance(x, Deferred) else x for x in (query, key, value))
    budget = _row_budget(config, ceil(config.density * cut.num_video_tiles))
    result = attend(query, key, value, layout, budget, scale=scale, deterministic=deterministic, impl=impl, selection=selection, means=True,
                    by_thw=layout.dense_length == 0)
    q_means, k_means, v_means = result.means
    if cut.dense:
        q_means, k_means, v_means = (torch.cat([of_video, *_run_means(x, cut.dense)], 2)
                                     for of_video, x in zip(result.means, (query, key, value)))
    pooled = exact_attention(q_means, k_means, v_means, TokenLayout((DenseRun(cut.num_tiles),)), scale=scale, impl=impl).out
    exact, spread = result.out, _spread(pooled, cut, impl)
    if gate is None:
        out = exact + spread
    else:
        # Without gradients nobody asks for the exact part again.
        out = torch.addcmul(exact, gate, spread) if torch.is_grad_enabled() else exact.addcmul_(gate, spread)
    result.out, result.means = out, ()
    return result


@remember_plain
def _row_budget(config: SSTAConfig, topk: int) -> SSTAConfig:
    """The same with as many tiles in every row, which a density spreads to within one."""
    return SSTAConfig(tile_thw=config.tile_thw, sparse_type=config.sparse_type, sampling_type=config.sampling_type, topk=topk)


def _run_means(x: Any, runs: Iterable[TiledSegment]) -> list[Tensor]:
    """The means of the tiles of each dense run of x ``[B, H, S, D]``, in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return [block_means(x.narrow(2, run.first_token, run.extent[2]), run.tile[2], wide).to(x.dtype) for run in runs]


def _spread(x: Tensor, cut: Cut, impl: str) -> Tensor:
    """``[B, H, tiles, D]`` -> ``[B, H, S, D]``: each token has its tile's row."""
    return _Spread.apply(x, cut, impl) if torch.is_grad_enabled() and x.requires_grad else _to_tokens(x, cut, impl)


class _Spread(torch.autograd.Function):
    """With a gradient that adds nothing atomically: the same bits every time."""

    @staticmethod
    def forward(ctx, x: Tensor, cut: Cut, impl: str) -> Tensor:
        ctx.cut = cut
        return _to_tokens(x, cut, impl)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([_tile_sums(grad, segment) for segment in (*ctx.cut.video, *ctx.cut.dense)], 2), None, None


def _to_tokens(x: Tensor, cut: Cut, impl: str) -> Tensor:
    return take_tokens(heads_by_row(x), _tile_of_token(cut.tokens, cut.tile_thw, x.device), impl)


@remember(64)
def _tile_of_token(layout: TokenLayout, tile_thw: tuple[int, int, int], device: torch.device) -> Tensor:
    """int64 ``[S]``."""
    tiles = checked_layout(layout, tile_thw, "none", device)
    return torch.bucketize(tiles.inverse, tiles.offsets[1:], right=True)


def _tile_sums(x: Tensor, segment: TiledSegment) -> Tensor:
    """``[B, H, S, D]`` -> ``[B, H, tiles of the segment, D]``, the transpose of ``_spread``."""
    sums = x.narrow(2, segment.first_token, prod(segment.extent)).unflatten(2, segment.extent)
    wide = torch.promote_types(x.dtype, torch.float32)
    for axis, (n, size) in enumerate(zip(segment.extent, segment.tile), start=2):
        whole = n // size * size
        parts = [sums.narrow(axis, 0, whole).unflatten(axis, (-1, size)).sum(axis + 1, dtype=wide)] if whole else []
        if whole < n:
            parts.append(sums.narrow(axis, whole, n - whole).sum(axis, keepdim=True, dtype=wide))
        sums = torch.cat(parts, axis)
    return sums.flatten(2, 4).to(x.dtype)
