"""ssta_3d_attention and ssta_attention: public signatures, and the one way from there to a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .config import SSTAConfig, in_effect
from .inputs import described
from .kernels import BlockLists
from .kernels.checks import require_bool
from .kernels.memo import remember_plain
from .layout import Input
from .op import in_autocast, run_layer, world_of
from .ranks.agreement import said_to
from .ranks.layer import attend_on_ranks
from .ranks.shards import Shards
from .result import LayerResult
from .selection import Selection
from .sequence import TokenLayout
from .text import TextMask

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def attend(
    query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, *, kv_layout: TokenLayout | None = None,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, means: bool = False, by_thw: bool = False, shards: Shards | None = None,
    note: Callable[[str], object] = lambda step: None,
) -> LayerResult:
    """``ssta_attention`` with all that it knows of itself; the same arguments, results and errors. For use inside the package.

    Args:
        query, key, value: with shards also all three as ``shards.start`` sent them.
        selection: attend to what an earlier call with the same layouts, config and text_mask selected, instead of selecting anew.
        means: give the means of the video tiles too; differentiable.
        by_thw: layout was given as thw and text_len, which errors name.
        shards: how ranks share ``layout`` out.
        note: on ranks, called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.
    """
    query, key, value = in_autocast(query, key, value)
    options: dict[str, Any] = dict(kv_layout=kv_layout, scale=scale, deterministic=deterministic, impl=impl, means=means, by_thw=by_thw)
    if shards is not None:
        return attend_on_ranks(query, key, value, layout, config, shards, text_mask=text_mask, selection=selection, note=note, **options)
    world = world_of(query, key, value, text_mask)
    spec = described(query, key, value, layout, config, text_mask=text_mask, recorded=world.recorded, **options)
    return run_layer(query, key, value, spec, world, text_mask, selection)


def ssta_3d_attention(
    query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], topk: int | None = SSTAConfig.topk,
    tile_thw: tuple[int, int, int] = SSTAConfig.tile_thw, kernel_thw: tuple[int, int, int] | None = SSTAConfig.kernel_thw,
    text_len: int = 0, sparse_type: str | None = SSTAConfig.sparse_type, threshold: float = SSTAConfig.threshold, *,
    lambda_: float = SSTAConfig.lambda_,
    sampling_type: str | Callable[[Tensor, Tensor], Tensor] | None = SSTAConfig.sampling_type, pad_type: str = SSTAConfig.pad_type,
    text_mask: Tensor | TextMask | None = None, mask_share_within_head: bool = SSTAConfig.mask_share_within_head,
    adaptive_pool: tuple[int, int, int] | None = SSTAConfig.adaptive_pool, density: float | None = SSTAConfig.density,
    compensation: str = SSTAConfig.compensation, compensation_parts: int = SSTAConfig.compensation_parts, scale: float | None = None,
    deterministic: bool = True, impl: str = "auto", group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Selective and sliding tile attention over a video of (t, h, w) tokens followed by ``text_len`` tokens of text.

    The argument names are the published ones. From ``lambda_`` on they are keywords, because published versions order them differently.

    Args:
        query: ``[B, H, S, D]``, S = t * h * w + text_len; any strides whose last is 1.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        thw: tokens of the video along t, h, w.
        text_len: tokens of text at the end. They attend to everything, and everything attends to them.
        text_mask: bool or integer ``[B, text_len]``, nonzero = valid, the valid tokens first. The order is checked on a CPU alone: on a GPU
            the check would wait. With pad_type "none" invalid tokens are not attended to and their rows give zeros; with "zero" and
            "repeat" only whole tiles of invalid text are left out, as published.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which implementation runs each step; "auto" chooses by device, dtype and shape.
        group: the ranks that share the video out. query, key, value and the result then hold this rank's ``torch.tensor_split`` share of
            the video's tokens and all of the text; thw, text_len and text_mask are the whole sequence's. See ``ssta_attention``.
        topk, tile_thw, kernel_thw, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
            density: what is attended to; see ``SSTAConfig``. Published code gives all of them always: with sparse_type "block_attn" there
            is no window whatever kernel_thw says, and with "sta" no budget whatever topk and threshold say.
        compensation, compensation_parts: what the rest of the video contributes; see ``SSTAConfig``.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable in query, key and value, once, and not by torch.func or in forward mode; the
        selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    kernel_thw, topk, threshold = in_effect(kernel_thw, topk, threshold, sparse_type)
    values = (tile_thw, kernel_thw, topk, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
              None, density, compensation, compensation_parts)
    # Equal triples of other numbers, and functions, which may hold what memory there is, are not remembered.
    named = sampling_type is None or type(sampling_type) is str
    plain = named and _ints(tile_thw) and (kernel_thw is None or _ints(kernel_thw)) and (adaptive_pool is None or _ints(adaptive_pool))

    def made() -> tuple[TokenLayout, SSTAConfig, Shards | None]:
        config = _config(*values) if plain else SSTAConfig(*values)
        layout = TokenLayout.video_text(thw, text_len)
        return layout, config, None if group is None else Shards.of(group, layout)

    layout, config, shards = made() if group is None else said_to(group, made)
    return attend(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl,
                  by_thw=True, shards=shards).out


def _ints(triple: object) -> bool:
    return type(triple) is tuple and len(triple) == 3 and type(triple[0]) is type(triple[1]) is type(triple[2]) is int


_config = remember_plain(SSTAConfig)


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    kv_layout: TokenLayout | None = ..., text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ...,
    impl: str = ..., group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: Literal[False] = ...,
) -> Tensor: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    kv_layout: TokenLayout | None = ..., text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ...,
    impl: str = ..., group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: Literal[True],
) -> tuple[Tensor, BlockLists]: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    kv_layout: TokenLayout | None = ..., text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ...,
    impl: str = ..., group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: bool,
) -> Tensor | tuple[Tensor, BlockLists]: ...


def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    kv_layout: TokenLayout | None = None, text_mask: Tensor | TextMask | None = None, scale: float | None = None,
    deterministic: bool = True, impl: str = "auto", group: ProcessGroup | DeviceMesh | None = None, split: str = "video",
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, BlockLists]:
    """Selective and sliding tile attention over any sequence of video grids and dense runs.

    Args:
        query: ``[B, H, S, D]``, S = ``layout.length``; any strides. Under autocast all three are cast to its dtype. All three may also be
            ``kernels.Deferred``, whose projections must end where segments of the layout do: they are materialised while they are tiled.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        layout: what the sequence consists of. Windows stay inside their video grid; the budget chooses among the tiles of all grids.
        kv_layout: what the sequence of key and value consists of where it is another than the queries', as with keys that were cached; the
            layout is then of query alone. Windows stay inside a grid that both have: their video grids are compared from the last one
            backwards, and one of the same (t, h, w) on both sides is the same grid. The budget and density choose among all video tiles of
            kv_layout, whose dense runs are always attended to. Needs pad_type "none". text_mask is then of kv_layout's dense runs. Rows of
            invalid tokens give zeros only where kv_layout equals layout; of another one the mask says nothing about rows.
        config: what is attended to. Its variants are resolved by the grid with the most frames.
        text_mask: bool or integer ``[B, layout.dense_length]`` over the tokens of all dense runs in their order, nonzero = valid, in
            each run the valid tokens first. What it does depends on pad_type as in ``ssta_3d_attention``. Layers that share one may share
            its ``TextMask``, which is checked once.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which implementation runs each step; "auto" chooses by device, dtype and shape.
        group: the ranks that share the sequence out, a ProcessGroup or a DeviceMesh of one dimension. query, key, value and the result are
            then ``[B, H, S_r, D]``, this rank's tokens of all heads; layout and text_mask are the whole sequence's. Heads are exchanged for
            tokens and back, so ranks may not be more than the key's heads. The first call of a group with a layout compares what ranks were
            given, and raises on all of them what is wrong on one. Gradients of what is whole on every rank add up over the ranks.
        split: what the ranks share out: "video" = each video grid by itself, dense runs are whole on every rank; "all" = the sequence as
            one run. Shares are ``torch.tensor_split``'s.
        return_blocks: also return the selection, over the layout's tiles in tiled order; with a group that of this rank's heads.

    Returns:
        ``[B, H, S, D]`` in query's dtype; with ``return_blocks`` also BlockLists. Differentiable in query, key and value, once, and not
        by torch.func or in forward mode; the selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    require_bool("return_blocks", return_blocks)
    if group is None and not (isinstance(split, str) and split == "video"):
        raise ValueError(f"split must be 'video' without a group, among whose ranks it splits, got {split!r}")
    if group is not None and kv_layout is not None:
        raise ValueError("kv_layout must be None with a group, whose ranks share out one sequence, got one of its own")
    shards = None if group is None else said_to(group, lambda: Shards.of(group, layout, split))
    result = attend(query, key, value, layout, config, kv_layout=kv_layout, text_mask=text_mask, scale=scale, deterministic=deterministic,
                    impl=impl, shards=shards)
    # Later calls read what a selection is made of; the caller may write to his copy.
    return (result.out, result.selection.blocks.clone()) if return_blocks else result.out
