"""Schedule: which steps and layers attend densely, densities by step, and layers that have a configuration of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from ssta import SSTAConfig
from ssta.checks import require_share
from ssta.kernels.checks import require_int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When SSTA steps back for exact dense attention. The default never does. Immutable, hashable, checked at construction.

    The first steps settle where things are, on noise in which no tile resembles another yet. Methods that drop tiles keep them dense, and
    ``warm_up`` does so too. With an estimate a higher density at all steps is the better use of the time (``benchmark/quality.md``).

    Args:
        dense_steps: the first fraction of the denoising steps, in [0, 1], rounded up to whole steps: 0.15 is 8 steps of 50 and 1 of 4;
            1.0 is all of them, and the int 1 is refused.
            Below 1 the last step stays sparse, so a model of a single step does too. The steps are those that run: where a generation
            starts in the middle of the scheduler's, as video-to-video with a strength of 0.5 does, 0.15 is 4 of its 25. Schedulers
            that call the model twice a step, as Heun's does, have two steps there. Needs a scheduler that counts the steps; a forward
            whose step cannot be found is not dense by this rule, and warns once.
        dense_layers: layers that are dense at every step: positions among a transformer's video self-attentions in the order of
            ``SSTAHandle.report`` (negative ones count from the end), or their dotted names; a tuple, a list or a range. In a pipeline with
            two transformers positions count in each of them, and so do names without the transformer's; names as the report has them, such
            as ``"transformer_2.blocks.1.attn1"``, are for that transformer alone.
        densities: a density in (0, 1] for each step, in place of the configuration's, for layers without a configuration of their own; 1
            is dense. As many steps share an entry as there are steps for each, so for a generation of n steps n entries are one each. ()
            = the same density at all steps. ``dense_steps`` comes before it. Needs a scheduler, as ``dense_steps``.
        layer_configs: ``{layer: SSTAConfig}``, or pairs of these, for layers that need a configuration of their own.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range, or a layer that is named twice or both dense and configured. Where one and the same layer goes by
            several names (0, -1 or "blocks.0.attn1"), ``apply_ssta`` finds out.
    """

    dense_steps: float = 0.0
    dense_layers: tuple[int | str, ...] = ()
    layer_configs: Mapping[int | str, SSTAConfig] | tuple[tuple[int | str, SSTAConfig], ...] = ()
    densities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if type(self.dense_steps) is int and self.dense_steps == 1:
            raise ValueError("dense_steps must be a fraction of the steps, got 1, which may be meant for one step: 1.0 keeps all of them "
                             "dense, and a small fraction, such as 0.01, the first one")
        require_share("dense_steps", self.dense_steps, "[0, 1]", "a fraction of the steps")
        if isinstance(self.densities, (str, bytes, bytearray)) or not isinstance(self.densities, Sequence):
            raise TypeError(f"densities must be a tuple of numbers, one for each step, got {self.densities!r}")
        object.__setattr__(self, "densities", tuple([
            float(require_share("densities", density, "(0, 1]", "shares of the tile pairs")) for density in self.densities]))
        if isinstance(self.dense_layers, (str, bytes, bytearray)) or not isinstance(self.dense_layers, Sequence):
            raise TypeError(f"dense_layers must be a tuple of positions and names, got {self.dense_layers!r}")
        dense = _layers("dense_layers", self.dense_layers)
        pairs = self.layer_configs
        pairs = tuple(pairs.items()) if isinstance(pairs, Mapping) else pairs
        if (isinstance(pairs, (str, bytes, bytearray)) or not isinstance(pairs, Sequence)
                or any(isinstance(pair, (str, bytes, bytearray)) or not isinstance(pair, Sequence) or len(pair) != 2 for pair in pairs)):
            raise TypeError(f"layer_configs must map layers to SSTAConfigs, got {self.layer_configs!r}")
        configured = _layers("layer_configs", [layer for layer, _ in pairs])
        for layer, config in pairs:
            if not isinstance(config, SSTAConfig):
                raise TypeError(f"layer_configs[{layer!r}] must be an SSTAConfig, got {type(config).__name__}")
        for layer in dense:
            if layer in configured:
                raise ValueError(f"dense_layers must not name a layer of layer_configs, got {layer!r} in both")
        object.__setattr__(self, "dense_layers", dense)
        object.__setattr__(self, "layer_configs", tuple((layer, config) for layer, (_, config) in zip(configured, pairs)))

    @classmethod
    def warm_up(cls) -> Schedule:
        """The first 15 % of the steps and the first layer dense: for tiles that are dropped, and where the video must have the layout of
        the dense one.

        Training-free methods agree on 10 to 25 % of the steps and the first layer: Sparse VideoGen has 25 %, its successor 10 %, Radial
        Attention 12 of 50 steps and one layer.
        """
        return cls(dense_steps=0.15, dense_layers=(0,))

    @property
    def counts_steps(self) -> bool:
        """Whether any rule asks for the step's number."""
        return self.dense_steps > 0 or len(self.densities) > 0

    def density_of_step(self, index: int, count: int) -> float | None:
        """The density that ``densities`` has for step ``index`` of the ``count`` that run, None where it has none; raises as
        ``is_dense_step``."""
        index, count = _step(index, count)
        return self.densities[index * len(self.densities) // count] if self.densities else None

    def is_dense_step(self, index: int, count: int) -> bool:
        """Whether ``dense_steps`` covers step ``index`` of the ``count`` that run.

        Raises:
            TypeError: not ints.
            ValueError: not 0 <= index < count.
        """
        index, count = _step(index, count)
        # 0.07 * 100 is a little more than 7.
        covered = math.ceil(self.dense_steps * count - 1e-9)
        return index < (covered if self.dense_steps == 1 else min(covered, count - 1))

    def for_transformer(self, name: str, names: Sequence[str]) -> Schedule:
        """What this says of the transformer ``name`` of a pipeline, which has transformers ``names``: layers under its name by their own
        names, and those under another one's left out."""
        def under(layer: int | str) -> str | None:
            return next((of for of in names if of and isinstance(layer, str) and layer.startswith(f"{of}.")), None)

        def own(layer: int | str) -> int | str:
            return layer if under(layer) is None else str(layer).removeprefix(f"{name}.")

        configs = dict(self.layer_configs)
        if not any([under(layer) for layer in (*self.dense_layers, *configs)]):
            return self
        return replace(self, dense_layers=tuple([own(layer) for layer in self.dense_layers if under(layer) in (None, name)]),
                       layer_configs=tuple([(own(layer), config) for layer, config in configs.items() if under(layer) in (None, name)]))

    def for_layers(self, names: Sequence[str], config: SSTAConfig) -> list[SSTAConfig | None]:
        """What each of the layers ``names`` uses: its configuration, ``config`` where it has none of its own, None where it is dense.

        Raises:
            ValueError: a layer that there is not, one that is named twice, or one that is both dense and configured.
        """
        chosen: list[SSTAConfig | None] = [config] * len(names)
        named: dict[int, tuple[str, int | str]] = {}
        asked: dict[str, Any] = {"layer_configs": self.layer_configs, "dense_layers": [(layer, None) for layer in self.dense_layers]}
        for argument, layers in asked.items():
            for layer, own in layers:
                position = _position(argument, layer, names)
                other, by = named.setdefault(position, (argument, layer))
                if other != argument:
                    raise ValueError(f"dense_layers must not name a layer of layer_configs, got {layer!r}, which is {names[position]}")
                if by != layer:
                    raise ValueError(f"{argument} must name a layer once, got {by!r} and {layer!r}, which are both {names[position]}")
                chosen[position] = own
        return chosen


def _step(index: int, count: int) -> tuple[int, int]:
    index, count = require_int("index", index, 0), require_int("count", count, 1)
    if index >= count:
        raise ValueError(f"index must lie in [0, {count}), the steps there are, got {index}")
    return index, count


def _layers(argument: str, layers: Sequence[int | str]) -> tuple[int | str, ...]:
    """Positions as plain ints and names, each once."""
    checked: list[int | str] = []
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, (str, Integral)):
            raise TypeError(f"{argument} must name layers by position or by name, got {layer!r} ({type(layer).__name__})")
        layer = layer if isinstance(layer, str) else int(layer)
        if layer in checked:
            raise ValueError(f"{argument} must name a layer once, got {layer!r} twice")
        checked.append(layer)
    return tuple(checked)


def _position(argument: str, layer: int | str, names: Sequence[str]) -> int:
    if isinstance(layer, str):
        if layer not in names:
            raise ValueError(f"{argument} must name video self-attentions such as {names[0]!r}, got {layer!r}")
        return names.index(layer)
    if not -len(names) <= layer < len(names):
        raise ValueError(f"{argument} must lie in [-{len(names)}, {len(names)}) for this model's {len(names)} layers, got {layer}; "
                         "positions count in each transformer by itself")
    return layer % len(names)
