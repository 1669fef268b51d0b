"""ssta_3d_attention and ssta_attention: tile, select, attend, combine, untile."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from .checks import require_runnable
from .compensation import compensate, estimate_tiles
from .config import SSTAConfig
from .exchange import wants_gradient
from .inputs import check_inputs, check_lengths
from .kernels import (
    BlockLists,
    Deferred,
    Kept,
    attend_owned,
    autocast_inputs,
    kernels_run,
    require_bool,
    resolve_scale,
)
from .layout import Input, TiledQKV, TileLayout, checked_layout
from .memo import remember_plain
from .parallel import Exchanged, Sent, Shards, alike
from .plan import Plan, kind_of
from .ring_layer import attend_own_rows, keys_may_follow, ring_layer
from .rings import Rings, shards_of
from .selection import Selection, select_tiles
from .sequence import TokenLayout
from .text import TextMask

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from .kernels import Route


class LayerResult(NamedTuple):
    """What a layer of attention gives. Of a sequence that ranks share out, ``out`` is this rank's tokens, and the rest is of its heads.

    Attributes:
        out: ``[B, H, S, D]`` in query's dtype, in the sequence's order.
        selection: what was attended to, over the layout's tiles in tiled order.
        route: which kernels ran, and why no faster ones; None while torch.compile traces, because the graph chooses when it runs.
        exact_mass: with a compensation the share of the softmax that was computed exactly, the rest being estimated: float32
            ``[B, H, N]`` (float64 for float64 inputs), the mean of each video tile's rows. None where ranks share rows out too.
    """

    out: Tensor
    selection: Selection
    route: Route | None
    exact_mass: Tensor | None = None


def ssta_3d_attention(
    query: Tensor, key: Tensor, value: Tensor, thw: tuple[int, int, int], topk: int | None = SSTAConfig.topk,
    tile_thw: tuple[int, int, int] = SSTAConfig.tile_thw, kernel_thw: tuple[int, int, int] = SSTAConfig.kernel_thw, text_len: int = 0,
    sparse_type: str | None = SSTAConfig.sparse_type, threshold: float = SSTAConfig.threshold, *, lambda_: float = SSTAConfig.lambda_,
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
        text_mask: bool or integer ``[B, text_len]``, nonzero = valid, the valid tokens first (which is not checked: it would wait for the
            device). With pad_type "none" invalid tokens are not attended to and their rows give zeros; with "zero" and "repeat"
            only whole tiles of invalid text are left out, as published.
        scale: factor on the scores; default 1 / sqrt(D).
        deterministic: whether gradients are the same bits every time; see ``block_sparse_attention``.
        impl: which kernel runs; "auto" chooses by device, dtype and shape.
        group: the ranks that share the video out. query, key, value and the result then hold this rank's ``torch.tensor_split`` share of
            the video's tokens and all of the text; thw, text_len and text_mask are the whole sequence's. See ``ssta_attention``.
        topk, tile_thw, kernel_thw, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
            density: what is attended to; see ``SSTAConfig``.
        compensation, compensation_parts: what the rest of the video contributes; see ``SSTAConfig``.

    Returns:
        ``[B, H, S, D]`` in query's dtype. Differentiable in query, key and value; the selection is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    values = (tile_thw, kernel_thw, topk, sparse_type, threshold, lambda_, sampling_type, pad_type, mask_share_within_head, adaptive_pool,
              None, density, compensation, compensation_parts)
    # Equal triples of other numbers, and functions, which may hold what memory there is, are not remembered.
    named = sampling_type is None or type(sampling_type) is str
    plain = named and _ints(tile_thw) and _ints(kernel_thw) and (adaptive_pool is None or _ints(adaptive_pool))
    config = _config(*values) if plain else SSTAConfig(*values)
    layout = TokenLayout.video_text(thw, text_len)
    shards = None
    if group is None:
        check_lengths(query, layout)
    else:
        shards = shards_of(group, layout)
    return ssta_layer(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic, impl=impl,
                      shards=shards).out


def _ints(triple: object) -> bool:
    return type(triple) is tuple and len(triple) == 3 and type(triple[0]) is type(triple[1]) is type(triple[2]) is int


@remember_plain
def _config(*values: Any) -> SSTAConfig:
    return SSTAConfig(*values)


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: Literal[False] = ...,
) -> Tensor: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: Literal[True],
) -> tuple[Tensor, BlockLists]: ...


@overload
def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = ..., scale: float | None = ..., deterministic: bool = ..., impl: str = ...,
    group: ProcessGroup | DeviceMesh | None = ..., split: str = ..., return_blocks: bool,
) -> Tensor | tuple[Tensor, BlockLists]: ...


def ssta_attention(
    query: Input, key: Input, value: Input, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    group: ProcessGroup | DeviceMesh | None = None, split: str = "video", return_blocks: bool = False,
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
        group: the ranks that share the sequence out, a ProcessGroup or a DeviceMesh of one dimension. query, key, value and the result are
            then ``[B, H, S_r, D]``, this rank's tokens of all heads; layout and text_mask are the whole sequence's. Heads are exchanged for
            tokens and back, so ranks may not be more than the key's heads; in a mesh of two dimensions that holds for the second, and ranks
            along the first gather tokens. The first call of a group with a layout compares what ranks were given, and raises on all of them
            what is wrong on one. Gradients of what is whole on every rank add up over the ranks.
        split: what the ranks share out: "video" = each video grid by itself, dense runs are whole on every rank; "each" = these too, each
            by itself; "all" = the sequence as one run. Shares are ``torch.tensor_split``'s.
        return_blocks: also return the selection, over the layout's tiles in tiled order; with a group that of this rank's heads.

    Returns:
        ``[B, H, S, D]`` in query's dtype; with ``return_blocks`` also BlockLists. Differentiable in query, key and value; the selection
        is a constant.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    require_bool("return_blocks", return_blocks)
    if group is None and split != "video":
        raise ValueError(f"split must be 'video' without a group, among whose ranks it splits, got {split!r}")
    out, selection, *_ = ssta_layer(query, key, value, layout, config, text_mask=text_mask, scale=scale, deterministic=deterministic,
                                    impl=impl, shards=None if group is None else shards_of(group, layout, split))
    # A copy says nothing of tensors that its owner may write to.
    return (out, copy(selection.blocks)) if return_blocks else out


def ssta_layer(
    query: Input | Sent, key: Input | Sent, value: Input | Sent, layout: TokenLayout, config: SSTAConfig, *,
    text_mask: Tensor | TextMask | None = None, scale: float | None = None, deterministic: bool = True, impl: str = "auto",
    selection: Selection | None = None, keep_scores: bool = False, shards: Shards | Rings | None = None,
    note: Callable[[str], object] | None = None,
) -> LayerResult:
    """``ssta_attention`` with all that it knows of itself; the same arguments, results and errors. For use inside the package.

    Args:
        query, key, value: with shards also all three as ``shards.start`` sent them.
        selection: attend to what an earlier call with the same layout, config and text_mask selected, instead of selecting anew.
        keep_scores: the selection keeps what its blocks follow from too, which stays in memory while attention runs.
        shards: how ranks share ``layout`` out.
        note: with shards called when "arrived" is launched, after which a rank has its heads, and when "attended" is, before they go back.
    """
    require_bool("deterministic", deterministic)
    exchanged, sent = None, None
    if shards is None:
        kind = kind_of(query, key, value, layout, config, text_mask, scale, impl)
        plan = None if kind is None else _plans.get(kind)
        if plan is not None:
            # Nothing was sent by other ranks.
            return LayerResult(*plan.run(query, key, value, text_mask, selection, keep_scores))  # type: ignore[arg-type]
        checked = _checked(query, key, value, layout, config, text_mask, scale, impl)
        if kind is not None:
            # For the next call of this kind.
            _plans[kind] = Plan(checked.config, checked.scale, checked.tiles, impl)
    elif isinstance(shards, Rings):
        q, k, v, checked = _agreed(query, key, value, layout, config, text_mask, scale, impl, shards)
        if keys_may_follow(checked.config, impl):
            del query, key, value
            return LayerResult(*ring_layer(shards, (q, k, v), *checked[3:], deterministic, impl, selection, keep_scores, note))
        q, k, v, exchanged = shards.exchange(q, k, v)
        checked = checked._replace(query=q, key=k, value=v)
    else:
        checked, exchanged, sent = _exchanged(query, key, value, layout, config, text_mask, scale, impl, shards)
    _, _, _, text_mask, config, scale, tiles = checked
    tiled = _tiled(checked, sent, None if exchanged is None else note)
    # What came from other ranks is this function's own.
    del query, key, value, checked, sent
    estimates = scores = None
    if config.compensation != "none" and tiles.num_video_tiles:
        estimates = estimate_tiles(tiled, config, scale, None if selection is None else selection.useful)
        if selection is None and config.scored_by == "error" and config.selected_by != "sta":
            scores = estimates.scores()
    if selection is None:
        selection = select_tiles(tiled, config, text_mask, scores=scores, keep_scores=keep_scores, exchanged=exchanged)
        if estimates is not None:
            selection = replace(selection, useful=estimates.useful)
    del scores
    q, k, v = tiled.release_q(), tiled.k, tiled.v
    # Beside the inputs there are never more than the three copies, and with a compensation out: the tiles' means are gone before
    # attention, out may take the place of q where nothing asks for q again, and k and v need not outlive the kernel.
    del tiled
    options: dict[str, Any] = dict(scale=scale, deterministic=deterministic, impl=impl)
    exact_mass = None
    if exchanged is not None and isinstance(shards, Rings):
        out, route = attend_own_rows(shards.rows(tiles), q, k, v, tiles, selection, estimates, options)
        if note is not None:
            note("attended")
        return LayerResult(exchanged.to_tokens(shards.join(out)), selection, route)
    out, lse, route = attend_owned(q, k, v, selection.blocks, **options, keep_q=estimates is not None)
    if estimates is not None:
        out, _, exact_mass = compensate(out, lse, q, k, v, tiles, selection.blocks, estimates, scale)
    del q, k, v, lse
    if exchanged is None:
        return LayerResult(tiles.untile(out), selection, route, exact_mass)
    if note is not None:
        note("attended")
    return LayerResult(exchanged.from_tiles(out, tiles), selection, route, exact_mass)


# By what ``kind_of`` gives.
_plans: dict[tuple, Plan] = Kept(64)


class _Checked(NamedTuple):
    """A layer's arguments, which fit one another; the config without variants."""

    query: Input
    key: Input
    value: Input
    text_mask: TextMask | None
    config: SSTAConfig
    scale: float
    tiles: TileLayout


def _checked(
    query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, text_mask: Tensor | TextMask | None, scale: float | None,
    impl: str, shards: Shards | Rings | None = None, local: bool = False,
) -> _Checked:
    """``local``: the inputs are a rank's own share."""
    if not isinstance(query, Deferred):
        query, key, value = autocast_inputs(query=query, key=key, value=value)
    elif shards is not None:
        raise TypeError("query, key and value must be tensors with a group, got Deferred")
    check_inputs(query, key, value, layout, config, shards if local else None)
    if text_mask is not None:
        text_mask = TextMask.of(text_mask, query.shape[0], layout, query.device)
    if layout.longest_video is not None:
        config = config.for_canvas(layout.longest_video)
    if shards is not None and config.mask_share_within_head and (callable(config.scored_by) or config.budget is not None):
        name, function = ("sampling_type", config.scored_by) if callable(config.scored_by) else ("budget", config.budget)
        raise ValueError(f"{name} must not be a function of your own where heads share a pattern and a group shares the heads out, because "
                         f"every rank would have to find the same pattern, got {function!r} with mask_share_within_head = True")
    scale = resolve_scale(scale, query.shape[3])
    require_runnable(impl, query)
    return _Checked(query, key, value, text_mask, config, scale, checked_layout(layout, config.tile_thw, config.pad_type, query.device))


def _exchanged(
    query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, text_mask: Tensor | TextMask | None, scale: float | None,
    impl: str, shards: Shards,
) -> tuple[_Checked, Exchanged, tuple[Sent, Sent, Sent] | None]:
    """The arguments with all tokens of this rank's heads, the way back, and what has to be waited for before they are read."""
    options = layout, config, text_mask, scale, impl, shards
    sent = [isinstance(x, Sent) for x in (query, key, value)]
    if any(sent):
        if not all(sent):
            raise TypeError("query, key and value must all three be sent, or none, got "
                            f"{', '.join([type(x).__name__ for x in (query, key, value)])}")
        exchanged = Exchanged.of(shards, query, key, value)
        q, k, v = (x.ahead for x in (query, key, value))
        # Under autocast checks may have to read.
        if q is not None and k is not None and v is not None and kernels_run(q[0]) and not torch.is_autocast_enabled(q[0].device.type):
            return _checked(q[0], k[0], v[0], *options), exchanged, (query, key, value)
        return _checked(query.wait(), key.wait(), value.wait(), *options), exchanged, None
    q, k, v, checked = _agreed(query, key, value, *options)
    if kernels_run(q) and not wants_gradient(q, k, v) and not torch.compiler.is_compiling():
        # Each is packed while the one before it is on its way, and v and k are brought into tiles while q is.
        v_sent, k_sent = shards.start(v), shards.start(k)
        q_sent = shards.start(q, key_heads=k.shape[1])
        return checked, Exchanged(shards, q.shape[1], k.shape[1]), (q_sent, k_sent, v_sent)
    q, k, v, exchanged = shards.exchange(q, k, v)
    return checked._replace(query=q, key=k, value=v), exchanged, None


def _agreed(
    query: Any, key: Any, value: Any, layout: TokenLayout, config: SSTAConfig, text_mask: Tensor | TextMask | None, scale: float | None,
    impl: str, shards: Shards | Rings,
) -> tuple[Tensor, Tensor, Tensor, _Checked]:
    """A rank's own share, after the checks that ranks make together."""
    if isinstance(shards, Rings) and any([isinstance(x, Sent) for x in (query, key, value)]):
        raise TypeError("query, key and value must be tensors with a mesh of rings, got what was sent")
    checked = shards.agreed(lambda: _checked(query, key, value, layout, config, text_mask, scale, impl, shards, local=True),
                            lambda own: {**alike("query", own.query), **alike("key", own.key), "config": config, "impl": impl,
                                         "text_mask": text_mask is not None})
    # Deferred ones were refused.
    q, k, v = (x for x in (checked.query, checked.key, checked.value) if isinstance(x, Tensor))
    return q, k, v, checked


def _tiled(checked: _Checked, sent: tuple[Sent, Sent, Sent] | None, note: Callable[[str], object] | None) -> TiledQKV:
    def arrived(q: Any) -> Any:
        if note is not None:
            note("arrived")
        return q

    if sent is None:
        return checked.tiles.tile_qkv(arrived(checked.query), checked.key, checked.value)
    query, key, value = sent
    return checked.tiles.tile_arriving(lambda: arrived(query.wait()), key.wait, value.wait)
