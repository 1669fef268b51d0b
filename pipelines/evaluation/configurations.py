"""What a comparison runs a pipeline with: Configuration, how it is written on a command line, and a pipeline that runs with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

from ssta import SSTAConfig
from ssta.kernels.routing import IMPLEMENTATIONS

from ..patch.apply import SSTAHandle, apply_ssta, transformers_of
from ..patch.context import having
from ..patch.family import Family, family_of, preset_names, preset_settings
from ..schedule.changes import changed
from ..schedule.presets import OWN_PRESETS, PRESETS
from ..schedule.schedule import Schedule

_NAMES = ("stock", "default", "dense")
_OWN = ("tile_thw", "kernel_thw", "adaptive_pool")
_CONFIG_FIELDS = {field.name for field in fields(SSTAConfig) if field.init} - {"variants", "budget"}
# A field that both have is the configuration's.
_SCHEDULE_FIELDS = {field.name for field in fields(Schedule) if field.init} - {"layer_configs"} - _CONFIG_FIELDS


@dataclass(frozen=True)
class Configuration:
    """One way to run a pipeline.

    Attributes:
        name: what tables, files and records call it.
        config: None = without SSTA, as diffusers has it.
        schedule: None = the family's.
        backend: which kernels attend exactly: one of diffusers' attention backends by its name, such as "_native_cudnn"; or, with SSTA, one
            of the library's implementations, such as "triton", which then computes what is sparse too. None = what the pipeline has.

    Raises:
        ValueError: a backend that there is not, or one of the library's without SSTA.
    """

    name: str
    config: SSTAConfig | None
    schedule: Schedule | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        others = [backend.value for backend in AttentionBackendName]
        if self.backend is not None and self.backend not in (*IMPLEMENTATIONS, *others):
            raise ValueError(f"backend must be one of diffusers' attention backends ({', '.join(others)}) or of the library's "
                             f"implementations ({', '.join(IMPLEMENTATIONS)}), got {self.backend!r}")
        if self.config is None and self.backend in IMPLEMENTATIONS:
            raise ValueError(f"backend must be one of diffusers' attention backends without SSTA, got {self.backend!r}")

    @property
    def all_dense(self) -> bool:
        """Whether SSTA is there and every step dense."""
        return self.config is not None and self.schedule is not None and self.schedule.dense_steps == 1


def dense(pipe: Any) -> Configuration:
    """Exact attention at every step, on the kernels that the dense steps of other configurations run and without masks of S x S tokens."""
    return parse_configuration("dense", pipe)


def parse_configuration(text: str, pipe: Any) -> Configuration:
    """A configuration from what a person writes.

    ``"default"``; ``"dense"``; ``"stock"``, without SSTA; a preset's name, as in ``preset_names``; fields of ``SSTAConfig`` and of
    ``Schedule`` that differ from the default, such as ``"density=0.2,tile_thw=4x8x8,dense_steps=0.1,dense_layers=0;-1"``; or a name and
    then the fields that differ from it, such as ``"fast,dense_steps=0"``. After all this ``"@backend"`` is ``Configuration.backend``:
    ``"dense@_native_cudnn"``. Fields of ``SSTAConfig`` change a configuration as they do as keywords of ``apply_ssta``.

    Raises:
        ValueError: an unknown name, field or backend, or a value that the field does not take.
    """
    family = family_of(transformers_of(pipe)[0][1])
    first, parts, backend = _read(text, preset_names(family))
    if first == "stock":
        return Configuration(text, None, backend=backend)
    config, schedule = _settings(family, first)
    changes: dict[str, dict[str, Any]] = {"config": {}, "schedule": {}}
    for name, value in parts:
        changes["config" if name in _CONFIG_FIELDS else "schedule"][name] = _value(name, value)
    try:
        config = changed(config, **changes["config"])
        return Configuration(text, config, replace(schedule, **changes["schedule"]), backend)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: {error}") from None


def check_names(text: str) -> None:
    """That some model takes a configuration of these names, which can be told before a pipeline is loaded; ``parse_configuration`` knows
    which presets its model has, and reads the values.

    Raises:
        ValueError: a name that is no preset of any model, or no field, or a field without a value.
    """
    _read(text, (*PRESETS, *OWN_PRESETS))


def _read(text: str, presets: Sequence[str]) -> tuple[str, list[tuple[str, str]], str | None]:
    """(name, (field, value) of all that differs from it, backend) of a configuration as a person writes it."""
    known = (*_NAMES, *presets)
    what, _, backend = (piece.strip() for piece in text.partition("@"))
    if "@" in text and not backend:
        raise ValueError(f"a configuration must have a backend after @, got {text!r}")
    first, *parts = (part.strip() for part in what.split(","))
    if "=" in first:
        first, parts = "default", [first, *parts]
    if first not in known or first == "stock" and parts:
        raise ValueError(_wanted(known, first))
    pairs = []
    for part in parts:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _CONFIG_FIELDS | _SCHEDULE_FIELDS or not value:
            raise ValueError(_wanted(known, part))
        pairs.append((name, value))
    return first, pairs, backend or None


def _settings(family: Family, name: str) -> tuple[SSTAConfig, Schedule]:
    if name == "default":
        return family.default_config(), family.default_schedule()
    if name == "dense":
        return family.default_config(), Schedule(dense_steps=1.0)
    return preset_settings(family, name)


def _wanted(known: tuple[str, ...], got: str) -> str:
    return (f"a configuration must be {', '.join(map(repr, known))} or fields such as topk=16 of "
            f"{', '.join(sorted(_CONFIG_FIELDS | _SCHEDULE_FIELDS))}, got {got!r}")


def _value(name: str, text: str) -> object:
    if text == "None":
        return None
    if name in _OWN:
        return tuple(int(part) if part.isdecimal() else part for part in text.split("x"))
    if name == "densities":
        return tuple(float(part) for part in text.split(";"))
    if name == "dense_layers":
        return tuple(int(part) if part.lstrip("-").isdecimal() else part for part in text.split(";"))
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@contextmanager
def running(pipe: Any, configuration: Configuration) -> Iterator[SSTAHandle | None]:
    """The pipeline with the configuration, until the end of the ``with``; gives the handle of ``apply_ssta``, None without SSTA."""
    with ExitStack() as stack:
        impl, backend = "auto", configuration.backend
        if backend in IMPLEMENTATIONS:
            impl = backend
        elif backend is not None:
            # diffusers' set_attention_backend, without what it leaves behind in the process.
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
