"""Launches that skip what an earlier launch has settled take the same arguments, and only where nothing else is compiled."""

import ast
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from triton import knobs
from triton.runtime import driver

import ssta.kernels
from ssta.kernels.lowering import by_address
from ssta.kernels.lowering.plans import Plan, Planned
from ssta.kernels.lowering.quick_launch import FUSED, QuickLaunch, Tiles, fit, launcher_known
from ssta.kernels.memo import Kept
from ssta.kernels.portable.config import LaunchConfig


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
    tiles = Tiles(x, lambda x: "tiles")
    launch(KEY, GRID, (tiles,), (x, None), (5, 0.5), dict(SIZE=64), dict(num_warps=4))
    launch(KEY, GRID, (tiles,), (y, None), (6, 0.5), dict(SIZE=64), dict(num_warps=4))
    assert kernel.launches == [(GRID, ("tiles", x, None, 5, 0.5), dict(SIZE=64, num_warps=4, **FUSED))]
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


def test_what_is_compiled_depends_on_which_pointers_are_aligned():
    """Triton takes multiples of 16 bytes for granted where it has seen them."""
    kernel = Recorder(Recorder())
    launch, (aligned, odd) = QuickLaunch(kernel), (torch.zeros(8), torch.zeros(8)[1:])
    every = (aligned, aligned), (odd, aligned), (aligned, odd), (odd, odd)
    for tensors in (*every, *every):
        launch(KEY, GRID, (), tensors, (5,), {}, {})
    assert [arguments[:2] for _, arguments, _ in kernel.launches] == list(every) and len(kernel.compiled.runs) == 4


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


class Compiled:
    """What Triton compiles a kernel to, with its own launcher for NVIDIA's GPUs around ``called``, which stands for the function in C.

    The kernel takes two descriptors of 2 x 3 tiles and between them one that is None, a pointer, one that is None, an int, a float and a
    constant.
    """

    signature = dict(a="tensordesc<bf16[2, 3]>", absent="constexpr", b="tensordesc<bf16[2, 3]>", p="*fp32", none="constexpr",
                     n="i32", x="fp32", SIZE="constexpr")
    constants = {"absent": None, "none": None, "SIZE": 64}
    function, packed_metadata, swizzles = 5, (4, 1, 1024), (1, 2)

    def __init__(self, called, scratch=0):
        from triton.backends.nvidia import driver as nvidia

        meta = [dict(swizzle=swizzle, elem_size=2, elem_type=10, block_size=[2, 3], fp4_padded=False) for swizzle in self.swizzles]
        self.metadata = SimpleNamespace(
            tensordesc_meta=meta, num_ctas=1, launch_cooperative_grid=True, launch_pdl=False, global_scratch_size=scratch,
            global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, instrumentation_mode="")
        source = SimpleNamespace(constants=self.constants, signature=self.signature,
                                 fn=SimpleNamespace(arg_names=list(self.signature)))
        driver.active.utils = SimpleNamespace(
            launch=called, build_signature_metadata=lambda signature: b"signature", fill_tma_descriptor=self.fill,
            fill_tma_descriptor_tiled=self.fill)
        self.filled = []
        with mock.patch.multiple(nvidia, create=True, library_dirs=list, annotate_arguments=tuple, make_kernel_signature=tuple,
                                 compile_module_from_src=lambda **options: SimpleNamespace(launch=called)):
            self.run = nvidia.CudaLauncher(source, self.metadata)

    def fill(self, *fields):
        self.filled.append(fields)
        return "encoded", fields

    def __getitem__(self, grid):
        return lambda *arguments: self.run(*grid, 7, self.function, self.packed_metadata, None, None, None, *arguments)


def descriptor(x):
    return SimpleNamespace(base=x, shape=list(x.shape), strides=list(x.stride()), padding="zero", round_f32_to_tf32=False)


def twice(tiles):
    return [tiles, None, tiles]


def flat(arguments):
    """A call's arguments, of which a list is as good as a tuple."""
    return [list(x) if isinstance(x, (list, tuple)) else x for x in arguments]


@pytest.fixture
def no_descriptors(monkeypatch):
    monkeypatch.setattr(by_address, "descriptors_known", Kept(5))


def planned(compiled):
    """A plan of one launch of ``compiled``, for two tensors with descriptors and one without."""
    plan = Plan(torch.device("cpu"), [torch.zeros(6, 3, dtype=torch.bfloat16), torch.zeros(6, 3, dtype=torch.bfloat16), torch.zeros(8)])
    first, second, p = plan.inputs
    tiles = [Tiles(first, descriptor), None, Tiles(second, descriptor)]
    plan.launch(QuickLaunch(Recorder(compiled)), KEY, GRID, tiles, (p, None), (9, 0.5), dict(SIZE=64), {})
    return Planned(plan)


def test_the_function_in_c_gets_what_tritons_launcher_gives_it(no_descriptors):
    """Under every version that is supported (``make compat``)."""
    calls = []
    compiled = Compiled(lambda *arguments: calls.append(flat(arguments)))
    plan, p = planned(compiled), torch.zeros(8)
    first, second, third = (torch.zeros(6, 3, dtype=torch.bfloat16) for _ in range(3))
    for x in (first, second, third, second):
        plan(x, first, p)
    assert len(calls) == 3
    for x, call in zip((second, third, second), calls.copy()):
        compiled[GRID](descriptor(x), None, descriptor(first), p.data_ptr(), 0, 9, 0.5, 64)
        assert call == calls[-1]


class WithoutDescriptors(Compiled):
    signature = {name: kind for name, kind in Compiled.signature.items() if name not in ("a", "absent", "b")}
    constants, swizzles = {"none": None, "SIZE": 64}, ()


def test_without_descriptors_no_plan_is_needed_for_that():
    calls = []
    compiled, p = WithoutDescriptors(lambda *arguments: calls.append(flat(arguments))), torch.zeros(8)
    launch = QuickLaunch(Recorder(compiled))
    for _ in range(2):
        launch(KEY, GRID, (), (p, None), (9, 0.5), dict(SIZE=64), {})
    assert len(calls) == 1 and launch.direct(KEY, (p.data_ptr(), 0)) is not None
    compiled[GRID](p.data_ptr(), 0, 9, 0.5, 64)
    assert calls[0] == calls[1]


def test_a_descriptor_is_encoded_once_for_an_address(no_descriptors):
    compiled, p = Compiled(lambda *arguments: None), torch.zeros(8)
    plan = planned(compiled)
    x, y = torch.zeros(6, 3, dtype=torch.bfloat16), torch.zeros(6, 3, dtype=torch.bfloat16)

    def run(a, b):
        plan(a, b, p)
        return len(compiled.filled)

    assert [run(x, y), run(x, y), run(x, y), run(y, x), run(x, y)] == [0, 2, 2, 4, 4]
    assert {fields[1] for fields in compiled.filled} == {1, 2}


def test_descriptors_that_are_kept_are_bounded(no_descriptors):
    plan, kept = planned(Compiled(lambda *arguments: None)), []
    for _ in range(9):
        kept.append([torch.zeros(6, 3, dtype=torch.bfloat16) for _ in range(2)])
        plan(*kept[-1], torch.zeros(8))
    assert len(by_address.descriptors_known) == 5


def test_a_kernel_that_wants_memory_of_its_own_is_launched_by_triton(monkeypatch):
    calls = []
    compiled = Compiled(lambda *arguments: calls.append(arguments), scratch=16)
    launch = QuickLaunch(Recorder(compiled))
    from triton.runtime import _allocation
    asked = []
    monkeypatch.setattr(_allocation, "_allocator", SimpleNamespace(get=lambda: lambda *size: asked.append(size)))
    for _ in range(3):
        launch(KEY, GRID, twice(Tiles(torch.zeros(6, 3), descriptor)), (None, None), (9, 0.5), dict(SIZE=64), {})
    assert len(calls) == len(asked) == 2


def test_every_launch_asks_for_products_and_sums_in_one_instruction():
    """From Triton 3.10 on they are two where nobody asks, and Triton 3.9 warns of that."""
    folder = Path(ssta.kernels.__file__).parent
    launches = [ast.unparse(node) for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "kernel" in ast.unparse(node.func.value)]
    assert len(launches) > 10
    # The tail's backward, whose options come by name.
    given = ("**FUSED", ".options()", "**launches[")
    assert [launch for launch in launches if not any(word in launch for word in given)] == []
    assert LaunchConfig(64, 64, 4, 2).options()["enable_fp_fusion"]
