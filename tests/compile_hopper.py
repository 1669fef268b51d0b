"""Compiles every configuration of the Hopper kernels for sm_90a, without a GPU, and prints a line of what ptxas says of each.

    python tests/compile_hopper.py

A spill, a serialised wgmma (C7512) or more than 227 KiB of shared memory makes it exit with 1: such a kernel would be slow or not start.
TRITON_INTERPRET must not be set, because the interpreter takes the compiler's place.
"""

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ssta.kernels import hopper_forward

SHARED_MEMORY = 227 * 1024


def compile_forward(dim: int, chunk: int, name: str, causal: bool) -> tuple[int, str]:
    """(bytes of shared memory, ptxas' report) of one configuration of the forward kernel."""
    kernel = hopper_forward._forward_kernel
    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[name]

    def tiles(rows: int) -> str:
        shape = [1, 1, rows, dim]
        return f"tensordesc<{name}{shape},{gl.NVMMASharedLayout.get_default_for(shape, dtype)!r}>"

    constants = hopper_forward.constants(dim, chunk) | dict(CAUSAL=causal, PARTS=3)
    rows = constants["ROWS"]
    types = dict(out=f"*{name}", lse="*fp32", queue="*i32", scale_log2="fp32", q_tiles=tiles(rows), k_tiles=tiles(chunk),
                 v_tiles=tiles(chunk), out_tiles=tiles(rows))
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=hopper_forward.OPTIONS)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        return compiled.metadata.shared, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> int:
    failures = 0
    for dim in (64, 128):
        for chunk in (64, 128):
            for name in ("bf16", "fp16"):
                for causal in (False, True):
                    shared, said = compile_forward(dim, chunk, name, causal)
                    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
                    wrong = [problem for problem, found in (("spills", spilled), ("serialised wgmma", "C7512" in said),
                                                            ("too much shared memory", shared > SHARED_MEMORY)) if found]
                    failures += bool(wrong)
                    registers = re.search(r"Used (\d+) registers", said).group(1)
                    print(f"forward D={dim} chunk={chunk} {name} causal={causal}: {registers} registers, {spilled} bytes spilled, "
                          f"{shared} bytes shared: {', '.join(wrong) or 'fine'}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
