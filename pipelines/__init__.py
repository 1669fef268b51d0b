"""Where it is used: one call makes a diffusers video model attend sparsely, another brings it back."""

from .apply import SSTAHandle, apply_ssta, remove_ssta
from .calibration import Calibration
from .context import ModelContext
from .families import PLACES
from .family import Family, Site, imported, register_family, stack_sites, supported_models
from .processor import SSTAProcessor
from .report import LayerRun, RunReport
from .schedule import Schedule

for _model, _place in PLACES.items():
    register_family(_model, _place)

__all__ = [
    "Calibration", "Family", "LayerRun", "ModelContext", "RunReport", "SSTAHandle", "SSTAProcessor", "Schedule", "Site",
    "apply_ssta", "register_family", "remove_ssta", "stack_sites", "supported_models",
]

# The families themselves, WAN and so on, are taken by name; `import *` leaves them out, for it would import all of their models.
_NAMED = {place.partition(":")[2]: (place, model) for model, place in PLACES.items()}


def __getattr__(name: str) -> Family:
    if name not in _NAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return imported(*_NAMED[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMED})
