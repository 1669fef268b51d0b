"""dense_attention: exact attention over a layout, in which not every token of the text need be valid."""

from __future__ import annotations

from torch import Tensor

from .attention import attend
from .config import SSTAConfig
from .inputs import check_query
from .result import LayerResult
from .selection import Selection
from .sequence import DenseRun, TokenLayout, require_layout
from .text import TextMask

# Only its tile counts, which is the one that kernels are fastest with: without video there is nothing to select, and nothing is moved.
EXACT = SSTAConfig(pad_type="none")


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | TextMask | None = None, *,
    scale: float | None = None, impl: str = "auto",
) -> LayerResult:
    """Exact attention of every token to every valid one, through lists of blocks, the last of which are short.

    Attention backends want a mask for every token here, and leave their fast kernels for it. Nothing is tiled or copied.

    Args:
        query: ``[B, H, S, D]``, S = ``layout.length``; any strides whose last is 1. Under autocast all three are cast to its dtype.
        key: ``[B, Hkv, S, D]``, query's dtype and device. H must be a multiple of Hkv.
        value: ``[B, Hkv, S, D]``.
        layout: what the sequence consists of.
        text_mask: bool or integer ``[B, layout.dense_length]``, nonzero = valid, in each dense run the valid tokens first; or a TextMask.
            Invalid tokens are not attended to, and their rows give zeros.
        scale: factor on the scores; default 1 / sqrt(D).
        impl: which kernel runs; "auto" chooses by device, dtype and shape.

    Returns:
        LayerResult: its selection holds all blocks of the sequence. Differentiable in query, key and value, once, and not by torch.func
        or in forward mode.

    Raises:
        TypeError, ValueError: the argument's name, what was required and what came.
    """
    result = exact_attention(query, key, value, layout, text_mask, scale=scale, impl=impl)
    # Later calls read the same lists; the caller may write to his copy.
    result.selection = Selection(result.selection.blocks.clone(), result.selection.useful)
    return result


def exact_attention(query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout, text_mask: Tensor | TextMask | None = None, *,
                    scale: float | None = None, impl: str = "auto") -> LayerResult:
    """``dense_attention`` for code that gives the selection to nobody: later calls read its lists."""
    require_layout("layout", layout)
    runs = TokenLayout(tuple([DenseRun(segment.length) for segment in layout.segments]))
    if text_mask is not None and layout.dense:
        check_query("query", query, layout)
        text_mask = TextMask.of(text_mask, query.shape[0], layout, query.device).whole()
    else:
        text_mask = None
    return attend(query, key, value, runs, EXACT, text_mask=text_mask, scale=scale, impl=impl)
