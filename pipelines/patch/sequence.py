"""VideoSequence: where the video and the conditions lie in the tokens that an attention is given, on one rank or on several."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssta import DenseRun, TokenLayout, VideoGrid
from ssta.kernels.notices import warn_once

from ..schedule.changes import warn_of_the_window
from .context import ModelContext

# Canvases alternate in few ways (guidance, two resolutions); a server's must not pile up.
_MOST_LAYOUTS = 16


class VideoSequence:
    """A processor's tokens. In all methods ``tokens`` is the length of the sequence, or on several ranks of this rank's part.

    A layout begins with the segments that ``Family.before`` finds, if there are any.

    Each raises ValueError where the rest of the tokens is not the canvas, and where there was no forward of the whole model.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def video_alone(self, tokens: int) -> TokenLayout:
        """The layout of the video."""
        return self._layout(tokens, True, 0)

    def video_then(self, tokens: int, conditions: int | None = None) -> TokenLayout:
        """The layout of the video and ``conditions`` tokens after it, which are dense; None = all others are."""
        return self._layout(tokens, True, conditions)

    def video_after(self, tokens: int, conditions: int | None = None) -> TokenLayout:
        """The layout of ``conditions`` dense tokens and the video, without ``Family.before``; None = all others are dense."""
        return self._layout(tokens, False, conditions)

    def canvas(self, video_tokens: int) -> tuple[int, int, int]:
        """The canvas (t, h, w) of the forward in progress.

        Raises:
            ValueError: it does not have ``video_tokens`` tokens, or this rank's share of it has not; or there was no forward of the whole
                model.
        """
        thw, ranks, own = self.context.thw, self.context.call.ranks, self._own_tokens
        if own != video_tokens:
            whose = "" if ranks is None or ranks.tokens is not None else f"rank {ranks.rank} of {ranks.size}'s {own} of "
            raise ValueError(f"hidden_states must have {whose}the canvas' {' x '.join(map(str, thw))} tokens, got {video_tokens} video "
                             "tokens")
        return thw

    @property
    def _own_tokens(self) -> int:
        """How many of the canvas' tokens hidden_states hold, where they do not hold just a rank's share of the whole sequence."""
        tokens, ranks = math.prod(self.context.thw), self.context.call.ranks
        return tokens if ranks is None or ranks.tokens is not None else ranks.share(tokens)

    def rank_share(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, which has an entry along ``dim`` for each token of the canvas; x where one rank has all of them."""
        ranks, tokens = self.context.call.ranks, math.prod(self.context.thw)
        return x if ranks is None else x.narrow(dim, ranks.start(tokens), ranks.share(tokens))

    def _layout(self, tokens: int, first: bool, conditions: int | None) -> TokenLayout:
        """The video and so many conditions. ``first``: the video comes first, after the family's segments."""
        call, layouts, compiling = self.context.call, self.context.layouts, torch.compiler.is_compiling()
        ranks, before = call.ranks, call.before if first else ()
        key = call.thw, None if ranks is None else (ranks.size, ranks.rank, ranks.tokens), tokens, before, first, conditions
        if not compiling and key in layouts:
            return layouts[key]
        leading = sum([segment.length for segment in before])
        if ranks is not None and ranks.tokens is not None:
            if tokens != ranks.share(ranks.tokens):
                raise ValueError(f"hidden_states must have rank {ranks.rank} of {ranks.size}'s {ranks.share(ranks.tokens)} of "
                                 f"{ranks.tokens} tokens, got {tokens}")
            tokens = ranks.tokens
        elif ranks is not None:
            leading = sum([ranks.share(segment.length) if isinstance(segment, VideoGrid) else segment.length for segment in before])
        others = max(tokens - leading - self._own_tokens, 0) if conditions is None else conditions
        grid = VideoGrid(*self.canvas(tokens - leading - others))
        dense = (DenseRun(others),) if others else ()
        layout = TokenLayout((*before, grid, *dense) if first else (*dense, grid))
        if not compiling:
            if len(layouts) >= _MOST_LAYOUTS:
                layouts.clear()
            layouts[key] = layout
            self._warn(leading + others if conditions is None else 0)
        return layout

    def _warn(self, counted: int) -> None:
        """Says of a new layout where the window leaves nothing out, and where ``counted`` tokens beside the canvas are too many."""
        model, thw = self.context.family.model, self.context.thw
        # The layer that asks first may be dense, so all configurations are looked at.
        for config in dict.fromkeys(self.context.configs):
            warn_of_the_window(model, config, thw)
        if counted > math.prod(thw):
            canvas = " x ".join(map(str, thw))
            warn_once(f"canvas of {model}", f"{counted:,} tokens of {model} stand beside its canvas of {canvas}, more than that has, "
                      "and attend densely: if they are the video's, Family.canvas is too small")
