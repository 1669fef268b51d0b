"""ssta_3d_attention and ssta_attention: tile, select, attend, combine, untile."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .compensation import compensate, estimate_tiles
from .config import SSTAConfig
from .kernels import (
    BlockLists,
    Deferred,
    attend_owned,
    autocast_inputs,
    choose_route,
    require_bool,
    require_impl,
    require_strided,
    resolve_scale,
)
from .layout import Input, checked_layout
from .memo import remember_plain
from .selection import Selection, select_tiles
from .sequence import TokenLayout
from .text import TextMask

if TYPE_CHECKING:
    from .kernels import Route


class LayerResult(NamedTuple):
    """What a layer of attention gives.

    Attributes:
        out: ``[B, H, S, D]`` in query's dtype, in the sequence's order.
        selection: what was attended to, over the layout's tiles in tiled order.
        route: which kernels ran, and why no faster ones; None while torch.compile traces, because the graph chooses when it runs.
        exact_mass: with a compensation the share of the softmax that was computed exactly, the rest being estimated: float32
            ``[B, H, N]`` (float64 for float64 inputs), the mean of each video tile's rows.
    """

    out: Tensor
    selection: Selection
    route: Route | None
    exact_mass: Tensor | None = None


def ssta_3d_attention(
    query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], topk: int | None = SSTAConfig.topk,
    tile_thw: tuple[int, int, int] = SSTAConfig.tile_thw, kernel_thw: tuple[int, int, int] = SSTAConfig.kernel_thw, text_len: int = 0,
    sparse_type: str = SSTAConfig.sparse_type, threshold: float = SSTAConfig.threshold, *, lambda_: float = SSTAConfig.lambda_,
    sampling_type: str | Callable[[Tensor, Tensor], Tensor] | None = SSTAConfig.sampling_type, pad_type: str = SSTAConfig.pad_type,
    text_mask: Tensor | TextMask | None = None, mask_share_within_head: bool = SSTAConfig.mask_share_within_head,
    adaptive_pool: tuple[int, int, int] | None = SSTAConfig.adaptive_pool, density: float | None = SSTAConfig.density,
    allocation: str = SSTAConfig.allocation, compensation: str = SSTAConfig.compensation,
    compensation_parts: int = SSTAConfig.compensation_parts, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
) -> Tensor:
    """Selective and sliding tile attention over a video of (t, h, w) tokens followed by ``text_len`` tokens of text.

    The argument names are the published ones. From ``lambda_`` on they are keywords, because published versions order them differently.

    Args:
        query: ``[B, H, S, D]``, S = t * h * w + text_len; any strides whose last is 1.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        thw: tokens of the video along t, h, w.
        text_len: tokens of text at the end. They attend to everything, and everything attends to them.
        text_mask: bool or integer ``[B, text_len]``, nonzero = valid, the valid tokens first (which is not checked: it would wait for the
            device). With pad_type "none" invalid tokens are not attended to and their rows give zeros; with "zero" and "repeat"
            only whole tiles of invalid text are left out, as published.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which kernel runs; "auto" chooses by device, dtype and shape.
        topk, tile_thw, kernel_thw, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
            density, allocation: what is attended to; see ``SSTAConfig``.
        compensation, compensation_parts: what the rest of the video contributes; see ``SSTAConfig``.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable in query, key and value; the selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    values = (tile_thw, kernel_thw, topk, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
              None, density, allocation, compensation, compensation_parts)
    # Equal triples of other numbers, and functions, which may hold what memory there is, are not remembered.
    named = sampling_type is None or type(sampling_type) is str
    plain = named and _ints(tile_thw) and _ints(kernel_thw) and (adaptive_pool is None or _ints(adaptive_pool))
    config = _config(*values) if plain else SSTAConfig(*values)
    layout = TokenLayout.video_text(thw, text_len)
    check_lengths(query, layout)
    return ssta_layer(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl).out


def _ints(triple: object) -> bool:
    return type(triple) is tuple and len(triple) == 3 and type(triple[0]) is type(triple[1]) is type(triple[2]) is int


@remember_plain
def _config(*values: Any) -> SSTAConfig:
    return SSTAConfig(*values)


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    return_blocks: Literal[False] = ...,
) -> Tensor: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    return_blocks: Literal[True],
) -> tuple[Tensor, BlockLists]: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    return_blocks: bool,
) -> Tensor | tuple[Tensor, BlockLists]: ...


def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, BlockLists]:
    """Selective and sliding tile attention over any sequence of video grids and dense runs.

    Args:
        query: ``[B, H, S, D]``, S = ``layout.length``; any strides. Under autocast all three are cast to its dtype. All three may also be
            ``kernels.Deferred``, whose projections must end where segments of the layout do: they are materialised while they are tiled.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        layout: what the sequence consists of. Windows stay inside their video grid; the budget chooses among the tiles of all grids.
        config: what is attended to. Its variants are resolved by the grid with the most frames.
        text_mask: bool or integer ``[B, layout.dense_length]`` over the tokens of all dense runs in their order, nonzero = valid, in
            each run the valid tokens first. What it does depends on pad_type as in ``ssta_3d_attention``. Layers that share one may share
            its ``TextMask``, which is checked once.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which kernel runs; "auto" chooses by device, dtype and shape.
        return_blocks: also return the selection, over the layout's tiles in tiled order.

    Returns:
        ``[B, H, S, D]`` in query's dtype; with ``return_blocks`` also BlockLists. Differentiable in query, key and value; the selection
        is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    require_bool("return_blocks", return_blocks)
    out, selection, *_ = ssta_layer(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic,
                                    impl=impl)
    # A copy says nothing of tensors that its owner may write to.
    return (out, copy(selection.blocks)) if return_blocks else out


def ssta_layer(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, keep_scores: bool = False,
) -> LayerResult:
    """``ssta_attention`` with all that it knows of itself; the same arguments, results and errors. For use inside the package.

    Args:
        selection: attend to what an earlier call with the same layout, config and text_mask selected, instead of selecting anew.
        keep_scores: the selection keeps what its blocks follow from too, which stays in memory while attention runs.
    """
    if not isinstance(query, Deferred):
        query, key, value = autocast_inputs(query=query, key=key, value=value)
    check_inputs(query, key, value, layout, config)
    if text_mask is not None:
        text_mask = TextMask.of(text_mask, query.shape[0], layout, query.device)
    if layout.longest_video is not None:
        config = config.for_canvas(layout.longest_video)
    scale = resolve_scale(scale, query.shape[3])
    # Before any work is done; a compiled graph asks the GPU when it runs.
    if require_impl(impl) not in ("auto", "reference") and not torch.compiler.is_compiling():
        choose_route(impl, query.device, query.dtype, query.shape[3])
    tiles = checked_layout(layout, config.tile_thw, config.pad_type, query.device)
    tiled = tiles.tile_qkv(query, key, value)
    estimates = scores = None
    if config.compensation != "none" and tiles.num_video_tiles:
        estimates = estimate_tiles(tiled, config, scale, None if selection is None else selection.useful)
        if selection is None and config.scored_by == "error" and config.sparse_type != "sta":
            scores = estimates.scores()
    if selection is None:
        selection = select_tiles(tiled, config, text_mask, scores=scores, scale=scale, keep_scores=keep_scores)
        if estimates is not None:
            selection = replace(selection, useful=estimates.useful)
    del scores
    q, k, v = tiled.release_q(), tiled.k, tiled.v
    # Beside the inputs there are never more than the three copies, and with a compensation out: the tiles' means are gone before
    # attention, out may take the place of q where nothing asks for q again, and k and v need not outlive the kernel.
    del tiled
    out, lse, route = attend_owned(q, k, v, selection.blocks, scale=scale, deterministic=deterministic, impl=impl,
                                   keep_q=estimates is not None)
    exact_mass = None
    if estimates is not None:
        out, _, exact_mass = compensate(out, lse, q, k, v, tiles, selection.blocks, estimates, scale)
    del q, k, v, lse
    return LayerResult(tiles.untile(out), selection, route, exact_mass)


def check_inputs(query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig) -> None:
    """That they fit one another; a layer's first step after autocast."""
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {type(layout).__name__}")
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig, got {type(config).__name__}")
    _check_tensor("query", query)
    deferred, dtype, device, (batch, heads, _, dim) = isinstance(query, Deferred), query.dtype, query.device, query.shape
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not query:
            _check_tensor(name, x)
        shape = x.shape
        if isinstance(x, Deferred) != deferred:
            raise TypeError(f"{name} must be {type(query).__name__} as query is, got {type(x).__name__}")
        if deferred and isinstance(x, Deferred):
            if not set(accumulate(x.lengths)) <= set(accumulate([segment.length for segment in layout.segments])):
                raise ValueError(f"{name}'s projections must end where segments of the layout do, got {x.lengths} tokens for "
                                 f"{layout.segments}")
        if shape[2] != layout.length:
            raise ValueError(f"{name} must have the layout's {layout.length} tokens, got {shape[2]} in shape {tuple(shape)}")
        if shape[0] != batch or shape[3] != dim:
            raise ValueError(f"{name} must have query's batch {batch} and head_dim {dim}, got shape {tuple(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} must have query's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on query's device {device}, got {x.device}")
    if key.shape != shape:
        raise ValueError(f"value must have key's shape {tuple(key.shape)}, got {tuple(shape)}")
    if heads == 0:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    if shape[1] == 0 or heads % shape[1]:
        raise ValueError(f"query's heads must be a multiple of key's {shape[1]}, got {heads}")


def _check_tensor(name: str, x: Input) -> None:
    if not isinstance(x, (Tensor, Deferred)):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if isinstance(x, Tensor):
        require_strided(name, x)
    if len(x.shape) != 4:
        raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_lengths(query: Tensor, layout: TokenLayout) -> None:
    """That thw and text_len, of which ``layout`` was made, say how long the sequence is, in these two names."""
    _check_tensor("query", query)
    length, text_len = query.shape[2], layout.dense_length
    if layout.length == length:
        return
    if text_len > length:
        raise ValueError(f"text_len must be at most the sequence's {length} tokens, got {text_len}")
    raise ValueError(f"thw must multiply to the {length - text_len} video tokens of query ({length} tokens less text_len {text_len}), "
                     f"got {layout.video[0].thw} = {layout.video_length}")
