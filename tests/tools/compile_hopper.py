"""Compiles every configuration of the Hopper kernels for sm_90a, without a GPU, and prints a line of what ptxas says of each.

    python tests/tools/compile_hopper.py

Words reloaded in a loop around matrix products, many bytes spilled outside of them, a serialised wgmma (C7512), registers that are not
reassigned (C7507) or more than 227 KiB of shared memory makes it exit with 1: such a kernel would be slow or not start.
TRITON_INTERPRET must not be set, because the interpreter takes the compiler's place.
"""

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ssta.kernels.hopper import backward as hopper_backward
from ssta.kernels.hopper import forward as hopper_forward
from ssta.kernels.hopper import tail_merge
from ssta.kernels.hopper.config import HopperForwardConfig, hopper_forward_config
from ssta.kernels.lowering import dq_accum

SHARED_MEMORY = 227 * 1024
DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
# Bytes: what a kernel may set aside for the end of a tile, when results are stored, while the loop over the chunks has all registers.
SPILLS = 2304
# The backward's loop at head_dim 128, of some 330 instructions. Triton 3.9 reloads more of it in float16, which will cost time.
RELOADS = 18
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# A forward of three warpgroups, in the second walk's loops. From Triton 3.8 on one of them reloads more in the loop over partial chunks,
# and up to six words in the one over full chunks.
RELOADS_OF_THREE = 60 if VERSION >= (3, 8) else 4
# One under a causal mask, in the loop over partial chunks, of which there are few.
RELOADS_OF_CAUSAL_FORWARD = 8
RELOADS_OF_FP16 = 60 if VERSION >= (3, 9) else RELOADS
# Under a causal mask they also keep the places of a chunk's queries through the loop, which only the few partial iterations need.
RELOADS_OF_CAUSAL = {64: 1, 128: 48} if VERSION in ((3, 7), (3, 9)) else {64: 0, 128: RELOADS}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


def descriptor_type(rows: int, dim: int, name: str, axes: int = 4) -> str:
    """The type of a descriptor of [1, ..., rows, dim] tiles."""
    shape = [*[1] * (axes - 2), rows, dim]
    return f"tensordesc<{name}{shape},{gl.NVMMASharedLayout.get_default_for(shape, DTYPES[name])!r}>"


def compile_forward(dim: int, config: HopperForwardConfig, name: str, causal: bool) -> tuple[int, str, int]:
    """(bytes of shared memory, ptxas' report, ``reloads``) of one configuration of the forward kernel."""
    constants = hopper_forward.constants(dim, config) | dict(CAUSAL=causal, PARTS=3)
    rows, chunk = (descriptor_type(size, dim, name, 5) for size in (hopper_forward.ROWS, config.chunk))
    types = dict.fromkeys(("queue", "partial_rows"), "*i32") | dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32")
    types |= dict(scale_log2="fp32", q_desc=rows, k_desc=chunk, v_desc=chunk, out_desc=rows)
    return report(hopper_forward._forward_kernel, types, constants, hopper_forward.options(config))


def compile_backward(dim: int, name: str, deterministic: bool, partial: bool, causal: bool = False) -> tuple[int, str, int]:
    """The same of the backward kernel; ``partial``: ragged blocks."""
    constants = hopper_backward.constants(dim, deterministic)
    constants |= dict(UNIFORM=not partial, PARTIAL_QUERIES=partial, PARTIAL_KEYS=partial, CAUSAL=causal)
    queries, keys = dq_accum.QUERIES, dq_accum.KEYS
    types = dict.fromkeys(("dq_semaphore", "spin_timeouts", "tiles", "counts", "indices", "lock_values", "skipped", "q_starts", "q_sizes"),
                          "*i32")
    types |= dict.fromkeys(("k_desc", "v_desc"), descriptor_type(keys, dim, name))
    types |= dict.fromkeys(("q_desc", "do_desc"), descriptor_type(queries, dim, name))
    types |= dict.fromkeys(("dk_desc", "dv_desc"), descriptor_type(keys // 2, dim, name)) | dict.fromkeys(("dk", "dv"), f"*{name}")
    types |= dict(lse_dpsum_desc=f"tensordesc<bf16[1, {queries}, 16],{hopper_backward.LSE_DPSUM_LAYOUT!r}>", dq_accum="*fp32",
                  scale_log2="fp32", scale="fp32")
    return report(hopper_backward._backward_kernel, types, constants, hopper_backward.OPTIONS)


def compile_tail_merge(dim: int, linear: bool) -> tuple[int, str, int]:
    """The same of the tail's merge."""
    rows, square = (descriptor_type(size, dim, "bf16") for size in (tail_merge.ROWS, dim))
    types = dict(q_desc=rows, out_desc=rows, k_desc=square, v_desc=square, matrix_desc=square, out="*bf16", lse="*fp32", tail_lse="*fp32",
                 share="*fp32", bias="*fp32", left="*i32", offsets="*i32", scale="fp32", scale_log2="fp32")
    constants = tail_merge.constants(dim) | ({} if linear else dict(matrix_desc=None))
    return report(tail_merge._tail_merge_kernel, types, constants, tail_merge.OPTIONS)


def report(kernel, types: dict[str, str], constants: dict, options: dict) -> tuple[int, str, int]:
    """Compiles ``kernel`` for sm_90a; arguments without a type are int32."""
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx, binary, ptxas = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin"), Path(get_ptxas(90).path)
        ptx.write_text(compiled.asm["ptx"])
        said = _output(ptxas, "-v", "-arch=sm_90a", ptx, "-o", binary)
        return compiled.metadata.shared, said, reloads(_output(ptxas.with_name("nvdisasm"), "-c", binary))


def _output(*command) -> str:
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def reloads(assembly: str) -> int:
    """The most words that one of the innermost loops around matrix products loads from local memory, where spilled registers are."""
    code, labels, jumps = [], {}, []
    for line in assembly.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            if found[1].startswith("BRA") and (to := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((to[0], len(code)))
            code.append(found[1])
    loops = {(labels[to], end) for to, end in jumps if labels[to] <= end}
    loops = {loop for loop in loops if any(x.startswith("HGMMA") for x in code[loop[0]:loop[1]])}
    # A jump back from where a loop's waiting was moved out of it closes no loop of its own.
    loops = {(first, last) for first, last in loops if not any(begin < first <= end < last for begin, end in loops)}
    inner = [loop for loop in loops if not any(loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)]
    assert inner, "no loop around matrix products"
    return max(sum(x.startswith("LDL") for x in code[first:last]) for first, last in inner)


def problems(label: str, shared: int, said: str, reloaded: int, allowed: int = 0) -> tuple[str, list[str]]:
    """(a line with what ptxas said of a kernel, what is wrong with it); ``allowed``: words reloaded in a loop that are no harm."""
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    # C7511, C7512: wgmma serialised; C7507: registers are not reassigned.
    wrong = [problem for problem, found in (("reloads", reloaded > allowed), ("spills", spilled > SPILLS),
                                            ("serialised wgmma", "C751" in said), ("setmaxnreg ignored", "C7507" in said),
                                            ("too much shared memory", shared > SHARED_MEMORY)) if found]
    registers = re.search(r"Used (\d+) registers", said).group(1)
    return (f"{label}: {registers} registers, {spilled} bytes spilled, {reloaded} words reloaded in a loop, {shared} bytes shared: "
            f"{', '.join(wrong) or 'fine'}"), wrong


def configurations() -> dict[str, tuple]:
    """Every configuration that the package launches: label -> (function that compiles it, its arguments, words that may be reloaded)."""
    found = {}
    for dim, rows, keys in product((64, 128), (128, 384), (64, 384)):
        for name, causal in product(DTYPES, (False, True)):
            config = hopper_forward_config(dim, rows, keys, causal, name == "bf16")
            label = f"forward D={dim} warpgroups={config.warpgroups} chunk={config.chunk} {name} causal={causal}"
            allowed = RELOADS_OF_CAUSAL_FORWARD if causal else RELOADS_OF_THREE * (config.warpgroups == 3)
            found[label] = compile_forward, (dim, config, name, causal), allowed
    for dim, name, deterministic, partial in product((64, 128), DTYPES, (True, False), (True, False)):
        label = f"backward D={dim} {name} deterministic={deterministic} partial={partial}"
        allowed = (RELOADS_OF_FP16 if name == "fp16" else RELOADS) * (dim == 128)
        found[label] = compile_backward, (dim, name, deterministic, partial), allowed
    for dim, (deterministic, partial) in product((64, 128), ((True, False), (True, True), (False, True))):
        label = f"backward D={dim} bf16 deterministic={deterministic} partial={partial} causal"
        found[label] = compile_backward, (dim, "bf16", deterministic, partial, True), RELOADS_OF_CAUSAL[dim]
    for dim, linear in product((64, 128), (True, False)):
        found[f"tail merge D={dim} linear={linear}"] = compile_tail_merge, (dim, linear), 0
    return found


def check(label: str) -> tuple[str, list[str]]:
    """``problems`` of one of the ``configurations``, compiled now."""
    function, arguments, allowed = configurations()[label]
    return problems(label, *function(*arguments), allowed)


def main() -> int:
    fine = True
    # Lines of labels on the standard input, if asked so by the test that keeps one such process for many of them.
    labels = map(str.strip, sys.stdin) if sys.argv[1:] == ["-"] else configurations()
    for label in labels:
        line, wrong = check(label)
        print(line, flush=True)
        fine = fine and not wrong
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
