"""Schedule: which denoising steps and which layers attend densely, and which layers have a configuration of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssta import SSTAConfig
from ssta.checks import require_number


@dataclass(frozen=True)
class Schedule:
    """When SSTA steps back for exact dense attention. The default never does. Immutable, hashable, checked at construction.

    The first steps settle where things are, on noise in which no tile resembles another yet, so models that were not trained with SSTA
    keep them dense; ``warm_up`` is what they get by default.

    Args:
        dense_steps: the first fraction of the denoising steps, in [0, 1], rounded up to whole steps: 0.15 is 8 steps of 50 and 1 of 4.
            Below 1 the last step stays sparse, so a model of a single step does too. A generation that enters the scheduler's steps
            half-way, as video-to-video does, has those behind it. Needs a scheduler that counts the steps.
        dense_above: noise level in [0, 1] above which steps are dense: the timestep over the number of training timesteps, which is sigma
            for flow matching. None = no such rule.
        dense_layers: layers that are dense at every step: positions among the model's video self-attentions in the order of
            ``SSTAHandle.report`` (negative ones count from the end), or their dotted names.
        layer_configs: ``{layer: SSTAConfig}``, or pairs of these, for layers that need a configuration of their own.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range, or a layer that is both dense and configured.
    """

    dense_steps: float = 0.0
    dense_above: float | None = None
    dense_layers: tuple[int | str, ...] = ()
    layer_configs: Mapping[int | str, SSTAConfig] | tuple[tuple[int | str, SSTAConfig], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= require_number("dense_steps", self.dense_steps) <= 1:
            raise ValueError(f"dense_steps must lie in [0, 1], a fraction of the steps, got {self.dense_steps}")
        if self.dense_above is not None and not 0 <= require_number("dense_above", self.dense_above) <= 1:
            raise ValueError(f"dense_above must lie in [0, 1], a noise level, got {self.dense_above}")
        if isinstance(self.dense_layers, str) or not isinstance(self.dense_layers, Sequence):
            raise TypeError(f"dense_layers must be a tuple of positions and names, got {self.dense_layers!r}")
        configs = self.layer_configs
        configs = tuple(configs.items()) if isinstance(configs, Mapping) else configs
        if not isinstance(configs, Sequence) or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in configs):
            raise TypeError(f"layer_configs must map layers to SSTAConfigs, got {self.layer_configs!r}")
        for name, layers in (("dense_layers", self.dense_layers), ("layer_configs", [layer for layer, _ in configs])):
            for layer in layers:
                if isinstance(layer, bool) or not isinstance(layer, (int, str)):
                    raise TypeError(f"{name} must name layers by position or by name, got {layer!r} ({type(layer).__name__})")
        for layer, config in configs:
            if not isinstance(config, SSTAConfig):
                raise TypeError(f"layer_configs[{layer!r}] must be an SSTAConfig, got {type(config).__name__}")
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "layer_configs", tuple((layer, config) for layer, config in configs))

    @classmethod
    def warm_up(cls) -> Schedule:
        """The first 15 % of the steps and the first layer dense, for models that were not trained with SSTA.

        Training-free methods agree on 10 to 25 % of the steps and the first layer: Sparse VideoGen has 25 %, its successor 10 %, Radial
        Attention 12 of 50 steps and one layer.
        """
        return cls(dense_steps=0.15, dense_layers=(0,))

    @property
    def follows_steps(self) -> bool:
        """Whether any rule asks which step it is."""
        return self.dense_steps > 0 or self.dense_above is not None

    def is_dense_step(self, index: int, count: int) -> bool:
        """Whether ``dense_steps`` covers step ``index`` of ``count``."""
        # 0.07 * 100 is a little more than 7.
        covered = math.ceil(self.dense_steps * count - 1e-9)
        return index < (covered if self.dense_steps == 1 else min(covered, count - 1))

    def for_layers(self, names: Sequence[str], config: SSTAConfig) -> list[SSTAConfig | None]:
        """What each of the layers ``names`` uses: its configuration, ``config`` where it has none of its own, None where it is dense.

        Raises:
            ValueError: a layer that there is not, or one that is both dense and configured.
        """
        chosen: list[SSTAConfig | None] = [config] * len(names)
        for layer, own in self.layer_configs:
            chosen[_position("layer_configs", layer, names)] = own
        configured = {_position("layer_configs", layer, names) for layer, _ in self.layer_configs}
        for layer in self.dense_layers:
            position = _position("dense_layers", layer, names)
            if position in configured:
                raise ValueError(f"dense_layers must not name a layer of layer_configs, got {layer!r}, which is {names[position]}")
            chosen[position] = None
        return chosen


def _position(argument: str, layer: int | str, names: Sequence[str]) -> int:
    if isinstance(layer, str):
        if layer not in names:
            raise ValueError(f"{argument} must name video self-attentions such as {names[0]!r}, got {layer!r}")
        return names.index(layer)
    if not -len(names) <= layer < len(names):
        raise ValueError(f"{argument} must lie in [-{len(names)}, {len(names)}) for this model's {len(names)} layers, got {layer}")
    return layer % len(names)
