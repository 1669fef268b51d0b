"""Common ground of all tests: fixed seeds, uninitialised memory that shows, Triton's interpreter where there is no GPU."""

import gc
import os

import hypothesis
import pytest
import torch
from quick_interpreter import quicken
from uninitialised import poison_free_memory, poisoned

GPU = torch.cuda.is_available()
if not GPU:
    # Triton reads it when it is first imported, which torch does not do by itself.
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()


# A device as a context knows the functions that make tensors by what they are when it first meets one: the true ones.
with torch.device("cpu"):
    torch.zeros(())


class _TorchRandom:
    """torch's generator in the form that hypothesis seeds before every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis keeps only a weak reference.
_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)
# No deadline: the first call of a kernel compiles, and the interpreter is slow. No database: a run depends on the code alone.
hypothesis.settings.register_profile("ssta", derandomize=True, deadline=None, database=None, max_examples=30)
hypothesis.settings.load_profile("ssta")


def pytest_collection_modifyitems(items):
    if GPU:
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


def pytest_collection_finish():
    """What imports and collection made stays: hundreds of thousands of objects, which every gc.collect() would walk through. Tracing makes
    as many again, which are looked through less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan(monkeypatch):
    """Every floating tensor that is made without a value starts as NaN, so that what a kernel forgets to write is seen."""
    for owner, name, replacement in poisoned():
        monkeypatch.setattr(owner, name, replacement)


@pytest.fixture(autouse=True)
def _free_memory_of_a_gpu_is_nan(request):
    """The same for memory that tests before this one have freed."""
    if GPU and request.node.get_closest_marker("gpu"):
        poison_free_memory()
