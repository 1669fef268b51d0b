"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back; other programs have a module each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .families import PLACES

if TYPE_CHECKING:
    from .apply import SSTAHandle, apply_ssta, remove_ssta
    from .context import ModelContext
    from .family import Family, Site, register_family, stack_sites, supported_models
    from .parallel import cp_plan
    from .processor import SSTAProcessor
    from .report import LayerRun, RunReport
    from .schedule.schedule import Schedule
    from .sparse_checkpoints import apply_sla, apply_vsa
    from .split import Split
    from .training import Ramp, Velocities, frozen_checkpoint, set_density, teacher_student

__all__ = [
    "Family", "LayerRun", "ModelContext", "Ramp", "RunReport", "SSTAHandle", "SSTAProcessor", "Schedule", "Site", "Split", "Velocities",
    "apply_sla", "apply_ssta", "apply_vsa", "cp_plan", "frozen_checkpoint", "register_family", "remove_ssta", "set_density", "stack_sites",
    "supported_models", "teacher_student",
]

# Loaded when first asked for: ComfyUI's users, who come in through .comfy, need not have diffusers.
_MODULES = {
    "Family": "family", "LayerRun": "report", "ModelContext": "context", "RunReport": "report", "SSTAHandle": "apply",
    "SSTAProcessor": "processor", "Schedule": "schedule.schedule", "Site": "family", "Split": "split", "apply_sla": "sparse_checkpoints",
    "apply_ssta": "apply", "apply_vsa": "sparse_checkpoints", "cp_plan": "parallel", "register_family": "family", "remove_ssta": "apply",
    "stack_sites": "family", "supported_models": "family",
    **dict.fromkeys(("Ramp", "Velocities", "frozen_checkpoint", "set_density", "teacher_student"), "training"),
}
# The families themselves, WAN and so on, are taken by name; `import *` leaves them out, for it would import all of their models.
_NAMED = {place.partition(":")[2]: (place, model) for model, place in PLACES.items()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name in _NAMED:
        return import_module(".family", __name__).imported(*_NAMED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_NAMED})
