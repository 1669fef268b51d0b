"""Configuration: one way to run a pipeline, its form on a command line, and a pipeline that runs with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

from ssta import SSTAConfig
from ssta.kernels.routing import IMPLEMENTATIONS

from ..patch.apply import SSTAHandle, apply_ssta, transformers_of
from ..patch.context import having
from ..patch.register import family_of, preset_names, preset_settings
from ..schedule.changes import changed
from ..schedule.presets import OWN_PRESETS, PRESETS
from ..schedule.schedule import Schedule

_NAMES = ("stock", "default", "dense")
_CONFIG_FIELDS = {field.name for field in fields(SSTAConfig) if field.init} - {"variants", "budget"}
# A field that both have is the configuration's.
_SCHEDULE_FIELDS = {field.name for field in fields(Schedule) if field.init} - {"layer_configs"} - _CONFIG_FIELDS


@dataclass(frozen=True)
class Configuration:
    """One way to run a pipeline.

    Attributes:
        name: in tables, files and records.
        config: None = without SSTA, as diffusers has it.
        schedule: None = the family's.
        backend: the kernels of exact attention: one of diffusers' attention backends by its name, such as "_native_cudnn"; or, with SSTA,
            one of the library's implementations, such as "triton", for sparse attention too. None = the pipeline's.

    Raises:
        ValueError: an unknown backend, or one of the library's without SSTA.
    """

    name: str
    config: SSTAConfig | None
    schedule: Schedule | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        names = [*(backend.value for backend in AttentionBackendName), *([] if self.config is None else IMPLEMENTATIONS)]
        if self.backend is not None and self.backend not in names:
            where = "without" if self.config is None else "with"
            raise ValueError(f"backend must be one of {', '.join(names)} {where} SSTA, got {self.backend!r}")

    @property
    def all_dense(self) -> bool:
        """Whether SSTA is there and every step dense."""
        return self.config is not None and self.schedule is not None and self.schedule.dense_steps == 1


def dense(pipe: Any) -> Configuration:
    """Exact attention at every step, on the kernels that the dense steps of other configurations run and without masks of S x S tokens."""
    return parse_configuration("dense", pipe)


def parse_configuration(text: str, pipe: Any) -> Configuration:
    """A configuration from its text.

    ``"default"``; ``"dense"``; ``"stock"``, without SSTA; a preset's name, as in ``preset_names``; fields of ``SSTAConfig`` and of
    ``Schedule`` that differ from the default, such as ``"density=0.2,tile_thw=4x8x8,dense_steps=0.1,dense_layers=0;-1"``; or a name and
    then the fields that differ from it, such as ``"fast,dense_steps=0"``. After all this ``"@backend"`` is ``Configuration.backend``:
    ``"dense@_native_cudnn"``. Fields of ``SSTAConfig`` change a configuration as they do as keywords of ``apply_ssta``.

    Raises:
        ValueError: an unknown name, field or backend, or a value that the field does not take.
    """
    family = family_of(transformers_of(pipe)[0][1])
    name, values, backend = read(text, preset_names(family))
    if name == "stock":
        return Configuration(text, None, backend=backend)
    config, schedule = preset_settings(family, name) if name not in _NAMES else (family.default_config(), family.default_schedule())
    if name == "dense":
        schedule = Schedule(dense_steps=1.0)
    try:
        config = changed(config, **{field: value for field, value in values.items() if field in _CONFIG_FIELDS})
        schedule = replace(schedule, **{field: value for field, value in values.items() if field in _SCHEDULE_FIELDS})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None
    return Configuration(text, config, schedule, backend)


def read(text: str, presets: Sequence[str] = (*PRESETS, *OWN_PRESETS)) -> tuple[str, dict[str, Any], str | None]:
    """(name, the fields that differ from it, backend) of a configuration's text, before there is a pipeline.

    Raises:
        ValueError: a name that is no preset, or no field, or a field without a value.
    """
    wanted = (f"a configuration must be {', '.join(map(repr, (*_NAMES, *presets)))} or fields such as topk=16 of "
              f"{', '.join(sorted(_CONFIG_FIELDS | _SCHEDULE_FIELDS))}, got")
    settings, at, backend = (piece.strip() for piece in text.partition("@"))
    if at and not backend:
        raise ValueError(f"a configuration must have a backend after @, got {text!r}")
    name, *parts = (part.strip() for part in settings.split(","))
    if "=" in name:
        name, parts = "default", [name, *parts]
    if name not in (*_NAMES, *presets) or name == "stock" and parts:
        raise ValueError(f"{wanted} {name!r}")
    values = {}
    for part in parts:
        field, _, value = (piece.strip() for piece in part.partition("="))
        if field not in _CONFIG_FIELDS | _SCHEDULE_FIELDS or not value:
            raise ValueError(f"{wanted} {part!r}")
        several = ";" in value or field in ("densities", "dense_layers")
        values[field] = tuple(_value(item) for item in value.split(";")) if several else _value(value)
    return name, values, backend or None


def _value(text: str) -> Any:
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(part) for part in text.split("x"))
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@contextmanager
def running(pipe: Any, configuration: Configuration) -> Iterator[SSTAHandle | None]:
    """The pipeline with the configuration, until the end of the ``with``; gives the handle of ``apply_ssta``, None without SSTA."""
    with ExitStack() as stack:
        impl, backend = "auto", configuration.backend
        if backend in IMPLEMENTATIONS:
            impl = backend
        elif backend is not None:
            # diffusers' set_attention_backend leaves its backend behind in the process.
            try:
                stack.enter_context(attention_backend(backend))
            except (ImportError, RuntimeError, ValueError) as error:
                raise ValueError(f"backend must be one that runs here, got {backend!r}: {error}") from None
            for processor in (getattr(module, "processor", None) for _, model in transformers_of(pipe) for module in model.modules()):
                if hasattr(processor, "_attention_backend"):
                    stack.enter_context(having(processor, "_attention_backend", AttentionBackendName(backend)))
        if configuration.config is None:
            yield None
            return
        yield stack.enter_context(apply_ssta(pipe, configuration.config, schedule=configuration.schedule, impl=impl))
