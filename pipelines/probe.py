"""Probe: what each layer of a densely running model would get wrong with other settings, and how much of it reaches the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssta import SSTAConfig, TokenLayout, VideoGrid, tile_layout
from ssta.attention import LayerResult, ssta_layer

from .allocation import allocate
from .calibration import LayerCalibration, Measured, candidate
from .context import ModelContext
from .processor import SSTAProcessor

DENSITIES = (0.05, 0.08, 0.12, 0.16, 0.2, 0.3, 0.45, 0.7)
# All layers at once take this one, about what will be chosen; one layer alone takes the least of all, whose effect on the model's output
# stands out of the rounding errors of bfloat16.
_TYPICAL = DENSITIES.index(0.16)
_LEAST = 0


class Trial(NamedTuple):
    """A setting to be tried on every layer."""

    density: float
    compensation: str
    config: SSTAConfig


@dataclass
class _Layer:
    """A layer's sums over the measured forwards, on its device.

    Attributes:
        name: the attention module's.
        attend: its processor's, which is dense.
        squares: float32 ``[trials, H]``, squared errors over the square of the dense output of all heads.
        computed: float32 ``[trials]``, the share of the video's tile pairs that was computed exactly.
        last: ``squares`` of the forward in progress.
        reached: squared errors of the model's output, over its square, with this layer alone at the first of the settings for it, ...
        caused: ... and the layer's own in the same forwards.
        alone: how many these were.
        instead: how to attend now, in place of densely.
    """

    name: str
    attend: Callable[..., Tensor]
    forwards: int = 0
    squares: Tensor | None = None
    computed: Tensor | None = None
    last: Tensor | None = None
    reached: list[Tensor] = field(default_factory=list)
    caused: list[Tensor] = field(default_factory=list)
    instead: Trial | None = None
    shape: tuple[int, int] = (0, 0)


class Probe:
    """Measures one transformer while it runs, at every forward whose step the schedule does not keep dense.

    Its layers attend densely, and what they are given goes through every setting in turn, so that no more than one other output of one
    layer is ever held. After such a forward the model runs ``extra`` times again with one layer sparse, each time the next one, and once
    with all of them sparse: how much a layer's error counts for the model's output is measured, not assumed, whatever gates and norms lie
    behind it.

    Args:
        model: with SSTA applied, for the probe's lifetime only: its processors are changed and not restored.
        context: its.
        processors: (name, processor) of its sites.
        config: what settings share.
        extra: 0 = the model does not run again, and all layers count the same.
        tell: called after each measured forward.
    """

    def __init__(self, model: nn.Module, context: ModelContext, processors: Sequence[tuple[str, SSTAProcessor]], config: SSTAConfig,
                 extra: int, tell: Callable[[ModelContext], None]) -> None:
        kind = config.compensation if config.compensation != "none" else "linear"
        # One estimate for all heads has no meaning.
        kinds = ("none",) if config.mask_share_within_head else (kind, "none")
        self.trials = [Trial(density, kind, candidate(config, density, kind)) for kind in kinds for density in DENSITIES]
        self.layers: list[_Layer] = []
        self.forwards = 0
        self._context, self._extra, self._tell = context, extra, tell
        self._again = self._due = False
        self._next = 0
        self._joint: list[Tensor] = []
        for name, processor in processors:
            if processor.config is not None:
                layer = _Layer(name, processor.attend)
                # What the forward in progress has as its step stays the schedule's; the layer is dense at all of them.
                processor.config = None
                vars(processor)["attend"] = partial(self._attend, layer)
                self.layers.append(layer)
        self._hook = model.register_forward_hook(self._finish, with_kwargs=True)

    def remove(self) -> None:
        """The model no longer runs again after its forwards."""
        self._hook.remove()

    # While the model runs

    def _attend(self, layer: _Layer, query: Tensor, key: Tensor, value: Tensor, layout: TokenLayout,
                text_mask: Tensor | None = None) -> Tensor:
        if layer.instead is not None:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return self._try(layer.instead, q, k, v, layout, text_mask).out.transpose(1, 2)
        out = layer.attend(query, key, value, layout, text_mask)
        if layout.video and not self._again and not self._context.dense_step:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            self._measure(layer, (q, k, v), out.transpose(1, 2), layout, text_mask)
            self._due = True
        return out

    def _try(self, trial: Trial, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, text_mask: Tensor | None) -> LayerResult:
        return ssta_layer(q, k, v, layout, trial.config, text_mask=text_mask, impl=self._context.impl)

    def _measure(self, layer: _Layer, qkv: tuple[Tensor, Tensor, Tensor], dense: Tensor, layout: TokenLayout,
                 text_mask: Tensor | None) -> None:
        """Adds one forward to a layer's sums. Nothing is read from the device."""
        squares, computed, spans = [], [], _video(layout)
        for trial in self.trials:
            result = self._try(trial, *qkv, layout, text_mask)
            squares.append(torch.stack([_squares(result.out[:, :, span] - dense[:, :, span], (0, 2, 3)) for span in spans]).sum(0))
            computed.append(_computed(result.selection.blocks, trial.config, layout))
            del result
        whole = torch.stack([_squares(dense[:, :, span], (0, 1, 2, 3)) for span in spans]).sum()
        layer.last = torch.stack(squares) / whole.clamp(min=1e-30)
        layer.squares = layer.last if layer.squares is None else layer.squares + layer.last
        layer.computed = torch.stack(computed) if layer.computed is None else layer.computed + torch.stack(computed)
        layer.forwards += 1
        layer.shape = dense.shape[1], dense.shape[3]

    def _finish(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Forward hook of the transformer: runs it again."""
        if self._again or not self._due:
            return
        self._due, self._again = False, True
        try:
            if self._extra:
                exact = _video_of(output)
                for _ in range(min(self._extra, len(self.layers))):
                    layer = self.layers[self._next % len(self.layers)]
                    self._next += 1
                    if layer.last is not None:
                        layer.reached.append(self._error_with([layer], _LEAST, exact, model, args, kwargs))
                        layer.caused.append(layer.last[_LEAST].sum())
                self._joint.append(self._error_with(self.layers, _TYPICAL, exact, model, args, kwargs))
        finally:
            self._again = False
            for layer in self.layers:
                layer.last = layer.instead = None
        self.forwards += 1
        self._tell(self._context)

    def _error_with(self, layers: Sequence[_Layer], trial: int, exact: Tensor, model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        """The squared error of the model's output with these layers sparse, over its square."""
        for layer in layers:
            layer.instead = self.trials[trial]
        try:
            out = _video_of(model(*args, **kwargs))
        finally:
            for layer in layers:
                layer.instead = None
        every = tuple(range(exact.dim()))
        return _squares(out - exact, every) / _squares(exact, every).clamp(min=1e-30)

    # Afterwards

    @property
    def shape(self) -> tuple[int, int]:
        """(heads, head_dim) of the layer that was measured first."""
        return next(layer.shape for layer in self.layers if layer.forwards)

    def result(self) -> tuple[LayerCalibration, ...]:
        """What was measured of each layer that ran. Synchronises the device.

        Raises:
            ValueError: outputs that are not finite.
        """
        found = [(layer, layer.squares.sum(1).double() / layer.forwards, layer.computed.tolist()) for layer in self.layers
                 if layer.squares is not None and layer.computed is not None]
        errors = {layer.name: squares.tolist() for layer, squares, _ in found}
        for name, squares in errors.items():
            if not all(map(isfinite, squares)):
                raise ValueError(f"model must give finite outputs to be calibrated, got others from {name}'s attention")
        weights = self._weights(errors)
        return tuple([
            LayerCalibration(layer.name, weights[layer.name], tuple([
                # A window, or a tile that is rounded up, may be more than was asked for.
                Measured(min(max(trial.density, round(share / layer.forwards, 4)), 1.0), trial.compensation, sqrt(square))
                for trial, share, square in zip(self.trials, computed, errors[layer.name])]))
            for layer, _, computed in found])

    def cost_by_heads(self, layers: Sequence[LayerCalibration], error: float) -> float:
        """What the least cost under ``error`` would be if each head could have a setting of its own. Synchronises the device."""
        weights = {layer.layer: layer for layer in layers}
        heads = []
        for layer in self.layers:
            if layer.squares is not None:
                known, squares = weights[layer.name], (layer.squares.double() / layer.forwards).T.tolist()
                heads += [[setting._replace(error=known.weight**2 * square) for setting, square in zip(known.settings, of_head)]
                          for of_head in squares]
        return sum([setting.cost for setting in allocate(heads, error=error**2)]) / len(heads)

    def _weights(self, errors: Mapping[str, list[float]]) -> dict[str, float]:
        """How large a relative error of the model's output a relative error of each layer's becomes."""
        if not self._extra:
            return dict.fromkeys(errors, sqrt(1 / len(errors)))
        squared = {layer.name: float(torch.stack(layer.reached).sum()) / caused for layer in self.layers
                   if layer.reached and (caused := float(torch.stack(layer.caused).sum())) > 0}
        # A layer that had no turn, or no error, counts like the mean of the others.
        mean = sum(squared.values()) / len(squared) if squared else 1 / len(errors)
        squared = {name: squared.get(name, mean) for name in errors}
        # Errors of several layers neither add up like strangers nor like twins: by how much, all of them together say.
        alone = sum([squared[name] * errors[name][_TYPICAL] for name in errors])
        together = float(torch.stack(self._joint).mean()) if self._joint else 0.0
        factor = together / alone if alone > 0 and together > 0 else 1.0
        if not isfinite(factor):
            raise ValueError("model must give finite outputs to be calibrated, got others with sparse layers")
        return {name: sqrt(factor * square) for name, square in squared.items()}


def _squares(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums of squares in float32, without a copy of ``x``."""
    return torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).square()


def _video(layout: TokenLayout) -> list[slice]:
    """Where the video's tokens are."""
    ends = list(accumulate([segment.length for segment in layout.segments]))
    return [slice(end - segment.length, end) for segment, end in zip(layout.segments, ends) if isinstance(segment, VideoGrid)]


def _computed(blocks: Any, config: SSTAConfig, layout: TokenLayout) -> Tensor:
    """The share of the video's tile pairs in the lists."""
    longest = layout.longest_video
    resolved = config if longest is None else config.for_canvas(longest)
    tiles = tile_layout(layout, resolved.tile_thw, resolved.pad_type, blocks.counts.device).num_video_tiles
    return blocks.to_mask()[..., :tiles, :tiles].float().mean()


def _video_of(output: Any) -> Tensor:
    """The first tensor of what a transformer returns, which is the video's."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return output
