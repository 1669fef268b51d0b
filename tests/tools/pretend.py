"""GPUs that are not there: the package's own launch code runs on CPU tensors, and what it would launch is compiled and kept, not run.

Signatures, constants, alignment and launch configurations are thus what a call really leads to. Only for a process of its own: ``install``
takes the place of Triton's driver and of what the package asks a GPU. TRITON_INTERPRET must not be set, because the interpreter takes the
compiler's place.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
# What assemblers call products on tensor cores.
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA")
# A tensor in shared memory that loads are written to ahead, tiles of it one behind the other.
BUFFER = re.compile(r"local_alloc[^\n]*?: \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:\d+x)*b?f16")

BARRIERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)+i64")


class Card(NamedTuple):
    """A kind of GPU: NVIDIA's by its compute capability, AMD's by the name of its instructions."""

    architecture: int | str
    shared_memory: int   # bytes, of one program
    multiprocessors: int
    products: str        # as ``DeviceLimits`` has it

    @property
    def amd(self) -> bool:
        return isinstance(self.architecture, str)

    @property
    def tma(self) -> bool:
        return not isinstance(self.architecture, str) and self.architecture >= 90

    def __str__(self) -> str:
        return self.architecture if isinstance(self.architecture, str) else f"sm_{self.architecture}"


CARDS = {card.architecture: card for card in (
    Card(80, 163 << 10, 108, "mma"), Card(89, 99 << 10, 128, "mma"), Card(90, 227 << 10, 132, "wgmma"),
    Card(100, 227 << 10, 148, "tcgen05"), Card(120, 99 << 10, 170, "mma"),
    # MI300X and MI350X.
    Card("gfx942", 64 << 10, 304, "mma"), Card("gfx950", 160 << 10, 256, "mma"))}
# Columns of tensor memory.
TENSOR_MEMORY = 512


class Loop(NamedTuple):
    """An innermost loop around matrix products."""

    instructions: int
    products: int
    reloads: int   # words loaded from local memory, where spilled registers are
    spills: int    # words stored there


class Compiled(NamedTuple):
    """What the compiler says of one kernel."""

    name: str            # module and function, below ssta.kernels
    launched: str        # sizes and options of the launch
    card: Card
    shared: int          # bytes
    tensor_memory: int   # columns
    ttgir: str
    said: str            # by ptxas; "" where it was not asked
    loops: list[Loop] | None   # None where nobody asked, or no register can be reloaded, for there is no local memory

    @property
    def spilled(self) -> int:
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.said)))

    @property
    def registers(self) -> int:
        found = re.search(r"Used (\d+) registers", self.said)
        return int(found[1]) if found else 0

    @property
    def idle_barriers(self) -> bool:
        """Whether barriers are set up that no partition uses: what partitions are given may stand in their memory."""
        before, *partitions = self.ttgir.split("ttg.warp_specialize", 1)
        return any(not re.search(f"{ring}\\b", partitions[0]) for ring in BARRIERS.findall(before) if partitions)

    @property
    def copies(self) -> list[int]:
        """Of every streamed tile, in the order of the loops."""
        return [int(number) for number in BUFFER.findall(self.ttgir)]


def loops(assembly: str) -> list[Loop]:
    """The innermost loops around matrix products of what nvdisasm prints, in order."""
    code, labels, jumps = [], {}, []
    for line in assembly.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            if found[1].startswith("BRA") and (to := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((to[0], len(code)))
            code.append(found[1])
    spans = {(labels[to], end) for to, end in jumps if labels.get(to, end + 1) <= end}
    spans = {span for span in spans if any(x.startswith(PRODUCTS) for x in code[span[0]:span[1]])}
    # A jump back from where a loop's waiting was moved out of it closes no loop of its own.
    spans = {(first, last) for first, last in spans if not any(begin < first <= end < last for begin, end in spans)}
    inner = [span for span in spans if not any(span != other and span[0] <= other[0] and other[1] <= span[1] for other in spans)]

    def count(span: tuple[int, int], kinds: tuple[str, ...]) -> int:
        return sum(x.startswith(kinds) for x in code[span[0]:span[1]])

    return [Loop(span[1] - span[0], count(span, PRODUCTS), count(span, ("LDL",)), count(span, ("STL",))) for span in sorted(inner)]


def has_local_memory(said: str) -> bool:
    """Whether a kernel has any, where registers are spilled to, by what ptxas -v says of it."""
    sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)
    return len(sizes) != 3 or any(map(int, sizes))


class Compiler:
    """Compiles what calls would launch on a card, each kernel once."""

    def __init__(self) -> None:
        self.card = CARDS[90]
        self.found: list[Compiled | str] = []
        self._wanted = re.compile("")
        self._assembled = self._looped = True
        self._seen: set[str] = set()
        self._said: dict[str, tuple[str, list[Loop] | None]] = {}

    def compile(self, call: Callable[[], None], card: Card, wanted: str = "", assembled: bool = True, looped: bool = True
                ) -> list[Compiled | str]:
        """What ``call`` would launch on ``card``, as far as it was not compiled for that before and its name fits ``wanted``; a string says
        what does not compile. Without ``assembled`` ptxas is not asked, which takes most of the time; without ``looped`` nobody looks for
        loops."""
        self.card, self._wanted, self.found, self._assembled, self._looped = card, re.compile(wanted), [], assembled, looped
        call()
        return self.found

    def install(self) -> None:
        """Lets this process launch nothing from here on; before any module with kernels is imported."""
        import torch
        from triton import knobs
        from triton._C.libtriton import llvm
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from ssta.kernels import device

        compiler = self

        class Driver:
            def get_current_device(self):
                return compiler.card.architecture

            def get_current_stream(self, device=None):
                return 0

            def get_current_target(self):
                backend, warp = ("hip", 64) if compiler.card.amd else ("cuda", 32)
                return GPUTarget(backend, compiler.card.architecture, warp)

            def get_active_torch_device(self):
                return torch.device("cpu")

        def run(kernel, *args, grid, warmup, **kwargs):
            name = f"{kernel.fn.__module__.removeprefix('ssta.kernels.')}.{kernel.fn.__name__}"
            # What a launch after the first is given, which names nothing.
            if len(args) + len(kwargs.keys() & set(kernel.arg_names)) != len(kernel.arg_names):
                compiler.found.append(f"{compiler.card} {name}: is not given all arguments")
            if compiler._wanted.search(name):
                compiler._keep(name, lambda: compile_only(kernel, *args, grid=grid, warmup=True, **kwargs), kwargs)

        optimize = llvm.optimize_module
        # Memory and copies are known before.
        llvm.optimize_module = lambda *args: optimize(*args) if compiler._assembled else None
        compile_only = JITFunction.run
        JITFunction.run = run
        driver.set_active(Driver())
        # What is read off must come from this compiler and this code.
        knobs.compilation.always_compile = True
        # Nobody reads which line an instruction is of.
        knobs.compilation.disable_line_info = True
        knobs.runtime.add_stages_inspection_hook = self._stages
        device.device_limits = lambda _: device.DeviceLimits(
            compiler.card.shared_memory, compiler.card.tma, products=compiler.card.products, multiprocessors=compiler.card.multiprocessors)

    def _keep(self, name: str, compile_it: Callable, options: dict) -> None:
        launched = " ".join(f"{key}={value}" for key, value in options.items() if key in ("M", "N", "C", "num_warps", "num_stages"))
        try:
            kernel = compile_it()
        except Exception as error:  # compilers fail in many ways
            self.found.append(f"{self.card} {name} {launched}: does not compile: {type(error).__name__}: {str(error)[:2000]}")
            return
        if kernel.hash in self._seen:
            return
        self._seen.add(kernel.hash)
        said, inner = self._said.pop(kernel.hash, ("", None))
        memory = kernel.metadata
        tensor_memory = getattr(memory, "tmem_size", 0) or 0
        self.found.append(Compiled(name, launched, self.card, memory.shared, tensor_memory, kernel.asm["ttgir"], said, inner))

    def _stages(self, backend=None, stages=None, options=None, language=None, capability=None):
        """Triton's hook: the stages after LLVM's by our own hand. Without arguments, what a cache is to tell apart."""
        if stages is None:
            return "pretend", "pretend"

        if self.card.amd:
            # Its assembler is LLVM's own, and says nothing.
            return

        def no_ptx(_, metadata):
            metadata["name"] = "kernel"
            return ""

        def no_cubin(_, metadata):
            return b""

        def cubin(ptx, metadata):
            from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

            with tempfile.TemporaryDirectory() as folder:
                source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
                source.write_text(ptx)
                ptxas = Path(get_ptxas(self.card.architecture).path)
                said = _output(ptxas, "-v", f"--gpu-name={sm_arch_from_capability(self.card.architecture)}", source, "-o", binary)
                looped = self._looped and has_local_memory(said)
                self._said[metadata["hash"]] = said, loops(_output(ptxas.with_name("nvdisasm"), "-c", binary)) if looped else None
                return binary.read_bytes()

        stages.update(cubin=cubin) if self._assembled else stages.update(ptx=no_ptx, cubin=no_cubin)


def _output(*command: object) -> str:
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError((run.stdout + run.stderr)[-2000:])
    return run.stdout + run.stderr
