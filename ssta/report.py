"""explain(): what SSTA would compute for these tensors, what it costs against dense attention, and where errors come from."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .config import SSTAConfig, in_effect
from .cut import TiledSegment
from .inputs import described
from .kernels import BlockLists
from .kernels.operators import on_device
from .layer import Layer, prepared
from .layout import TileLayout
from .op import in_autocast
from .result import LayerResult
from .sequence import TokenLayout
from .text import TextMask

SAMPLED_ROWS = 32


class Report:
    """What ``explain`` found. ``print(report)`` shows a table; ``to_dict`` gives plain numbers; the pictures of ``ssta.plot`` take it.

    Attributes:
        implementation: the kernels that ``impl`` stands for on these tensors: "hopper", "cudnn", "triton", "torch" or "reference".
        why_not: a sentence for each faster implementation that was not taken, for those that run the forward and not the backward, and on
            the self-check of a library's kernels that were taken.
        device, dtype: of query, as strings.
        batch, heads, kv_heads, head_dim: sizes of query and key.
        tokens, video_tokens, text_tokens: length of the sequence and of its parts (text: every dense run).
        valid_text_tokens: per batch element; None without a text mask.
        tiled_tokens: slots after tiling, padding included.
        padding_share: fraction of the tiled tokens that are padding.
        video_tiles, text_tiles: number of tiles.
        partial_video_tiles, partial_text_tiles: those of them that hold fewer real tokens than a full tile.
        tiles_per_query: mean number of key tiles of a video query tile, text included.
        tile_density: kept share of all (query tile, key tile) pairs, the mean over batch and heads.
        token_density: computed token pairs over ``tokens`` squared, mean over batch and heads. Above 1 where padding outweighs savings.
        flops: 4 x head_dim x computed token pairs, over batch and heads (2 for Q K^T, 2 for P V, a multiply-add being 2).
        dense_flops: the same with every real token attending to every real token.
        attention_kept: share of dense attention's softmax weight that falls on selected tiles; mean over ``SAMPLED_ROWS`` video
            rows (of each head and batch element); None where it is not finite.
        error_sources: sentences on what makes the result differ from exact dense attention.
        seconds: wall time of the one call that was run, first-call compilation included; None when ``value`` was not given.
        exact_mass: with a compensation, the share of the softmax that was computed exactly: the mean, the 5th percentile over query tiles
            of all heads, and the mean of the worst head; the estimate carried the rest. None when not run or not compensated.
        without_estimate: with a compensation, (how many heads have no estimate, of how many), over the batch elements. What such a head
            does not compute exactly is dropped, and ``exact_mass`` leaves it out. None when not run or not compensated.
        output_error: ||sparse - dense|| / ||dense|| over the sampled rows of that call; None when not run or not finite.
        route: what ``implementation`` and ``why_not`` are taken from, forward and backward.
        config, layout, blocks: what was selected with. ``blocks`` is in tiled order.
        near: bool [N, N] over video tiles, the window; None where the window is not used.
        backend: which implementation runs the layer's other steps, and why no faster one.
    """

    def __init__(self, layer: Layer, ran: LayerResult, query: Tensor, key: Tensor, value: Tensor | None, text: TextMask | None,
                 seconds: float) -> None:
        route, spec, config, layout = ran.route, layer.spec, layer.spec.config, layer.tiles
        assert route is not None, "a run of a layer knows"
        # Later calls read what a selection is made of; the report's owner may write to his copy.
        blocks, n = ran.selection.blocks.clone(), layout.num_video_tiles
        mask = blocks.to_mask()
        masses = None if value is None or ran.mass is None else ran.mass.tensor()
        self.implementation, self.why_not = route.name, route.explain()
        self.device, self.dtype = str(query.device), str(query.dtype).removeprefix("torch.")
        self.batch, self.heads, self.kv_heads, self.head_dim = len(query), spec.heads, spec.kv_heads, spec.head_dim
        self.tokens, self.video_tokens, self.text_tokens = spec.layout.length, spec.layout.video_length, spec.layout.dense_length
        self.valid_text_tokens = None if text is None else text.valid_tokens()
        self.tiled_tokens, self.padding_share = layout.num_slots, 1 - self.tokens / layout.num_slots
        self.video_tiles, self.partial_video_tiles = n, _partial_tiles(layout.video)
        self.text_tiles, self.partial_text_tiles = layout.num_dense_tiles, _partial_tiles(layout.dense)
        self.tiles_per_query = float(mask[..., :n, :].sum(-1).float().mean()) if n else 0.0
        self.tile_density = float(mask.float().mean())
        self.flops = 4 * self.head_dim * _token_pairs(blocks, mask, layout.num_slots, self.batch * self.heads)
        self.dense_flops = 4 * self.head_dim * self.tokens**2 * self.batch * self.heads
        self.token_density = self.flops / self.dense_flops
        self.without_estimate = None if masses is None else heads_without_estimate(masses)
        self.attention_kept, self.output_error = _against_dense(query, key, value, ran.out, layout, mask, text, spec.scale)
        self.seconds = None if value is None else seconds
        self.exact_mass = None if masses is None else mass_summary(masses)
        self.route, self.backend, self.config, self.layout, self.blocks = route, layer.backend, config, layout.clone(), blocks
        self.error_sources = self._error_sources(query.dtype)
        self.near = layer.fixed.forced[:n, :n].clone() if config.selected_by != "block_attn" else None

    def to_dict(self) -> dict:
        """The numbers and sentences as plain Python values that json.dumps takes; the configuration and the tensors stay out."""
        held = {"route", "backend", "config", "layout", "blocks", "near"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items() if name not in held}

    def __str__(self) -> str:
        ran = "would run" if self.seconds is None else f"ran, {self.seconds:.3g} s"
        text = f"{self.text_tokens:,} text"
        if self.valid_text_tokens is not None:
            text += f" (valid: {', '.join(f'{valid:,}' for valid in self.valid_text_tokens)})"
        rows = [
            ("implementation", f"{self.route} ({ran}) on {self.device}, {self.dtype}"),
            *(("", sentence) for sentence in self.why_not),
            *(("steps" if number == 0 else "", sentence) for number, sentence in enumerate(self.backend.explain())),
            ("tensors", f"batch {self.batch}, {self.heads} query heads, {self.kv_heads} key heads, head_dim {self.head_dim}"),
            ("tokens", f"{self.tokens:,} = {self.video_tokens:,} video + {text}"),
            ("after tiling", f"{self.tiled_tokens:,} tokens, {self.padding_share:.1%} of them padding"),
            ("tiles", f"{self.video_tiles} video ({self.partial_video_tiles} partial), "
                      f"{self.text_tiles} text ({self.partial_text_tiles} partial)"),
            ("tiles per query tile", f"{self.tiles_per_query:.1f} of {self.video_tiles + self.text_tiles}"),
            ("density", f"{self.tile_density:.1%} of tile pairs, {self.token_density:.1%} of token pairs"),
            ("FLOPs", f"{_si(self.flops)}FLOP, dense {_si(self.dense_flops)}FLOP"),
        ]
        # One quantity, the share of the softmax on tiles that are computed exactly, measured in two ways.
        masses = []
        if self.attention_kept is not None:
            rest = "dropped" if self.config.compensation == "none" else "estimated"
            masses.append(f"{self.attention_kept:.1%} of the softmax is computed exactly and the rest {rest}, by dense attention "
                          "on sampled rows")
        if self.exact_mass is not None:
            mean, fifth, worst = self.exact_mass
            masses.append(f"{mean:.1%} by the estimate, over all rows; 5th percentile of tiles {fifth:.1%}, worst head {worst:.1%}")
        rows += [("" if number else "exact mass", sentence) for number, sentence in enumerate(masses)]
        if self.without_estimate is not None and self.without_estimate[0]:
            rows.append(("without an estimate", "{} of {} heads, whose other tiles are dropped".format(*self.without_estimate)))
        if self.output_error is not None:
            rows.append(("relative error", f"{self.output_error:.2e} against dense (sampled)"))
        rows += [("error sources" if index == 0 else "", sentence) for index, sentence in enumerate(self.error_sources)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    __repr__ = __str__

    def _error_sources(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Sentences on what makes this case differ from exact dense attention, the largest source first."""
        found = []
        config, padding = self.config, self.tiled_tokens - self.tokens
        if self.tile_density < 1:
            rest = f"{1 - self.tile_density:.1%} of the tile pairs are "
            if config.compensation == "none":
                found.append(rest + "dropped, with all that their keys would have given")
            else:
                dropped, of = self.without_estimate or (0, 1)
                found.append(rest + ("estimated from their means and covariances" if dropped < of else
                                     "dropped: no head has an estimate, because its tokens differ too much inside tiles"))
                if 0 < dropped < of:
                    found.append(f"{dropped} of {of} heads have no estimate, because their tokens differ too much inside tiles: "
                                 "theirs are dropped")
            if config.selected_by == "sta":
                without = "seen, however similar" if config.compensation == "none" else "computed exactly, however poor its estimate"
                found.append(f"the window alone selects: nothing outside it is {without}")
            elif config.scored_by != "error":
                cells = 1 if config.pool_cells is None else math.prod(config.pool_cells)
                found.append(f"tiles are chosen by {'the mean' if cells == 1 else f'{cells} means'} of their tokens: "
                             "a single similar token in an unlike tile is overlooked")
            if config.mask_share_within_head and self.heads > 1 and config.selected_by != "sta":
                found.append(f"one pattern serves all {self.heads} heads: a head that looks elsewhere loses more")
        if padding:
            what = "repetitions" if config.pad_type == "repeat" else "zeros in the video"
            if config.pad_type == "zero" and self.text_tiles:
                what += ", repetitions in the text"
            found.append(f"{padding:,} padding tokens ({what}) are attended to like real ones")
        if self.valid_text_tokens is not None and config.pad_type != "none":
            found.append("text is kept by whole tiles: invalid text tokens that share a tile with valid ones are attended to")
        if not found:
            found.append("nothing is dropped and nothing is padded: equal to dense attention but for rounding")
        found.append(f"rounding to {str(dtype).removeprefix('torch.')}, in relative steps of {torch.finfo(dtype).eps:.1e}")
        return tuple(found)


@torch.no_grad()
def explain(
    query: Tensor, key: Tensor, thw: tuple[int, int, int] | TokenLayout, config: SSTAConfig | None = None, *, value: Tensor | None = None,
    text_mask: Tensor | None = None, text_len: int | None = None, scale: float | None = None, impl: str = "auto", **keywords,
) -> Report:
    """Says what SSTA would compute for these tensors and, given ``value``, runs it once and says what that gave.

    For looking, not for production: it synchronises the device and takes float32 copies of key and value.

    Args:
        query: [B, H, S, D], floating point, B and H at least 1: of nothing there is no share to report.
        key: [B, Hkv, S, D].
        thw: (t, h, w) of the video, followed by ``text_len`` text tokens, as in ``ssta_3d_attention``; or, in its place and under its name,
            the ``TokenLayout`` that ``ssta_attention`` takes as ``layout``, for sequences of any other form.
        config: what is attended; or, instead of it, the keywords of ``ssta_3d_attention``: topk, tile_thw, kernel_thw, sparse_type, ...
        value: [B, Hkv, S, D]; with it the attention is run once and measured.
        text_mask: [B, text tokens], valid tokens first, bool or integer.
        text_len: number of text tokens after the video; default 0.
        scale: factor on the scores; default 1 / sqrt(D).
        impl: which implementation runs each step; "auto" chooses.

    Raises:
        TypeError: both a config and keywords, or a keyword that ``SSTAConfig`` does not have.
        ValueError: an empty query, or one on the meta device, which has no values to select by.
        TypeError, ValueError: what ``ssta_3d_attention`` rejects.
    """
    if not isinstance(thw, TokenLayout):
        tokens = TokenLayout.video_text(thw, 0 if text_len is None else text_len)
    elif text_len is None:
        tokens = thw
    else:
        raise ValueError(f"text_len must be left out with a TokenLayout, which says it, got {text_len}")
    if config is None:
        names = ("kernel_thw", "topk", "threshold")
        settings: list[Any] = [keywords.get(name, getattr(SSTAConfig, name)) for name in names]
        window, topk, threshold = settings
        in_use = in_effect(window, topk, threshold, keywords.get("sparse_type"))
        config = SSTAConfig(**keywords | dict(zip(names, in_use)))
    elif keywords:
        raise TypeError(f"config must not be given together with other keywords, got {', '.join(sorted(keywords))}")
    query, key, given = in_autocast(query, key, key if value is None else value)
    spec = described(query, key, given, tokens, config, text_mask=text_mask, scale=scale, impl=impl,
                     by_thw=not isinstance(thw, TokenLayout))
    if query.numel() == 0 or query.is_meta:
        raise ValueError(f"query must have values to explain, got shape {tuple(query.shape)} on {query.device}")
    text = None if text_mask is None else TextMask.of(text_mask, query.shape[0], tokens, query.device)
    layer = prepared(spec)
    finish = partial(torch.cuda.synchronize, query.device) if query.is_cuda else lambda: None
    with on_device(query):
        finish()
        start = time.perf_counter()
        ran = layer.run(query, key, given, text)
        finish()
    return Report(layer, ran, query, key, None if value is None else given, text, time.perf_counter() - start)


def heads_without_estimate(exact_mass: Tensor) -> tuple[int, int]:
    """(How many of the B x H heads have no estimate, B x H), from ``LayerResult.exact_mass``, ``[B, H, N]``, which is NaN for such heads.
    Synchronises the device."""
    without = exact_mass.isnan().any(2)
    return int(without.sum()), without.numel()


def mass_summary(exact_mass: Tensor) -> tuple[float, float, float] | None:
    """The mean of the shares ``[B, H, N]`` that were computed exactly, their 5th percentile over query tiles of all heads, and the mean of
    the worst head. Heads without an estimate are left out; None if there are no others. Synchronises the device."""
    shares = exact_mass.double().cpu()
    shares = shares[~shares.isnan().any(2)]
    if not shares.numel():
        return None
    lowest = shares.flatten().sort().values
    return float(shares.mean()), float(lowest[int(0.05 * (len(lowest) - 1))]), float(shares.mean(1).min())


def _partial_tiles(segments: tuple[TiledSegment, ...]) -> int:
    """Tiles that hold fewer real tokens than a tile has room for."""
    return sum(segment.num_tiles - math.prod(n // size for n, size in zip(segment.extent, segment.tile)) for segment in segments)


def _token_pairs(blocks: BlockLists, mask: Tensor, slots: int, batch_times_heads: int) -> int:
    """Token pairs that the kernel computes: for every list, the real tokens of its query tile times those of its key tiles."""
    (_, q_sizes), (_, kv_sizes) = blocks.q_bounds(slots), blocks.kv_bounds(slots)
    pairs = (torch.where(mask, kv_sizes[..., None, :], 0).sum(-1) * q_sizes).sum(-1)
    # Lists that are shared count once for each batch element and head that shares them.
    return int(pairs.sum()) * (batch_times_heads // pairs.numel())


def _against_dense(query: Tensor, key: Tensor, value: Tensor | None, output: Tensor, layout: TileLayout, mask: Tensor,
                   text: TextMask | None, scale: float) -> tuple[float | None, float | None]:
    """(attention_kept, output_error) over video rows at even distances, from their full softmax."""
    video = [segment.first_token + torch.arange(math.prod(segment.extent), device=query.device) for segment in layout.video]
    if not video:
        return None, None
    rows = torch.cat(video)
    evenly = torch.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows)), dtype=torch.float32, device=query.device)
    rows = rows[evenly.round().long()]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, length, head_dim = query.shape
    groups = (batch, key.shape[1], heads // key.shape[1], len(rows), -1)  # query heads grouped by the key head that they read
    scores = query[:, :, rows].to(wide).reshape(groups) @ key.to(wide).mT[:, :, None] * scale
    if text is not None:
        scores = scores.masked_fill(~text.in_sequence[:, None, None, None], -math.inf)
    weights = scores.softmax(-1)
    tile_of = torch.searchsorted(layout.offsets[1:], layout.inverse.int(), right=True)
    selected = mask[:, :, tile_of[rows]].index_select(-1, tile_of)
    selected = selected.repeat_interleave(heads // selected.shape[1], 1).expand(batch, -1, -1, -1).reshape(groups)
    kept = float((weights * selected).sum(-1).mean())
    error = math.nan
    if value is not None:
        dense = weights @ value.to(wide)[:, :, None]
        error = float((output[:, :, rows].to(wide).reshape(groups) - dense).norm() / dense.norm())
    return (kept if math.isfinite(kept) else None), (error if math.isfinite(error) else None)


def _si(number: float) -> str:
    """Three digits and a decimal prefix, the prefix ready to be followed by a unit."""
    for exponent, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**exponent:
            return f"{number / 10**exponent:.3g} {prefix}"
    return f"{number:.3g} "
