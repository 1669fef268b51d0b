"""The modules of an example that is more than one file."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def script(monkeypatch):
    """The modules of the example; accelerate's state is another one each time."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("finetune", "finetune_clips", "finetune_noise")
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    yield SimpleNamespace(**{name.rpartition("_")[2]: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
