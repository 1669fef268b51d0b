"""ssta_3d_attention and ssta_attention: tile, select, attend, untile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from .config import SSTAConfig
from .kernels import BlockLists, Unfinished, attend_owned, autocast_inputs, choose_route, require_impl, resolve_scale
from .layout import Input, tile_layout
from .selection import check_text_mask, select_tiles
from .sequence import TokenLayout


def ssta_3d_attention(
    query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], topk: int = 64, tile_thw: tuple[int, int, int] = (6, 8, 8),
    kernel_thw: tuple[int, int, int] = (3, 3, 3), text_len: int = 0, sparse_type: str = "ssta", threshold: float = 0.0, *,
    lambda_: float = 0.7, sampling_type: str | Callable[[Tensor, Tensor], Tensor] = "similarity", pad_type: str = "none",
    text_mask: Tensor | None = None, mask_share_within_head: bool = False, adaptive_pool: tuple[int, int, int] | None = None,
    scale: float | None = None, deterministic: bool = True, impl: str = "auto",
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
        topk, tile_thw, kernel_thw, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool: what
            is attended to; see ``SSTAConfig``.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable in query, key and value; the selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    config = SSTAConfig(tile_thw=tile_thw, kernel_thw=kernel_thw, topk=topk, sparse_type=sparse_type, threshold=threshold, lambda_=lambda_,
                        sampling_type=sampling_type, pad_type=pad_type, mask_share_within_head=mask_share_within_head,
                        adaptive_pool=adaptive_pool)
    layout = TokenLayout.video_text(thw, text_len)
    check_lengths(query, layout, thw, text_len)
    return ssta_attention(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl)


def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, BlockLists]:
    """Selective and sliding tile attention over any sequence of video grids and dense runs.

    Args:
        query: ``[B, H, S, D]``, S = ``layout.length``; any strides. Under autocast all three are cast to its dtype. All three may also be
            ``kernels.Unfinished``, whose projections must end where segments of the layout do: they are finished while they are tiled.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        layout: what the sequence consists of. Windows stay inside their video grid; the budget chooses among the tiles of all grids.
        config: what is attended to. Its variants are resolved by the grid with the most frames.
        text_mask: bool or integer ``[B, layout.dense_length]`` over the tokens of all dense runs in their order, nonzero = valid, in
            each run the valid tokens first. What it does depends on pad_type as in ``ssta_3d_attention``.
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
    if not isinstance(query, Unfinished):
        query, key, value = autocast_inputs(query=query, key=key, value=value)
    check_inputs(query, key, value, layout, config, text_mask)
    if layout.video:
        config = config.for_canvas(max([grid.thw for grid in layout.video]))
    tiles = tile_layout(layout, config.tile_thw, config.pad_type, query.device)
    scale = resolve_scale(scale, query.shape[-1])
    # Before any work is done; a compiled graph asks the GPU when it runs.
    if require_impl(impl) not in ("auto", "reference") and not torch.compiler.is_compiling():
        choose_route(impl, query.device, query.dtype, query.shape[-1])
    q, k, v, means = tiles.tile_qkv(query, key, value)
    blocks = select_tiles(q, k, tiles, config, text_mask, means)
    del means
    # The tiled copies are this call's own: the result may take the place of q, and k and v need not outlive the kernel. Beside the
    # inputs there are then never more than the three copies.
    tiled_out, _, _ = attend_owned(q, k, v, blocks, scale=scale, deterministic=deterministic, impl=impl)
    del q, k, v
    out = tiles.untile(tiled_out)
    return (out, blocks) if return_blocks else out


def check_inputs(query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, text_mask: Tensor | None) -> None:
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {type(layout).__name__}")
    if not isinstance(config, SSTAConfig):
        raise TypeError(f"config must be an SSTAConfig, got {type(config).__name__}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x)
        if isinstance(x, Unfinished) != isinstance(query, Unfinished):
            raise TypeError(f"{name} must be {type(query).__name__} as query is, got {type(x).__name__}")
        if isinstance(x, Unfinished) and not set(accumulate(x.lengths)) <= set(accumulate(segment.length for segment in layout.segments)):
            raise ValueError(f"{name}'s projections must end where segments of the layout do, got {x.lengths} tokens for {layout.segments}")
        if x.shape[2] != layout.length:
            raise ValueError(f"{name} must have the layout's {layout.length} tokens, got {x.shape[2]} in shape {tuple(x.shape)}")
        if x.shape[0] != query.shape[0] or x.shape[3] != query.shape[3]:
            raise ValueError(f"{name} must have query's batch {query.shape[0]} and head_dim {query.shape[3]}, got shape {tuple(x.shape)}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name} must be on query's device {query.device}, got {x.device}")
    if key.shape != value.shape:
        raise ValueError(f"value must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query's heads must be a multiple of key's {key.shape[1]}, got {query.shape[1]}")
    if text_mask is not None:
        check_text_mask(text_mask, query.shape[0], layout.dense_length, query.device)


def _check_tensor(name: str, x: Input) -> None:
    if not isinstance(x, (Tensor, Unfinished)):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if len(x.shape) != 4:
        raise ValueError(f"{name} must be [batch, heads, tokens, head_dim], got shape {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_lengths(query: Tensor, layout: TokenLayout, thw: tuple[int, int, int], text_len: int) -> None:
    """That thw and text_len say how long the sequence is, in these two names."""
    _check_tensor("query", query)
    length = query.shape[2]
    if text_len > length:
        raise ValueError(f"text_len must be at most the sequence's {length} tokens, got {text_len}")
    if layout.length != length:
        raise ValueError(f"thw must multiply to the {length - text_len} video tokens of query ({length} tokens less text_len {text_len}), "
                         f"got {tuple(thw)} = {layout.video_length}")
