"""Calibration: what was measured of a model's layers, the density and compensation of each that follow, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike, fspath
from typing import Any

from torch import nn

import ssta
from ssta import SSTAConfig
from ssta.kernels import require_number

from .allocation import Setting, allocate
from .density import with_density
from .family import Site
from .schedule import Schedule
from .text_table import aligned

FORMAT, SCHEMA = "ssta calibration", 1
# What a compensation costs, over dense attention: a ninth of what a layer costs that computes 18 % exactly.
COMPENSATION_COST = 0.016


@dataclass(frozen=True)
class Measured:
    """One setting that was tried on a layer.

    Attributes:
        density: share in (0, 1] of the video's tile pairs that was computed exactly.
        compensation: of the others.
        error: the relative error of the attention's output over the video's tokens, root mean square over the forwards.
    """

    density: float
    compensation: str
    error: float


@dataclass(frozen=True)
class LayerCalibration:
    """What was found out about a layer, and what was chosen for it.

    Attributes:
        layer: the attention module's dotted name in the transformer.
        weight: how large a relative error of the model's output a relative error of this layer's becomes, per unit of it.
        measured: every setting that was tried.
        density: chosen, in (0, 1]; 1 = dense attention.
        compensation: chosen.
        error: the relative error of the layer's output to be expected.
    """

    layer: str
    weight: float
    measured: tuple[Measured, ...]
    density: float = 1.0
    compensation: str = "none"
    error: float = 0.0

    @property
    def settings(self) -> list[Setting]:
        """What was measured, as ``allocate`` takes it."""
        return [Setting(_cost(tried.density, tried.compensation), (self.weight * tried.error) ** 2, tried.density, tried.compensation)
                for tried in self.measured]


@dataclass(frozen=True)
class ModelCalibration:
    """One transformer's part of a calibration.

    Attributes:
        name: its attribute in the pipeline; "" for a transformer without one.
        model: its class name.
        sites: how many video self-attentions it has, those that the schedule keeps dense included.
        heads, head_dim: of each.
        forwards: how many were measured.
        layers: those that the schedule does not keep dense.
    """

    name: str
    model: str
    sites: int
    heads: int
    head_dim: int
    forwards: int
    layers: tuple[LayerCalibration, ...]

    @property
    def error(self) -> float:
        """The relative error of the transformer's output to be expected at a step that is not dense."""
        return math.sqrt(sum([(layer.weight * layer.error) ** 2 for layer in self.layers]))

    @property
    def density(self) -> float:
        """The mean of the layers'."""
        return sum([layer.density for layer in self.layers]) / len(self.layers)

    @property
    def cost(self) -> float:
        """The time of the layers' attention over that of dense attention."""
        return sum([_cost(layer.density, layer.compensation) for layer in self.layers]) / len(self.layers)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "compensation", "density", "error", "weight", "share of the squared error")]
        whole = self.error ** 2 or 1.0
        for layer in self.layers:
            share = (layer.weight * layer.error) ** 2 / whole
            rows.append((layer.layer, layer.compensation, f"{layer.density:.1%}", f"{layer.error:.4f}", f"{layer.weight:.3f}",
                         f"{share:.1%}"))
        rows.append((f"{self.name or self.model}, the model's output", "", f"{self.density:.1%}", f"{self.error:.4f}", "", ""))
        return aligned(rows, left=2)


@dataclass(frozen=True)
class Calibration:
    """A density and a compensation for each layer, made by ``calibrate``; ``apply_ssta(pipe, calibration)`` or its file's name applies it.

    It holds for any canvas, steps and prompts, as far as these resemble what it was measured with.

    Attributes:
        target: the error that was asked for, see ``ModelCalibration.error``; None where a density was.
        density: the mean density that was asked for; None where a target was.
        config: tile, window and everything else that all layers share; its own density and compensation are those of no layer.
        schedule: which steps and layers are dense; None = the family's default.
        models: a pipeline's transformers.
        version: of the library that measured.
    """

    target: float | None
    density: float | None
    config: SSTAConfig
    schedule: Schedule | None
    models: tuple[ModelCalibration, ...]
    version: str = ssta.__version__

    def chosen(self, *, target: float | None = None, density: float | None = None) -> Calibration:
        """The same measurements with another choice; runs nothing.

        Args:
            target: relative error in (0, 1) of each transformer's output.
            density: instead, what one density in (0, 1] for all layers, with the configuration's compensation, would cost.

        Raises:
            TypeError: not numbers.
            ValueError: both or neither, out of range, or a density below what the window alone takes.
        """
        target, density = checked_aim(target, density)
        return replace(self, target=target, density=density, models=tuple([self._choose(model, target, density) for model in self.models]))

    def _choose(self, model: ModelCalibration, target: float | None, density: float | None) -> ModelCalibration:
        settings = [layer.settings for layer in model.layers]
        if target is not None:
            # A rounding error is not to take it above the target.
            found = allocate(settings, error=target**2 * (1 - 1e-12))
        else:
            assert density is not None
            cost = len(settings) * min(_cost(density, self.config.compensation), 1.0)
            try:
                found = allocate(settings, cost=cost)
            except ValueError:
                least = sum([min(tried.density for tried in layer.measured) for layer in model.layers]) / len(settings)
                raise ValueError(f"density must be at least {math.ceil(1e3 * least) / 1e3:.3f}, the least that was measured (windows take "
                                 f"their share of a small canvas), got {density}") from None
        layers = [replace(layer, density=setting.density, compensation=setting.compensation,
                          error=math.sqrt(setting.error) / layer.weight if layer.weight else 0.0)
                  for layer, setting in zip(model.layers, found)]
        return replace(model, layers=tuple(layers))

    def scheduled(self, named: tuple[str, Sequence[str]], model: nn.Module, sites: Sequence[Site], schedule: Schedule) -> Schedule:
        """``schedule`` with each layer's own configuration, for one transformer.

        Args:
            named: the transformer's attribute in its pipeline, or "", and those of all that the calibration is applied to.
            model: the transformer.
            sites: the transformer's.
            schedule: which steps and layers are dense anyway.

        Raises:
            ValueError: another model than the one that was measured, or a schedule that it does not fit.
        """
        own = self._part(*named)
        layers = {layer.layer: layer for layer in own.layers}
        _require_same(own, model, sites)
        if schedule.layer_configs or isinstance(schedule.density, float):
            found = f"density = {schedule.density}" if isinstance(schedule.density, float) else f"layer_configs = {schedule.layer_configs}"
            raise ValueError(f"schedule must leave densities and configurations of layers to the calibration, got {found}")
        if schedule.levels:
            raise ValueError("schedule must leave densities to the calibration, got one that follows the noise")
        places = [site.name for site in sites]
        sparse = [place for place, config in zip(places, schedule.for_layers(places, self.config)) if config is not None]
        unknown = [place for place in sparse if place not in layers]
        if unknown:
            raise ValueError(f"schedule must keep dense what was dense when the calibration was measured, got {', '.join(unknown)} sparse")
        configs: dict[int | str, SSTAConfig] = {
            place: candidate(self.config, layers[place].density, layers[place].compensation)
            for place in sparse if layers[place].density < 1}
        return replace(schedule, dense_layers=tuple([place for place in places if place not in configs]), layer_configs=configs)

    def _part(self, name: str, names: Sequence[str]) -> ModelCalibration:
        if len(self.models) == len(names):
            for model in self.models:
                # A transformer alone goes by no name, and is the same in a pipeline.
                if model.name == name or len(names) == 1:
                    return model
        raise ValueError(f"model must be what the calibration was measured with, {_named([model.name for model in self.models])}, "
                         f"got {_named(names)}")

    def save(self, path: str | PathLike[str]) -> None:
        """Writes JSON, which ``load`` reads.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(_encoded(self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """What ``save`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a calibration, or one of another format or library version.
        """
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        return _decoded(text, fspath(path))

    def __str__(self) -> str:
        aim = f"target {self.target:g}" if self.target is not None else f"density {self.density:g}"
        return "\n".join([f"calibration for {aim}", *map(str, self.models)])


def checked_aim(target: float | None, density: float | None) -> tuple[float | None, float | None]:
    """Exactly one of them, as a float.

    Raises:
        TypeError: not numbers.
        ValueError: both or neither, or out of range.
    """
    if (target is None) == (density is None):
        raise ValueError(f"target must be given or density, and not both, got target = {target} and density = {density}")
    if target is not None:
        target = require_number("target", target)
        if not 0 < target < 1:
            raise ValueError(f"target must lie in (0, 1), a relative error of the model's output, got {target}")
        return target, None
    assert density is not None
    share = require_number("density", density)
    if not 0 < share <= 1:
        raise ValueError(f"density must lie in (0, 1], a share of the tile pairs, got {share}")
    return None, share


def candidate(config: SSTAConfig, density: float, compensation: str) -> SSTAConfig:
    """``config`` with this density and compensation in place of its own, in its variants too."""
    parts = 1 if compensation == "none" else config.compensation_parts
    changes: dict[str, Any] = {"compensation": compensation, "compensation_parts": parts}
    if compensation == "none" and config.sampling_type == "error":
        changes["sampling_type"] = None
    if compensation != "none" and config.sampling_type in (None, "error"):
        # The error has no descriptors.
        changes["adaptive_pool"] = None
    base = with_density(config, density)
    variants = tuple([(frames, {name: value for name, value in dict(overrides).items() if name not in changes})
                      for frames, overrides in base.variants])
    return replace(base, **changes, variants=variants)


def _cost(density: float, compensation: str) -> float:
    """The time of a layer's attention over that of dense attention."""
    return density + (COMPENSATION_COST if compensation != "none" and density < 1 else 0.0)


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """(heads, head_dim) of an attention module whose projections say so; else None."""
    heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
    projection = getattr(module, "to_q", None) or getattr(module, "to_query", None)
    width = getattr(projection, "out_features", None)
    return (heads, width // heads) if isinstance(heads, int) and isinstance(width, int) else None


def _require_same(own: ModelCalibration, model: nn.Module, sites: Sequence[Site]) -> None:
    measured, found = f"{own.model} of {own.sites} layers", f"{type(model).__name__} of {len(sites)} layers"
    shape = shape_of(sites[0].module)
    if shape is not None:
        measured += f" with {own.heads} heads of {own.head_dim}"
        found += f" with {shape[0]} heads of {shape[1]}"
    if measured != found:
        raise ValueError(f"model must be what the calibration was measured with, {measured}, got {found}")
    absent = sorted({layer.layer for layer in own.layers} - {site.name for site in sites})
    if absent:
        raise ValueError(f"model must have the layers that the calibration was measured with, got a {found} without {', '.join(absent)}")


def _named(names: Sequence[str]) -> str:
    return f"a pipeline with {' and '.join(names)}" if len(names) > 1 else "one transformer"


# The file


def writable(config: SSTAConfig, schedule: Schedule | None) -> None:
    """That a file can hold them.

    Raises:
        ValueError: a function.
    """
    for kind, settings in (("config", config), ("schedule", schedule)):
        for name, value in ([] if settings is None else _fields(settings).items()):
            if callable(value):
                raise ValueError(f"{kind} must be of names and numbers, which a file can hold, got {name} = {value!r}")


def _fields(settings: Any) -> dict[str, Any]:
    found = {field.name: getattr(settings, field.name) for field in fields(settings) if field.init}
    found.pop("layer_configs", None)
    return found


def _encoded(calibration: Calibration) -> str:
    """JSON with a line for each layer."""
    head = {"format": FORMAT, "schema": SCHEMA, "ssta": calibration.version, "target": calibration.target, "density": calibration.density,
            "config": _fields(calibration.config), "schedule": None if calibration.schedule is None else _fields(calibration.schedule)}
    models = []
    for model in calibration.models:
        own = {name: value for name, value in asdict(model).items() if name != "layers"}
        layers = [json.dumps(asdict(layer) | {"measured": [list(asdict(tried).values()) for tried in layer.measured]})
                  for layer in model.layers]
        models.append(json.dumps(own)[:-1] + ', "layers": [\n' + ",\n".join(layers) + "\n]}")
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    return "{\n" + ",\n".join([*lines, '"models": [\n' + ",\n".join(models) + "\n]"]) + "\n}\n"


def _decoded(text: str, path: str) -> Calibration:
    wanted = f"{path} must be a calibration as Calibration.save writes it"
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{wanted}, got no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{wanted}, got JSON without \"format\": {json.dumps(FORMAT)}")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} must be a calibration of schema {SCHEMA}, which ssta {ssta.__version__} reads, got schema "
                         f"{data.get('schema')} of ssta {data.get('ssta')}; calibrate again")
    if data.get("ssta") != ssta.__version__:
        raise ValueError(f"{path} must be measured with the ssta that applies it, {ssta.__version__}, got one of ssta {data.get('ssta')}; "
                         "calibrate again")
    try:
        target, density = checked_aim(data["target"], data["density"])
        schedule = None if data["schedule"] is None else Schedule(**data["schedule"])
        config = SSTAConfig(**{name: _tuples(value) for name, value in data["config"].items()})
        return Calibration(target, density, config, schedule, tuple([_model(model) for model in data["models"]]), data["ssta"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{wanted}, got one that was changed: {type(error).__name__}: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple([_tuples(item) for item in value]) if isinstance(value, list) else value


def _model(data: dict[str, Any]) -> ModelCalibration:
    layers = []
    for layer in data["layers"]:
        measured = tuple([Measured(require_number("density", tried[0]), str(tried[1]), require_number("error", tried[2]))
                          for tried in layer["measured"]])
        numbers = {name: require_number(name, layer[name]) for name in ("weight", "density", "error")}
        if not 0 < numbers["density"] <= 1:
            raise ValueError(f"{layer['layer']}'s density must lie in (0, 1], got {numbers['density']}")
        layers.append(LayerCalibration(str(layer["layer"]), measured=measured, compensation=str(layer["compensation"]), **numbers))
    if not layers:
        raise ValueError("layers must hold at least one, got none")
    whole = {name: int(data[name]) for name in ("sites", "heads", "head_dim", "forwards")}
    return ModelCalibration(str(data["name"]), str(data["model"]), layers=tuple(layers), **whole)
