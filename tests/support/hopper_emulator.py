"""Runs the Hopper kernels on a CPU: their partitions as threads, their barriers, copies and matrix products in plain torch.

What is asynchronous on the GPU happens here as early or as late as a kernel's barriers and waits allow, so that a wrong phase, a buffer
that is overwritten too soon or read too early, or a deadlock shows. Programs of a cooperative launch run side by side, so that those that
wait for one another in a ring show too, the others one after another. Layouts, registers and fences are beyond it.
"""

import importlib.util
import random
import sys
import threading
import time
from functools import cache
from math import prod
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from unittest import mock

import torch
from hanging import HANG
from triton.language import constexpr

import ssta.kernels

# Triton, what lowers the lists and what counts must be the real ones, so they are imported before anything is replaced.
from ssta.kernels.hopper import spin_timeouts  # noqa: F401
from ssta.kernels.lowering import outputs as triton_outputs  # noqa: F401
from ssta.kernels.lowering import primitives as real_primitives
from ssta.kernels.lowering import tma as real_tma

FAR = real_tma.FAR.value
_late = False
_state = threading.Lock()
_local = threading.local()


class Barrier:
    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.turned = threading.Condition(_state)

    def signal(self, arrivals=0, bytes=0):
        with _state:
            self.pending -= arrivals
            self.bytes += bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.turned.notify_all()

    def wait(self, parity):
        with _state:
            assert self.turned.wait_for(lambda: self.phase % 2 != int(parity), HANG), "deadlock"


class Barriers(list):
    @property
    def shape(self):
        return [len(self), 1]

    def index(self, i):
        return self[int(i)]


class Shared:
    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def index(self, i):
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return self.data.clone()

    def store(self, x):
        self.data.copy_(x)


class Pointer:
    def __init__(self, data, offset=0):
        self.data, self.offset = data, offset

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, offset):
        return Pointer(self.data, self.offset + offset)

    def __sub__(self, offset):
        return Pointer(self.data, self.offset - offset)


class Tiles:
    """A tensor descriptor: windows of ``block`` entries of x, zeros beyond its end, nothing written there."""

    def __init__(self, x, shape, strides, block, layout):
        self.x, self.dtype, self.layout, self.block = x, x.dtype, None, block
        self.base, self.block_shape = x, block
        self.block_type = SimpleNamespace(nbytes=prod(block) * x.element_size(), shape=block)

    def window(self, at):
        return self.x[tuple(slice(int(first), int(first) + size) for first, size in zip(at, self.block))]


class Chunks(Tiles):
    """A descriptor of chunks of x, as tma_chunks makes it."""

    def __init__(self, x, rows):
        super().__init__(x, None, None, [1, 1, 1, rows, x.shape[3]], None)

    def window(self, at):
        far, head, end, before, _ = map(int, at)
        size, batch_tokens = FAR - before, real_tma.batch_tokens(self.x)
        assert far == FAR and 0 <= size <= self.block[3]
        batch = (end - 1) // batch_tokens if batch_tokens and size else 0
        end -= batch * batch_tokens
        assert 0 <= end - size and (size == 0 or end <= self.x.shape[2])
        return self.x[batch:batch + 1, head:head + 1, None, end - size:end]


def tma_descriptor(x, rows, columns=None):
    return Tiles(x, x.shape, x.stride(), [1, 1, rows, columns or x.shape[3]], None)


def copy_in(tiles, at, barrier, shared):
    def run():
        window, target = tiles.window(at), shared.data.view(tiles.block)
        target.zero_()
        target[tuple(slice(size) for size in window.shape)] = window
        barrier.signal(bytes=-tiles.block_type.nbytes)

    if _late and random.random() < 0.5:
        # In a thread of its own it may be overtaken by copies that were asked for later.
        threading.Timer(random.random() * 2e-3, run).start()
    else:
        run()


def copy_out(tiles, at, shared):
    window = tiles.window(at)

    def run():
        source = shared.data.view(tiles.block)[tuple(slice(size) for size in window.shape)]
        window.copy_(source)

    _local.stores.append(run)


def store_wait(pending=0):
    for store in _local.stores:
        store()
    _local.stores.clear()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    def run():
        left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
        product = left.float() @ right.float()
        # What it is added to may itself be in flight: products end in order.
        return product + (acc.value if isinstance(acc, SimpleNamespace) else acc) if use_acc else product

    token = SimpleNamespace(run=run, value=None if _late else run())
    _local.products.append(token)
    return token


def warpgroup_mma_wait(pending, deps):
    if _late:
        time.sleep(random.random() * 2e-3)
    while len(_local.products) > pending:
        token = _local.products.pop(0)
        token.value = token.run() if _late else token.value
    # What is still in flight stays a token.
    values = [x.value if isinstance(x, SimpleNamespace) and x.value is not None else x for x in deps]
    return values[0] if len(values) == 1 else values


def warp_specialize(partitions, warps, registers):
    def run(function, arguments):
        _local.products, _local.stores = [], []
        function(*arguments)
        assert not _local.products and not _local.stores, "left without waiting"

    together([(run, partition) for partition in partitions])


def together(calls):
    """Runs (function, arguments) each in a thread of its own; the first error of any is raised."""
    errors = []

    def run(function, arguments):
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.1)
    if errors:
        raise errors[0]


def allocate(dtype, shape, layout, value=None):
    if layout == "barriers":
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype) if value is None else value.clone())


def _pair(function):
    return lambda a, b: function(*(x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b)))


def _where(condition, a, b):
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float32)
    return torch.where(condition, *(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype) for x in (a, b)))


def aggregate(cls):
    def __init__(self, *values):
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    cls.__init__ = __init__
    return cls


def lazy_rescale(row_max, own):
    # Every lane of a row comes to the same.
    top = own.amax(1, keepdim=True).expand_as(own)
    moved = torch.where(top > row_max + 8, top, row_max)
    return moved, torch.exp2(row_max - moved)


def multiply_pairs(x, y):
    return x * y.bfloat16() if x.dtype == torch.bfloat16 else (x.float() * y).to(x.dtype)


def add_words(pointer, x):
    with _state:
        pointer.data[pointer.offset[..., :1] + torch.arange(4)] += x


def put_words(pointer, x, stored):
    if int(stored):
        return add_words(pointer, x)
    with _state:
        pointer.data[pointer.offset[..., :1] + torch.arange(4)] = x


# What each function of ssta.kernels.hopper.inline_asm does; a kernel that imports another does not load here.
INLINE_ASM = dict(
    lazy_rescale=lazy_rescale, rescale_lanes=lambda x, alpha: x * alpha, scheduling_fence=lambda x: x,
    round_pairs=lambda x, dtype: x.to(dtype), multiply_pairs=multiply_pairs,
    add_words=add_words, put_words=put_words, release_fence=lambda: None, wait_for_previous_kernel=lambda: None)


def load(pointer, mask=None, other=None, volatile=False):
    if mask is not None:
        return torch.where(mask, pointer.data[torch.where(mask, pointer.offset, 0)], other)
    if volatile:
        # Someone waits for a change: let those run who may bring it.
        time.sleep(1e-4)
    return pointer.data[int(pointer.offset)].clone()


def store(pointer, x, mask=None):
    if x.dim() == 0:
        pointer.data[int(pointer.offset)] = x
        return
    mask = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    pointer.data[pointer.offset[mask]] = x[mask]


def atomic_add(pointer, x, sem):
    with _state:
        before = pointer.data[int(pointer.offset)].clone()
        pointer.data[int(pointer.offset)] += x
    return before


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, enable_fp_fusion, launch_cooperative_grid=False, launch_pdl=False, **constants):
            device = [Pointer(torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), x.storage_offset()) if
                      isinstance(x, torch.Tensor) else torch.tensor(x) if isinstance(x, int) else x for x in arguments]

            def run(program):
                _local.program, _local.programs = torch.tensor(program), torch.tensor(grid[0])
                self.function(*device, **constants)

            if launch_cooperative_grid:
                together([(run, (program,)) for program in range(grid[0])])
            else:
                for program in range(grid[0]):
                    run(program)
        return launch


def _modules():
    anything = lambda *args, **options: None  # noqa: E731
    language = SimpleNamespace(
        constexpr=lambda x: x, tensor=None, shared_memory_descriptor=None, to_tensor=torch.tensor,
        float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32, int1=torch.bool, int32=torch.int32, int64=torch.int64,
        NVMMADistributedLayout=anything, DistributedLinearLayout=anything, BlockedLayout=anything, SliceLayout=anything,
        DotOperandLayout=anything, SwizzledSharedLayout=anything, NVMMASharedLayout=SharedLayout, static_range=range,
        cast=lambda x, dtype, bitcast: x.view(dtype), program_id=lambda axis: _local.program, num_programs=lambda axis: _local.programs,
        multiple_of=lambda x, factor: x, atomic_add=atomic_add, warp_specialize=warp_specialize, allocate_shared_memory=allocate,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), arange=lambda a, b, layout: torch.arange(a, b),
        full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype), convert_layout=lambda x, layout, assert_trivial=False: x,
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis), sum=lambda x, axis: x.sum(axis), abs=torch.abs,
        exp2=torch.exp2, log2=torch.log2, where=_where,
        maximum=_pair(torch.maximum), minimum=_pair(torch.minimum), load=load, store=store)
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=lambda bar, count: bar.init(count), wait=lambda bar, phase: bar.wait(phase),
        arrive=lambda bar, count: bar.signal(arrivals=count), expect=lambda bar, bytes: bar.signal(arrivals=1, bytes=bytes))
    jit = lambda function=None, **options: Kernel(function) if function else Kernel  # noqa: E731
    gluon = dict(jit=jit, constexpr_function=lambda function: function, language=language)
    tma = SimpleNamespace(store_wait=store_wait, tensor_descriptor=None)
    hopper = dict(fence_async_shared=anything, mbarrier=mbarrier, tma=tma, warpgroup_mma=warpgroup_mma,
                  warpgroup_mma_wait=warpgroup_mma_wait)
    names = dict(aggregate=aggregate, barrier=anything, copy_in=copy_in, copy_out=copy_out)
    # What portable kernels share with them.
    sampled_rows = FunctionType(real_primitives.sampled_rows.fn.__code__, dict(tl=language))
    fakes = {"triton.experimental.gluon": gluon, "ssta.kernels.lowering.primitives": dict(vars(real_primitives), sampled_rows=sampled_rows),
             "triton.experimental.gluon.language.nvidia.hopper": hopper,
             "triton.experimental.gluon.nvidia.hopper": dict(TensorDescriptor=Tiles),
             "ssta.kernels.hopper.gluon_compat": names, "ssta.kernels.hopper.inline_asm": INLINE_ASM,
             "ssta.kernels.lowering.tma": dict(tma_descriptor=tma_descriptor, tma_chunks=Chunks, chunks_ready=lambda x: x,
                                                batch_tokens=real_tma.batch_tokens, FAR=FAR)}
    modules = {}
    for name, members in fakes.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(members)
    modules["triton.experimental"] = ModuleType("triton.experimental")
    modules["triton.experimental"].gluon = modules["triton.experimental.gluon"]
    return modules


class SharedLayout:
    def __init__(self, **options):
        pass

    @staticmethod
    def get_default_for(shape, dtype):
        return None


def module(name):
    """``ssta.kernels.hopper.<name>``, run by what stands above."""
    return _loaded()[name]


@cache
def _loaded():
    modules = {}
    with mock.patch.dict(sys.modules, _modules()):
        for part in ("primitives", "softmax", "forward_load", "forward_mainloop", "forward", "backward_iterator", "backward_smem",
                     "backward_partitions", "backward", "estimate_merge"):
            path = Path(ssta.kernels.__file__).with_name("hopper") / f"{part}.py"
            spec = importlib.util.spec_from_file_location(f"ssta.kernels.hopper.{part}", path)
            modules[part] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[part])
            for name, value in list(vars(modules[part]).items()):
                if isinstance(value, constexpr):
                    setattr(modules[part], name, value.value)
    return modules


def run(name, *arguments, late: bool, function: str | None = None, **options):
    """``function``, or ``hopper_<name>``, of the module ``name``; ``late``: everything asynchronous happens as late as it may."""
    global _late
    _late = late
    return getattr(module(name), function or f"hopper_{name}")(*arguments, **options)
