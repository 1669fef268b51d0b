"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back.

patch/ puts SSTA into a model and takes it out, schedule/ says which steps and layers stay dense, ranks/ shares a forward among GPUs,
families/ has one file a model, training/ teaches a model its tiles, plugs/ serves other programs, and evaluation/ measures what a
configuration does to videos.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .families import PLACES

# Every public name, once. Type checkers read these imports; at run time a name is imported when it is first asked for, because what plugs/
# serves need not have diffusers.
if TYPE_CHECKING:
    from .families.trained.sparse_checkpoints import apply_sla as apply_sla
    from .families.trained.sparse_checkpoints import apply_vsa as apply_vsa
    from .patch.apply import SSTAHandle as SSTAHandle
    from .patch.apply import apply_ssta as apply_ssta
    from .patch.apply import remove_ssta as remove_ssta
    from .patch.context import ModelContext as ModelContext
    from .patch.family import Family as Family
    from .patch.family import Site as Site
    from .patch.family import register_family as register_family
    from .patch.family import stack_sites as stack_sites
    from .patch.family import supported_models as supported_models
    from .patch.family import unregister_family as unregister_family
    from .patch.processor import SSTAProcessor as SSTAProcessor
    from .patch.report import LayerRun as LayerRun
    from .patch.report import RunReport as RunReport
    from .ranks.parallel import cp_plan as cp_plan
    from .ranks.split import Split as Split
    from .schedule.schedule import Schedule as Schedule
    from .training.training import Ramp as Ramp
    from .training.training import Velocities as Velocities
    from .training.training import frozen_checkpoint as frozen_checkpoint
    from .training.training import set_density as set_density
    from .training.training import teacher_student as teacher_student


def _public() -> dict[str, str]:
    """The module of each public name: what this file imports `as` itself."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(sys.modules[__name__]))) if isinstance(node, ast.ImportFrom)]
    return {alias.name: f".{node.module}" for node in imports for alias in node.names if alias.asname == alias.name}


_MODULES = _public()
__all__ = sorted(_MODULES)
# The families themselves, WAN and so on, are taken by name; `import *` leaves them out, for it would import all of their models.
_NAMED = {place.partition(":")[2]: (place, model) for model, place in PLACES.items()}


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name], __name__), name)
        if name in _NAMED:
            return import_module(".patch.family", __name__).imported(*_NAMED[name])
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
