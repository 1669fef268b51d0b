"""Compiles the tail's kernels for GPUs of several kinds, without one, and prints a line of what ptxas says of each.

    python tests/tools/compile_tail.py

Many spilled registers, a serialised wgmma (C751x) or more shared memory than the kind of GPU has makes it exit with 1. TRITON_INTERPRET
must not be set, because the interpreter takes the compiler's place. Words in the labels, as arguments, choose some of them.
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from ssta.kernels.device import DeviceLimits
from ssta.kernels.lowering.arguments import View
from ssta.kernels.portable import tail_rows, tail_statistics
from ssta.kernels.portable.tail_config import tail_config

# Compute capability -> bytes of shared memory of one program.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bytes: on an H200 few warps, whose registers hardly do at some head_dims, are faster than more of them.
SPILLS = 112
INTEGER, NUMBER = "i32", "fp32"


def _kernels(name: str, linear: bool, parts: int) -> dict[str, tuple]:
    """Label -> (kernel, key of the configurations or None, types of its pointers, names of tile sizes or further constants)."""
    floats, mine = "*fp32", f"*{name}"
    order = "*i32" if parts > 1 else None
    squares, known = ("*bf16", floats) if linear else (None, None)
    lists = dict(counts="*i32", indices="*i32", useful="*i1")
    keys = dict(k=mine, v=mine, order=order, offsets="*i32", k_mean=mine, v_mean=mine, log_count=floats)
    rows = dict(q=mine, k_mean=mine, bias=floats, offsets="*i32")
    shifted = name != "bf16"
    found: dict[str, tuple] = {
        "keys": (tail_statistics._keys_kernel, "keys", keys | dict(moments=squares),
                 dict(PARTS=parts, SHIFTED=shifted, SUMMED=tail_statistics.SUMMED, SLAB=tail_statistics.SLAB)),
        "queries": (tail_statistics._queries_kernel, "moments", dict(q=mine, offsets="*i32", moments="*bf16"),
                    dict(SLAB=tail_statistics.SLAB)),
        "covariances": (tail_statistics._covariances_kernel, "covariances", keys | dict(useful="*i1", out="*bf16"), dict(PARTS=parts)),
        "order": (tail_statistics._order_kernel, "order", dict(k=mine, offsets="*i32", projections=floats, order="*i32"),
                  dict(ITERATIONS=10, WIDTH=tail_statistics.WIDTH, SHIFTED=shifted)),
        "bias": (tail_rows._bias_kernel, None,
                 dict(log_count=floats, half_variance=known, mass=known, bias=floats, left="*i32", mixture=squares) | lists,
                 dict(CAP=1.0, PARTS=parts, WIDTH=tail_rows.WIDTH)),
        "error": (tail_rows._error_kernel, None, dict(mass=floats, half_variance=floats, log_count=floats, scores=floats, error=floats),
                  dict(PARTS=parts, WIDTH=tail_rows.WIDTH)),
        "mass": (tail_rows._mass_kernel, "mass", rows | dict(mass=floats), dict(SAMPLE=32)),
        "combine": (tail_rows._combine_kernel, "combine", rows | dict(v_mean=mine, left="*i32", matrix=squares, tail_lse=floats, out=mine,
                                                                      lse=floats, share=floats), dict(TILES=3)),
    }
    return found


def _compile(kernel, types: dict, constants: dict, options: dict, capability: int) -> tuple[int, str]:
    """(bytes of shared memory, ptxas' report)"""
    signature, known, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = types.get(name, NUMBER if name.startswith("scale") else INTEGER)
        if name in constants or kind is None:
            signature[name], known[(i,)] = "constexpr", constants.get(name)
            continue
        signature[name] = kind
        for path, member in [((i,), kind)] if isinstance(kind, str) else [((i, j), member) for j, member in enumerate(kind)]:
            # As they are with head_dims and tokens that are multiples of 16: strides too.
            if member.startswith("*") or isinstance(kind, View) or re.fullmatch("(q|k|v|out)_(batch|head|row)", name):
                aligned[path] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        arch = f"sm_{capability}{'a' * (capability >= 90)}"
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", str(ptx), "-o", str(binary)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return compiled.metadata.shared, run.stdout + run.stderr


def configurations() -> dict[str, tuple]:
    """label -> arguments of ``check``."""
    found = {}
    for capability, (name, dim) in product(SHARED_MEMORY, (("bf16", 128), ("fp16", 64), ("bf16", 80), ("bf16", 256), ("fp32", 64))):
        for linear, parts in ((True, 1), (True, 2), (False, 1)):
            for kernel in _kernels(name, linear, parts):
                # What does not depend on the case; and the order at 256, whose matrix alone takes all registers: it is right, and slow.
                skipped = {"queries", "order", "covariances"} if not linear else {"queries", "order"} if parts > 1 else ()
                if kernel not in skipped and not (kernel == "order" and dim > 128):
                    label = f"{kernel} sm_{capability} D={dim} {name}{'' if linear else ' means'}{' halves' * (parts > 1)}"
                    found[label] = kernel, capability, name, dim, linear, parts
    return found


def check(label: str) -> tuple[str, list[str]]:
    """(a line with what ptxas said of one of the ``configurations``, what is wrong with it)"""
    kernel_name, capability, name, dim, linear, parts = configurations()[label]
    kernel, key, types, constants = _kernels(name, linear, parts)[kernel_name]
    options = {}
    if key is not None:
        config = tail_config(key, dim, DTYPES[name], DeviceLimits(SHARED_MEMORY[capability], capability >= 90))
        options = config.options()
        every = tail_statistics._tile(config, dim) | dict(M=config.block_m, N=config.block_n, SAME=tail_statistics._same(config, dim))
        every["DEPTH"] = tail_rows.depth(every["DIM_PAD"], every["M"])
        constants = constants | {size: value for size, value in every.items() if size in kernel.arg_names}
    return verdict(label, kernel, types, constants, options, capability, SPILLS)


def verdict(label: str, kernel: triton.JITFunction, types: dict[str, object], constants: dict[str, object], options: dict[str, int],
            capability: int, spills: int) -> tuple[str, list[str]]:
    """(a line about a kernel that is compiled now, what is wrong with it); up to ``spills`` bytes of spilling are not."""
    shared, said = _compile(kernel, types, constants, options, capability)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    wrong = [problem for problem, there in (("spills", spilled > spills), ("serialised wgmma", "C751" in said),
                                            ("too much shared memory", shared > SHARED_MEMORY[capability])) if there]
    registers = re.search(r"Used (\d+) registers", said).group(1)
    return f"{label}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared: {', '.join(wrong) or 'fine'}", wrong


def main() -> int:
    fine = True
    for label in configurations():
        if all(word in label for word in sys.argv[1:]):
            line, wrong = check(label)
            print(line, flush=True)
            fine = fine and not wrong
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
