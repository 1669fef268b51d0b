"""flex-block-attn: attention over a boolean block mask, and the STA, MoBA and SSTA masks that HunyuanVideo 1.5 hands to it.

``ssta_attention`` needs no mask: it selects by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from .. import SSTAConfig, TextMask, TokenLayout
from ..checks import require_triple
from ..kernels import BlockLists
from ..kernels.checks import DTYPES, INTEGERS, check_tensor, require_bool, require_int, require_mask, require_values
from ..layer import Tiled, prepared
from ..spec import LayerSpec
from ..window import near
from .tokens import block_attention


def flex_block_attn_func(q: Tensor, k: Tensor, v: Tensor, q_block_size: int, kv_block_size: int, block_mask: Tensor) -> Tensor:
    """Attention within the blocks that a mask keeps; ``flex_block_attn.flex_block_attn_func``.

    Args:
        q: ``[B, Hq, Sq, D]``, any strides whose last is 1; dtypes and head dimensions as in ``block_sparse_attention``.
        k: ``[B, Hkv, Skv, D]``, q's dtype and device. Hq must be a multiple of Hkv.
        v: ``[B, Hkv, Skv, D]``.
        q_block_size, kv_block_size: tokens of a block, in any ratio.
        block_mask: bool on q's device, ``[Nq, Nk]`` for all batch elements and heads, or ``[B or 1, H or 1, Nq, Nk]`` with H the query or
            the key/value heads, or ``[H or 1, Nq, Nk]`` as the mask builders return it. Nq = ceil(Sq / q_block_size), Nk likewise. True
            attends to the whole block. ``[B, 1, 1, Nq, Nk]`` counts as ``[B, 1, Nq, Nk]``: so HunyuanVideo 1.5 and xDiT hand over a mask
            that heads share, which upstream refuses.

    Returns:
        ``[B, Hq, Sq, D]`` in q's dtype, scaled by 1 / sqrt(D).
    """
    sizes = require_int("q_block_size", q_block_size, 1), require_int("kv_block_size", kv_block_size, 1)
    blocks = BlockLists.from_mask(_mask(block_mask), *sizes)
    return block_attention(q, k, v, blocks)[0]


def create_sparse_mask(Q: Tensor, block_size: int, selected_blocks: Iterable[tuple[int, int]]) -> Tensor:
    """The mask that keeps the given blocks; ``create_sparse_mask`` of flex-block-attn's benchmarks.

    Args:
        Q: ``[B, H, S, D]``; its length and device count.
        block_size: tokens of a block.
        selected_blocks: pairs (query block, key block), in an iterable or as an integer tensor ``[n, 2]``, which is read.

    Returns:
        bool ``[N, N]`` on Q's device, N = S // block_size.
    """
    if not isinstance(Q, Tensor) or Q.dim() != 4:
        raise ValueError(f"Q must be a tensor [batch, heads, tokens, head_dim], got {getattr(Q, 'shape', type(Q).__name__)}")
    number = Q.shape[2] // require_int("block_size", block_size, 1)
    mask = torch.zeros(number, number, dtype=torch.bool, device="cpu")
    pairs = _pairs(selected_blocks)
    outside = (pairs < 0) | (pairs >= number)
    if outside.any():
        raise ValueError(f"selected_blocks must lie in {number} x {number} blocks, got {tuple(pairs[outside.any(1)][0].tolist())}")
    mask[pairs[:, 0], pairs[:, 1]] = True
    return mask.to(Q.device)


def _pairs(selected: Iterable[tuple[int, int]] | Tensor) -> Tensor:
    """int64 [n, 2] on the CPU."""
    if isinstance(selected, Tensor):
        if selected.is_floating_point() or selected.is_complex() or selected.dtype == torch.bool:
            raise TypeError(f"selected_blocks must be pairs of ints, got a tensor of {selected.dtype}")
        if selected.dim() != 2 or selected.shape[1] != 2:
            raise ValueError(f"selected_blocks must be [n, 2] as a tensor, got shape {tuple(selected.shape)}")
        return require_values("selected_blocks", selected).long().cpu()
    if isinstance(selected, (str, bytes)) or not isinstance(selected, Iterable):
        raise TypeError(f"selected_blocks must be pairs (query block, key block), got {type(selected).__name__}")
    pairs = []
    for number, pair in enumerate(selected):
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Iterable):
            raise TypeError(f"selected_blocks[{number}] must be a pair (query block, key block), got {pair!r}")
        pair = [int(x) if isinstance(x, Tensor) and x.dim() == 0 and x.dtype in INTEGERS else x for x in pair]
        if len(pair) != 2:
            raise ValueError(f"selected_blocks[{number}] must be a pair (query block, key block), got {len(pair)} entries")
        pairs.append([require_int(f"selected_blocks[{number}][{at}]", x, 0) for at, x in enumerate(pair)])
    return torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _mask(block_mask: Tensor) -> Tensor:
    require_mask("block_mask", block_mask)
    if block_mask.dim() == 5 and block_mask.shape[1] == block_mask.shape[2] == 1:
        return block_mask[:, 0]
    if not 2 <= block_mask.dim() <= 4:
        raise ValueError(f"block_mask must be [Nq, Nk], [H, Nq, Nk] or [B, H, Nq, Nk], got shape {tuple(block_mask.shape)}")
    return block_mask


def create_sta_3d_mask(
    canvas_thw: tuple[int, int, int], tile_thw: tuple[int, int, int], kernel_thw: tuple[int, int, int], text_block_num: int = 0,
) -> Tensor:
    """The sliding window: which tiles are near a tile.

    Args:
        canvas_thw: tokens of the video along t, h, w, multiples of the tile's.
        tile_thw: tokens of a tile along t, h, w.
        kernel_thw: the window in tiles along t, h, w; an even entry k reaches as far as k + 1.
        text_block_num: blocks of text after the N of video. They attend to everything, and everything attends to them.

    Returns:
        bool ``[N + text_block_num, N + text_block_num]`` on the CPU, rows for query blocks.
    """
    grid = _grid(canvas_thw, tile_thw)
    mask = near([grid], require_triple("kernel_thw", kernel_thw))
    return _with_text(mask, require_int("text_block_num", text_block_num, 0), True)


@torch.no_grad()
def create_moba_3d_mask(
    q: Tensor, k: Tensor, canvas_thw: tuple[int, int, int], topk: int, tile_thw: tuple[int, int, int], kernel_thw: tuple[int, int, int],
    text_block_num: int = 0, add_text_mask: bool = False, threshold: float = 0.0, lambda_: float | None = None,
    mask_share_within_head: bool = True, q_block_avg_pool: bool = True, adaptive_pool: tuple[int, int, int] | None = None,
    sampling_type: str | None = None,
) -> Tensor:
    """The budget: the tiles most like a tile, or most important to it.

    Args:
        q: ``[B, H, S, D]``, floating point, in tiled order, S = t * h * w of ``canvas_thw``.
        k: ``[B, Hkv, S, D]`` in tiled order, q's dtype and device; H a multiple of Hkv.
        canvas_thw, tile_thw, kernel_thw, text_block_num: as in ``create_sta_3d_mask``; the window itself plays no part here.
        topk, threshold, lambda_, mask_share_within_head, adaptive_pool: as in ``SSTAConfig``.
        add_text_mask: selects the rows and columns of the text too, which are left out otherwise.
        q_block_avg_pool: must be True: scores are those of tiles.
        sampling_type: "similarity" (also None) or "importance", which needs ``lambda_``.

    Returns:
        bool ``[H, N + text_block_num, N + text_block_num]`` on q's device, H = 1 with ``mask_share_within_head``; a
        batch of several stands in front.
    """
    if q_block_avg_pool is not True:
        raise ValueError(f"q_block_avg_pool must be True, because scores are those of tiles, got {q_block_avg_pool}")
    require_bool("add_text_mask", add_text_mask)
    config = _config("block_attn", canvas_thw, tile_thw, kernel_thw, topk, threshold, lambda_, mask_share_within_head, adaptive_pool,
                     sampling_type)
    keep = _selected(q, k, canvas_thw, 0, config, None)
    return _with_text(keep, require_int("text_block_num", text_block_num, 0), add_text_mask)


@torch.no_grad()
def create_ssta_3d_mask(
    q: Tensor, k: Tensor, canvas_thw: tuple[int, int, int], topk: int, tile_thw: tuple[int, int, int], kernel_thw: tuple[int, int, int],
    text_block_num: int = 0, threshold: float = 0.0, lambda_: float | None = None, text_mask: Tensor | None = None,
    mask_share_within_head: bool = True, adaptive_pool: tuple[int, int, int] | None = None, sampling_type: str | None = None,
) -> Tensor:
    """Window, budget and text together.

    Args:
        text_mask: bool or integer ``[text tokens]`` or ``[B, text tokens]``, nonzero = valid, the valid tokens first; as many tokens as
            ``text_block_num`` blocks hold, the last of which may be partial. The text blocks past the valid tokens, of which at least
            one block counts, then attend only to themselves, and nothing else to them.
        q, k, canvas_thw, topk, tile_thw, kernel_thw, text_block_num, threshold, lambda_, mask_share_within_head, adaptive_pool,
            sampling_type: as in ``create_moba_3d_mask``.

    Returns:
        As ``create_moba_3d_mask``.
    """
    config = _config("ssta", canvas_thw, tile_thw, kernel_thw, topk, threshold, lambda_, mask_share_within_head, adaptive_pool,
                     sampling_type)
    block = prod(tile_thw)
    text_len = require_int("text_block_num", text_block_num, 0) * block
    if isinstance(text_mask, Tensor) and text_mask.dim() > 0:
        if -(-text_mask.shape[-1] // block) != text_block_num:
            raise ValueError(f"text_mask must have the tokens of text_block_num {text_block_num} blocks of {block}, the last of which may "
                             f"be partial, got {text_mask.shape[-1]}")
        text_len = text_mask.shape[-1]
        text_mask = text_mask.expand(len(q), -1) if text_mask.dim() == 1 else text_mask
    return _selected(q, k, canvas_thw, text_len, config, text_mask)


def _config(sparse_type: str, canvas_thw: tuple[int, int, int], tile_thw: tuple[int, int, int], kernel_thw: tuple[int, int, int], topk: int,
            threshold: float, lambda_: float | None, share: bool, adaptive_pool: tuple[int, int, int] | None, sampling_type: str | None
            ) -> SSTAConfig:
    _grid(canvas_thw, tile_thw)
    if sampling_type == "importance" and lambda_ is None:
        raise ValueError("lambda_ must be given with sampling_type 'importance', got None")
    # With padding the first tile of a text without valid tokens counts as active.
    window = None if sparse_type == "block_attn" else kernel_thw
    return SSTAConfig(tile_thw=tile_thw, kernel_thw=window, topk=require_int("topk", topk, 1), sparse_type=sparse_type,
                      threshold=threshold, lambda_=0.0 if lambda_ is None else lambda_, sampling_type=sampling_type or "similarity",
                      pad_type="zero", mask_share_within_head=share, adaptive_pool=adaptive_pool)


def _selected(q: Tensor, k: Tensor, canvas_thw: tuple[int, int, int], text_len: int, config: SSTAConfig, text_mask: Tensor | None
              ) -> Tensor:
    """bool ``[B, H or 1, T, T]``, without a batch of one: what a layer with this configuration selects; q and k need not have the text."""
    wanted = "[batch, heads, tokens of canvas_thw, head_dim]"
    check_tensor("q", q, DTYPES, (None, None, prod(canvas_thw), None), wanted, None)
    check_tensor("k", k, (q.dtype,), (q.shape[0], None, q.shape[2], q.shape[3]), wanted, q.device)
    if 0 in (q.shape[1], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(f"q's heads must be a multiple of k's, at least one of each, got {q.shape[1]} and {k.shape[1]}")
    layout = TokenLayout.video_text(canvas_thw, text_len)
    (batch, heads, _, dim), kv_heads = q.shape, k.shape[1]
    text = None if text_mask is None else TextMask.of(text_mask, batch, layout, q.device)
    layer = prepared(LayerSpec(layout, layout, config, dim**-0.5, q.dtype, q.device, heads, kv_heads, dim, "auto", True, False))
    mask = layer.select(Tiled(q, k, k, None, None), None, layer.left(text)).blocks.to_mask()
    return mask[0] if batch == 1 else mask


def _grid(canvas_thw: tuple[int, int, int], tile_thw: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tiles along t, h, w."""
    canvas, tile = require_triple("canvas_thw", canvas_thw), require_triple("tile_thw", tile_thw)
    if any(n % size for n, size in zip(canvas, tile)):
        raise ValueError(f"canvas_thw must be a multiple of tile_thw {tile}, got {canvas}; pad the video, or call ssta_3d_attention")
    t, h, w = (n // size for n, size in zip(canvas, tile))
    return t, h, w


def _with_text(mask: Tensor, blocks: int, selected: bool) -> Tensor:
    return torch.nn.functional.pad(mask, (0, blocks, 0, blocks), value=selected)
