"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back.

patch/ puts SSTA into a model and takes it out, schedule/ says which steps and layers stay dense, ranks/ shares a forward among GPUs,
families/ has one file a model, training/ teaches a model its tiles, plugs/ serves other programs, and evaluation/ measures what a
configuration does to videos.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .families import PLACES

# Type checkers read these imports. At run time a name is imported when it is first asked for, because plugs/ works without diffusers.
if TYPE_CHECKING:
    from .families.trained.sparse_checkpoints import apply_sla as apply_sla
    from .families.trained.sparse_checkpoints import apply_vsa as apply_vsa
    from .patch.apply import SSTAHandle as SSTAHandle
    from .patch.apply import apply_ssta as apply_ssta
    from .patch.apply import remove_ssta as remove_ssta
    from .patch.context import ModelContext as ModelContext
    from .patch.processor import SSTAProcessor as SSTAProcessor
    from .patch.register import cp_plan as cp_plan
    from .patch.register import register_family as register_family
    from .patch.register import supported_models as supported_models
    from .patch.register import unregister_family as unregister_family
    from .patch.report import LayerRun as LayerRun
    from .patch.report import RunReport as RunReport
    from .schedule.schedule import Schedule as Schedule
    from .terms import Family as Family
    from .terms import Site as Site
    from .terms import Split as Split
    from .terms import stack_sites as stack_sites
    from .training.training import Ramp as Ramp
    from .training.training import Velocities as Velocities
    from .training.training import frozen_checkpoint as frozen_checkpoint
    from .training.training import set_density as set_density
    from .training.training import teacher_student as teacher_student

# The public names of each module.
_PUBLIC = {
    ".families.trained.sparse_checkpoints": ("apply_sla", "apply_vsa"),
    ".patch.apply": ("SSTAHandle", "apply_ssta", "remove_ssta"),
    ".patch.context": ("ModelContext",),
    ".patch.processor": ("SSTAProcessor",),
    ".patch.register": ("cp_plan", "register_family", "supported_models", "unregister_family"),
    ".patch.report": ("LayerRun", "RunReport"),
    ".schedule.schedule": ("Schedule",),
    ".terms": ("Family", "Site", "Split", "stack_sites"),
    ".training.training": ("Ramp", "Velocities", "frozen_checkpoint", "set_density", "teacher_student"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULES)
# The families themselves, WAN and so on, are taken by name; `import *` leaves them out, for it would import all of their models.
_NAMED = {place.partition(":")[2]: (place, model) for model, place in PLACES.items()}


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name], __name__), name)
        if name in _NAMED:
            return import_module(".patch.register", __name__).imported(*_NAMED[name])
    except ModuleNotFoundError:
        require_diffusers(f"{__name__}.{name}")
        raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require_diffusers(name: str) -> None:
    """ImportError, which says how diffusers is installed for ``name``, where it is not."""
    try:
        import diffusers  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "diffusers":
            raise ImportError(f"{name} needs diffusers 0.42, which is not installed: pip install 'diffusers==0.42.*' transformers "
                              "accelerate") from error
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_NAMED})
