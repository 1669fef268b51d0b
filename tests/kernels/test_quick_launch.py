"""Launches by address pass what Triton's launches pass, and only where nothing else is compiled."""

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
from ssta.kernels.lowering.quick_launch import FUSED, Direct, Tiles, launcher_known
from ssta.kernels.memo import Kept
from ssta.kernels.portable.config import LaunchConfig


class Recorder:
    """Stands for a kernel and for what it compiles to; keeps what it was launched with."""

    def __init__(self, compiled=None):
        self.compiled, self.launches = compiled, []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((grid, arguments, options))
            return self.compiled
        return launch


@pytest.fixture(autouse=True)
def stream_7(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(driver, "_active", active)


GRID = (3, 2, 1)


def test_a_launch_with_tensors_is_tritons():
    """And so is every one in Triton's interpreter, which compiles nothing."""
    kernel = Recorder(None)
    plan = Plan(torch.device("cpu"), [torch.zeros(8)])
    x, = plan.inputs
    plan.launch(kernel, GRID, (x, None), (5, 0.5), dict(SIZE=64), dict(num_warps=4), (Tiles(x, lambda x: "tiles"),))
    plan, x = Planned(plan), torch.zeros(8)
    for _ in range(2):
        plan(x)
    assert plan.by_address is None
    for grid, (tiles, given, *rest), options in kernel.launches:
        assert (grid, tiles, rest, options) == (GRID, "tiles", [None, 5, 0.5], dict(SIZE=64, num_warps=4, **FUSED))
        assert given.data_ptr() == x.data_ptr()
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "3.10.0rc1", "4.0.0"])
def test_under_a_version_that_is_not_checked_every_launch_is_tritons(version, monkeypatch):
    assert Direct.of(WithoutDescriptors(print), 0) is not None
    monkeypatch.setattr("triton.__version__", version)
    assert Direct.of(WithoutDescriptors(print), 0) is None


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
    plan.launch(Recorder(compiled), GRID, (p, None), (9, 0.5), dict(SIZE=64), {}, tiles)
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


def test_without_descriptors_too():
    calls = []
    compiled = WithoutDescriptors(lambda *arguments: calls.append(flat(arguments)))
    plan = Plan(torch.device("cpu"), [torch.zeros(8)])
    plan.launch(Recorder(compiled), GRID, (*plan.inputs, None), (9, 0.5), dict(SIZE=64))
    plan, p = Planned(plan), torch.zeros(8)
    for _ in range(2):
        plan(p)
    compiled[GRID](p.data_ptr(), 0, 9, 0.5, 64)
    assert len(calls) == 2 and calls[0] == calls[1]


def test_launch_hooks_are_called_at_every_launch(monkeypatch):
    """By Triton, which then launches."""
    calls, kernel = [], Recorder(WithoutDescriptors(lambda *arguments: calls.append(arguments)))
    plan = Plan(torch.device("cpu"), [torch.zeros(8)])
    plan.launch(kernel, GRID, (*plan.inputs, None), (9, 0.5), dict(SIZE=64))
    plan = Planned(plan)
    plan(torch.zeros(8))
    for hooks in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(knobs.runtime, hooks), "calls", [print])
            for _ in range(2):
                plan(torch.zeros(8))
    assert len(kernel.launches) == 5 and not calls


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


def test_a_kernel_that_wants_memory_of_its_own_is_launched_by_triton():
    assert Direct.of(Compiled(print, scratch=16), 2) is None and Direct.of(Compiled(print), 2) is not None


def test_tensors_at_odd_addresses_are_launched_by_triton():
    """It takes multiples of 16 bytes for granted where it has seen them."""
    calls, kernel = [], Recorder(WithoutDescriptors(lambda *arguments: calls.append(arguments)))
    plan = Plan(torch.device("cpu"), [torch.zeros(8)])
    plan.launch(kernel, GRID, (*plan.inputs, None), (9, 0.5), dict(SIZE=64))
    plan, (even, odd) = Planned(plan), (torch.zeros(8), torch.zeros(9)[1:])
    for x in (odd, even, odd, even):
        plan(x)
    assert [arguments[0].data_ptr() for _, arguments, _ in kernel.launches] == [x.data_ptr() for x in (odd, even, odd)] and len(calls) == 1


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
