"""Records: an Evaluation as JSON that others can append theirs to, one file for each model; docs/evaluation.md documents every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .folder import SCHEMA
from .measurement import Clip, Measurement, measurement_of, plain, read_json, write_json
from .table import METRICS, Evaluation

# A run is recognised by these settings. Runs that differ in any of them are listed beside each other.
_IDENTITY = ("pipeline", "transformers", "dtype", "device", "versions", "call", "reference")
_MEANS = (*METRICS, "speed_up", "density")


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """One run: its settings, every clip with what each configuration gave for it, and means and paired differences with their spread."""
    clips: dict[Clip, dict[str, Any]] = {}
    for name, found in evaluation.measurements.items():
        for clip, measured in found.items():
            clips.setdefault(clip, {})[name] = _without_class(measured)
    aggregates = {name: {metric: _without_class(spread) for metric in _MEANS if (spread := evaluation.spread(name, metric)) is not None}
                  for name in evaluation.measurements}
    settings = {key: evaluation.settings[key] for key in (*_IDENTITY, "configurations")}
    settings["configurations"] = {name: settings["configurations"][name] for name in evaluation.measurements}
    pairs = [_without_class(pair) | {"difference": _without_class(pair.difference)} for pair in evaluation.pairs()]
    return settings | {"clips": [_without_class(clip) | {"results": results} for clip, results in clips.items()],
                       "aggregates": aggregates, "pairs": pairs}


def _without_class(value: Any) -> dict[str, Any]:
    return {key: item for key, item in plain(value).items() if key != "class"}


def read_records(path: Path, model: str) -> dict[str, Any]:
    """The file of records, or an empty one of this model where there is none yet.

    Raises:
        ValueError: a file that cannot be read, or of another schema or model; names both sides.
    """
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ValueError(f"json must be a file in a folder that exists, got {path}")
        return {"schema": SCHEMA, "model": model, "runs": []}
    found = read_json(path, "json")
    for key, wanted in (("schema", SCHEMA), ("model", model)):
        if found.get(key) != wanted:
            raise ValueError(f"json must be a file of {key} {wanted!r}, got {path} of {key} {found.get(key)!r}")
    if not isinstance(found.get("runs"), list):
        raise ValueError(f"json must hold a list of runs, got {type(found.get('runs')).__name__} in {path}")
    return found


def append_record(path: Path, evaluation: Evaluation) -> None:
    """Adds a run to a file of records. Where the file has one of the same settings, whose configurations of the same name are the same, the
    two become one: clips and configurations that are new are added, those that are not are replaced.

    Raises:
        ValueError: as ``read_records``, or a run in the file that is not as ``record_of`` made it.
        OSError: the file cannot be written.
    """
    found = read_records(path, evaluation.settings["model"])
    record = record_of(evaluation)
    for index, run in enumerate(found["runs"]):
        if _same(run, record):
            try:
                found["runs"][index] = record_of(_joined(run, evaluation))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"json must hold runs as they were written, got runs[{index}] in {path}: {error!r}") from None
            break
    else:
        found["runs"].append(record)
    write_json(path, found)


def _same(run: Any, record: Mapping[str, Any]) -> bool:
    if not isinstance(run, dict) or any(run.get(key) != record[key] for key in _IDENTITY):
        return False
    known = run.get("configurations", {})
    return all(known[name] == configuration for name, configuration in record["configurations"].items() if name in known)


def _joined(run: Mapping[str, Any], evaluation: Evaluation) -> Evaluation:
    """The run with the evaluation's clips and configurations added."""
    measurements: dict[str, dict[Clip, Measurement]] = {name: {} for name in run["configurations"]}
    for clip in run["clips"]:
        key = Clip(clip["prompt"], clip["seed"], clip["image"])
        for name, measured in clip["results"].items():
            measurements[name][key] = measurement_of(measured)
    for name, found in evaluation.measurements.items():
        measurements[name] = measurements.get(name, {}) | dict(found)
    settings = dict(evaluation.settings)
    settings["configurations"] = {**run["configurations"], **settings["configurations"]}
    return Evaluation(settings, measurements)
