"""The launcher: Triton launches once for a kind of arguments, then the compiled kernel does, and no kind takes another's place."""

import inspect
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from backend_rows import DEVICE, GPU
from launches import launches
from triton import knobs

from ssta import SSTAConfig, TokenLayout, ssta_attention
from ssta.kernels import BlockLists, block_sparse_attention, launch
from ssta.kernels.launch import FUSED

GRID = (3, 2, 1)


class Pair(NamedTuple):
    x: torch.Tensor | None
    size: int


class Recorder:
    """Stands for a kernel: notes its launches in ``calls``, and those of its compiled kernel in ``later``."""

    def __init__(self, compiles=True):
        self.compiled, self.calls, self.later = SimpleNamespace() if compiles else None, [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return None if self.compiled is None else Compiled(self.later)

        return run


class Compiled:
    def __init__(self, later):
        self.later = later

    def __getitem__(self, grid):
        return lambda *arguments: self.later.append((grid, arguments))


def descriptor(x, rows):
    return SimpleNamespace(base=x, block_shape=[rows, x.shape[1]], layout=None)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})


def test_the_second_launch_of_a_kind_is_the_compiled_kernels():
    kernel, x, tiles = Recorder(), torch.zeros(8), descriptor(torch.zeros(4, 4), 2)
    for grid in (GRID, (7, 1, 1)):
        launch.launch(kernel, grid, (x, None), (5, 0.5), dict(SIZE=64), dict(num_warps=4), (tiles,))
    assert kernel.calls == [(GRID, (tiles, x, None, 5, 0.5), dict(SIZE=64, num_warps=4, **FUSED))]
    assert kernel.later == [((7, 1, 1), (tiles, x, None, 5, 0.5, 64))]


FLOATS, TILES = torch.zeros(12), torch.zeros(8, 4)
USUAL = dict(tensors=(FLOATS, Pair(FLOATS, 4)), numbers=(5, 0.5), constants=dict(SIZE=64), options=dict(num_warps=4),
             descriptors=(descriptor(TILES, 2),))


@pytest.mark.parametrize("other", [
    dict(tensors=(FLOATS.half(), Pair(FLOATS, 4))), dict(tensors=(FLOATS[1:], Pair(FLOATS, 4))), dict(tensors=(None, Pair(FLOATS, 4))),
    dict(tensors=(FLOATS, Pair(FLOATS.int(), 4))), dict(tensors=(FLOATS, Pair(FLOATS[1:], 4))), dict(tensors=(FLOATS, Pair(None, 4))),
    dict(tensors=(FLOATS, Pair(FLOATS, 1))), dict(tensors=(torch.nn.Parameter(FLOATS[1:]), Pair(FLOATS, 4))),
    dict(numbers=(1, 0.5)), dict(numbers=(16, 0.5)), dict(numbers=(5.0, 0.5)), dict(numbers=(1 << 40, 0.5)), dict(constants=dict(SIZE=128)),
    dict(options=dict(num_warps=8)), dict(options=None), dict(descriptors=(descriptor(TILES, 4),)),
    dict(descriptors=(descriptor(TILES.half(), 2),)), dict(descriptors=(None,))], ids=lambda other: next(iter(other)))
def test_triton_looks_at_every_kind_once(other):
    """Dtypes, alignment, absent tensors, numbers, constants, options and tiles each make a kind of their own."""
    kernel = Recorder()
    for of in (USUAL, USUAL | other, USUAL, USUAL | other):
        launch.launch(kernel, GRID, **of)
    assert len(kernel.calls) == 2 and len(kernel.later) == 2


def test_each_odd_address_counts():
    kernel, odd = Recorder(), FLOATS[1:]
    for tensors in ((FLOATS, odd), (odd, FLOATS), (odd, odd), (FLOATS, FLOATS), (FLOATS[2:], odd), (FLOATS, odd)):
        launch.launch(kernel, GRID, tensors, (5,), dict(SIZE=64))
    assert len(kernel.calls) == 5 and len(kernel.later) == 1


def test_another_tensor_of_a_kind_is_no_new_one():
    kernel = Recorder()
    for _ in range(3):
        launch.launch(kernel, GRID, **USUAL | dict(tensors=(torch.zeros(20), Pair(torch.zeros(4), 4))))
    assert len(kernel.calls) == 1


def test_a_kernel_that_is_gone_leaves_its_number_to_none():
    """Kinds are told apart by the kernel's own number, which Python gives to a later object once it is gone."""
    numbers = set()
    for _ in range(20):
        kernel = Recorder()
        numbers.add(id(kernel))
        launch.launch(kernel, GRID, **USUAL)
        assert len(kernel.calls) == 1
        del kernel
    assert len(numbers) == 20


@pytest.mark.parametrize("where", ["interpreter", "amd"])
def test_where_every_launch_is_tritons(where, monkeypatch):
    """Its interpreter compiles nothing, and on AMD's GPUs it looks at more than is asked here."""
    kernel = Recorder(where != "interpreter")
    if where == "amd":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    for _ in range(3):
        launch.launch(kernel, GRID, **USUAL)
    assert len(kernel.calls) == 3 and not kernel.later


def test_triton_gives_a_compiled_kernels_launcher_all_that_it_is_called_with():
    """On the current stream and with the hooks of launches, under every version that is supported (``make compat``)."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    seen, compiled = [], CompiledKernel.__new__(CompiledKernel)
    vars(compiled).update(module=1, function=5, packed_metadata=(4,), metadata=None, src=None, name="kernel",
                          _run=lambda *arguments: seen.append(arguments))
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    with mock.patch.object(driver, "_active", active):
        compiled[GRID](1, 2.0, None)
    (*grid, stream, function, metadata, _, enter, leave), arguments = seen[0][:9], seen[0][9:]
    assert (grid, stream, function, metadata, arguments) == ([*GRID], 7, 5, (4,), (1, 2.0, None))
    assert enter is knobs.runtime.launch_enter_hook and leave is knobs.runtime.launch_exit_hook


@triton.jit
def _scaled(x, out, number, factor, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place, mask=place < number, other=0.0) * factor, mask=place < number)


def test_kinds_in_turn_give_what_they_give_alone():
    """By alignment, by numbers that Triton specialises on and by dtype, on a GPU by the compiled kernels: no kind takes another's place."""
    given = torch.randn(200, device=DEVICE)
    for _ in range(3):
        for start, number, dtype in ((0, 16, torch.float32), (1, 16, torch.float32), (0, 1, torch.float32), (3, 48, torch.float16),
                                     (0, 37, torch.float16), (0, 64, torch.float32)):
            x = given.to(dtype)[start:]
            out = torch.zeros(64, dtype=dtype, device=DEVICE)
            launch.launch(_scaled, (1, 1, 1), (x, out), (number, 0.5), dict(SIZE=64), dict(num_warps=1))
            assert torch.equal(out[:number], x[:number] * 0.5) and not out[number:].any()
    assert len(launch._compiled) == (6 if GPU else 0)


@pytest.mark.gpu
def test_on_a_gpu_hooks_see_every_launch_on_its_own_stream():
    x, out, seen = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda"), []

    def hook(metadata):
        seen.append(metadata.get()["stream"])

    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for stream in streams:
            with torch.cuda.stream(stream):
                launch.launch(_scaled, (1, 1, 1), (x, out), (64, 0.5), dict(SIZE=64), dict(num_warps=1))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == [stream.cuda_stream for stream in streams]


@pytest.mark.skipif(GPU, reason="there is a GPU, so Triton's interpreter is off")
def test_every_launch_gives_all_arguments():
    """Constants too, because a compiled kernel takes them by place. ``make compile`` looks at Hopper's kernels."""
    layout = TokenLayout.video_text((2, 4, 4), 3)
    q, k, v = (torch.randn(1, 2, layout.length, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    config = SSTAConfig(tile_thw=(2, 2, 2), density=0.4, compensation="linear", compensation_parts=2)
    with launches() as seen:
        ssta_attention(q, k, v, layout, config, impl="triton").sum().backward()
        block_sparse_attention(q, k, v, BlockLists.from_mask(torch.ones(3, 3, dtype=torch.bool), 16, 16), impl="triton").sum().backward()
    assert len(seen) > 20
    for kernel, _, tensors, numbers, constants, *rest in seen:
        descriptors = rest[1] if len(rest) > 1 else ()
        names = list(inspect.signature(kernel.fn).parameters)
        assert len(descriptors) + len(tensors) + len(numbers) + len(constants) == len(names), kernel
        assert set(names[-len(constants):]) == set(constants), kernel
