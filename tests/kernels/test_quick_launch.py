"""Launches that skip what an earlier launch has settled take the same arguments, and only where nothing else is compiled."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.runtime import driver

from ssta.kernels.lowering.quick_launch import QuickLaunch, fit, launcher_known


class Recorder:
    """Stands for a kernel and for what it compiles to; keeps what it was launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, compiled=None):
        self.compiled, self.launches, self.runs = compiled, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return self.compiled
        return launch

    def run(self, *arguments):
        self.runs.append(arguments)


@pytest.fixture(autouse=True)
def stream_7(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(driver, "_active", active)


GRID, KEY = (3, 2, 1), ("cuda:0", torch.bfloat16)


def test_the_second_launch_passes_by_the_compiler():
    compiled = Recorder()
    kernel = Recorder(compiled)
    launch = QuickLaunch(kernel)
    x, y = torch.zeros(8), torch.ones(8)
    launch(KEY, GRID, ("tiles",), (x, None), (5, 0.5), dict(SIZE=64), dict(num_warps=4))
    launch(KEY, GRID, ("tiles",), (y, None), (6, 0.5), dict(SIZE=64), dict(num_warps=4))
    assert kernel.launches == [(GRID, ("tiles", x, None, 5, 0.5), dict(SIZE=64, num_warps=4))]
    assert compiled.runs == [(*GRID, 7, "function", "metadata", None, None, None, "tiles", y.data_ptr(), 0, 6, 0.5, 64)]


def test_launch_hooks_are_called_at_every_launch(monkeypatch):
    """By Triton, which then launches."""
    compiled = Recorder()
    launch = QuickLaunch(Recorder(compiled))
    for hooks in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(knobs.runtime, hooks), "calls", [print])
            for _ in range(2):
                launch(KEY, GRID, (), (torch.zeros(8),), (5,), {}, {})
    assert len(compiled.launches) == 3 and not compiled.runs


def test_for_unaligned_pointers_triton_is_asked():
    compiled = Recorder()
    kernel = Recorder(compiled)
    launch = QuickLaunch(kernel)
    for _ in range(2):
        launch(KEY, GRID, (), (torch.zeros(8)[1:],), (5,), {}, {})
    launch(KEY, GRID, (), (torch.zeros(8),), (5,), {}, {})
    assert len(kernel.launches) == 3 and not compiled.runs


def test_numbers_of_64_bits_are_told_apart():
    assert fit((5, -1)) == fit(((1 << 31) - 1,)) and len({fit(x) for x in ((5, 6), (5, 1 << 31), (1 << 31, 5))}) == 3


def test_another_key_is_another_kernel():
    kernel = Recorder(Recorder())
    launch = QuickLaunch(kernel)
    for key in ("cuda:0", "cuda:1"):
        launch((key,), GRID, (), (torch.zeros(8),), (5,), {}, {})
    assert len(kernel.launches) == 2


def test_triton_interpreter_is_always_asked():
    kernel = Recorder(None)
    launch = QuickLaunch(kernel)
    for _ in range(2):
        launch(KEY, GRID, (), (torch.zeros(8),), (5,), {}, {})
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "3.10.0rc1", "4.0.0"])
def test_under_a_version_that_is_not_checked_every_launch_is_a_plain_one(version, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    compiled = Recorder()
    kernel = Recorder(compiled)
    launch = QuickLaunch(kernel)
    for _ in range(3):
        launch(KEY, GRID, (), (torch.zeros(8),), (5,), {}, {})
    assert len(kernel.launches) == 3 and not compiled.runs and not compiled.launches


def test_versions_whose_launchers_are_known():
    assert all(map(launcher_known, ("3.6.0", "3.7.1", "3.8.0+git12ab", "3.9.0")))
    assert not any(map(launcher_known, ("3.5.1", "3.10.0", "4.6.0", "2.7.0")))
