"""Compiles every configuration of the Hopper kernels for sm_90a, without a GPU, and prints a line of what ptxas says of each.

    python tests/compile_hopper.py

A spill, a serialised wgmma (C7512), registers that are not dealt out anew (C7507) or more than 227 KiB of shared memory makes it exit
with 1: such a kernel would be slow or not start.
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

from ssta.kernels import hopper_backward, hopper_forward, hopper_slots
from ssta.kernels.launch import HopperForwardConfig, hopper_forward_config

SHARED_MEMORY = 227 * 1024
DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
# Bytes: what the backward at head_dim 128 keeps for the end of a tile, when dK and dV are stored, while the loop over the chunks has all
# registers. Where blocks are whole, that loop reloads two numbers in bfloat16 and fifteen in float16; where they are cut, ten.
SPILLS = {False: 450, True: 1650}
# Forward programs of three warpgroups set words aside outside of their loop over whole chunks, most where a result is stored.
SPILLS_OF_THREE = 250
# Triton 3.9's assembler sets aside two words of the forward under a causal mask at head_dim 128; 3.6 to 3.8 none.
SPILLS_OF_CAUSAL = 16


def tiles(rows: int, dim: int, name: str) -> str:
    """The type of a descriptor of [1, 1, rows, dim] tiles."""
    shape = [1, 1, rows, dim]
    return f"tensordesc<{name}{shape},{gl.NVMMASharedLayout.get_default_for(shape, DTYPES[name])!r}>"


def compile_forward(dim: int, config: HopperForwardConfig, name: str, causal: bool) -> tuple[int, str]:
    """(bytes of shared memory, ptxas' report) of one configuration of the forward kernel."""
    constants = hopper_forward.constants(dim, config) | dict(CAUSAL=causal, PARTS=3)
    rows, chunk = hopper_forward.ROWS, config.chunk
    types = dict(out=f"*{name}", lse="*fp32", queue="*i32", scale_log2="fp32", q_tiles=tiles(rows, dim, name),
                 k_tiles=tiles(chunk, dim, name), v_tiles=tiles(chunk, dim, name), out_tiles=tiles(rows, dim, name))
    return report(hopper_forward._forward_kernel, types, constants, hopper_forward.options(config))


def compile_backward(dim: int, name: str, deterministic: bool, cut: bool) -> tuple[int, str]:
    """The same of the backward kernel; ``cut``: ragged blocks."""
    constants = hopper_backward.constants(dim, deterministic) | dict(UNIFORM=not cut, CUT_QUERIES=cut, CUT_KEYS=cut)
    queries, keys = hopper_slots.QUERIES, hopper_slots.KEYS
    types = dict.fromkeys(("turns", "tile_numbers", "counts", "indices", "ranks", "q_starts", "q_sizes"), "*i32")
    types |= dict.fromkeys(("k_tiles", "v_tiles"), tiles(keys, dim, name))
    types |= dict.fromkeys(("q_tiles", "do_tiles"), tiles(queries, dim, name))
    types |= dict.fromkeys(("dk_tiles", "dv_tiles"), tiles(keys // 2, dim, name)) | dict.fromkeys(("dk", "dv"), f"*{name}")
    types |= dict(dq_tiles=f"tensordesc<fp32[1, {queries}, 64],{hopper_backward.SUM_LAYOUT!r}>",
                  side_tiles=f"tensordesc<bf16[1, {queries}, 16],{hopper_backward.SIDE_LAYOUT!r}>", scale_log2="fp32", scale="fp32")
    return report(hopper_backward._backward_kernel, types, constants, hopper_backward.OPTIONS)


def report(kernel, types: dict[str, str], constants: dict, options: dict) -> tuple[int, str]:
    """Compiles ``kernel`` for sm_90a; arguments without a type are int32."""
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        return compiled.metadata.shared, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def passes(label: str, shared: int, said: str, spills: int = 0) -> bool:
    """Prints what ptxas said of a kernel, and whether it will do; ``spills``: bytes that are no harm."""
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    # C7511, C7512: wgmma serialised; C7507: registers are not dealt out anew.
    wrong = [problem for problem, found in (("spills", spilled > spills), ("serialised wgmma", "C751" in said),
                                            ("setmaxnreg ignored", "C7507" in said),
                                            ("too much shared memory", shared > SHARED_MEMORY)) if found]
    registers = re.search(r"Used (\d+) registers", said).group(1)
    print(f"{label}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared: {', '.join(wrong) or 'fine'}")
    return not wrong


def main() -> int:
    forward = dict.fromkeys((dim, hopper_forward_config(dim, rows, keys, causal), causal)
                            for dim in (64, 128) for rows in (128, 384) for keys in (64, 384) for causal in (False, True))
    fine = [passes(f"forward D={dim} warpgroups={config.warpgroups} chunk={config.chunk} {name} causal={causal}",
                   *compile_forward(dim, config, name, causal), SPILLS_OF_CAUSAL if causal else SPILLS_OF_THREE * (config.warpgroups == 3))
            for dim, config, causal in forward for name in DTYPES]
    fine += [passes(f"backward D={dim} {name} deterministic={deterministic} cut={cut}", *compile_backward(dim, name, deterministic, cut),
                    SPILLS[cut] * (dim == 128))
             for dim in (64, 128) for name in DTYPES for deterministic in (True, False) for cut in (True, False)]
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
