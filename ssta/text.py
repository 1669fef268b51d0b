"""TextMask: which tokens of a sequence's dense runs are valid, checked once, and what of tiles follows from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .kernels.checks import require_strided, require_values
from .kernels.memo import captured, remember, traced
from .kernels.operators import at_hand
from .layout import TileLayout
from .sequence import DenseRun, TokenLayout

if TYPE_CHECKING:
    from .kernels import Backend

# A value computed from a mask: a tensor or another mask.
Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class TextMask:
    """Which tokens of a sequence's dense runs are valid. Made by ``TextMask.of``; one that several calls share is checked, and what
    follows from it computed, only once. Nothing here synchronises, but for ``valid_tokens``.

    Args:
        valid: bool ``[B, tokens.dense_length]``, in each run the valid tokens first. Not to be written to: the next call
            refuses it. Tensors of inference mode have no count of writes, and are believed.
        tokens: the sequence.
    """

    valid: Tensor
    tokens: TokenLayout
    _views: dict = field(init=False, repr=False, default_factory=dict)
    _version: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", None if traced() or self.valid.is_inference() else self.valid._version)

    def __getstate__(self) -> dict:
        return {"valid": self.valid, "tokens": self.tokens}

    def __setstate__(self, state: dict) -> None:
        # A copy's tensor counts anew how often it is written to.
        for name, value in {**state, "_views": {}}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @classmethod
    def of(cls, text_mask: Tensor | TextMask, batch: int, tokens: TokenLayout, device: torch.device) -> TextMask:
        """``text_mask`` for ``batch`` elements of ``tokens`` on ``device``: bool or integer ``[B, dense tokens]``, nonzero = valid.

        Raises:
            TypeError: neither a TextMask nor a bool or integer tensor.
            ValueError: another shape, sequence or device; on a CPU also a valid token behind an invalid one of its run.
        """
        if isinstance(text_mask, TextMask):
            if text_mask.tokens != tokens:
                raise ValueError(f"text_mask must be of this sequence, {tokens}, got one of {text_mask.tokens}")
            text, mask = text_mask, text_mask.valid
        else:
            if not isinstance(text_mask, Tensor):
                raise TypeError(f"text_mask must be a bool or integer tensor, got {type(text_mask).__name__}")
            if text_mask.is_floating_point() or text_mask.is_complex():
                raise TypeError(f"text_mask must be bool or integer (nonzero = valid token), got {text_mask.dtype}")
            require_strided("text_mask", text_mask)
            text, mask = None, text_mask
        if mask.shape != (batch, tokens.dense_length):
            raise ValueError(f"text_mask must be [batch, dense tokens] = {(batch, tokens.dense_length)}, got {tuple(mask.shape)}")
        if mask.device != device:
            raise ValueError(f"text_mask must be on query's device {device}, got {mask.device}")
        if text is None:
            require_valid_first(mask, tokens)
        # What follows from a mask is kept, and its owner may write to his own.
        return text or cls(mask.clone() if mask.dtype == torch.bool else mask != 0, tokens)

    @property
    def in_sequence(self) -> Tensor:
        """bool ``[B, S]``: the valid tokens of the whole sequence, of which video tokens all are; new each time."""
        batch, runs = len(self.valid), iter(self.valid.split([run.length for run in self.tokens.dense], 1))
        return torch.cat([next(runs) if isinstance(segment, DenseRun) else self.valid.new_ones(batch, segment.length)
                          for segment in self.tokens.segments], 1)

    def whole(self) -> TextMask:
        """The same over the sequence taken as dense runs only, one for each segment."""
        runs = TokenLayout(tuple([DenseRun(segment.length) for segment in self.tokens.segments]))
        return self._view("whole", lambda: TextMask(self.in_sequence, runs))

    def left(self, layout: TileLayout, backend: Backend) -> Tensor:
        """int32 ``[B, 1, N + M]``: of each tile's slots, how many from its first one on are valid; those of video tiles all are. With
        padding a run without valid tokens counts as one with one, as published."""
        return self._view(layout, lambda: backend.valid_lengths(self.valid, *tile_places(layout), layout.lengths,
                                                                int(layout.padding != "none")))

    def valid_tokens(self) -> tuple[int, ...]:
        """The valid tokens of each batch element. Synchronises the device."""
        return tuple(require_values("text_mask", self.valid).sum(1).tolist())

    def _view(self, key: object, make: Callable[[], Derived]) -> Derived:
        # As in memo.remember: a graph's tensors are its own.
        if traced() or captured():
            return make()
        if self._version is not None and self.valid._version != self._version:
            raise ValueError("text_mask must not be written to once it is a TextMask, got one whose valid tensor was; TextMask.of makes a "
                             "new one")
        found = self._views.get(key)
        if found is None:
            # A tensor made in inference mode could not be saved for a later backward pass.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                found = self._views[key] = make()
        return found


def require_valid_first(text_mask: Tensor, tokens: TokenLayout) -> None:
    """Refuses a mask ``[B, dense tokens]`` with a valid token behind an invalid one of the same run; where reading values waits for a GPU,
    nothing is checked."""
    if not at_hand(text_mask):
        return
    for run in (text_mask != 0).split([run.length for run in tokens.dense], 1):
        late = (run[:, 1:] & ~run[:, :-1]).any(1)
        if late.any():
            raise ValueError("text_mask must have the valid tokens of each dense run first, got a valid token behind an invalid one in "
                             f"batch element {int(late.int().argmax())}: bring the text's tokens into that order")


@remember(64)
def tile_starts(layout: TileLayout, batch: int) -> Tensor:
    """int32 ``[B, 1, N + M]``: each tile's first slot."""
    return layout.offsets[:-1].repeat(batch, 1, 1)


@remember(64)
def tile_places(layout: TileLayout) -> tuple[Tensor, Tensor]:
    """Where tiles stand in their dense runs, as ``valid_lengths`` takes it: int32 ``[2, N + M]``, where among the tokens of all runs each
    tile's run begins and ends; int32 ``[N + M]``, the run's tokens before it. A video tile counts as one that stands far before any run."""
    options: dict[str, Any] = dict(device=layout.device, dtype=torch.int32)
    starts = [torch.full((layout.num_video_tiles,), -1 << 30, **options)]
    ends, first = [torch.zeros(2, layout.num_video_tiles, **options)], 0
    for run in layout.dense:
        last = first + run.extent[2]
        ends.append(torch.cat([torch.full((1, run.num_tiles), end, **options) for end in (first, last)]))
        first = last
        starts.append(torch.arange(0, run.extent[2], run.tile[2], **options))
    return torch.cat(ends, 1), torch.cat(starts)
